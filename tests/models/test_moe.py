"""The mixture of experts routes as GShard's Algorithm 1 does token by token, and has the parameters and FLOP of the paper's formulas."""

import dataclasses
import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_hpc.models.moe import MoE, top_two
from tests.models import plain

TINY = MoE(num_layers=2, hidden=16, num_heads=2, num_experts=4, vocab=32, sequence=8, group_size=8, mlp_factor=2, aux_weight=0.1)
CROWDED = MoE(
    num_layers=4,
    hidden=8,
    num_heads=2,
    num_experts=3,
    vocab=32,
    sequence=8,
    group_size=8,
    mlp_factor=2,
    capacity_factor=1.1,
    aux_weight=0.5,
)
PAPER = [  # layers, hidden, experts, billions of parameters, PFLOP an iteration at batch 1024
    (8, 768, 8, 0.3835, 1.580),
    (8, 768, 16, 0.6857, 1.580),
    (16, 768, 16, 1.3468, 3.006),
    (16, 1024, 16, 2.3830, 4.993),
    (16, 1536, 32, 10.170, 10.446),
    (16, 2048, 48, 26.648, 17.871),
    (32, 2048, 64, 70.415, 35.333),
]


def tokens(model: MoE, rows: int = 4, seed: int = 1) -> dict[str, Any]:
    return {"tokens": np.random.default_rng(seed).integers(0, model.vocab, (rows, model.sequence + 1)).astype(np.int32)}


@functools.cache
def fresh(model: MoE) -> Any:
    return jax.jit(model.init)(jax.random.key(0))


def count(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("layers", "hidden", "experts", "billions", "petaflop"), PAPER)
def test_paper_sizes(layers: int, hidden: int, experts: int, billions: float, petaflop: float) -> None:
    model = MoE(num_layers=layers, hidden=hidden, num_heads=16, num_experts=experts, vocab=32000, sequence=1024)
    dense, experts_params = 20 * hidden**2 + 17 * hidden, experts * (16 * hidden**2 + 9 * hidden)
    gates = layers // 2 * hidden * experts
    formula = layers // 2 * (dense + 4 * hidden**2 + 8 * hidden + experts_params) + 32000 * (hidden + 1)
    assert model.num_params() == count(jax.eval_shape(model.init, jax.random.key(0))) == formula + gates
    assert formula / 1e9 == pytest.approx(billions, rel=2e-4)
    assert gates < 1e-3 * formula
    assert model.iteration_flops(1024, remat=True) / 1e15 == pytest.approx(petaflop, abs=1e-3)
    assert 0.7 < model.iteration_flops(1024, remat=False) / model.iteration_flops(1024, remat=True) < 0.8


def test_an_expert_has_the_slots_of_the_papers_benchmark() -> None:
    for experts, slots in ((8, 512), (16, 256), (48, 85), (64, 64)):
        model = MoE(num_layers=2, hidden=8, num_heads=1, num_experts=experts, vocab=8, sequence=1024)
        assert model.capacity(2048) == slots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_loss_is_the_logarithm_of_the_vocabulary_and_a_fair_balance(dtype: str) -> None:
    model = MoE(num_layers=4, hidden=16, num_heads=2, num_experts=4, vocab=32, sequence=8, group_size=16, aux_weight=0.1, dtype=dtype)
    loss = jax.jit(model.loss)(fresh(model), tokens(model), jax.random.key(0))
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(math.log(32) + 0.1 * 2, abs=0.05)


def test_routing_is_algorithm_1() -> None:
    """Random gates, groups and capacities, and gates that tie; each kind of dropping occurs."""
    draw = np.random.default_rng(0)
    seen: Counter[str] = Counter()
    for case in range(60):
        groups, size, experts, capacity = ((2, 17, 4, 6), (3, 8, 6, 2), (1, 24, 2, 20))[case % 3]
        logits = draw.normal(size=(groups, size, experts)) * draw.choice([0.1, 1.0, 4.0])
        if case % 4 == 0:
            logits = np.round(logits)
        gates = plain.softmax(logits).astype(np.float32)
        found = route(gates, capacity)
        expected = by_hand(gates, capacity, seen)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=f"case {case}: {name}")
        seen["ties"] += any(len(set(row)) < experts for row in gates.reshape(-1, experts).tolist())
    assert min(seen[kind] for kind in ("kept", "first only", "second only", "neither", "ties")) >= 5, seen


@functools.partial(jax.jit, static_argnums=1)
def route(gates: jax.Array, capacity: int) -> dict[str, jax.Array]:
    return dataclasses.asdict(top_two(gates, capacity, jnp.float32))


def by_hand(gates: np.ndarray, capacity: int, seen: Counter[str]) -> dict[str, np.ndarray]:
    groups, size, experts = gates.shape
    dispatch = np.zeros((groups, size, experts, capacity))
    combine, imbalances = dispatch.copy(), []
    for group in range(groups):
        choices, firsts = plain.choose(gates[group], capacity)
        slots = [0] * experts
        for rank in (0, 1):
            for token, pair in enumerate(choices):
                expert, has_slot = pair[rank]
                if has_slot:
                    share = gates[group, token, expert] / sum(gates[group, token, one] for one, _ in pair)
                    dispatch[group, token, expert, slots[expert]] = 1
                    combine[group, token, expert, slots[expert]] = share
                    slots[expert] += 1
        imbalances.append(experts * np.sum(firsts / size * gates[group].mean(0)))
        for (_, first), (_, second) in choices:
            seen[
                {(True, True): "kept", (True, False): "first only", (False, True): "second only", (False, False): "neither"}[first, second]
            ] += 1
    return {"dispatch": dispatch, "combine": combine, "imbalance": np.array(np.mean(imbalances))}


@pytest.mark.parametrize("model", [TINY, CROWDED], ids=["tiny", "crowded"])
def test_loss_and_gradient_are_those_of_each_token_routed_by_itself(model: MoE) -> None:
    params, batch = plain.drawn(model), tokens(model, rows=2)
    recorded: list[Any] = []
    dropped: Counter[bool] = Counter()

    def decide(gates: np.ndarray, capacity: int) -> Any:
        recorded.append(plain.choose(gates, capacity))
        dropped.update(not has_slot for pair in recorded[-1][0] for _, has_slot in pair)
        return recorded[-1]

    plain.moe_loss(model, params, batch["tokens"], decide)
    assert len(recorded) == model.num_layers // 2 * 2
    assert dropped[False] >= 10 and (dropped[True] >= 10 or model is TINY)
    replayed = iter(recorded)
    expected = jax.jit(jax.value_and_grad(lambda p: plain.moe_loss(model, p, batch["tokens"], lambda *_: next(replayed))))(params)
    found = jax.jit(jax.value_and_grad(model.loss))(params, batch, jax.random.key(0))
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    assert plain.relative_error(found[1], expected[1]) < 1e-4


def test_whole_groups_are_routed_alike_however_the_batch_is_cut() -> None:
    params, batch = plain.drawn(CROWDED), tokens(CROWDED, rows=8)
    loss = jax.jit(CROWDED.loss)
    halves = [loss(params, {"tokens": part}, jax.random.key(0)) for part in np.split(batch["tokens"], 4)]
    assert float(loss(params, batch, jax.random.key(0))) == pytest.approx(float(np.mean(halves)), rel=1e-5)


def test_a_small_microbatch_is_one_group_and_a_broken_group_is_refused() -> None:
    params = jax.eval_shape(TINY.init, jax.random.key(0))
    wide = dataclasses.replace(TINY, group_size=16)
    assert jax.eval_shape(wide.loss, params, wide.batch(1), jax.random.key(0)).shape == ()
    with pytest.raises(ValueError, match="3 rows of 8 tokens do not divide into groups of group_size=16"):
        jax.eval_shape(wide.loss, params, wide.batch(3), jax.random.key(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_layers": 3}, "num_layers is 3"), ({"num_experts": 1}, "num_experts is 1"), ({"num_heads": 3}, "num_heads 3")],
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, int], message: str) -> None:
    sizes = {"num_layers": 2, "hidden": 8, "num_heads": 1, "num_experts": 2, "vocab": 8, "sequence": 8}
    with pytest.raises(ValueError, match=message):
        MoE(**{**sizes, **change})  # pyright: ignore[reportArgumentType]


def test_training_lowers_the_loss() -> None:
    params, batch = fresh(TINY), tokens(TINY)
    value_and_grad = jax.jit(jax.value_and_grad(TINY.loss))
    losses: list[float] = []
    for _ in range(60):
        loss, gradients = value_and_grad(params, batch, jax.random.key(0))
        params = jax.tree.map(lambda a, g: np.asarray(a) - 0.5 * np.asarray(g), params, gradients)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5
