"""Stages of each model compile for CPUs to what their plans say: bytes of each kind of collective among the same devices, task by task.

Strategies are drawn at random, which asks for more kinds of them than a good plan does.
"""

from collections.abc import Callable, Mapping
from functools import cache

import optax
import pytest

from alpa_hpc.cluster.hardware import Submesh
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.models.gpt import GPT
from alpa_hpc.runtime.alone import tasks_alone
from alpa_hpc.runtime.stage import describe_stage
from alpa_hpc.runtime.tasks import compile_task
from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.stages.options import CheckTarget
from alpa_hpc.verify.check import TaskCheck, check_task
from alpa_hpc.verify.target import described_mesh
from tests.models.test_planned import family, llama, moe, wide_resnet
from tests.random_plans import NUM_LAYERS, QUICK, ROWS, Family, Variant, Work, tokens

pytestmark = pytest.mark.slow

NUM_MICROBATCHES = 2


def gpt() -> Family:
    model = GPT(num_layers=2, hidden=16, num_heads=4, vocab=32, sequence=8)
    return family(model, lambda rows: tokens(rows, model.vocab, model.sequence + 1), optax.adamw(1e-2))


CASES: Mapping[str, tuple[Callable[[], Family], Variant]] = {
    "gpt": (gpt, Variant(1, 2, (2, 4), False, 5)),
    "moe": (moe, Variant(2, 3, (2, 4), False, 2)),
    "llama": (llama, Variant(1, 2, (4, 2), True, 6)),
    "wide_resnet": (wide_resnet, Variant(1, 2, (2, 4), False, 3)),
}


@cache
def checked(name: str) -> Mapping[str, TaskCheck]:
    """The tasks of a model's stage, compiled."""
    make, variant = CASES[name]
    made = make()
    batch = made.make_batch(NUM_MICROBATCHES * ROWS)
    traced = trace_step(made.step, made.state, batch, num_microbatches=NUM_MICROBATCHES)
    step = cut_layers(traced, num_layers=NUM_LAYERS, imbalance=3.0)
    made.works[NUM_MICROBATCHES] = Work(traced, step, batch, made.state, {})
    stage = made.stage(variant, NUM_MICROBATCHES)
    io = describe_stage(step, (stage,), 0, {})
    mesh = described_mesh(CheckTarget.CPU, Submesh(2, 4), stage.shape)
    tasks = tasks_alone(step, stage)
    return {one.name: check_task(step, stage, io, one, 0, compile_task(one, mesh, QUICK)) for one in tasks}


@pytest.mark.parametrize("name", CASES)
def test_code_exchanges_what_is_planned(name: str):
    found = checked(name)
    assert {"forward", "backward", "update"} <= set(found)
    for one in found.values():
        assert not one.mismatches
        for lane in one.lanes:
            assert 0.95 <= lane.planned_bytes / lane.compiled_bytes <= 1.05, (one.task, lane)


@pytest.mark.parametrize("name", CASES)
def test_every_model_has_collectives_of_several_kinds_in_forward_and_backward(name: str):
    for task in ("forward", "backward"):
        assert len({lane.lane.kind for lane in checked(name)[task].lanes}) >= 2, task
    assert len(checked(name)["update"].lanes) > 0


def test_all_kinds_occur_over_each_axis_and_both():
    lanes = {lane.lane for name in CASES for one in checked(name).values() for lane in one.lanes}
    assert {lane.kind for lane in lanes} == set(CollectiveKind) - {CollectiveKind.COLLECTIVE_PERMUTE}
    assert {lane.axes for lane in lanes} == {(0,), (1,), (0, 1)}
