"""Random valid plans = one device with as many microbatches: loss and every gradient. A psum or a message less, and they differ."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa_hpc.errors import ProgramError
from alpa_hpc.ir.grad import SumCount, value_and_grad
from alpa_hpc.models.gpt import GPT
from alpa_hpc.runtime.check import check_programs
from alpa_hpc.runtime.instructions import MeshProgram, Send
from alpa_hpc.runtime.schedule import OneFOneB
from alpa_hpc.runtime.tasks import compile_task
from alpa_hpc.sharding import apply
from alpa_hpc.sharding.place import Place
from alpa_hpc.sharding.resharding import AllReduce, Move
from alpa_hpc.training.step import build_train_step
from tests.random_plans import (
    VOCAB,
    Family,
    Plan,
    Variant,
    assert_equal,
    mlp_batch,
    mlp_logits,
    mlp_loss,
    mlp_params,
    optax_step,
    random_plans,
    run_plan,
    sgd_step,
    splits,
    token_losses,
    tokens,
)

pytestmark = pytest.mark.slow


@cache
def mlp() -> Family:
    return Family(sgd_step(mlp_loss), {"params": mlp_params()}, mlp_batch)


@cache
def mlp_adamw() -> Family:
    optimiser = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))
    params = mlp_params()
    return Family(optax_step(mlp_loss, optimiser), {"params": params, "optimiser": optimiser.init(params)}, mlp_batch)


def gpt_family(**options: Any) -> Family:
    model = GPT(num_layers=2, hidden=16, num_heads=4, vocab=32, sequence=8, **options)
    train = build_train_step(model, optax.sgd(1.0))
    return Family(train.step, train.init(jax.random.key(0)), lambda rows: tokens(rows, model.vocab, model.sequence + 1))


@cache
def gpt() -> Family:
    return gpt_family()


FAMILIES = {"mlp": mlp, "mlp_adamw": mlp_adamw, "gpt": gpt}
PLANS = {
    "mlp": random_plans(0, 120, 3, (1, 2, 4)),
    "mlp_adamw": random_plans(1, 30, 2, (3,)),
    "gpt": random_plans(2, 60, 2, (2, 8)),
}
CASES = [(name, number) for name, plans in PLANS.items() for number in range(len(plans))]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_random_plan_equals_one_device(name: str, number: int) -> None:
    family, plan = FAMILIES[name](), PLANS[name][number]
    assert_equal(family, plan, run_plan(family, plan), tolerance=2e-4 if name != "mlp_adamw" else 2e-3)


def test_the_plans_cover_what_plans_can_be():
    assert len(CASES) >= 200
    counts: Counter[str] = Counter()
    for name, plans in PLANS.items():
        for plan in plans:
            by_rows, by_weight = splits(FAMILIES[name](), plan)
            counts[f"{len(plan.stages)} stages"] += 1
            counts["rows split"] += by_rows
            counts["weights split"] += by_weight
            counts["both split"] += by_rows and by_weight
            counts["unequal meshes"] += len({stage.shape for stage in plan.stages}) > 1
            counts["tied across stages"] += len(plan.stages) > 1  # the first and the last layer read the embedding
            counts["more microbatches than stages"] += plan.num_microbatches > len(plan.stages)
    wanted = ["1 stages", "2 stages", "3 stages", "rows split", "weights split", "both split", "unequal meshes", "tied across stages"]
    for what in (*wanted, "more microbatches than stages"):
        assert counts[what] >= 0.1 * len(CASES), f"{what}: {counts[what]} of {len(CASES)} plans"


def two_stages(seed: int, *, remat: bool = False, num_microbatches: int = 2) -> Plan:
    return Plan((Variant(0, 2, (2, 2), remat, seed), Variant(2, 4, (2, 1), remat, seed + 1)), num_microbatches)


def three_stages(seed: int, *, num_microbatches: int = 3) -> Plan:
    return Plan(
        (Variant(0, 1, (1, 2), False, seed), Variant(1, 3, (2, 2), True, seed), Variant(3, 4, (2, 1), False, seed)), num_microbatches
    )


def check(family: Family, plan: Plan, tolerance: float = 2e-4) -> None:
    assert_equal(family, plan, run_plan(family, plan), tolerance)


def test_norms_of_what_was_clipped_by_a_norm():
    """Three rounds of reductions, each of which depends on the one before, on meshes that each have a share in them."""
    optimiser = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3), optax.clip_by_global_norm(0.05))

    def step(state: Any, batch: Any) -> Any:
        value, gradients = value_and_grad(mlp_loss)(state["params"], batch)
        updates, moments = optimiser.update(gradients, state["optimiser"], state["params"])
        metrics = {"loss": value, "norm": optax.tree.norm(updates), "least": jax.tree.reduce(jnp.minimum, jax.tree.map(jnp.min, updates))}
        return {"params": optax.apply_updates(state["params"], updates), "optimiser": moments}, metrics

    params = mlp_params()
    family = Family(step, {"params": params, "optimiser": optimiser.init(params)}, mlp_batch)
    plan = three_stages(5)
    assert len(family.work(plan.num_microbatches).layered.update.rounds) == 3
    check(family, plan, 2e-3)


def test_bfloat16():
    family = Family(sgd_step(lambda p, b: jnp.mean(token_losses(mlp_logits(p, b, jnp.bfloat16), b))), {"params": mlp_params()}, mlp_batch)
    check(family, two_stages(1), 1e-1)  # 8 bits of mantissa, and summands rounded on each device
    check(family, Plan((Variant(0, 4, (2, 2), True, 5),), 2), 1e-1)


def test_dropout():
    family = gpt_family(dropout=0.2)
    check(family, two_stages(2))
    assert float(family.work(2).expected_metrics["loss"]) != float(gpt().work(2).expected_metrics["loss"])


@jax.custom_vjp
def halved_gradient(x: jax.Array) -> jax.Array:
    return x


halved_gradient.defvjp(lambda x: (x, None), lambda _, g: (0.5 * g,))


def test_a_custom_vjp_in_the_loss():
    family = Family(
        sgd_step(lambda p, b: jnp.mean(halved_gradient(token_losses(mlp_logits(p, b), b)))), {"params": mlp_params()}, mlp_batch
    )
    check(family, two_stages(3))
    assert float(family.work(2).expected_metrics["grad_norm"]) < 0.6 * float(mlp().work(2).expected_metrics["grad_norm"])


def test_a_sum_and_its_count():
    def loss(params: Any, batch: Any) -> Any:
        counted = (batch["tokens"][:, 1:] > VOCAB // 3).astype(jnp.float32)
        return jnp.sum(counted * token_losses(mlp_logits(params, batch), batch)), jnp.sum(counted)

    family = Family(sgd_step(loss, reduction=SumCount()), {"params": mlp_params()}, mlp_batch)
    check(family, two_stages(4, remat=True, num_microbatches=3))


@pytest.mark.parametrize("plan", [three_stages(6), Plan((Variant(0, 4, (2, 2), False, 7),), 2)], ids=["three stages", "one stage"])
def test_a_parameter_read_by_three_layers(plan: Plan) -> None:
    def loss(params: Any, batch: Any) -> Any:
        blocks = [{**block, "up": params["shared"]} for block in params["blocks"]]
        return mlp_loss({"embedding": params["embedding"], "blocks": blocks}, batch)

    params = mlp_params()
    shared = params["blocks"][0]["up"]
    blocks = [{name: block[name] for name in ("bias", "down")} for block in params["blocks"]]
    family = Family(sgd_step(loss), {"params": {"embedding": params["embedding"], "blocks": blocks, "shared": shared}}, mlp_batch)
    readers = [layer for layer in family.work(plan.num_microbatches).layered.layers if len(layer.params) > 0]
    assert (
        sum(any(family.work(plan.num_microbatches).layered.state_names[p].endswith("shared") for p in layer.params) for layer in readers)
        >= 3
    )
    check(family, plan)


def differs(family: Family, plan: Plan, **mutated: Any) -> bool:
    try:
        assert_equal(family, plan, run_plan(family, plan, **mutated))
    except (AssertionError, ProgramError):
        return True
    return False


def test_a_dropped_psum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    family, plan = mlp(), Plan((Variant(0, 4, (2, 2), False, 11),), 2)
    assert not differs(family, plan)
    run_move = apply.run_move
    dropped: list[Move] = []

    def without_one(x: jax.Array, move: Move, place: Place) -> jax.Array:
        if isinstance(move.steps[0], AllReduce) and not dropped:
            dropped.append(move)
            return x
        return run_move(x, move, place)

    assembly = family.assembly(plan)
    monkeypatch.setattr(apply, "run_move", without_one)
    tasks = {name: compile_task(task, plan.stages[0].mesh) for name, task in assembly.tasks(0).items()}
    assert len(dropped) == 1
    assert differs(family, plan, tasks=[tasks])


def changed(program: MeshProgram, changes: dict[int, Send]) -> MeshProgram:
    return replace(program, instructions=tuple(changes.get(i, one) for i, one in enumerate(program.instructions)))


def sends_of_values(program: MeshProgram) -> list[tuple[int, Send]]:
    found = [(i, one) for i, one in enumerate(program.instructions) if isinstance(one, Send) and one.buffer.name.startswith("value.")]
    first = found[0][1].buffer.name
    return [(i, one) for i, one in found if one.buffer.name == first]


def test_a_microbatch_sent_in_place_of_another_is_noticed():
    family = mlp()
    plan = Plan((Variant(0, 2, (2, 2), False, 12), Variant(2, 4, (2, 1), False, 13)), 4)
    assert not differs(family, plan)
    programs = list(family.assembly(plan).programs)
    (_, _), (later, one), *_ = sends_of_values(programs[0])
    (_, other), *_ = sends_of_values(programs[0])
    before = [i for i, ins in enumerate(programs[0].instructions) if isinstance(ins, Send) and ins.buffer == other.buffer]
    swapped = {before[0]: replace(other, tag=one.tag), later: replace(one, tag=other.tag)}
    assert differs(family, plan, programs=[changed(programs[0], swapped), programs[1]])


@pytest.mark.parametrize(
    "mutate", [lambda one: replace(one, tag=one.tag + 1000), lambda one: replace(one, to=1 - one.to)], ids=["tag", "target"]
)
def test_a_send_without_its_receive_is_refused(mutate: Callable[[Send], Send]) -> None:
    programs = list(mlp().assembly(two_stages(14)).programs)
    index, one = sends_of_values(programs[0])[0]
    with pytest.raises(ProgramError):
        check_programs((changed(programs[0], {index: mutate(one)}), programs[1]), OneFOneB())


def test_a_send_of_another_layout_is_refused():
    programs = list(mlp().assembly(two_stages(14)).programs)
    index, one = sends_of_values(programs[0])[0]
    wrong = replace(one.target, shape=tuple(2 * size for size in one.target.shape))
    with pytest.raises(ProgramError):
        check_programs((changed(programs[0], {index: replace(one, target=wrong)}), programs[1]), OneFOneB())
    assert np.prod(wrong.shape) > 0
