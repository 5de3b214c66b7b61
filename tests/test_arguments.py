"""Arguments of a wrong kind are told by name, with what was found and what was expected; all that Python takes for a number is one."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import alpa_hpc
from alpa_hpc.api import DEFAULT_LAYERS, DEFAULT_SEARCH
from alpa_hpc.arguments import check_argument
from alpa_hpc.errors import ConfigError, TraceError
from tests.planning import CLUSTER, DEVICE


def step(state: Any, batch: Any) -> Any:
    raise AssertionError("nothing is traced before arguments are looked at")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": None}, "parallelize: step is None, expected a function"),
        ({"cluster": None}, "parallelize: cluster is None, expected a ClusterSpec"),
        ({"cluster": "laptop"}, "parallelize: cluster is 'laptop', expected a ClusterSpec"),
        ({"num_microbatches": "2"}, "parallelize: num_microbatches is '2', expected a whole number"),
        ({"num_microbatches": -1}, "parallelize: num_microbatches is -1, expected at least 1 .*"),
        ({"num_microbatches": 2.0}, "parallelize: num_microbatches is 2.0, expected a whole number"),
        ({"num_microbatches": True}, "parallelize: num_microbatches is True, expected a whole number"),
        ({"plan": "plan.json"}, "parallelize: plan is 'plan.json', expected a ParallelPlan or None"),
        ({"layers": 3}, "parallelize: layers is 3, expected a LayerOptions"),
        ({"search": "alpa"}, "parallelize: search is 'alpa', expected a SearchOptions"),
        ({"schedule": "gpipe"}, "parallelize: schedule is 'gpipe', expected one of ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE"),
    ],
)
def test_parallelize_says_which_argument_is_wrong(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"step": step, "cluster": CLUSTER, "num_microbatches": 4, **changed}
    with pytest.raises(ConfigError, match=f"^{message}$"):
        alpa_hpc.parallelize(arguments.pop("step"), **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(DEVICE, memory=float("nan")), "device 'cpu': memory is nan, expected bytes"),
        (lambda: replace(DEVICE, flops_16bit="1e9"), "DeviceSpec: flops_16bit is '1e9', expected a number"),
        (lambda: replace(DEVICE, hides_collectives=1), "DeviceSpec: hides_collectives is 1, expected True or False"),
        (lambda: replace(CLUSTER, devices_per_node=1.5), "ClusterSpec: devices_per_node is 1.5, expected a whole number"),
        (lambda: replace(CLUSTER, intra_node=None), "ClusterSpec: intra_node is None, expected a Link"),
        (lambda: replace(CLUSTER, name=3), "ClusterSpec: name is 3, expected a text"),
        (lambda: alpa_hpc.Link(2e9, None), "Link: latency is None, expected a number"),  # pyright: ignore[reportArgumentType]
        (lambda: replace(DEFAULT_LAYERS, num_layers="many"), "LayerOptions: num_layers is 'many', expected a whole number"),
        (lambda: replace(DEFAULT_SEARCH, remat=True), "SearchOptions: remat is True, expected one of RematChoice"),
        (lambda: replace(DEFAULT_SEARCH, manual=(1,)), "SearchOptions: manual has an entry that is 1, expected a text"),
        (lambda: alpa_hpc.value_and_grad(step, reduction="mean"), "reduction is 'mean', expected alpa_hpc.Mean"),  # pyright: ignore[reportArgumentType]
        (lambda: alpa_hpc.value_and_grad(3), "value_and_grad: fun is 3, expected a function"),  # pyright: ignore[reportArgumentType]
        (lambda: alpa_hpc.load_plan(None), "path is None, expected a text or a Path"),  # pyright: ignore[reportArgumentType]
        (lambda: alpa_hpc.save_plan("plan", "plan.json"), "plan is 'plan', expected a ParallelPlan"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_descriptions_and_options_say_which_field_is_wrong(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.ones((4, 3), np.float32), "y": "hello"}, "leaf 'y' of the batch is 'hello', expected an array"),
        ({"x": np.ones((4, 3), np.float32), "y": np.array(["a"] * 4)}, "leaf 'y' of the batch is array.*, expected an array of numbers"),
        ({"x": np.ones((0, 3), np.float32)}, "no rows .*'x': 0"),
    ],
)
def test_batches_are_arrays_of_numbers_with_rows(batch: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        alpa_hpc.parallelize(step, cluster=CLUSTER, num_microbatches=2).find_plan(np.ones(3, np.float32), batch)


@pytest.mark.parametrize(
    ("fun", "changed", "message"),
    [
        (None, {}, "value_and_grad: fun is None, expected a function"),
        (step, {"has_aux": "yes"}, "value_and_grad: has_aux is 'yes', expected True or False"),
        (step, {"reduction": "sum"}, r"value_and_grad: reduction is 'sum', expected alpa_hpc.Mean\(\) .* or alpa_hpc.SumCount\(\)"),
        (step, {"reduction": alpa_hpc.SumCount}, "value_and_grad: reduction is <class .*SumCount'>, expected alpa_hpc.Mean"),
        (step, {"aux": alpa_hpc.AuxKind.SUM}, "value_and_grad: aux is <AuxKind.SUM.*, expected none without has_aux=True"),
    ],
)
def test_value_and_grad_says_which_argument_is_wrong(fun: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        alpa_hpc.value_and_grad(fun, **changed)


@pytest.mark.parametrize("number", [3, np.int64(3)])
def test_whole_numbers(number: Any) -> None:
    check_argument("it", number, int)
    check_argument("it", number, float)


@pytest.mark.parametrize("number", [2.5, np.float32(2.5), Fraction(5, 2), float("inf")])
def test_numbers(number: Any) -> None:
    check_argument("it", number, float)
    with pytest.raises(ConfigError, match="expected a whole number"):
        check_argument("it", number, int)


def test_numbers_of_numpy_are_pythons_from_then_on() -> None:
    two: Any = np.int64(2)
    half: Any = np.float32(0.5)
    link = alpa_hpc.Link(np.float64(1e9), half)
    assert repr(replace(CLUSTER, num_nodes=two, intra_node=link)) == repr(replace(CLUSTER, num_nodes=2, intra_node=alpa_hpc.Link(1e9, 0.5)))
    assert type(alpa_hpc.parallelize(step, cluster=CLUSTER, num_microbatches=two).num_microbatches) is int
