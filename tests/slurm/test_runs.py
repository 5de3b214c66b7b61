"""The main path on a real Slurm of four nodes: what the name of the product promises, and what happens when parts of it die."""

import json
import signal
import time

import pytest

from alpa_hpc.launch.files import read_json
from alpa_hpc.profiling.store import read_store
from alpa_hpc.training.metrics import read_metrics
from tests.slurm.bed import Bed
from tests.slurm.conftest import StartBed
from tests.slurm.runs import SMALL, Run, command, folder_of, kill, submit, wait_until

NUM_STEPS = 4
SHORT = (
    f"training.num_steps={NUM_STEPS}",
    "training.evaluate_batches=1",
    "profiling.max_rounds=1",
    "profiling.tasks_per_round=6",
    "profiling.repeats=3",
)
END_SECONDS = 15.0  # from the death of a rank to the end of its job

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def quickstart(shared_bed: Bed) -> Run:
    """The quickstart through four nodes, followed to its end."""
    arguments = ("+experiment=quickstart", "launcher=slurm", "launcher.wait=true", f"runs={shared_bed.state}/runs")
    return Run(shared_bed, folder_of(command(shared_bed, *arguments, *SHORT).stdout))


def test_the_quickstart_profiles_and_trains_over_nodes_as_its_processes_see_them(quickstart: Run) -> None:
    assert quickstart.states()["run"] == "done"
    rows = read_store(quickstart.paths.costs).rows.values()
    assert len(rows) >= 6
    assert len({row.nodes for row in rows}) >= 2, "profiling stayed on one node"
    nodes = quickstart.result()["training"]["nodes"]
    assert len(nodes) == 8
    assert len(set(nodes)) == 2
    assert nodes == sorted(nodes), "ranks are numbered node by node"
    assert {job for states in map(quickstart.slurm_state, ("plan", "profile", "train")) for job in states} == {"COMPLETED"}


def test_losses_are_those_of_the_local_launcher(quickstart: Run, bed: Bed) -> None:
    done = command(bed, "+experiment=quickstart", "launcher=local", f"runs={bed.state}/runs", *SHORT)
    local = folder_of(done.stdout)
    assert local.plan.read_text() == quickstart.paths.plan.read_text(), "the store has all costs, so the plan is the same"
    assert read_json(local.planning)["counts"]["profile_tasks_new"] == 0
    here, there = ([row["loss"] for row in read_metrics(paths.metrics)] for paths in (local, quickstart.paths))
    assert len(here) == NUM_STEPS
    assert here == there, "bit for bit"


def test_a_sweep_submits_its_runs_and_list_shows_them(quickstart: Run, bed: Bed) -> None:
    overrides = (*SHORT, "training.learning_rate=1e-3,3e-3", "launcher=slurm", f"runs={bed.state}/runs")
    done = command(bed, "-m", "+experiment=quickstart", *overrides)
    folders = [line.removeprefix("run folder: ") for line in done.stdout.splitlines() if line.startswith("run folder: ")]
    runs = [Run(bed, folder_of(f"run folder: {folder}")) for folder in folders]
    assert len(runs) == 2
    for run in runs:
        wait_until(run.paths.planning.exists, "plan", run.tell)
        assert read_json(run.paths.planning)["counts"]["profile_tasks_new"] == 0, "equal stages share every cost"
        assert read_json(run.paths.plan)["stages"] == read_json(quickstart.paths.plan)["stages"]
    listed = command(bed, "list", "--runs", f"{bed.state}/runs").stdout
    assert all(run.paths.root.name in listed for run in runs)
    assert all(f"training.learning_rate={rate}" in listed for rate in ("0.001", "0.003")), "to tell them apart"
    for run in runs:
        command(bed, "cancel", str(run.paths.root))
        assert run.states()["run"] == "cancelled"


@pytest.fixture
def training(bed: Bed) -> Run:
    """A small run that is being trained."""
    run = submit(bed, *SMALL)
    run.wait_for_step(2)
    return run


def assert_fails_soon(run: Run) -> None:
    """The training job ends in time, FAILED for Slurm and for `status` alike, and no rank is left."""
    wait_until(lambda: run.slurm_state("train") == ("FAILED",), "end of the training job", run.tell, END_SECONDS)
    wait_until(lambda: not run.ranks(), "end of the ranks", run.tell, 5)
    assert run.states() == {"plan": "done", "train": "failed", "run": "failed"}
    assert command(run.bed, "status", str(run.paths.root), expect=1).stdout


def test_a_rank_killed_while_it_compiles_ends_the_job(bed: Bed) -> None:
    run = submit(bed, *SMALL)
    wait_until(lambda: "compiling" in run.log("train"), "compilation", run.tell)
    kill([run.ranks()[3]])
    assert_fails_soon(run)


def test_a_rank_killed_in_a_collective_ends_the_job(training: Run) -> None:
    mesh = next(stage["devices"] for stage in read_json(training.paths.plan)["stages"] if len(stage["devices"]) > 1)
    ranks = training.ranks()
    kill([ranks[mesh[0]]], signal.SIGSTOP)  # now its peers wait for it in a collective
    wait_until(lambda: steps_stand_still(training), "standstill", training.tell)
    kill([ranks[mesh[1]]])
    assert_fails_soon(training)


def test_a_rank_killed_in_an_mpi_wait_ends_the_job(bed: Bed) -> None:
    # slow devices and slower links: two stages win
    slow = ("cluster.device.flops_32bit=2e9", "cluster.inter_node.bandwidth=2e7", "cluster.intra_node.bandwidth=2e7")
    run = submit(bed, *SMALL, *slow, "training.batch_size=32", "schedule.num_microbatches=8")
    run.wait_for_step(2)
    meshes = [stage["devices"] for stage in read_json(run.paths.plan)["stages"]]
    assert len(meshes) > 1
    ranks = run.ranks()
    kill([ranks[device] for device in meshes[0]], signal.SIGSTOP)  # now the other meshes wait for its messages
    wait_until(lambda: steps_stand_still(run), "standstill", run.tell)
    kill([ranks[meshes[-1][0]]])
    assert_fails_soon(run)


def steps_stand_still(run: Run) -> bool:
    """Whether no step ends in a second."""
    before = len(read_metrics(run.paths.metrics))
    time.sleep(1.0)
    return len(read_metrics(run.paths.metrics)) == before


def test_the_first_traceback_of_a_rank_is_what_status_shows(bed: Bed) -> None:
    run = submit(bed, *SMALL, "training.num_steps=2")
    run.paths.training.mkdir()  # so that the one rank that writes its figures cannot
    wait_until(run.ranks, "ranks", run.tell)
    wait_until(lambda: run.slurm_state("train") == ("FAILED",), "end of the training job", run.tell)
    shown = command(bed, "status", str(run.paths.root), expect=1).stdout
    assert "rank 0 on node" in shown
    assert shown.index("rank 0 on node") < shown.index("cannot be written (Is a directory)")


def test_a_killed_profiling_task_costs_infinity_and_the_plan_goes_on(start_bed: StartBed) -> None:
    bed = start_bed(MAX_ARRAY_SIZE=4)
    run = submit(bed, *SHORT, "mode=plan")
    wait_until(lambda: run.paths.profile_answer(1).exists(), "profiling", run.tell)
    kill([read_json(run.paths.status_folder / "profile-0001.json")["pid"]])
    wait_until(lambda: run.states()["run"] == "done", "plan", run.tell)
    (blank,) = read_json(run.paths.planning)["not_measured"]
    assert blank["outcome"] == "failed"
    assert "killed" in blank["reason"].lower()
    assert run.states()["profile-0001"] == "failed"
    assert [len(one.tasks) for one in run.submissions("profile")[:2]] == [4, 2], "no array is longer than the site allows"


def test_a_failed_planning_job_starts_no_training(bed: Bed) -> None:
    unknown = "training.weight_decay=0.0123"  # no other test asks for it, so that there is a search to be killed
    run = submit(bed, *SMALL, unknown, "launcher.chain=dependency")
    wait_until((run.paths.status_folder / "plan.json").exists, "planning job", run.tell)
    kill([read_json(run.paths.status_folder / "plan.json")["pid"]])
    wait_until(lambda: run.slurm_state("train") == ("CANCELLED",), "end of the training job", run.tell)
    assert run.slurm_state("plan") == ("FAILED",)
    assert run.states() == {"plan": "failed", "train": "cancelled", "run": "failed"}
    assert not run.paths.training.exists()


def test_a_dependent_training_job_runs_after_planning(bed: Bed) -> None:
    run = submit(bed, *SMALL, "training.num_steps=2", "launcher.chain=dependency", "launcher.wait=true")
    assert run.states() == {"plan": "done", "train": "done", "run": "done"}
    assert len(read_metrics(run.paths.metrics)) == 2


def test_a_cancelled_run_leaves_nothing(training: Run) -> None:
    command(training.bed, "cancel", str(training.paths.root))
    wait_until(lambda: not training.ranks(), "end of the ranks", training.tell, END_SECONDS)
    assert training.slurm_state("train") == ("CANCELLED",)
    assert training.states()["run"] == "cancelled"
    assert json.loads((training.paths.root / "cancelled.json").read_text())["time"]
