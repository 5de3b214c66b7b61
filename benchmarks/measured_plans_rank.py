"""One of the two ranks of measured_plans.py: `mpirun -n 2 python measured_plans_rank.py FOLDER` runs the plans of a folder in turns."""

import gc
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from alpa_hpc.cluster.hardware import ClusterSpec, MeshShape
from alpa_hpc.config import compose_experiment
from alpa_hpc.ir.reference import microbatch_inputs
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.parts import open_training_data, prepared
from alpa_hpc.plan.codec import plan_from_json
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.lookup import schedule_of, stages_of_plan
from alpa_hpc.runtime.assemble import assemble, compile_tasks, place_batch, place_state
from alpa_hpc.runtime.devices import CpuDevice
from alpa_hpc.runtime.execute import Executor, prepare, run_iteration
from alpa_hpc.runtime.groups import MeshContext, join_mesh
from alpa_hpc.runtime.instructions import Buffer
from alpa_hpc.runtime.links import DirectLinks
from alpa_hpc.runtime.transport import MpiTransport
from alpa_hpc.sharding.collectives import AXIS_NAMES
from alpa_hpc.training.data import Split
from alpa_hpc.training.prepare import Prepared

WARM_UP_STEPS = 2


@dataclass(slots=True, eq=False)
class Running:
    """This rank's part of a plan, and its state."""

    executor: Executor
    feed: Callable[[int, int], jax.Array]
    state: dict[Buffer, jax.Array]

    def step(self) -> None:
        """One iteration, to its end."""
        result = run_iteration(self.executor, self.state, self.feed)
        jax.block_until_ready((result.resident, result.results))
        self.state = result.resident


def main(folder: Path) -> None:
    request = read_json(folder / "request.json")
    context = join_mesh(((0, 1),), (MeshShape(2, 1),), CpuDevice())

    @cache
    def problem(num_microbatches: int) -> "Problem":
        return problem_of((*request["overrides"], f"schedule.num_microbatches={num_microbatches}"))

    running: list[Running] = []
    for number, num_microbatches in enumerate(request["microbatches"]):
        path = folder / f"{number}.json"
        running.append(compiled(plan_from_json(path.read_text(), str(path)), problem(num_microbatches), context))
        if context.rank == 0:
            sys.stderr.write(f"compiled {number + 1} of {len(request['microbatches'])} plans\n")
    gc.collect()
    gc.freeze()  # all plans' objects together would make each later look for garbage take as long as a step
    for one in running * WARM_UP_STEPS:
        one.step()
    order = random.Random(0)

    def take_turns(numbers: Sequence[int], repeats: int) -> dict[int, list[float]]:
        rounds = [one_round({number: running[number] for number in numbers}, request, order, context) for _ in range(repeats)]
        return {number: [each[number] for each in rounds] for number in numbers}

    seconds = take_turns(range(len(running)), request["repeats"])
    final = take_turns(finalists(seconds, request), request["final_repeats"])
    if context.rank == 0:
        write_json(
            folder / "seconds.json", {"all": list(seconds.values()), "final": {str(number): found for number, found in final.items()}}
        )


def one_round(running: Mapping[int, Running], request: Mapping[str, Any], order: random.Random, context: MeshContext) -> dict[int, float]:
    """Median seconds of a step of each plan over all passes of a round."""
    steps: dict[int, list[float]] = {number: [] for number in running}
    for _ in range(request["passes"]):
        for number in order.sample(list(running), len(running)):  # so that no plan always has the same one before it
            steps[number] += timed(running[number], request["steps"], context)
    return {number: median(taken) for number, taken in steps.items()}


def finalists(seconds: Mapping[int, Sequence[float]], request: Mapping[str, Any]) -> list[int]:
    """The chosen plan, and those that may be the fastest of all; both ranks find the same, since they know the same seconds."""
    means = {number: mean(found) for number, found in seconds.items()}
    limit = min(means.values()) * request["final_margin"]
    return [number for number, found in means.items() if found <= limit or number == request["chosen"]]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What is trained, on what cluster, from what state and on what batch."""

    made: Prepared
    cluster: ClusterSpec
    leaves: dict[int, np.ndarray]
    batch: object


def problem_of(overrides: tuple[str, ...]) -> Problem:
    config = compose_experiment("quickstart", overrides)
    made = prepared(config)
    state = jax.jit(made.train_step.init)(jax.random.key(config.training.seed))
    leaves = {leaf: np.asarray(value) for leaf, value in enumerate(jax.tree.leaves(state))}
    batch = open_training_data(config).batch(Split.TRAINING, config.training.batch_size, config.training.seed, 0)
    return Problem(made, config.cluster, leaves, batch)


def compiled(plan: ParallelPlan, problem: Problem, context: MeshContext) -> Running:
    """Compile this rank's programs and place its state and its batch."""
    step, traced = problem.made.step, problem.made.traced
    assembly = assemble(step, stages_of_plan(plan, step, problem.cluster), schedule_of(plan))
    here = placed(plan, context)
    index, mesh = here.mesh_index, here.mesh
    executor = prepare(assembly.programs[index], compile_tasks(assembly, index, mesh), MpiTransport(here, DirectLinks()))
    inputs = microbatch_inputs(traced, problem.leaves, problem.batch)

    @cache
    def feed(number: int, microbatch: int) -> jax.Array:
        return place_batch(assembly, index, mesh, number, np.asarray(inputs[microbatch][number]))

    return Running(executor, feed, dict(place_state(assembly, index, mesh, problem.leaves)))


def placed(plan: ParallelPlan, context: MeshContext) -> MeshContext:
    """This rank's place in a plan. The two ranks are one jax process group; of a stage on one of them the mesh is that rank's device."""
    index = next(index for index, devices in enumerate(plan.mesh_devices) if context.rank in devices)
    devices = context.mesh.devices if len(plan.stages) == 1 else np.array(jax.local_devices())
    mesh = Mesh(devices.reshape(plan.stages[index].shape.sizes), AXIS_NAMES, axis_types=context.mesh.axis_types)
    local_device = plan.mesh_devices[index].index(context.rank)
    return replace(context, mesh_index=index, mesh=mesh, local_device=local_device, ranks=plan.mesh_devices)


def timed(one: Running, num_steps: int, context: MeshContext) -> list[float]:
    """Seconds of some steps, each on the slower rank."""
    seconds: list[float] = []
    for _ in range(num_steps):
        context.world.Barrier()
        began = time.perf_counter()
        one.step()
        seconds.append(time.perf_counter() - began)
    return [max(both) for both in zip(*context.world.allgather(seconds), strict=True)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
