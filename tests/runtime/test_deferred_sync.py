"""The compiled programs of a data-parallel plan: gradients wait for the iteration's end, optimiser state is split (paper, section 4.2)."""

import re
from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.models.gpt import GPT
from alpa_hpc.runtime.assemble import Assembly, assemble, compile_tasks
from alpa_hpc.runtime.compute_tasks import gradient_layouts
from alpa_hpc.runtime.schedule import OneFOneB
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.runtime.update_tasks import leaf_layouts
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from alpa_hpc.verify.hlo import collectives
from tests.random_plans import CLUSTER, NUM_LAYERS, Family, Variant, mlp_batch, mlp_loss, mlp_params, optax_step, sgd_step, tokens

pytestmark = pytest.mark.slow
NUM_DEVICES = 4


@cache
def family() -> Family:
    params = mlp_params()
    optimiser = optax.adamw(1e-2)
    return Family(optax_step(mlp_loss, optimiser), {"params": params, "optimiser": optimiser.init(params)}, mlp_batch)


@cache
def data_parallel() -> Assembly:
    """With many microbatches nothing beats splitting the rows: only gradients are ever exchanged, once."""
    layered = family().work(8).layered
    solver = StageSolver(layered, MeshPrices(logical_mesh(CLUSTER, Submesh(1, NUM_DEVICES), MeshShape(NUM_DEVICES, 1))), remat=False)
    stage = Stage(MeshShape(NUM_DEVICES, 1), solver.choose(0, NUM_LAYERS, MemoryPrice(0.0, 0.0)))
    return assemble(layered, [stage], OneFOneB())


@cache
def texts() -> dict[str, str]:
    mesh = Mesh(np.array(jax.devices()[:NUM_DEVICES]).reshape(NUM_DEVICES, 1), ("x", "y"))
    return {name: compiled.as_text() or "" for name, compiled in compile_tasks(data_parallel(), 0, mesh).items()}


def bytes_of(text: str, kind: CollectiveKind) -> int:
    return sum(one.num_bytes for one in collectives(text) if one.kind is kind)


def test_no_gradient_is_exchanged_a_microbatch():
    smallest = min(np.prod(aval.shape) * 4 for aval in family().work(8).traced.state_avals[-len(jax.tree.leaves(mlp_params())) :])
    assert smallest >= 128
    assert all(one.num_bytes <= 8 for name in ("forward", "backward") for one in collectives(texts()[name])), "the loss is all there is"


def test_each_gradient_is_scattered_and_each_parameter_gathered_once():
    step, stage = data_parallel().step, data_parallel().stages[0]
    io = data_parallel().pipeline.stages[0]
    whole = sum(4 * int(np.prod(layout.shape)) for p in io.owned for layout in set(gradient_layouts(step, stage, p)))
    once = sum(4 * int(np.prod(step.state_avals[p].shape)) for p in io.owned)
    everything = "\n".join(texts().values())
    assert bytes_of(everything, CollectiveKind.REDUCE_SCATTER) == whole
    assert bytes_of(everything, CollectiveKind.ALL_GATHER) == once
    assert bytes_of(everything, CollectiveKind.ALL_TO_ALL) == bytes_of(everything, CollectiveKind.COLLECTIVE_PERMUTE) == 0
    assert bytes_of(everything, CollectiveKind.ALL_REDUCE) < 128, "only the loss and other scalars"


def test_a_leaf_is_updated_where_it_lies():
    update = data_parallel().tasks(0)["update"]
    aliases = {int(out): int(parameter) for out, parameter in re.findall(r"\{(\d+)\}: \((\d+), \{\}", texts()["update"].splitlines()[0])}
    first = sum(len(argument) for argument in update.inputs if isinstance(argument, tuple))  # behind all accumulators
    assert aliases == {number: first + number for number in range(len(data_parallel().pipeline.stages[0].leaves))}


def test_optimiser_state_is_split_over_all_devices():
    step, stage, io = data_parallel().step, data_parallel().stages[0], data_parallel().pipeline.stages[0]
    layouts = leaf_layouts(step, stage, io)
    moments = [layouts[leaf] for leaf in io.leaves if leaf not in io.params and layouts[leaf].shape]
    assert len(moments) == 2 * len(io.params)
    for layout in moments:
        assert np.prod(layout.spec.local_shape(layout.shape, layout.mesh)) * NUM_DEVICES == np.prod(layout.shape)


def test_gradients_of_a_gpt_wait_too():
    model = GPT(num_layers=2, hidden=16, num_heads=4, vocab=32, sequence=8)
    state = {"params": model.init(jax.random.key(0))}
    gpt = Family(sgd_step(partial(model.loss, key=jax.random.key(0))), state, lambda rows: tokens(rows, model.vocab, model.sequence + 1))
    stage = gpt.stage(Variant(0, NUM_LAYERS, (NUM_DEVICES, 1), False, -1), 8)
    for chosen in stage.layers:
        for param, gradient in zip(chosen.problem.layer.params, chosen.problem.gradients, strict=True):
            assert chosen.spec(gradient).partial == (0,), gpt.work(8).layered.state_names[param]
