"""Which arrays XLA makes inside a parameter's update: those that it works out once for several readers."""

import pytest

from alpa_hpc.sharding.joined_kernels import joined_kernels
from alpa_hpc.sharding.kernel_costs import KernelWork, Read, Reduction, work_seconds
from alpa_hpc.sharding.priority_fusion import FusedKernel, Operation, Value, fused_kernels
from alpa_hpc.sharding.update_memory import update_memory
from tests.updates import LONE, UPDATES, UpdateCase, name_of, stage_of

LARGE = 1 << 22


@pytest.mark.parametrize("case", UPDATES, ids=name_of)
def test_an_array_lies_inside_an_update_where_xla_has_one(case: UpdateCase):
    memory = update_memory(stage_of(case).layers, LONE, hiding=True)
    assert memory.hand_out == pytest.approx(case.num_arrays * case.num_bytes, abs=0.05 * case.num_bytes)


def test_what_is_spread_is_read_slowly_where_few_blocks_run():
    ready, spread = Read(4.0 * LARGE, 4.0 * LARGE, 4), Read(4.0 * LARGE, 4.0, 4)

    def seconds(read: Read, columns: int) -> float:
        return work_seconds(KernelWork((read,), columns, Reduction(1, LARGE // columns, columns), 0.0, 0.0))

    assert seconds(spread, 1 << 13) < seconds(ready, 1 << 13)
    assert seconds(spread, 1 << 11) == pytest.approx(seconds(ready, 1 << 11)), "in 32 blocks a cache gives no more than memory does"
    assert seconds(spread, 1 << 12) == pytest.approx(2 * seconds(spread, 1 << 13))


def two_readers(flop: float) -> list[Operation]:
    """A value of so much arithmetic an element, made of an array, and what is made of it twice."""
    array, value, one, other = (Value(LARGE, 4) for _ in range(4))
    return [Operation((array,), value, flop * LARGE), Operation((value,), one, 0.0), Operation((value,), other, 0.0)]


def test_what_takes_long_to_work_out_is_made_once_for_its_readers():
    cheap, dear = two_readers(7.0), two_readers(2000.0)
    assert len(fused_kernels(cheap, [one.made for one in cheap[1:]])) == 2
    assert len(fused_kernels(dear, [one.made for one in dear[1:]])) == 3
    assert len(fused_kernels(dear, [dear[1].made])) == 3, "the other one is a kernel, too, though nobody wants it"


def test_a_result_and_what_a_collective_reads_lie_in_memory():
    array, value, sent, made = (Value(LARGE, 4) for _ in range(4))
    first, second = Operation((array,), value, 7.0 * LARGE), Operation((value,), made, 0.0)
    exchanged = Operation((value,), sent, 0.0, along=False, fused=False)
    assert len(fused_kernels([first, second], [made])) == 1
    assert len(fused_kernels([first, second], [value, made])) == 2
    assert len(fused_kernels([first, second, exchanged], [made, sent])) == 3


def test_what_two_parts_of_a_kernel_read_alike_is_read_once():
    array, square, root, total = (Value(LARGE, 4) for _ in range(4))
    [kernel] = fused_kernels(
        [Operation((array,), square, 0.0), Operation((array,), root, 0.0), Operation((square, root), total, 0.0)], [total]
    )
    assert kernel.operands == {array: 1.0}


def reading(*reads: Value, elements: int = LARGE, reduction: Reduction | None = None) -> FusedKernel:
    """A kernel of its own."""
    part = 1 if reduction else 0
    return FusedKernel(Value(elements, 4), {(value, part): 1.0 for value in reads}, 0.0, reduction, fused=True)


def test_kernels_that_go_through_as_many_elements_and_read_a_common_array_are_one():
    array = Value(LARGE, 4)
    one, other, small = reading(array), reading(array), reading(array, elements=8)
    rows, columns = (reading(array, elements=8, reduction=Reduction(8, LARGE // 8, minor)) for minor in (1, LARGE // 64))
    assert joined_kernels([one, other, small]) == [[one, other], [small]]
    assert joined_kernels([one, rows]) == [[one, rows]]
    assert joined_kernels([rows, columns]) == [[rows], [columns]], "they reduce otherwise"


def test_a_kernel_is_one_with_what_reads_it_if_nothing_has_to_run_between():
    array = Value(LARGE, 4)
    first = reading(array)
    second = reading(first.made)
    total = reading(first.made, elements=1, reduction=Reduction(1, LARGE, 1))
    last = reading(first.made, total.made)
    assert joined_kernels([first, second]) == [[first, second]]
    assert joined_kernels([first, total, last]) == [[first, total], [last]], "the total has to be there before the last one"
