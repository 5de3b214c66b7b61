"""A plan of a run -> a trained model and its figures: the training job's batch half, one of its ranks, or all meshes in one process."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from alpa_hpc.config import ExperimentConfig
from alpa_hpc.errors import LaunchError, PlanError
from alpa_hpc.launch.devices import check_devices_here, local_device
from alpa_hpc.launch.failures import explained_by_ranks
from alpa_hpc.launch.files import is_there, read_json, write_json
from alpa_hpc.launch.locations import job_script
from alpa_hpc.launch.mpirun import run_ranks
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.status import reporting, this_node
from alpa_hpc.parts import config_of_run, open_training_data, prepared, ranks_on, store_result, whole_cluster
from alpa_hpc.plan.codec import plan_from_json, plan_hash
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.lookup import check_plan_fits
from alpa_hpc.runtime.links import DirectLinks
from alpa_hpc.training.loop import Report, TrainingFigures
from alpa_hpc.training.metrics import open_metrics
from alpa_hpc.training.run import TrainingJob, train_as_rank, train_in_process


def fingerprint(config: ExperimentConfig, plan: ParallelPlan) -> dict[str, str]:
    """What tells whether a plan and a config are those that belong together."""
    return {"plan_hash": plan_hash(plan), "config_hash": hashlib.sha256(config.resolved.encode()).hexdigest()}


def read_plan(paths: RunPaths) -> ParallelPlan:
    """The plan of a run. Raises LaunchError where there is none, PlanError where it is torn or foreign."""
    if not (paths.plan.is_file() and paths.planning.is_file()):
        raise LaunchError(f"{paths.plan} is missing: planning did not finish, so there is nothing to train. See {paths.logs}.")
    return plan_from_json(paths.plan.read_text(encoding="utf-8", errors="replace"), str(paths.plan))


def train_run(paths: RunPaths) -> None:
    """The training job: see that the plan is the one that was made for this run, start the ranks, and write the result."""
    config, plan = config_of_run(paths), read_plan(paths)
    planning = read_json(paths.planning)
    if any(planning.get(name) != value for name, value in fingerprint(config, plan).items()):  # somebody changed one of the two, and may
        check_plan_fits(plan, prepared(config).step, config.cluster, config.schedule.kind)
    ranks = ranks_on(config, whole_cluster(config))
    earlier = _written(paths.training)
    with explained_by_ranks(paths.failures(JobKind.TRAIN)):
        run_ranks(ranks, (str(job_script("train_rank")), str(paths.root)), os.environ)
        _check_end(paths, earlier, ranks.num_ranks)
    store_result(config, paths)


def _written(path: Path) -> int | None:
    """When a file was written, in nanoseconds since 1970; None where there is none."""
    return path.stat().st_mtime_ns if is_there(path) else None


def _check_end(paths: RunPaths, earlier: int | None, num_ranks: int) -> None:
    """Rank 0 says that training has come to its end: mpirun may end with 0 where somebody has stopped its helpers on the nodes."""
    if _written(paths.training) == earlier:
        raise LaunchError(
            f"mpirun with {num_ranks} ranks ended with exit code 0, but training did not come to its end: no rank wrote "
            f"{paths.training.name}. They were stopped from outside, as by a preemption. There are no checkpoints yet: start the run again"
        )


def train_rank(paths: RunPaths) -> None:
    """One rank of the training job: join the mesh first, since it must come before anything else that jax does."""
    from alpa_hpc.runtime.groups import join_mesh  # late, since it starts MPI: only ranks may

    config, plan = config_of_run(paths), read_plan(paths)
    device = local_device(config.site, config.cluster, os.environ)
    context = join_mesh(plan.mesh_devices, tuple(stage.shape for stage in plan.stages), device)
    if len(set(context.world.allgather(plan_hash(plan)))) > 1:
        raise PlanError(f"ranks read different plans from {paths.plan}: it changed while they started, or their file systems differ")
    nodes, job = context.world.allgather(this_node()), training_job(config, plan)
    if context.rank == 0:
        reported(paths, nodes, lambda report: train_as_rank(job, context, DirectLinks(), report))
    else:
        train_as_rank(job, context, DirectLinks(), lambda step, figures: None)


def train_here(paths: RunPaths) -> None:
    """The training job in this process, which reports as a job of its own would."""
    with reporting(paths, JobKind.TRAIN):
        train_all_meshes(paths)


def train_all_meshes(paths: RunPaths) -> None:
    """Train in this process alone, all meshes on its virtual devices."""
    config = config_of_run(paths)
    check_devices_here(config.site, config.cluster, os.environ)
    job = training_job(config, read_plan(paths))
    reported(paths, [this_node()], lambda report: train_in_process(job, report))
    store_result(config, paths)


def reported(paths: RunPaths, nodes: list[str], training: Callable[[Report], TrainingFigures]) -> None:
    """Run a training whose figures go to metrics.jsonl and, at its end, training.json, with the node of each rank as it sees it."""
    with open_metrics(paths.metrics) as metrics:
        figures = training(metrics.write)
    write_json(paths.training, {**asdict(figures), "nodes": nodes})


def training_job(config: ExperimentConfig, plan: ParallelPlan) -> TrainingJob:
    """What the training job trains."""
    return TrainingJob(prepared(config), plan, config.cluster, config.training, open_training_data(config))
