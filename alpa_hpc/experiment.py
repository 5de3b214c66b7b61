"""THE MAIN PATH: config -> traced step -> layers -> candidates -> costs -> stages -> programs -> plan -> training.

`run` is the login side; `plan_run`, `profile_task`, `train_ranks` and `train_rank` are what the scripts in jobs/ call on a run folder.
All of them read the same config and trace the same step, so what passes between jobs is small: requests, cost rows, the plan.
"""

import functools
import gc
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import jax

from alpa_hpc.config import ExperimentConfig, Mode, load_config, write_config
from alpa_hpc.errors import LaunchError
from alpa_hpc.ir.flops import jaxpr_flops
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.launch.files import read_json, write_json, write_text
from alpa_hpc.launch.launchers import InProcessLauncher, Launcher, LocalLauncher, SlurmLauncher
from alpa_hpc.launch.mpirun import Place, Ranks
from alpa_hpc.launch.options import LauncherKind
from alpa_hpc.launch.paths import RunPaths, new_run
from alpa_hpc.launch.profiling import StoreProfiler, measure_requests
from alpa_hpc.plan.codec import plan_from_json, plan_to_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.lookup import make_plan
from alpa_hpc.planner.refine import Refinement, unmeasured, with_exact_memory, with_measurements
from alpa_hpc.planner.requests import describe_request, requests_from_json
from alpa_hpc.planner.search import SCHEDULES, find_candidates, pick, simulate_partition
from alpa_hpc.profiling.keys import software_versions
from alpa_hpc.profiling.options import CostSource
from alpa_hpc.report.planning import PlanningRecord, iteration_flop, planning_document
from alpa_hpc.report.result import print_result, write_result
from alpa_hpc.report.stopwatch import Stopwatch, process_age_seconds
from alpa_hpc.runtime.links import DirectLinks
from alpa_hpc.sharding.solve import SolverOptions
from alpa_hpc.stages.cost_table import CostTable
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.training.data import DataSource, open_data
from alpa_hpc.training.loop import Report, TrainingFigures
from alpa_hpc.training.metrics import open_metrics
from alpa_hpc.training.prepare import Prepared, Timed, prepare, untimed
from alpa_hpc.training.run import TrainingJob, train_as_rank, train_in_process


def run(config: ExperimentConfig) -> Path:
    """Do what the command line asks, and return the run folder."""
    launcher = launcher_for(config)
    check_run(config, launcher)
    paths = new_run(config.runs, config.name)
    write_config(config, paths.config)
    match config.mode:
        case Mode.DRY_RUN:
            sys.stdout.write(launcher.scripts(paths, config.cluster.num_nodes, config.cluster.devices_per_node))
        case Mode.PLAN:
            plan_here_or_there(config, launcher, paths)
            report_result(config, paths)
        case Mode.FULL:
            launcher.plan(paths)
            launcher.train(paths, config.training.num_steps)
            report_result(config, paths)
    sys.stdout.write(f"run folder: {paths.root}\n")
    return paths.root


def launcher_for(config: ExperimentConfig) -> Launcher:
    """The launcher that the config names."""
    match config.launcher.kind:
        case LauncherKind.INPROCESS:
            return InProcessLauncher(plan_run, profile_task, train_all_meshes)
        case LauncherKind.LOCAL:
            return LocalLauncher()
        case LauncherKind.SLURM:
            return SlurmLauncher(config.launcher)


def check_run(config: ExperimentConfig, launcher: Launcher) -> None:
    """Refuse before anything is submitted: what cannot start, a model that cannot be traced or cut, or that fits on no candidate."""
    if config.launcher.kind is LauncherKind.INPROCESS:
        jax.config.update("jax_num_cpu_devices", config.cluster.num_devices)
    if config.mode is Mode.FULL:
        launcher.check(config.cluster.num_devices)
        open_training_data(config)
    if config.mode is not Mode.PLAN:
        find_candidates(prepared(config).step, config.cluster, config.search)


def plan_here_or_there(config: ExperimentConfig, launcher: Launcher, paths: RunPaths) -> None:
    """Plan in this process where no device has to be measured, else as the launcher's planning job."""
    if config.profiling.source is CostSource.ANALYTIC:
        plan_run(paths)
    else:
        launcher.plan(paths)


def plan_run(paths: RunPaths) -> None:
    """The planning job: write plan.json and planning.json."""
    watch = Stopwatch({"import": process_age_seconds()})
    config = load_config(paths.config)
    made = prepared(config, watch.time)
    plan, record = plan_experiment(config, made, paths, watch)
    write_text(paths.plan, plan_to_json(plan))
    remat = any(stage.remat for stage in plan.stages)
    flop = iteration_flop(config.model, made.step, config.training.batch_size, remat=remat, count=counted_flop)
    write_json(paths.planning, planning_document(record, made.step, watch.seconds, flop, os.cpu_count() or 1))


def plan_experiment(config: ExperimentConfig, made: Prepared, paths: RunPaths, watch: Stopwatch) -> tuple[ParallelPlan, PlanningRecord]:
    """Turn a layered step and a cluster into a checked parallel plan."""
    step, cluster, search = made.step, config.cluster, config.search
    candidates = watch.time("candidates", lambda: find_candidates(step, cluster, search))
    general = SolverOptions(time_limit_seconds=search.solver_seconds, table_cap=search.table_cap)
    pricer = StagePricer(step, cluster, general=general)
    watch.time("problems", lambda: pricer.build(candidates))
    table = watch.time("solve", lambda: pricer.price(candidates))
    table = watch.time("stage_dp", lambda: with_exact_memory(pricer, table, cluster, search))
    profiler = StoreProfiler(paths, cost_store(config, paths), functools.partial(launcher_for(config).profile, paths))
    refinement = watch.time("profile", lambda: refine(config, pricer, table, profiler))
    seconds_of, schedule = refinement.seconds_of(pricer), SCHEDULES[config.schedule.kind]
    with without_cycle_collection():
        simulated = watch.time("simulate", lambda: [simulate_partition(pricer, one, schedule, seconds_of) for one in refinement.partitions])
    chosen = pick(simulated, cluster)
    plan = make_plan(step, chosen, cluster, config.schedule.kind)
    return plan, PlanningRecord(candidates, pricer, refinement, simulated, chosen, seconds_of, profiler.num_new, profiler.num_reused)


@contextmanager
def without_cycle_collection() -> Generator[None]:
    """Programs are millions of small objects without cycles: to look for some is 60 % of emission (measured)."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def refine(config: ExperimentConfig, pricer: StagePricer, table: CostTable, profiler: StoreProfiler) -> Refinement:
    """The table as it is, or with the best few measured."""
    cluster, search = config.cluster, config.search
    match config.profiling.source:
        case CostSource.ANALYTIC:
            return unmeasured(pricer, table, cluster, search)
        case CostSource.MEASURED:
            describe = functools.partial(
                describe_request, device_kind=cluster.device.kind, versions=software_versions(), xla_flags=os.environ.get("XLA_FLAGS", "")
            )
            rounds, tasks = config.profiling.max_rounds, config.profiling.tasks_per_round
            return with_measurements(pricer, table, cluster, search, profiler, describe, max_rounds=rounds, tasks_per_round=tasks)


def profile_task(paths: RunPaths, task: int) -> None:
    """A profiling task: time the stages of its request file on this process's device, into one shard of the cost store."""
    config, request = load_config(paths.config), paths.profile_request(task)
    requests = requests_from_json(read_json(request), str(request))
    measure_requests(prepared(config).step, config.cluster, cost_store(config, paths), requests, config.profiling.repeats)


def prepared(config: ExperimentConfig, timed: Timed = untimed) -> Prepared:
    """The traced and layered train step of a config."""
    return prepare(config.model, config.training, config.layers, config.schedule.num_microbatches, timed)


def cost_store(config: ExperimentConfig, paths: RunPaths) -> Path:
    """The folder of measured costs: the config's own, else the one that all runs share."""
    return Path(config.profiling.store) if config.profiling.store else paths.costs


def counted_flop(step: LayeredStep) -> float:
    """FLOP of an iteration by counting the traced operators."""
    return float(sum(jaxpr_flops(layer.forward.jaxpr) + jaxpr_flops(layer.backward.jaxpr) for layer in step.layers)) * step.num_microbatches


def read_plan(paths: RunPaths) -> ParallelPlan:
    """The plan of a run. Raises LaunchError where there is none, PlanError where it is torn or foreign."""
    if not paths.plan.is_file():
        raise LaunchError(f"{paths.plan} is missing: planning did not finish, so there is nothing to train. See {paths.logs}.")
    return plan_from_json(paths.plan.read_text(encoding="utf-8", errors="replace"), str(paths.plan))


def train_ranks(paths: RunPaths) -> Ranks:
    """How many ranks the training job starts, and where."""
    kind = load_config(paths.config).launcher.kind
    return Ranks(read_plan(paths).num_devices, Place.THIS_MACHINE if kind is LauncherKind.LOCAL else Place.ALLOCATION)


def train_rank(paths: RunPaths) -> None:
    """One rank of the training job: join the mesh first, since it must come before anything else that jax does."""
    from alpa_hpc.runtime.groups import CpuDevice, join_mesh  # late, since it starts MPI: only ranks may

    config, plan = load_config(paths.config), read_plan(paths)
    context = join_mesh(plan.mesh_devices, tuple(stage.shape for stage in plan.stages), CpuDevice())
    job = training_job(config, plan)
    if context.rank == 0:
        reported(paths, lambda report: train_as_rank(job, context, DirectLinks(), report))
    else:
        train_as_rank(job, context, DirectLinks(), lambda step, figures: None)


def train_all_meshes(paths: RunPaths) -> None:
    """Train in this process alone, all meshes on its virtual devices."""
    job = training_job(load_config(paths.config), read_plan(paths))
    reported(paths, lambda report: train_in_process(job, report))


def reported(paths: RunPaths, training: Callable[[Report], TrainingFigures]) -> None:
    """Run a training whose figures go to metrics.jsonl and, at its end, training.json."""
    with open_metrics(paths.metrics) as metrics:
        figures = training(metrics.write)
    write_json(paths.training, asdict(figures))


def training_job(config: ExperimentConfig, plan: ParallelPlan) -> TrainingJob:
    """What the training job trains."""
    return TrainingJob(prepared(config), plan, config.cluster, config.training, open_training_data(config))


def open_training_data(config: ExperimentConfig) -> DataSource:
    """The data of a config, in the shapes of its model."""
    return open_data(config.data, config.model, vocabulary_of(config.model))


def vocabulary_of(model: object) -> int:
    """How many tokens a model knows: its field `vocab`, which text data needs."""
    return int(getattr(model, "vocab", 0))


def report_result(config: ExperimentConfig, paths: RunPaths) -> None:
    """Write result.json and print what a person looks for first."""
    batch = jax.tree.leaves(config.model.batch(config.training.batch_size))
    tokens = max(leaf.size for leaf in batch)
    print_result(write_result(paths, config.name, config.cluster.num_devices, tokens))
