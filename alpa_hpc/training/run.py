"""A plan on this process's devices -> a finished training: as one rank of an MPI job, or alone with all meshes."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from alpa_hpc.cluster.hardware import ClusterSpec
from alpa_hpc.errors import LaunchError, TrainingError
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.lookup import schedule_of, stages_of_plan
from alpa_hpc.runtime.assemble import Assembly, assemble
from alpa_hpc.runtime.check import check_programs
from alpa_hpc.runtime.links import AbstractLinks
from alpa_hpc.runtime.listing import program_hash
from alpa_hpc.runtime.session import RankSession, build_runner, in_process_session
from alpa_hpc.runtime.transport import MpiTransport
from alpa_hpc.runtime.watchdog import WatchdogLimits, watched
from alpa_hpc.training.data import DataSource
from alpa_hpc.training.loop import Report, TrainingFigures, train
from alpa_hpc.training.options import TrainingOptions
from alpa_hpc.training.prepare import Prepared

if TYPE_CHECKING:
    from alpa_hpc.runtime.groups import MeshContext  # it loads MPI, which starting a rank needs and training in one process does not

MEETING_SECONDS = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class TrainingJob:
    """What is trained, by which plan, on what."""

    prepared: Prepared
    plan: ParallelPlan
    cluster: ClusterSpec
    options: TrainingOptions
    data: DataSource


def assemble_plan(job: TrainingJob) -> Assembly:
    """The plan's stages and programs, checked; every rank derives them for itself."""
    schedule = schedule_of(job.plan)
    assembly = assemble(job.prepared.step, stages_of_plan(job.plan, job.prepared.step, job.cluster), schedule)
    check_programs(assembly.programs, schedule)
    return assembly


def initial_leaves(job: TrainingJob) -> Mapping[int, np.ndarray[Any, Any]]:
    """The state's leaves as host arrays, the same on every rank for the same seed."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # the whole state would not fit on the rank's own GPU
        state = jax.jit(job.prepared.train_step.init)(jax.random.key(job.options.seed))
    return {leaf: np.asarray(value) for leaf, value in enumerate(jax.tree.leaves(state))}


def train_in_process(job: TrainingJob, report: Report) -> TrainingFigures:
    """Train with all meshes on this process's devices; device i of the plan is device i of the process."""
    assembly = assemble_plan(job)
    session = in_process_session(assembly, job.prepared.traced, job.plan.mesh_devices, initial_leaves(job))
    return train(session, job.data, job.options, report)


def train_as_rank(job: TrainingJob, context: "MeshContext", links: AbstractLinks, report: Report) -> TrainingFigures:
    """Train as one rank of an MPI job that has joined its mesh (`context`); all ranks compile before step 1."""
    assembly = assemble_plan(job)
    check_same_programs(context, assembly)
    transport = MpiTransport(context, links)
    if context.local_device == 0:
        sys.stderr.write(f"mesh {context.mesh_index}: compiling its programs\n")
    runner = build_runner(assembly, job.prepared.traced, context.mesh_index, context.mesh, transport, initial_leaves(job))
    context.world.Barrier()
    limits = WatchdogLimits()
    with watched(runner.training, context.rank, limits, sys.stderr, lambda: context.world.Abort(1)):
        return train_together(context, lambda: train(RankSession(runner), job.data, job.options, report))


def train_together(context: "MeshContext", training: Callable[[], TrainingFigures]) -> TrainingFigures:
    """Run a training; where it goes astray, which it does on all ranks at one step, none leaves before the step is on record.

    Who leaves ends the others. The wait is bounded, should a rank not have gone astray after all.
    """
    try:
        return training()
    except TrainingError:
        met, end = context.world.Ibarrier(), time.monotonic() + MEETING_SECONDS
        while not met.Test() and time.monotonic() < end:
            time.sleep(0.02)
        raise


def check_same_programs(context: "MeshContext", assembly: Assembly) -> None:
    """Raise LaunchError where ranks derived different programs from the same plan."""
    hashes = context.world.allgather(program_hash(assembly.programs))
    if len(set(hashes)) > 1:
        raise LaunchError(
            f"ranks derived different programs from the same plan (hashes {sorted(set(hashes))}): "
            "they run different versions of Python, jax or alpa_hpc. Give all nodes the same environment."
        )
