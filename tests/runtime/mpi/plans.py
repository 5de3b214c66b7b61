"""Random plans on the meshes of this MPI job, one after the other; every rank compares its own tiles with the one-device reference.

Arguments: the meshes (`2x1,2x1`), the first seed, how many plans.
"""

import json
import random
import sys
from collections.abc import Mapping

import jax
import numpy as np
from meshes import join, shapes_of

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.ir.reference import microbatch_inputs
from alpa_hpc.runtime.assemble import place_batch, place_state
from alpa_hpc.runtime.execute import IterationResult, prepare, run_iteration
from alpa_hpc.runtime.groups import MeshContext
from alpa_hpc.runtime.instructions import Buffer
from alpa_hpc.runtime.links import DirectLinks
from alpa_hpc.runtime.tasks import compile_task
from alpa_hpc.runtime.transport import MpiTransport
from tests.random_plans import NUM_LAYERS, Family, Plan, Variant, Work, mlp_batch, mlp_loss, mlp_params, sgd_step

MICROBATCHES = (2, 4)  # each number costs a trace and a reference
TOLERANCE = 2e-4


def draw_plan(shapes: tuple[MeshShape, ...], seed: int) -> Plan:
    """Any cut of the layers into as many stages as there are meshes, any strategies."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, NUM_LAYERS), len(shapes) - 1))
    ranges = zip((0, *cuts), (*cuts, NUM_LAYERS), shapes, strict=True)
    stages = (Variant(start, stop, shape.sizes, draw.random() < 0.4, draw.randrange(10**6)) for start, stop, shape in ranges)
    return Plan(tuple(stages), draw.choice(MICROBATCHES))


def run_plan(family: Family, plan: Plan, context: MeshContext, transport: MpiTransport) -> IterationResult:
    """One iteration of this rank's mesh."""
    assembly, work = family.assembly(plan), family.work(plan.num_microbatches)
    index, mesh = context.mesh_index, context.mesh
    tasks = {name: compile_task(task, mesh) for name, task in assembly.tasks(index).items()}
    executor = prepare(assembly.programs[index], tasks, transport)
    leaves = {number: np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(family.state))}
    microbatches = microbatch_inputs(work.traced, dict(enumerate(jax.tree.leaves(family.state))), work.batch)

    def feed(number: int, microbatch: int) -> jax.Array:
        return place_batch(assembly, index, mesh, number, np.asarray(microbatches[microbatch][number]))

    return run_iteration(executor, place_state(assembly, index, mesh, leaves), feed)


def compare(family: Family, work: Work, result: IterationResult) -> tuple[int, ...]:
    """The numbers of the state leaves of which this rank holds a tile; each changed as on one device (SGD of rate 1: by its gradient)."""
    before = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(family.state)]
    after = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(work.expected_state)]
    held: list[int] = []
    for buffer, array in result.resident.items():
        number = int(buffer.name.removeprefix("state."))
        (shard,) = array.addressable_shards
        change = after[number] - before[number]
        found = np.asarray(shard.data, np.float64) - before[number][shard.index]
        bound = TOLERANCE * np.abs(change).max() + 1e-6
        worst = np.abs(found - change[shard.index]).max()
        assert worst <= bound, f"{work.layered.state_names[number]} is off by {worst:.2e}, {worst / bound:.1f} times the tolerance"
        held.append(number)
    return tuple(held)


def compare_metrics(work: Work, result: IterationResult) -> Mapping[str, float]:
    """The metrics of the step, which every mesh has."""
    metrics = {name: float(np.asarray(result.results[Buffer(f"metric.{k}")])) for k, name in enumerate(work.layered.metric_names)}
    for name, value in metrics.items():
        np.testing.assert_allclose(value, float(work.expected_metrics[name]), rtol=TOLERANCE, err_msg=name)
    return metrics


def main() -> None:
    """Rank 0 prints one JSON line a plan, once all ranks have found it right."""
    shapes, first, count = shapes_of(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    context = join(shapes)
    transport = MpiTransport(context, DirectLinks())
    family = Family(sgd_step(mlp_loss), {"params": mlp_params()}, mlp_batch)
    for seed in range(first, first + count):
        plan = draw_plan(shapes, seed)
        work = family.work(plan.num_microbatches)
        result = run_plan(family, plan, context, transport)
        leaves, metrics = compare(family, work, result), compare_metrics(work, result)
        everyone = context.world.allgather(leaves)
        if context.rank == 0:
            leaves = sorted({leaf for held in everyone for leaf in held})
            missing = set(range(len(jax.tree.leaves(family.state)))) - set(leaves)
            assert not missing, f"leaves {missing} live nowhere"
            stages = [[stage.start, stage.stop, stage.remat] for stage in plan.stages]
            line = {"seed": seed, "stages": stages, "microbatches": plan.num_microbatches, "leaves": len(leaves), **metrics}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
