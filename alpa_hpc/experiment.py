"""THE MAIN PATH: config -> traced step -> layers -> candidates -> costs -> stages -> programs -> plan -> training.

`run` is the login side; `plan_run`, `profile_run`, `profile_rank`, `train_run` and `train_rank` are what the scripts in jobs/ call on a
run folder. All of them read the same config and trace the same step, so what passes between jobs is small: requests, cost rows, the plan.
"""

import functools
import gc
import hashlib
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import jax

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.config import ExperimentConfig, Mode, load_config, write_config
from alpa_hpc.errors import LaunchError, PlanError
from alpa_hpc.ir.flops import jaxpr_flops
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.launch.devices import check_devices_here, local_device
from alpa_hpc.launch.failures import explained_by_ranks
from alpa_hpc.launch.files import read_json, write_json, write_text
from alpa_hpc.launch.launchers import InProcessLauncher, Launcher, LocalLauncher, RunSize
from alpa_hpc.launch.locations import job_script
from alpa_hpc.launch.mpirun import ONE_THREAD, Place, Ranks, run_ranks
from alpa_hpc.launch.options import LauncherKind
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run
from alpa_hpc.launch.profiling import StoreProfiler, measure_all
from alpa_hpc.launch.site import Platform, site_environment, use_site
from alpa_hpc.launch.slurm_launcher import SlurmLauncher
from alpa_hpc.launch.status import reporting, this_node
from alpa_hpc.plan.codec import plan_from_json, plan_hash, plan_to_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.lookup import check_plan_fits, make_plan
from alpa_hpc.planner.refine import Refinement, unmeasured, with_exact_memory, with_measurements
from alpa_hpc.planner.requests import ProfileRequest, describe_request, requests_from_json
from alpa_hpc.planner.search import SCHEDULES, find_candidates, pick, simulate_partition
from alpa_hpc.planner.timing import joined_rows, measure_here, measure_request_on_mesh
from alpa_hpc.profiling.keys import software_versions
from alpa_hpc.profiling.options import CostSource
from alpa_hpc.profiling.outcome import Failed, explain_failure
from alpa_hpc.profiling.store import ProfileRow
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
    try:
        if started(config, launcher, paths):
            print_result(read_json(paths.result))
    finally:
        sys.stdout.write(f"run folder: {paths.root}\n")  # after a failure, too: status/ and logs/ tell what happened
    return paths.root


def started(config: ExperimentConfig, launcher: Launcher, paths: RunPaths) -> bool:
    """Start what the mode asks for; whether it has come to its end, or only into a queue."""
    match config.mode:
        case Mode.DRY_RUN:
            sys.stdout.write(launcher.scripts(paths))
            return False
        case Mode.PLAN if config.profiling.source is CostSource.ANALYTIC:
            plan_here(paths)  # no device has to be measured, so this process will do
            return True
        case Mode.PLAN:
            return launcher.plan(paths)
        case Mode.FULL:
            return launcher.plan_and_train(paths)


def launcher_for(config: ExperimentConfig) -> Launcher:
    """The launcher that the config names."""
    measures = config.profiling.source is CostSource.MEASURED
    size = RunSize(whole_cluster(config), config.training.num_steps, config.profiling.max_parallel if measures else 0)
    has_gpus = config.site.platform is Platform.CUDA
    match config.launcher.kind:
        case LauncherKind.INPROCESS:
            return InProcessLauncher(plan_here, profile_here, train_here)
        case LauncherKind.LOCAL:
            # Two tasks at a time would share this machine's first GPU.
            return LocalLauncher(replace(size, max_parallel=1) if has_gpus else size)
        case LauncherKind.SLURM:
            return SlurmLauncher(config.launcher, size, has_gpus, 60 * config.profiling.max_pending_minutes)


def whole_cluster(config: ExperimentConfig) -> Submesh:
    """All devices: what a training job takes."""
    return Submesh(config.cluster.num_nodes, config.cluster.devices_per_node)


def check_run(config: ExperimentConfig, launcher: Launcher) -> None:
    """Refuse before anything is submitted: what cannot start, a model that cannot be traced or cut, or that fits on no candidate."""
    if config.launcher.kind is LauncherKind.INPROCESS:
        use_site(config.site)
        jax.config.update("jax_num_cpu_devices", config.cluster.num_devices)
    if config.mode is Mode.FULL:
        launcher.check()
        open_training_data(config)
    if config.mode is not Mode.PLAN:
        find_candidates(prepared(config).step, config.cluster, config.search)


def plan_here(paths: RunPaths) -> None:
    """The planning job in this process, which reports as a job of its own would."""
    with reporting(paths, JobKind.PLAN):
        plan_run(paths)


def plan_run(paths: RunPaths) -> None:
    """The planning job: write plan.json, planning.json and result.json, and have the training job follow."""
    watch = Stopwatch({"import": process_age_seconds()})
    config = load_config(paths.config)
    launcher = launcher_for(config)
    made = prepared(config, watch.time)
    plan, record = plan_experiment(config, made, paths, launcher, watch)
    write_text(paths.plan, plan_to_json(plan))
    remat = any(stage.remat for stage in plan.stages)
    flop = iteration_flop(config.model, made.step, config.training.batch_size, remat=remat, count=counted_flop)
    document = planning_document(record, made.step, watch.seconds, flop, os.cpu_count() or 1)
    write_json(paths.planning, {**fingerprint(config, plan), **document})
    store_result(config, paths)
    if config.mode is Mode.FULL:
        launcher.planned(paths)


def plan_experiment(
    config: ExperimentConfig, made: Prepared, paths: RunPaths, launcher: Launcher, watch: Stopwatch
) -> tuple[ParallelPlan, PlanningRecord]:
    """Turn a layered step and a cluster into a checked parallel plan."""
    step, cluster, search = made.step, config.cluster, config.search
    candidates = watch.time("candidates", lambda: find_candidates(step, cluster, search))
    general = SolverOptions(time_limit_seconds=search.solver_seconds, table_cap=search.table_cap)
    pricer = StagePricer(step, cluster, general=general)
    watch.time("problems", lambda: pricer.build(watch.counted(candidates)))
    table = watch.time("solve", lambda: pricer.price(watch.counted(candidates)))
    table = watch.time("stage_dp", lambda: with_exact_memory(pricer, table, cluster, search))
    profiler = StoreProfiler(paths, cost_store(config, paths), functools.partial(launcher.profile, paths), launcher.num_shares)
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
                describe_request,
                device_kind=cluster.device.kind,
                versions=software_versions(),
                xla_flags=site_environment(config.site, os.environ)["XLA_FLAGS"],
                extent=config.profiling.extent,
                cluster_name=cluster.name,
            )
            rounds, tasks = config.profiling.max_rounds, config.profiling.tasks_per_round
            return with_measurements(pricer, table, cluster, search, profiler, describe, max_rounds=rounds, tasks_per_round=tasks)


def profile_run(paths: RunPaths, task: int) -> None:
    """A profiling task: time the stages of its request file, on this process's device or with a rank on each device of their mesh."""
    config = load_config(paths.config)
    submesh = profile_requests(paths, task)[0].submesh
    if submesh.num_devices == 1:
        profile_alone(paths, task)
        return
    with explained_by_ranks(paths.failures(JobKind.PROFILE, task)):
        run_ranks(ranks_on(config, submesh), (str(job_script("profile_rank")), str(paths.root), str(task)), os.environ)


def profile_here(paths: RunPaths, task: int) -> None:
    """A profiling task in this process, which reports as a job of its own would."""
    with reporting(paths, JobKind.PROFILE, task):
        profile_alone(paths, task)


def profile_alone(paths: RunPaths, task: int) -> None:
    """Time the stages of a request file in this process; one that does not compile or fit has failed, and the others go on."""
    config, requests = load_config(paths.config), profile_requests(paths, task)
    use_site(config.site)
    check_devices_here(config.site, config.cluster, os.environ)
    step = prepared(config).step

    def measure(request: ProfileRequest) -> ProfileRow | Failed:
        try:
            return measure_here(step, config.cluster, request, config.profiling.repeats, this_node())
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            return Failed(explain_failure(error))

    measure_all(paths, task, cost_store(config, paths), requests, measure)


def profile_rank(paths: RunPaths, task: int) -> None:
    """One rank of a profiling task that has a device for each rank; the first one writes."""
    from alpa_hpc.runtime.groups import join_mesh  # late, since it starts MPI: only ranks may

    config, requests = load_config(paths.config), profile_requests(paths, task)
    ranks = tuple(range(requests[0].submesh.num_devices))
    context = join_mesh((ranks,), (requests[0].stage.shape,), local_device(config.site, config.cluster, os.environ))
    step, repeats, barrier = prepared(config).step, config.profiling.repeats, context.world.Barrier

    def measure(request: ProfileRequest) -> ProfileRow:
        row = measure_request_on_mesh(step, config.cluster, request, repeats, context.mesh, barrier, this_node())
        return joined_rows(context.world.allgather(row))

    if context.rank == 0:
        measure_all(paths, task, cost_store(config, paths), requests, measure)
    else:
        for request in requests:
            measure(request)


def profile_requests(paths: RunPaths, task: int) -> tuple[ProfileRequest, ...]:
    """What a profiling task shall measure."""
    path = paths.profile_request(task)
    return requests_from_json(read_json(path), str(path))


def prepared(config: ExperimentConfig, timed: Timed = untimed) -> Prepared:
    """The traced and layered train step of a config."""
    return prepare(config.model, config.training, config.layers, config.schedule.num_microbatches, timed)


def cost_store(config: ExperimentConfig, paths: RunPaths) -> Path:
    """The folder of measured costs: the config's own, else the one that all runs share."""
    return Path(config.profiling.store) if config.profiling.store else paths.costs


def counted_flop(step: LayeredStep) -> float:
    """FLOP of an iteration by counting the traced operators."""
    return float(sum(jaxpr_flops(layer.forward.jaxpr) + jaxpr_flops(layer.backward.jaxpr) for layer in step.layers)) * step.num_microbatches


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
    config, plan = load_config(paths.config), read_plan(paths)
    planning = read_json(paths.planning)
    if any(planning.get(name) != value for name, value in fingerprint(config, plan).items()):  # somebody changed one of the two, and may
        check_plan_fits(plan, prepared(config).step, config.cluster, config.schedule.kind)
    with explained_by_ranks(paths.failures(JobKind.TRAIN)):
        run_ranks(ranks_on(config, whole_cluster(config)), (str(job_script("train_rank")), str(paths.root)), os.environ)
    store_result(config, paths)


def ranks_on(config: ExperimentConfig, submesh: Submesh) -> Ranks:
    """A rank on every device of a submesh."""
    place = Place.ALLOCATION if config.launcher.kind is LauncherKind.SLURM else Place.THIS_MACHINE
    threads = ONE_THREAD if config.site.platform is Platform.CPU else {}
    settings = {**site_environment(config.site, os.environ), **threads}
    asked = {name: str(value) for name, value in config.launcher.slurm.environment.items()} if place is Place.ALLOCATION else {}
    return Ranks(submesh.num_devices, submesh.devices_per_node, place, {**settings, **asked})


def train_rank(paths: RunPaths) -> None:
    """One rank of the training job: join the mesh first, since it must come before anything else that jax does."""
    from alpa_hpc.runtime.groups import join_mesh  # late, since it starts MPI: only ranks may

    config, plan = load_config(paths.config), read_plan(paths)
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
    config = load_config(paths.config)
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


def open_training_data(config: ExperimentConfig) -> DataSource:
    """The data of a config, in the shapes of its model."""
    return open_data(config.data, config.model, vocabulary_of(config.model))


def vocabulary_of(model: object) -> int:
    """How many tokens a model knows: its field `vocab`, which text data needs."""
    return int(getattr(model, "vocab", 0))


def store_result(config: ExperimentConfig, paths: RunPaths) -> None:
    """Write result.json from what the jobs measured so far."""
    batch = jax.tree.leaves(config.model.batch(config.training.batch_size))
    tokens = max(leaf.size for leaf in batch)
    write_result(paths, config.name, config.cluster.num_devices, tokens)
