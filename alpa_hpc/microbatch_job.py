"""A run whose number of microbatches is to be chosen -> microbatches.json: the start of its planning job, and a process for each number."""

import functools
import os
from pathlib import Path
from threading import Event

from alpa_hpc.config import ExperimentConfig, load_config
from alpa_hpc.errors import SolverError, TraceError
from alpa_hpc.garbage import seldom_collected
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.launch.files import write_json
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.parts import key_of_number, prepared, with_microbatches
from alpa_hpc.planner.families import pricer_for
from alpa_hpc.planner.microbatches import TriedNumber, numbers_for, refused, tried, try_numbers
from alpa_hpc.planner.refine import Interest
from alpa_hpc.planner.search import SCHEDULES, SimulatedPlan
from alpa_hpc.planner.simulating import fastest_modelled
from alpa_hpc.profiling.solutions import read_solutions, write_solutions
from alpa_hpc.report.known_numbers import read_number, write_number
from alpa_hpc.report.planning import microbatches_document
from alpa_hpc.report.stopwatch import Stopwatch
from alpa_hpc.runtime.options import SEARCHED
from alpa_hpc.sharding.worker import Worker

MOST_PARALLEL = 4  # searches at different numbers of microbatches: each takes some GB of memory for a large model
MOST_SECONDS = 86_400.0  # that one of them may take


def numbers_of(config: ExperimentConfig) -> tuple[int, ...]:
    """The number of microbatches that is given, or all that there are to choose from."""
    given = config.schedule.num_microbatches
    return numbers_for(config.training.batch_size, config.cluster.num_devices) if given == SEARCHED else (given,)


def choose_microbatches(config: ExperimentConfig, paths: RunPaths, watch: Stopwatch) -> None:
    """Write microbatches.json: the number of microbatches whose plan is the fastest by modelled costs, and what the others give.

    Each number is searched in a process of its own: they share the cores that there are, and no memory.
    """
    workers: list[Worker[TriedNumber]] = []
    over = Event()

    def try_at(number: int, most_seconds: float) -> TriedNumber:
        worker = Worker(try_number)
        workers.append(worker)
        try:
            return worker.call(MOST_SECONDS, str(paths.root), number, most_seconds)
        except SolverError as error:
            if over.is_set():  # it was ended from here
                raise
            return TriedNumber(number, reason=f"its search failed: {error}")
        finally:
            worker.end()  # it holds some GB

    num_parallel = min(len(os.sched_getaffinity(0)), MOST_PARALLEL)
    try:
        found = watch.time("microbatches", lambda: try_numbers(numbers_of(config), try_at, watch.tell, num_parallel))
    finally:
        over.set()
        for worker in workers:
            worker.end()
    write_json(paths.microbatches, microbatches_document(found))


@seldom_collected()
def try_number(root: str, number: int, most_seconds: float) -> TriedNumber:
    """What the run in `root` gives at a number of microbatches by modelled costs, as far as it is of interest; searched once for all."""
    paths = RunPaths(Path(root))
    config = with_microbatches(load_config(paths.config), number)
    try:
        step = prepared(config).step
    except TraceError as error:
        return refused(number, error)
    key = key_of_number(config, step)
    found = read_number(paths.known_numbers, key)
    if found is None:
        found = tried(number, most_seconds, functools.partial(_search, config, step, paths))
        write_number(paths.known_numbers, key, found)
    return found


def _search(config: ExperimentConfig, step: LayeredStep, paths: RunPaths, interest: Interest) -> SimulatedPlan:
    schedule = SCHEDULES[config.schedule.kind]
    pricer = pricer_for(step, config.cluster, config.search, schedule, read_solutions(paths.solutions))
    try:
        return fastest_modelled(pricer, config.search, schedule, interest)
    finally:
        write_solutions(paths.solutions, pricer.learnt)
