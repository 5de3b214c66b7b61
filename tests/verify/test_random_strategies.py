"""Plans of GPT and Llama with strategies drawn at random exchange, as code for CPUs, what is planned: to the byte, kind by kind.

Among them are embeddings whose two readers leave their gradients in different specs, and norms of gradients whose shares are sums in
others.
"""

from collections import Counter
from functools import cache
from itertools import chain

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.runtime.assemble import Assembly
from alpa_hpc.runtime.stage import gradient_spec, partial_spec
from alpa_hpc.runtime.tasks import compile_task
from alpa_hpc.sharding.apply import share_specs
from alpa_hpc.sharding.resharding import CollectiveKind, Lane, joint_moves, reshard_moves
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.verify.check import check_task
from alpa_hpc.verify.target import described_mesh
from alpa_hpc.verify.traffic import planned_collectives
from tests.models.test_planned import llama
from tests.random_plans import NUM_LAYERS, Plan, Variant
from tests.verify.test_models import gpt

pytestmark = pytest.mark.slow

SHAPE = MeshShape(4, 2)
CASES = {
    "gpt": (gpt, Variant(0, NUM_LAYERS, (2, 4), False, 3)),
    "llama": (llama, Variant(0, NUM_LAYERS, SHAPE.sizes, True, 15)),
    "broadcasts": (gpt, Variant(0, NUM_LAYERS, SHAPE.sizes, True, 13)),
}


@cache
def assembly(name: str) -> Assembly:
    make, variant = CASES[name]
    return make().assembly(Plan((variant,), 2))


@pytest.mark.parametrize(("name", "tasks"), [("gpt", ("backward", "partials")), ("llama", ("forward", "partials"))])
def test_code_exchanges_what_is_planned_to_the_byte(name: str, tasks: tuple[str, ...]) -> None:
    whole, (_, variant) = assembly(name), CASES[name]
    for task in map(whole.tasks(0).__getitem__, tasks):
        lanes = check_task(whole.step, whole.stages[0], whole.pipeline.stages[0], task, 0, compile_task(task, variant.mesh)).lanes
        assert lanes
        for lane in lanes:
            assert lane.planned_bytes == lane.compiled_bytes, (task.name, lane)


def lanes_of(name: str, task: str, *, gpu: bool) -> Counter[Lane]:
    whole = assembly(name)
    lanes = Counter[Lane]()
    for one in planned_collectives(whole.step, whole.stages[0], whole.pipeline.stages[0], whole.tasks(0)[task], gpu=gpu):
        lanes[one.lane] += one.num_bytes
    return lanes


def test_on_gpus_gathers_of_broadcasts_are_fewer_bytes() -> None:
    """Twice the rows of a mean that is subtracted [4, 8], of which 16 columns are made.

    Code for GPUs gathers 512 bytes that it has already, since a barrier lies between.
    """
    fewer = lanes_of("broadcasts", "backward", gpu=False) - lanes_of("broadcasts", "backward", gpu=True)
    assert fewer[Lane(CollectiveKind.ALL_GATHER, (1,))] == 2 * 4 * 8 * 8 * (16 - 1) - 512


@pytest.mark.gpu_code
@pytest.mark.usefixtures("gpu_compiler")
def test_gpu_code_exchanges_what_is_planned_to_the_byte() -> None:
    whole, mesh = assembly("broadcasts"), described_mesh(CheckTarget.H100, Submesh(1, 8), SHAPE)
    compiled = compile_task(whole.tasks(0)["backward"], mesh)
    for lane in check_task(whole.step, whole.stages[0], whole.pipeline.stages[0], whole.tasks(0)["backward"], 0, compiled).lanes:
        assert lane.planned_bytes == lane.compiled_bytes, lane


def test_gradients_of_a_parameter_meet_on_their_way() -> None:
    [stage] = assembly("gpt").stages
    met = 0
    for param in range(len(assembly("gpt").step.state_names)):
        readers = stage.readers(param)
        if len(readers) > 1:
            target, specs = partial_spec(stage, param), {gradient_spec(reader, param) for reader in readers}
            apart = sum(len(reshard_moves(spec, target, stage.shape)) for spec in specs)
            met += len(joint_moves(specs, target, stage.shape)) < apart
    assert met


def test_shares_of_a_norm_are_left_as_they_are_made() -> None:
    [stage] = assembly("llama").stages
    updates = chain.from_iterable([(layer, update) for update in layer.problem.updates] for layer in stage.layers)
    found = [spec != layer.spec(tensor) for layer, update in updates for tensor, spec in share_specs(update.partials[0], layer).items()]
    assert any(found) and not all(found)
