"""What every device repeats: next to nothing in a GPT, and named where a rule is missing."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.flops import equation_flops
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.models.gpt import GPT
from alpa_hpc.sharding.build import LayerProblem
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.replicated import replicated_share, replicated_work
from alpa_hpc.sharding.stage import StageSolver
from alpa_hpc.training.step import build_train_step
from tests.random_plans import Family, mlp_batch, mlp_loss, mlp_params, sgd_step

CLUSTER = ClusterSpec("one node", 1, 4, DeviceSpec("cpu", 4 << 30, 1e11, 1e11, 1e10, 0.5), Link(1e10, 1e-6), Link(1e9, 1e-5))


def problems(step: LayeredStep, rows: int, cols: int) -> list[LayerProblem]:
    prices = MeshPrices(logical_mesh(CLUSTER, Submesh(1, rows * cols), MeshShape(rows, cols)))
    solver = StageSolver(step, prices, remat=False)
    return [solver.problem(layer.index) for layer in step.layers]


@pytest.fixture(scope="module")
def gpt_step() -> LayeredStep:
    model = GPT(num_layers=2, hidden=64, num_heads=4, vocab=256, sequence=32, dtype="bfloat16")
    train = build_train_step(model, optax.adamw(1e-3))
    state = jax.eval_shape(train.init, jax.random.key(0))
    step: Any = train.step
    traced = trace_step(step, state, model.batch(16), num_microbatches=2)
    return cut_layers(traced, num_layers=2, imbalance=1.0)


def test_a_gpt_repeats_at_most_five_percent(gpt_step: LayeredStep) -> None:
    share = replicated_share(problems(gpt_step, 2, 2))
    assert share.flop <= 0.05
    assert share.num_bytes <= 0.05


def test_each_large_product_of_a_gpt_has_two_dimensional_strategies(gpt_step: LayeredStep) -> None:
    num_products = 0
    for problem in problems(gpt_step, 2, 2):
        for program in (problem.forward, problem.backward):
            for eqn, record in zip(program.jaxpr.jaxpr.eqns, program.records, strict=True):
                if eqn.primitive.name == "dot_general" and equation_flops(eqn) > 1e5:
                    assert any(plan.split == 4 for plan in record.plans), eqn
                    num_products += 1
    assert num_products >= 3 * (
        2 * 6 + 1
    )  # four weights and two products of attention a block, and the logits: forward and two in backward


def test_an_operator_without_a_rule_is_named():
    def loss(params: Any, batch: Any) -> jax.Array:
        return mlp_loss(params, batch) + 0.0 * jnp.sum(jnp.sort(params["blocks"][0]["bias"]))

    step = Family(sgd_step(loss), {"params": mlp_params()}, mlp_batch).work(1).layered
    assert "sort" in {work.primitive for work in replicated_work(problems(step, 2, 2))}
    assert replicated_work(problems(step, 1, 1)) == (), "on one device nothing is repeated"


def test_an_operator_on_single_numbers_is_not_worth_a_word():
    def loss(params: Any, batch: Any) -> jax.Array:
        value = mlp_loss(params, batch)
        return value + 0.0 * jax.lax.digamma(value) + 0.0 * jnp.sum(jax.lax.digamma(params["blocks"][0]["bias"].reshape(2, -1)[:, :0]))

    found = problems(Family(sgd_step(loss), {"params": mlp_params()}, mlp_batch).work(1).layered, 2, 2)
    scalars = [
        eqn.primitive.name
        for problem in found
        for eqn, record in zip(problem.forward.jaxpr.jaxpr.eqns, problem.forward.records, strict=True)
        if record.replicated
    ]
    assert scalars, "else nothing is tested"
    assert replicated_work(found) == ()
