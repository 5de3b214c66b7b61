"""Kernels put in order keep what they need of each other; siblings become one, and what nobody waits for hides collectives."""

import random
from collections.abc import Sequence

from alpa_hpc.sharding.kernel_order import LATENCY, RATE
from alpa_hpc.sharding.lifetimes import Kernel, Lifetimes
from alpa_hpc.sharding.schedule import as_scheduled

NOTHING = frozenset[int]()
ELEMENTS = 8.0


def elementwise(lifetimes: Lifetimes, *reads: int, elements: float = ELEMENTS) -> int:
    """A kernel that goes through an array; what it makes."""
    (made,) = lifetimes.run(frozenset(reads), (elements,), in_place=True, elements=elements, seconds=1.0)
    return made


def product(lifetimes: Lifetimes, *reads: int, seconds: float = 1.0) -> int:
    (made,) = lifetimes.run(frozenset(reads), (ELEMENTS,), in_place=False, seconds=seconds)
    return made


def collective(lifetimes: Lifetimes, read: int, seconds: float) -> tuple[int, int]:
    """A start and an end; what arrives, and what says that it is there."""
    arriving, arrived = sorted(lifetimes.exchange(frozenset((read,)), ELEMENTS, (seconds - LATENCY) * RATE))
    return arriving, arrived


def place(order: Sequence[Kernel], value: int) -> int:
    """The position of the kernel that makes a value."""
    return next(position for position, kernel in enumerate(order) if value in kernel.makes)


def random_kernels(draw: random.Random) -> Lifetimes:
    lifetimes = Lifetimes()
    known = [frozenset((lifetimes.value(),)) for _ in range(draw.randint(1, 4))]
    for _ in range(draw.randint(1, 14)):
        reads = frozenset[int]().union(*draw.sample(known, min(len(known), draw.randint(1, 3))))
        elements, num_bytes = draw.choice((0.0, 4.0, 8.0)), float(draw.randint(1, 5))
        if elements or draw.random() < 0.5:
            known.append(frozenset(lifetimes.run(reads, (num_bytes,), in_place=bool(elements), elements=elements, seconds=1.0)))
        else:
            known.append(lifetimes.exchange(reads, num_bytes, 2.0))
    return lifetimes


def test_every_order_is_one_that_could_run_and_makes_everything_once():
    draw = random.Random(0)
    joined = moved = absorbed = 0
    for _ in range(500):
        lifetimes = random_kernels(draw)
        order = as_scheduled(lifetimes.kernels)
        made = {value: position for position, kernel in enumerate(order) for value in kernel.makes}
        gone = {value for kernel in lifetimes.kernels for value in kernel.makes} - made.keys()
        assert sum(len(kernel.makes) for kernel in order) == len(made)
        for position, kernel in enumerate(order):
            assert all(made.get(value, -1) < position for value in kernel.reads)
            assert gone.isdisjoint(kernel.reads), "what became part of another kernel is not read"
        under_way = [kernel.ends for kernel in order if kernel.ends or kernel.moved]
        assert under_way == [False, True] * (len(under_way) // 2), "one collective at a time"
        absorbed += len(gone)
        joined += len(order) < len(lifetimes.kernels)
        moved += [value for kernel in order for value in kernel.makes] != sorted(made)
    assert joined > 50 and moved > 50 and absorbed > 50


def test_siblings_are_joined_until_none_are_left_that_could_be():
    draw = random.Random(1)
    kept = 0
    for _ in range(300):
        order = as_scheduled(random_kernels(draw).kernels)
        for later, one in enumerate(order):
            for other in order[:later]:
                if one.reads & other.reads and one.elements == other.elements > 0:
                    assert needs(order, later, other), "only those that need each other are left apart"
                    kept += 1
    assert kept > 20


def needs(order: Sequence[Kernel], position: int, other: Kernel) -> bool:
    """Whether a kernel cannot run before another has."""
    wanted = set(order[position].reads)
    for kernel in reversed(order[:position]):
        if wanted & set(kernel.makes):
            if kernel is other:
                return True
            wanted |= kernel.reads
    return False


def test_what_one_kernel_makes_lies_together():
    """As of scores, of which one kernel makes the probabilities for one product and their gradients for the others."""
    lifetimes = Lifetimes()
    scores, seed = lifetimes.value(), lifetimes.value()
    probabilities = elementwise(lifetimes, scores)
    product(lifetimes, probabilities)
    gradient = product(lifetimes, seed)
    product(lifetimes, elementwise(lifetimes, scores, gradient))
    order = as_scheduled(lifetimes.kernels)
    assert place(order, probabilities) > place(order, gradient)
    assert lifetimes.peak_bytes() == 2 * ELEMENTS < lifetimes.peak_bytes(order) == 3 * ELEMENTS


def test_arrays_of_other_sizes_are_gone_through_by_kernels_of_their_own():
    lifetimes = Lifetimes()
    common = lifetimes.value()
    elementwise(lifetimes, common)
    elementwise(lifetimes, common, elements=2 * ELEMENTS)
    assert len(as_scheduled(lifetimes.kernels)) == 2


def between(num_collectives: int, seconds: float) -> tuple[int, list[int]]:
    """How many of three products XLA runs under each of collectives in a row that have nothing to do with them."""
    lifetimes = Lifetimes()
    made = [product(lifetimes, product(lifetimes, lifetimes.value())) for _ in range(3)]
    pairs = [(lifetimes.value(), lifetimes.value())]
    for _ in range(num_collectives):
        pairs.append(collective(lifetimes, product(lifetimes, *pairs[-1]), seconds))
    product(lifetimes, *pairs[-1])
    order = as_scheduled(lifetimes.kernels)
    found = [[value for value in made if place(order, start) < place(order, value) < place(order, end)] for start, end in pairs[1:]]
    assert not found[-1] or found[-1] == made[-len(found[-1]) :], "the last ones listed"
    return sum(map(len, found)), [len(some) for some in found]


def test_collectives_hide_behind_as_many_products_as_take_as_long():
    for seconds, late in ((0.9, 1), (3.9, 2), (100.0, 3)):
        assert between(2, seconds)[1][-1] == late, seconds


def test_a_collective_that_waits_for_none_begins_before_all_that_can_wait():
    for seconds in (1.0, 4.0, 100.0):
        assert between(1, seconds) == (3, [3])
        assert between(2, seconds)[0] == 3


def test_what_one_elementwise_kernel_alone_reads_is_not_made():
    """As the sum of which one kernel makes what is positive, and where."""
    for elements, gone in ((ELEMENTS, True), (2 * ELEMENTS, False)):
        lifetimes = Lifetimes()
        total = elementwise(lifetimes, lifetimes.value(), lifetimes.value(), elements=elements)
        positive, where = elementwise(lifetimes, total), elementwise(lifetimes, total)
        product(lifetimes, positive)
        order = as_scheduled(lifetimes.kernels)
        made = {value for kernel in order for value in kernel.makes}
        assert made >= {positive, where}
        assert (total not in made) == gone
        assert total in {value for kernel in as_scheduled(lifetimes.kernels, kept={total}) for value in kernel.makes}, "it is a result"


def test_without_collectives_and_siblings_nothing_is_moved():
    draw = random.Random(2)
    for _ in range(100):
        lifetimes = Lifetimes()
        for _ in range(draw.randint(1, 12)):
            known = range(len(lifetimes.sizes))
            product(lifetimes, *draw.sample(known, min(len(known), draw.randint(0, 3))))
        assert as_scheduled(lifetimes.kernels) == lifetimes.kernels
