"""Transfers, in-flight counts and the checker of chosen stages."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.errors import PlanError
from alpa_hpc.stages.cost_table import CostTable, StageOption
from alpa_hpc.stages.objective import (
    StageChoice,
    check_stages,
    crosses_nodes,
    iteration_seconds,
    one_forward_one_backward,
    transfer_seconds,
)

DEVICE = DeviceSpec("test", 2**30, 1e12, 2e12, 1e11, 0.5)
CLUSTER = ClusterSpec("test", 2, 4, DEVICE, Link(4.0, 0.01), Link(2.0, 0.1))


def option(num_devices: int, seconds: float) -> StageOption:
    return StageOption(MeshShape(1, num_devices), False, 0, seconds, 4.0, 10.0, 2.0, 5.0, False)


FIRST, SECOND = option(4, 3.0), option(4, 2.0)
TABLE = CostTable(3, {(0, 2, Submesh(1, 4)): (FIRST,), (2, 3, Submesh(1, 4)): (SECOND,)}, (0.0, 1.0, 8.0))
STAGES = (StageChoice(0, 2, Submesh(1, 4), FIRST), StageChoice(2, 3, Submesh(1, 4), SECOND))


def test_transfer_is_there_and_back_on_the_stages_paths() -> None:
    assert transfer_seconds(CLUSTER, Submesh(1, 2), 8.0, crosses=False) == pytest.approx(2 * (1.0 + 0.01))
    assert transfer_seconds(CLUSTER, Submesh(1, 2), 8.0, crosses=True) == pytest.approx(2 * (4.0 + 0.1))
    assert transfer_seconds(CLUSTER, Submesh(2, 4), 8.0, crosses=True) == pytest.approx(2 * (2.0 + 0.1))
    assert transfer_seconds(CLUSTER, Submesh(2, 4), 0.0, crosses=True) == 0.0


def test_only_a_part_of_a_node_that_starts_inside_one_and_ends_there_stays_inside() -> None:
    assert [crosses_nodes(CLUSTER, Submesh(1, 2), offset) for offset in range(7)] == [True, False, False, True, True, False, False]
    assert crosses_nodes(CLUSTER, Submesh(1, 4), 4)
    assert crosses_nodes(CLUSTER, Submesh(2, 4), 2)


def test_iteration_seconds_by_hand() -> None:
    first, second = 3.0 + 4.0 / 8, 2.0 + 4.0 / 8 + 2 * (8.0 / 2.0 + 0.1)
    assert iteration_seconds(STAGES, TABLE, CLUSTER, 8) == pytest.approx(first + second + 7 * second)


def test_in_flight_of_1f1b() -> None:
    assert [one_forward_one_backward(stages, 3) for stages in (1, 2, 3, 4)] == [1, 2, 3, 3]


def test_check_stages_accepts_and_returns() -> None:
    assert check_stages(STAGES, TABLE, CLUSTER, 8, memory_limit=19.0) is STAGES


@pytest.mark.parametrize(
    ("stages", "limit", "message"),
    [
        (STAGES[1:], 100.0, "stage 0 starts at layer 2, expected layer 0"),
        (STAGES[:1], 100.0, "end at layer 2, expected 3"),
        (STAGES, 18.0, "stage 0 needs 19 bytes a device with 2 microbatches in flight"),
        ((replace(STAGES[0], option=SECOND), STAGES[1]), 100.0, "by an option that the cost table lacks"),
    ],
)
def test_check_stages_refuses(stages: tuple[StageChoice, ...], limit: float, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_stages(stages, TABLE, CLUSTER, 8, memory_limit=limit)


def test_check_stages_wants_all_devices() -> None:
    small = CostTable(1, {(0, 1, Submesh(1, 4)): (FIRST,)}, (0.0,))
    with pytest.raises(PlanError, match="use 4 devices, expected all 8"):
        check_stages((StageChoice(0, 1, Submesh(1, 4), FIRST),), small, CLUSTER, 8, memory_limit=100.0)


@given(st.lists(st.sampled_from((1, 2, 4, 8)), min_size=1), st.integers(2, 4))
def test_so_many_nodes_are_entered_as_there_are(sizes: list[int], num_nodes: int) -> None:
    """No order of stages goes through more nodes than are entered, the first one included."""
    cluster = replace(CLUSTER, num_nodes=num_nodes)
    entered, offset = 0, 0
    for size in sizes * (4 * num_nodes):
        submesh = Submesh(1, size) if size < 4 else Submesh(size // 4, 4)
        if offset + size <= cluster.num_devices:
            entered += submesh.num_nodes if crosses_nodes(cluster, submesh, offset) else 0
            offset += size
    assert entered >= -(-offset // 4)
