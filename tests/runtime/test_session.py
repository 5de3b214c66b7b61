"""A session trains as one device would: the losses of each step, held-out losses, and one state that is handed from step to step."""

import gc
import weakref
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
import pytest

from alpa_hpc.errors import LaunchError
from alpa_hpc.planner.search import SCHEDULES, analytic_seconds, simulate_partition
from alpa_hpc.runtime.instructions import Buffer
from alpa_hpc.runtime.options import ScheduleKind
from alpa_hpc.runtime.session import Batch, InProcessSession, in_process_session
from tests.planning import MODEL, TRAINING, planned, prepared

TOLERANCE = 2e-5  # relative, of float32 losses: sums are taken in another order


@cache
def batch(number: int) -> Batch:
    draw = np.random.default_rng(number)
    return {"tokens": draw.integers(0, MODEL.vocab, (TRAINING.batch_size, MODEL.sequence + 1)).astype(np.int32)}


@dataclass(frozen=True, eq=False)
class Trained:
    """Three steps of a plan of two stages, and of one device: losses before, between and after them, and the metrics of each step."""

    session: InProcessSession
    losses: list[float]
    metrics: list[dict[str, float]]
    expected_losses: list[float]
    expected_metrics: list[dict[str, float]]
    first_state: list["weakref.ref[jax.Array]"]
    state: object


@cache
def trained() -> Trained:
    one, made = planned(), prepared()
    partition = next(p for p in one.refinement().partitions if len(p.stages) == 2)
    plan = simulate_partition(one.pricer, partition, SCHEDULES[ScheduleKind.ONE_F_ONE_B], analytic_seconds(one.pricer))
    state: object = jax.jit(made.train_step.init)(jax.random.key(0))
    leaves = {number: np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}
    session = in_process_session(plan.assembly, made.traced, plan.devices, leaves)
    first = [weakref.ref(array) for runner in session.runners for array in runner.resident.values()]
    alone = jax.jit(made.train_step.step)
    losses, metrics = [session.score(batch(9)), session.score(batch(9))], list[dict[str, float]]()
    expected_losses, expected_metrics = [held_out(state)] * 2, list[dict[str, float]]()
    for step in range(3):
        metrics.append(session.train(batch(step)))
        losses.append(session.score(batch(9)))
        state, figures = alone(state, batch(step))
        expected_metrics.append({name: float(value) for name, value in figures.items()})
        expected_losses.append(held_out(state))
    return Trained(session, losses, metrics, expected_losses, expected_metrics, first, state)


def held_out(state: object) -> float:
    """The mean loss over the batch's rows, on one device."""
    assert isinstance(state, dict)
    return float(jax.jit(MODEL.loss)(state["params"], batch(9), jax.random.key(0)))


def test_each_step_has_the_metrics_of_one_device():
    found, expected = trained().metrics, trained().expected_metrics
    assert [sorted(figures) for figures in found] == [["grad_norm", "loss"]] * 3
    for mine, its in zip(found, expected, strict=True):
        assert mine == pytest.approx(its, rel=TOLERANCE)
    assert len({figures["loss"] for figures in found}) == 3


def test_the_score_is_the_mean_loss_before_and_after_every_step():
    assert trained().losses == pytest.approx(trained().expected_losses, rel=TOLERANCE)
    assert trained().losses[0] != trained().losses[-1], "the steps changed nothing"


def test_scoring_changes_nothing():
    assert trained().losses[0] == trained().losses[1]


def test_every_leaf_of_the_state_is_what_one_device_has():
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(trained().state)]
    found = {buffer: array for runner in trained().session.runners for buffer, array in runner.resident.items()}
    assert {buffer.name for buffer in found} == {f"state.{number}" for number in range(len(expected))}
    for number, leaf in enumerate(expected):
        np.testing.assert_allclose(np.asarray(found[Buffer(f"state.{number}")]), leaf, rtol=1e-3, atol=2e-5)


def test_the_state_is_handed_over_not_kept_beside_the_new_one():
    gc.collect()
    assert trained().first_state and not any(reference() for reference in trained().first_state)
    assert not any(array.is_deleted() for runner in trained().session.runners for array in runner.resident.values())


def test_too_few_devices_are_refused():
    one, made = planned(), prepared()
    plan = simulate_partition(one.pricer, one.refinement().partitions[0], SCHEDULES[ScheduleKind.ONE_F_ONE_B], analytic_seconds(one.pricer))
    with pytest.raises(LaunchError, match="9"):
        in_process_session(plan.assembly, made.traced, (tuple(range(9)),), {})
