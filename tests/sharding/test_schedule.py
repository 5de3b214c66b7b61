"""Kernels put in order keep what they need of each other; siblings become one, and what nobody waits for hides collectives."""

import random
from collections.abc import Sequence

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


def collective(lifetimes: Lifetimes, read: int, seconds: float) -> int:
    """A start and an end; what arrives."""
    begun = lifetimes.run(frozenset((read,)), (ELEMENTS,), in_place=False, hidden=seconds)
    (made,) = lifetimes.run(frozenset((read, *begun)), (ELEMENTS,), in_place=True)
    return made


def place(order: Sequence[Kernel], value: int) -> int:
    """The position of the kernel that makes a value."""
    return next(position for position, kernel in enumerate(order) if value in kernel.makes)


def random_kernels(draw: random.Random) -> Lifetimes:
    lifetimes = Lifetimes()
    for _ in range(draw.randint(1, 4)):
        lifetimes.value()
    for _ in range(draw.randint(1, 14)):
        known = range(len(lifetimes.sizes))
        reads = frozenset(draw.sample(known, min(len(known), draw.randint(1, 3))))
        elements = draw.choice((0.0, 4.0, 8.0))
        hidden = draw.choice((0.0, 2.0)) if not elements else 0.0
        lifetimes.run(reads, (float(draw.randint(1, 5)),), in_place=bool(elements), elements=elements, seconds=1.0, hidden=hidden)
    return lifetimes


def test_every_order_is_one_that_could_run_and_makes_everything_once():
    draw = random.Random(0)
    joined = moved = 0
    for _ in range(500):
        lifetimes = random_kernels(draw)
        order = as_scheduled(lifetimes.kernels)
        made = {value: position for position, kernel in enumerate(order) for value in kernel.makes}
        assert sorted(made) == sorted(value for kernel in lifetimes.kernels for value in kernel.makes)
        assert sum(len(kernel.makes) for kernel in order) == len(made)
        for position, kernel in enumerate(order):
            assert all(made.get(value, -1) < position for value in kernel.reads)
        joined += len(order) < len(lifetimes.kernels)
        moved += [value for kernel in order for value in kernel.makes] != sorted(made)
    assert joined > 50 and moved > 50


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


def gradients(count: int, seconds: float) -> tuple[Lifetimes, list[int], int]:
    """Products, each made of an array of its own before a collective that has nothing to do with it; then something reads what arrives."""
    lifetimes = Lifetimes()
    made = [product(lifetimes, product(lifetimes, lifetimes.value())) for _ in range(count)]
    arrived = collective(lifetimes, product(lifetimes, lifetimes.value()), seconds)
    product(lifetimes, arrived)
    return lifetimes, made, arrived


def test_collectives_hide_behind_as_many_products_as_take_as_long():
    for seconds, late in ((1.0, 1), (4.0, 2), (100.0, 3)):
        lifetimes, made, arrived = gradients(3, seconds)
        order = as_scheduled(lifetimes.kernels)
        start = next(position for position, kernel in enumerate(order) if kernel.hidden)
        between = [value for value in made if start < place(order, value) < place(order, arrived)]
        assert between == made[-late:], seconds


def test_without_collectives_and_siblings_nothing_is_moved():
    draw = random.Random(2)
    for _ in range(100):
        lifetimes = Lifetimes()
        for _ in range(draw.randint(1, 12)):
            known = range(len(lifetimes.sizes))
            product(lifetimes, *draw.sample(known, min(len(known), draw.randint(0, 3))))
        assert as_scheduled(lifetimes.kernels) == lifetimes.kernels
