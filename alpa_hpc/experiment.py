"""THE MAIN PATH: config -> traced step -> layers -> candidates -> costs -> stages -> programs -> plan -> training.

`run` is the login side, `plan_run` the planning job; what the other scripts in jobs/ call on a run folder stands in `profile_job` and
`train_job`. All of them read the same config and trace the same step, so what passes between jobs is small: requests, cost rows, the plan.
"""

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path

import jax

from alpa_hpc.config import ExperimentConfig, Mode, write_config
from alpa_hpc.errors import ConfigError, InfeasibleError, TraceError
from alpa_hpc.garbage import seldom_collected
from alpa_hpc.ir.flops import jaxpr_flops
from alpa_hpc.launch.files import is_there, read_json, write_json, write_text
from alpa_hpc.launch.launchers import InProcessLauncher, Launcher, LocalLauncher, RunSize
from alpa_hpc.launch.options import LauncherKind
from alpa_hpc.launch.paths import ALONE, JobKind, Origin, RunPaths, new_run
from alpa_hpc.launch.profiling import StoreProfiler
from alpa_hpc.launch.site import Platform, site_environment, use_site
from alpa_hpc.launch.slurm_launcher import SlurmLauncher
from alpa_hpc.launch.status import reporting
from alpa_hpc.microbatch_job import choose_microbatches, numbers_of
from alpa_hpc.parts import (
    config_of_run,
    cost_store,
    counted_flop,
    data_fault,
    key_of_search,
    open_training_data,
    predicted_here,
    prepared,
    store_result,
    whole_cluster,
    with_microbatches,
)
from alpa_hpc.plan.codec import plan_to_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.families import pricer_for
from alpa_hpc.planner.lookup import make_plan
from alpa_hpc.planner.refine import Refinement, modelled, with_measurements
from alpa_hpc.planner.requests import describe_request
from alpa_hpc.planner.search import SCHEDULES, find_candidates, pick
from alpa_hpc.planner.simulating import simulated
from alpa_hpc.profile_job import profile_here
from alpa_hpc.profiling.keys import software_versions
from alpa_hpc.profiling.options import CostSource
from alpa_hpc.profiling.solutions import read_solutions, write_solutions
from alpa_hpc.report.known_plans import FoundPlan, read_known, write_known
from alpa_hpc.report.planning import PlanningRecord, iteration_flop, planning_document, recomputed_share
from alpa_hpc.report.result import check_warnings, infeasible_noted, print_result
from alpa_hpc.report.stopwatch import Stopwatch, process_age_seconds
from alpa_hpc.report.words import chosen_words
from alpa_hpc.runtime.options import SEARCHED
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.train_job import fingerprint, train_here
from alpa_hpc.training.prepare import Prepared
from alpa_hpc.verify.plan import check_plan_code
from alpa_hpc.verify.target import check_compiler, prepare_target

IMPORT_SECONDS = process_age_seconds()  # from the start of the process to here: a sweep pays it once


def run(config: ExperimentConfig, origin: Origin = ALONE) -> Path:
    """Do what the command line asks, and return the run folder; `origin` is kept there for people."""
    launcher = launcher_for(config)
    check_run(config, launcher)
    paths = new_run(config.runs, config.name, origin)
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
        case Mode.CALIBRATE:
            raise AssertionError("a calibration is no run of an experiment")


def launcher_for(config: ExperimentConfig) -> Launcher:
    """The launcher that the config names."""
    measures = config.profiling.source is CostSource.MEASURED
    num_parallel, stage_seconds = config.profiling.max_parallel if measures else 0, 60 * config.profiling.max_stage_minutes
    size = RunSize(whole_cluster(config), config.training.num_steps, num_parallel, stage_seconds)
    has_gpus = config.site.platform is Platform.CUDA
    match config.launcher.kind:
        case LauncherKind.INPROCESS:
            return InProcessLauncher(plan_here, profile_here, train_here)
        case LauncherKind.LOCAL:
            # Two tasks at a time would share this machine's first GPU.
            return LocalLauncher(replace(size, max_parallel=1) if has_gpus else size)
        case LauncherKind.SLURM:
            return SlurmLauncher(config.launcher, size, has_gpus, 60 * config.profiling.max_pending_minutes)


def check_run(config: ExperimentConfig, launcher: Launcher) -> None:
    """Refuse before anything is submitted: what cannot start, a model that cannot be traced or cut, or that fits on no candidate."""
    if config.mode is Mode.CALIBRATE:
        raise ConfigError(f"mode={config.mode.value} is for `python -m alpa_hpc calibrate cluster={config.cluster.name}` alone")
    check_compiler(config.search.check_target)
    if config.launcher.kind is LauncherKind.INPROCESS:
        use_site(config.site)
        jax.config.update("jax_num_cpu_devices", config.cluster.num_devices)
    if config.mode is Mode.FULL:
        launcher.check()
        open_training_data(config)
    elif fault := data_fault(config):
        sys.stderr.write(f"warning: a plan needs no data, but training would be refused: {fault}\n")
    if config.mode is not Mode.PLAN or config.profiling.source is CostSource.MEASURED:  # else this process plans, and finds it out itself
        check_numbers(config)


def check_numbers(config: ExperimentConfig) -> None:
    """Raise where the model cannot be traced or cut, or fits on no candidate, at the number of microbatches: of several, at all of them."""
    refusals: list[InfeasibleError | TraceError] = []
    for number in numbers_of(config):
        try:
            find_candidates(prepared(with_microbatches(config, number)).step, config.cluster, config.search)
        except (InfeasibleError, TraceError) as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]


def plan_here(paths: RunPaths) -> None:
    """The planning job in this process, which reports as a job of its own would."""
    with reporting(paths, JobKind.PLAN):
        plan_run(paths)


def plan_run(paths: RunPaths) -> None:
    """The planning job: write plan.json, planning.json and result.json, and have the training job follow."""
    watch = Stopwatch({"import": IMPORT_SECONDS})
    config = config_of_run(paths)
    launcher = launcher_for(config)
    prepare_target(config.search.check_target, config.cluster.num_devices)
    if config.schedule.num_microbatches == SEARCHED:
        choose_microbatches(config, paths, watch)
        config = config_of_run(paths)
    made = prepared(config, watch.time)
    key = key_of_search(config, made.step)
    found = read_known(paths.known_plans, key) if key else None
    if found is None:
        with infeasible_noted(paths, config.name, config.search.name):
            found = searched(config, made, paths, launcher, watch)
    write_text(paths.plan, plan_to_json(found.plan))
    own = {**fingerprint(config, found.plan), "searched_by": found.searched_by, "seconds": watch.seconds}
    if is_there(paths.microbatches):
        own["microbatches"] = read_json(paths.microbatches)
    write_json(paths.planning, {**found.planning, **own})
    store_result(config, paths)
    if key and found.searched_by == str(paths.root):
        write_known(paths.known_plans, key, found)  # when the run has its own: the cache is the lesser loss
    sys.stderr.write("".join(f"{text}\n" for text in check_warnings(found.planning["check"])))
    before = "" if found.searched_by == str(paths.root) else f" (found by {found.searched_by}, which was asked the same)"
    sys.stderr.write(f"planned: {chosen_words(found.planning)}{before}\n")
    if config.mode is Mode.FULL:
        launcher.planned(paths)


def searched(config: ExperimentConfig, made: Prepared, paths: RunPaths, launcher: Launcher, watch: Stopwatch) -> FoundPlan:
    """Search for a plan, and tell of it what planning.json tells."""
    plan, record = plan_experiment(config, made, paths, launcher, watch)
    recomputed = recomputed_share(plan.stages, [jaxpr_flops(layer.forward.jaxpr) for layer in made.step.layers])
    flop = iteration_flop(config.model, made.step, config.training.batch_size, recomputed=recomputed, count=counted_flop)
    here = predicted_here(config, made.step, record, os.cpu_count() or 1)
    return FoundPlan(plan, planning_document(record, made.step, flop, here), str(paths.root))


@seldom_collected()
def plan_experiment(
    config: ExperimentConfig, made: Prepared, paths: RunPaths, launcher: Launcher, watch: Stopwatch
) -> tuple[ParallelPlan, PlanningRecord]:
    """Turn a layered step and a cluster into a checked parallel plan."""
    step, cluster, search = made.step, config.cluster, config.search
    candidates = watch.time("candidates", lambda: find_candidates(step, cluster, search))
    schedule = SCHEDULES[config.schedule.kind]
    pricer = pricer_for(step, cluster, search, schedule, read_solutions(paths.solutions))
    found = modelled(pricer, candidates, search, watch.time)
    profiler = StoreProfiler(paths, cost_store(config, paths), functools.partial(launcher.profile, paths), launcher.num_shares)
    refinement = watch.time("profile", lambda: refine(config, pricer, found, profiler))
    refinement, plans = watch.time("simulate", lambda: simulated(pricer, refinement, search, schedule))
    write_solutions(paths.solutions, pricer.learnt)
    chosen = pick(plans, cluster)
    plan = watch.time("programs", lambda: make_plan(step, chosen, cluster, config.schedule.kind))
    submeshes = [stage.submesh for stage in plan.stages]
    checked = watch.time("check", lambda: check_plan_code(chosen.assembly, submeshes, search.check_target))
    counts = profiler.num_new, profiler.num_reused
    return plan, PlanningRecord(search, candidates, pricer, refinement, plans, chosen, refinement.seconds_of(pricer), *counts, checked)


def refine(config: ExperimentConfig, pricer: StagePricer, found: Refinement, profiler: StoreProfiler) -> Refinement:
    """What was found by modelled costs as it is, or with the best few measured."""
    match config.profiling.source:
        case CostSource.ANALYTIC:
            return found
        case CostSource.MEASURED:
            describe = functools.partial(
                describe_request,
                device_kind=config.cluster.device.kind,
                versions=software_versions(),
                xla_flags=site_environment(config.site, os.environ)["XLA_FLAGS"],
                extent=config.profiling.extent,
                cluster_name=config.cluster.name,
            )
            rounds, tasks = config.profiling.max_rounds, config.profiling.tasks_per_round
            return with_measurements(pricer, found, config.search, profiler, describe, max_rounds=rounds, tasks_per_round=tasks)
