"""Property: under a restriction strategies split what it allows, cost no less than the free ones, and talk as the baseline does."""

import pytest

from alpa_hpc.baselines.dim_kinds import DimKind, border_variables, layer_kinds, microbatch_rows
from alpa_hpc.baselines.manual import Pricers
from alpa_hpc.baselines.restriction import BATCH_ON_AXIS_0, FREE, MEGATRON, Restriction
from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.build import Program
from alpa_hpc.sharding.resharding import AllReduce, Slice, Step, reshard_steps
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.stage import MemoryPrice

FASTEST = MemoryPrice(0.0, 0.0)
SHAPES = (MeshShape(4, 1), MeshShape(2, 2), MeshShape(1, 4))


def chosen_layers(pricers: Pricers, restriction: Restriction, shape: MeshShape) -> tuple[ChosenLayer, ...]:
    return pricers.under(restriction).solver(Submesh(1, 4), shape, remat=True).choose(0, 4, FASTEST)


def collectives(program: Program, chosen: ChosenLayer) -> list[Step]:
    """What a program does to its operands and results, each resharding once."""
    steps: dict[tuple[int, object], tuple[Step, ...]] = {}
    for record in program.records:
        if record.node < 0:
            continue
        plan = record.plans[chosen.choices[record.node]]
        for tensor, spec in zip(record.operands, plan.operands, strict=True):
            if tensor >= 0 and chosen.problem.tensors[tensor].home >= 0:
                steps[tensor, spec] = reshard_steps(chosen.spec(tensor), spec)
        for position, tensor in enumerate(record.results):
            steps[tensor, "result"] = reshard_steps(plan.raw[position], chosen.spec(tensor))
    return [step for some in steps.values() for step in some if not isinstance(step, Slice)]


def split_of_param(pricers: Pricers, chosen: ChosenLayer, name: str) -> tuple[tuple[int, ...], ...]:
    names = {
        pricers.step.state_names[param]: tensor for param, tensor in zip(chosen.problem.layer.params, chosen.problem.params, strict=True)
    }
    (tensor,) = [tensor for full, tensor in names.items() if full.startswith("params/") and full.endswith(f"/{name}")]
    return chosen.spec(tensor).dims


def test_dims_are_what_they_are_in_a_gpt(pricers: Pricers) -> None:
    layer = pricers.step.layers[1]
    kinds = layer_kinds(pricers.step, layer)
    by_name = {
        pricers.step.state_names[p].rpartition("/")[2]: var for p, var in zip(layer.params, layer.forward.jaxpr.invars, strict=False)
    }
    border, inner = DimKind.BORDER, DimKind.INNER
    assert kinds(by_name["qkv"])[0] is border
    assert kinds(by_name["qkv"])[2:] == (inner, border)
    assert kinds(by_name["out"]) == (inner, border, border)
    assert kinds(by_name["up"]) == (border, inner)
    assert kinds(by_name["down"]) == (inner, border)
    assert kinds(layer.forward.jaxpr.invars[-1]) == (DimKind.BATCH, DimKind.TOKEN, border)


def test_the_batch_is_the_first_dim_of_every_activation_between_layers(pricers: Pricers) -> None:
    assert microbatch_rows(pricers.step) == 4
    for layer in pricers.step.layers[:-1]:
        leaving = [var for value, var in border_variables(layer) if value in layer.outputs]
        assert [layer_kinds(pricers.step, layer)(var) for var in leaving] == [(DimKind.BATCH, DimKind.TOKEN, DimKind.BORDER)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("restriction", [BATCH_ON_AXIS_0, MEGATRON])
def test_a_restricted_optimum_never_beats_the_free_one(pricers: Pricers, restriction: Restriction, shape: MeshShape) -> None:
    for price in (FASTEST, pricers.under(FREE).memory_price(1)):
        free = pricers.under(FREE).solver(Submesh(1, 4), shape, remat=True).value(0, 4, price)
        bound = pricers.under(restriction).solver(Submesh(1, 4), shape, remat=True).value(0, 4, price)
        weigh = [value.seconds + price.fixed * value.fixed_bytes + price.inflight * value.inflight_bytes for value in (free, bound)]
        assert weigh[0] <= weigh[1] * (1 + 1e-9) < float("inf")


@pytest.mark.parametrize("restriction", [BATCH_ON_AXIS_0, MEGATRON])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_data_parallelism_splits_the_batch_and_no_weight_over_axis_0(pricers: Pricers, restriction: Restriction, shape: MeshShape) -> None:
    for chosen in chosen_layers(pricers, restriction, shape):
        problem = chosen.problem
        weights = [chosen.spec(tensor).dims for tensor in (*problem.params, *problem.gradients)]
        assert not [dims for dims in weights if any(0 in dim for dim in dims)]
        borders = [chosen.spec(port.tensor) for port in (*problem.inputs, *problem.cotangent_inputs)]
        assert all(0 in spec.dims[0] for spec in borders)
        assert any(0 in dim for update in problem.updates for dim in chosen.spec(update.gradient).dims), "the update stays free to split"
    partial = [chosen.spec(tensor).partial for chosen in chosen_layers(pricers, restriction, shape) for tensor in chosen.problem.gradients]
    assert all(0 in axes for axes in partial), "each device adds up its own rows; summed once an iteration"


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_megatron_splits_columns_then_rows_and_sums_twice_a_block(pricers: Pricers, shape: MeshShape) -> None:
    chosen = chosen_layers(pricers, MEGATRON, shape)[1]
    assert split_of_param(pricers, chosen, "qkv") == ((), (), (1,), ())
    assert split_of_param(pricers, chosen, "out") == ((1,), (), ())
    assert split_of_param(pricers, chosen, "up") == ((), (1,))
    assert split_of_param(pricers, chosen, "down") == ((1,), ())
    assert split_of_param(pricers, chosen, "norm1_scale") == ((),)
    assert collectives(chosen.problem.forward, chosen) == [AllReduce(1), AllReduce(1)]


def test_megatron_without_tensor_parallelism_says_nothing_in_the_forward(pricers: Pricers) -> None:
    chosen = chosen_layers(pricers, MEGATRON, MeshShape(4, 1))[1]
    assert collectives(chosen.problem.forward, chosen) == []


WITH_BATCH_SPLIT = {
    BATCH_ON_AXIS_0.name: {Spec(((0,), (), ())), Spec(((0,), (1,), ())), Spec(((0,), (), (1,)))},
    MEGATRON.name: {Spec(((0,), (), ()))},
}


@pytest.mark.parametrize("restriction", [BATCH_ON_AXIS_0, MEGATRON])
def test_an_activation_may_lie_in_no_other_way(pricers: Pricers, restriction: Restriction) -> None:
    problem = pricers.under(restriction).solver(Submesh(1, 4), MeshShape(2, 2), remat=True).problem(1)
    for port in (*problem.inputs, *problem.outputs, *problem.cotangent_inputs, *problem.cotangent_outputs):
        tensor = problem.tensors[port.tensor]
        costs = problem.problem.node_costs[tensor.home]
        allowed = {spec for spec, cost in zip(tensor.specs, costs, strict=True) if cost < float("inf")}
        assert allowed
        assert allowed == WITH_BATCH_SPLIT[restriction.name] & set(tensor.specs)
