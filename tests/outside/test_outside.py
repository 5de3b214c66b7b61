"""Models of other libraries, as their users train them: each plans on four meshes of 8 devices, is split, equals one device, and exchanges
what is planned.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.stages import Compiled

from alpa_hpc.ir.flops import equation_flops
from alpa_hpc.ir.reference import reference_step
from alpa_hpc.ir.trace import Split, trace_step
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.verify.check import TaskCheck, check_task
from tests.outside.cases import SMALL
from tests.outside.models import ROWS
from tests.random_plans import CLUSTER, DEVICE, NUM_LAYERS, Family, Plan, Variant, assert_equal, run_plan

SHAPES = [(1, 8), (2, 4), (8, 1), (4, 2)]
NUM_MICROBATCHES = 2
BEST = -1  # the solver's choice
MOST_OUTSIDE = 0.02  # of a model's collectives, by kind and group
NAMES = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ROWS]  # a row is traced once, by one worker
# The models are tiny, so devices are slow in proportion: else the latency of a link outweighs all that there is to split.
SLOW = replace(CLUSTER, device=replace(DEVICE, flops_32bit=1e9, flops_16bit=1e9, memory_bandwidth=1e9))

pytestmark = pytest.mark.filterwarnings("default")  # what other libraries warn of is theirs


@cache
def family(name: str) -> Family:
    case = ROWS[name](SMALL)
    return Family(case.step, case.state, case.batch, SLOW)


def plan_of(shape: tuple[int, int]) -> Plan:
    return Plan((Variant(0, NUM_LAYERS, shape, remat=False, seed=BEST),), NUM_MICROBATCHES)


def flops(chosen: ChosenLayer) -> tuple[float, float]:
    """FLOP an iteration of a layer's operators, and of those among them that the devices divide between them."""
    problem = chosen.problem
    updates = [program for update in problem.updates for program in update.programs]
    total = split = 0.0
    for times, program in [(NUM_MICROBATCHES, problem.forward), (NUM_MICROBATCHES, problem.backward), *((1, one) for one in updates)]:
        for eqn, record in zip(program.jaxpr.jaxpr.eqns, program.records, strict=True):
            flop = times * equation_flops(eqn)
            total += flop
            if record.node >= 0 and record.plans[chosen.choices[record.node]].split > 1:
                split += flop
    return total, split


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_equals_one_device(name: str, shape: tuple[int, int]) -> None:
    plan = plan_of(shape)
    assert_equal(family(name), plan, run_plan(family(name), plan))


@pytest.mark.parametrize("name", NAMES)
def test_code_exchanges_what_is_planned(name: str) -> None:
    """Bytes of each task by kind and group. Where they differ, a warning names the place; so far no plan of these models has one."""
    checks = [(shape, one) for shape in SHAPES for one in checked(name, plan_of(shape))]
    for shape, text in ((shape, text) for shape, one in checks for text in one.mismatches):
        warnings.warn(f"{name} on {shape[0]}x{shape[1]}, {text}", stacklevel=1)
    lanes = [(one.task, lane) for _, one in checks for lane in one.lanes]
    outside = sum(not lane.agrees for _, lane in lanes)
    assert outside <= MOST_OUTSIDE * len(lanes), f"{outside} of {len(lanes)}"
    assert len({task for task, _ in lanes}) >= 2
    assert {lane.lane.axes for _, lane in lanes} >= {(0,), (1,)}


def checked(name: str, plan: Plan) -> list[TaskCheck]:
    """The tasks of a plan of one stage, as they were compiled to be run, held against it."""
    made = family(name)
    assembly = made.assembly(plan)
    [stage], [io], [variant] = assembly.stages, assembly.pipeline.stages, plan.stages
    checks: list[TaskCheck] = []
    for task in assembly.tasks(0).values():
        compiled = made.task(assembly, 0, variant, task)
        assert isinstance(compiled, Compiled)
        checks.append(check_task(assembly.step, stage, io, task, 0, compiled))
    return checks


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_jax_itself(name: str) -> None:
    """What plans are compared with does, with one microbatch that takes keys as they are, what jax does with the step as it stands."""
    made = family(name)
    batch = made.make_batch(8)
    traced = trace_step(made.step, made.state, batch, num_microbatches=1)
    traced = replace(traced, splits=tuple(Split.SAME if split is Split.KEY else split for split in traced.splits))

    def plain(arrays: Sequence[jax.Array], batch: Any) -> Any:
        state, metrics = made.step(traced.layout.state(arrays), batch)
        return traced.layout.arrays(state), metrics

    found, found_metrics = reference_step(traced, made.state, batch)
    expected, metrics = jax.jit(plain)(traced.layout.arrays(made.state), batch)
    for leaf, one, other in zip(traced.state_names, traced.layout.arrays(found), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5, err_msg=leaf)
    assert found_metrics["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_most_of_the_work_is_split(name: str) -> None:
    [stage] = [family(name).stage(variant, NUM_MICROBATCHES) for variant in plan_of((2, 4)).stages]
    parts = [flops(chosen) for chosen in stage.layers]
    assert sum(split for _, split in parts) >= 0.8 * sum(total for total, _ in parts)
