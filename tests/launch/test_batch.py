"""Batch scripts are those in golden/, word by word, with this machine's Python and job folder as @PYTHON@ and @JOBS@.

After a wanted change, `ALPA_HPC_WRITE_GOLDEN=1 pytest tests/launch/test_batch.py` writes them anew; read the difference before you keep it.
"""

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.launch import batch
from alpa_hpc.launch.batch import Allocation, BatchJob, batch_script, job_name, sbatch_flags
from alpa_hpc.launch.locations import job_script
from alpa_hpc.launch.options import SlurmOptions
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.python import job_python
from tests.launching import slurm_options

GOLDEN = Path(__file__).parent / "golden"
RUN = RunPaths(Path("/runs/quickstart/20250102-030405-3f2a1b"))
ODD_RUN = RunPaths(Path("/my runs/it's $HOME/quickstart/20250102-030405-3f2a1b"))
PLAN = BatchJob(JobKind.PLAN, Allocation(1, 1, 0))
PROFILE = BatchJob(JobKind.PROFILE, Allocation(2, 4, 4), tasks=(4, 5, 6, 7, 8, 9), max_parallel=2)
TRAIN = BatchJob(JobKind.TRAIN, Allocation(2, 4, 4))
EVERYTHING = slurm_options(
    partition="gpu",
    account="physics",
    qos="long",
    constraint="a100|h100",
    time_minutes=90,
    memory="64G",
    gres="gpu:a100:4",
    cpus_per_task=8,
    additional={"exclude": "node7", "mail_type": "END,FAIL", "hint": "nomultithread", "no_kill": "true", "nice": 0, "signal": ""},
    plan={"partition": "cpu", "mem": "8G"},
    profile={"qos": "short", "exclusive": "", "time": 20},
    train={"mem": 0, "switches": "1@10", "exclude": "node8", "comment": "it's a test", "contiguous": True},
    setup=("module purge", "module load cuda/12.4  # the site's"),
    environment={"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": 22, "TITLE": 'say "it\'s $HOME"'},
)
CASES: dict[str, tuple[BatchJob, RunPaths, SlurmOptions]] = {
    "plan": (PLAN, RUN, slurm_options(time_minutes=60)),
    "profile": (PROFILE, RUN, slurm_options(time_minutes=60)),
    "train": (TRAIN, RUN, slurm_options(time_minutes=60)),
    "train_after_planning": (BatchJob(JobKind.TRAIN, Allocation(2, 4, 0), dependency="afterok:12"), RUN, slurm_options()),
    "plan_with_everything": (PLAN, ODD_RUN, EVERYTHING),
    "profile_with_everything": (PROFILE, ODD_RUN, EVERYTHING),
    "train_with_everything": (TRAIN, ODD_RUN, EVERYTHING),
}


def with_placeholders(script: str) -> str:
    return script.replace(job_python(), "@PYTHON@").replace(str(job_script("plan").parent), "@JOBS@")


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_the_golden_one(name: str) -> None:
    script, golden = with_placeholders(batch_script(*CASES[name])), GOLDEN / f"{name}.sh"
    if os.environ.get("ALPA_HPC_WRITE_GOLDEN") == "1":
        golden.write_text(script)
    assert script == golden.read_text()


def test_no_golden_script_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == set(CASES)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sh")), ids=lambda path: path.stem)
def test_a_golden_script_is_a_shell_script_with_every_flag_before_its_first_command(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    flags = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(flags) < first_command, "sbatch reads no further than that"
    assert all(len(shlex.split(lines[number], comments=False)) == 2 for number in flags), "a flag is one word"
    names = [re.split(r"[ =]", lines[number])[1] for number in flags]
    assert len(set(names)) == len(names)


@given(st.sampled_from(list(CASES)))
@settings(max_examples=len(CASES))
def test_devices_are_never_dealt_out_task_by_task(name: str) -> None:
    """Ranks on one node must see each other's GPUs, or NCCL cannot copy between them directly; and srun would stand before mpirun."""
    script = batch_script(*CASES[name])
    assert "gpus-per-task" not in script
    assert "gpu-bind" not in script
    assert "srun" not in script
    assert "requeue" not in script.replace("no-requeue", "")


def test_a_job_is_never_ended_early_by_submitits_own_signal() -> None:
    asked = ("", "B:USR1@120")
    assert [sbatch_flags(PLAN, slurm_options(additional={"signal": value}))["signal"] for value in asked] == ["TERM@0", "B:USR1@120"]


flag_names = st.from_regex(r"[a-z]{2,6}([_-][a-z]{2,6})?", fullmatch=True)
flag_values = st.one_of(st.text("ab $'\"\\", min_size=1, max_size=6), st.integers(0, 99), st.booleans(), st.sampled_from(["", "true"]))


@given(st.dictionaries(flag_names, flag_values, max_size=4), st.dictionaries(flag_names, flag_values, max_size=4))
def test_a_flag_of_one_kind_beats_that_of_all_and_an_empty_one_takes_it_away(for_all: dict[str, str], for_one: dict[str, str]) -> None:
    def dashed(flags: dict[str, str]) -> dict[str, str]:
        return {name.replace("_", "-"): value for name, value in flags.items()}

    options = slurm_options(additional=for_all, plan=for_one, profile={"aa": "other"}, train={"aa": "other"})
    got = sbatch_flags(PLAN, options)
    wanted = {"no-requeue": True, "signal": "TERM@0", **dashed(for_all), **dashed(for_one)}
    for name, value in wanted.items():
        match value:
            case "" | False:
                assert name not in got or (name, got[name]) == ("signal", "TERM@0"), "submitit's own signal would end Python early"
            case "true":
                assert got[name] is True
            case _:
                assert (got[name], type(got[name])) == (value, type(value))
    assert set(got) <= set(wanted)


def test_own_flags_of_zero_are_left_out_but_a_zero_that_was_asked_for_stays() -> None:
    assert not {"time", "mem", "cpus-per-task", "gpus-per-node", "gres"} & set(sbatch_flags(PLAN, slurm_options()))
    assert sbatch_flags(TRAIN, slurm_options(memory="64G", additional={"mem": 0}))["mem"] == 0, "--mem=0 is all memory of a node"


def test_gpus_are_asked_for_by_number_or_as_gres_but_only_where_they_are_used() -> None:
    asked = {"gpus-per-node", "gres"}
    assert {name: sbatch_flags(TRAIN, slurm_options()).get(name) for name in asked} == {"gpus-per-node": 4, "gres": None}
    assert {name: sbatch_flags(TRAIN, slurm_options(gres="gpu:4")).get(name) for name in asked} == {"gpus-per-node": None, "gres": "gpu:4"}
    assert not asked & set(sbatch_flags(PLAN, slurm_options(gres="gpu:4"))), "planning takes no GPU"


def test_only_what_is_timed_has_its_node_alone() -> None:
    assert [sbatch_flags(job, slurm_options()).get("exclusive") for job in (PLAN, PROFILE, TRAIN)] == [None, True, None]


def test_a_job_is_found_by_a_name_that_says_its_kind_and_no_other_run_has() -> None:
    other = RunPaths(RUN.root.with_name("20250102-030405-9c8b7a"))
    jobs = (PLAN, PROFILE, replace(PROFILE, tasks=(8, 9)), TRAIN)
    names = {job_name(paths, job) for paths in (RUN, other) for job in jobs}
    assert len(names) == 8
    assert job_name(RUN, TRAIN) == "train-quickstart-3f2a1b"


@pytest.mark.parametrize("paths", [RUN, ODD_RUN], ids=["plain", "odd"])
@pytest.mark.parametrize(("job", "arguments"), [(PLAN, []), (PROFILE, ["7"]), (TRAIN, [])], ids=["plan", "profile", "train"])
def test_bash_starts_the_job_script_on_the_run_folder(
    job: BatchJob, arguments: list[str], paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "job_python", lambda: "printf '%s\\n'")
    script = batch_script(job, paths, EVERYTHING).replace("exec printf", "printf").replace("module ", ": ")
    done = subprocess.run(
        ["bash"], input=f"{script}\nprintf '%s\\n' \"$TITLE\"", env={"SLURM_ARRAY_TASK_ID": "3"}, capture_output=True, text=True, check=True
    )
    title = str(EVERYTHING.environment["TITLE"])
    assert done.stdout.splitlines() == [str(job_script(job.kind.value)), str(paths.root), *arguments, title]
