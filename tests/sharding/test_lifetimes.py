"""Values lie in memory from the kernel that makes them to the last one that reads them: against a count by brute force."""

import random

from alpa_hpc.sharding.kernel_seconds import Collective
from alpa_hpc.sharding.lifetimes import Lifetimes
from alpa_hpc.sharding.resharding import CollectiveKind, Lane

NOTHING = frozenset[int]()


def chain(*, in_place: bool, kept: bool) -> Lifetimes:
    """Three values of 8 bytes, each made from the one before."""
    lifetimes = Lifetimes()
    value = NOTHING
    for _ in range(3):
        value = frozenset(lifetimes.run(value, (8.0,), in_place=in_place))
        lifetimes.kept |= value if kept else NOTHING
    return lifetimes


def test_a_value_is_gone_once_it_was_read():
    assert chain(in_place=False, kept=False).peak_bytes() == 16


def test_elementwise_kernels_write_over_what_nobody_reads_later():
    assert chain(in_place=True, kept=False).peak_bytes() == 8


def test_kept_values_stay_and_are_not_written_over():
    lifetimes = chain(in_place=True, kept=True)
    assert lifetimes.peak_bytes() == 24
    assert lifetimes.bytes_beside_kept(lifetimes.kernels) == 0


def test_only_a_value_of_the_same_size_is_written_over():
    lifetimes = Lifetimes()
    first = frozenset(lifetimes.run(NOTHING, (8.0, 4.0), in_place=True))
    lifetimes.run(first, (4.0, 4.0), in_place=True)
    assert lifetimes.peak_bytes() == 16


def test_an_addition_to_what_is_wider_waits_for_what_takes_no_more():
    """Four bytes are added to eight: to XLA that takes four more."""
    for later, waits in ((3.0, True), (4.0, True), (5.0, False)):
        lifetimes = Lifetimes()
        gradient = frozenset(lifetimes.run(NOTHING, (4.0,), in_place=False))
        lifetimes.run(gradient, (), in_place=True)
        lifetimes.run(NOTHING, (later,), in_place=False)
        product, addition, other = lifetimes.kernels
        lifetimes.put_off({1: 8.0})
        assert lifetimes.kernels == ([product, other, addition] if waits else [product, addition, other])


def housed(guest: float, home: float, *, in_place: bool = False) -> float:
    """Bytes beside a kept value that is made of another, which is gone then."""
    lifetimes = Lifetimes()
    first = frozenset(lifetimes.run(NOTHING, (guest,), in_place=False))
    lifetimes.kept |= set(lifetimes.run(first, (home,), in_place=in_place))
    return lifetimes.bytes_beside_kept(lifetimes.kernels)


def test_a_kept_value_has_no_room_for_what_it_is_made_of_but_for_what_it_is_written_over():
    assert housed(8.0, 8.0) == 8
    assert housed(8.0, 8.0, in_place=True) == 0
    assert housed(4.0, 8.0, in_place=True) == 4


def test_a_kept_value_has_room_before_it_is_made_for_one_at_a_time_that_is_no_larger():
    for size, beside in ((8.0, 0.0), (9.0, 9.0)):
        lifetimes = Lifetimes()
        for _ in range(3):
            lifetimes.run(NOTHING, (size,), in_place=False)
        lifetimes.kept |= set(lifetimes.run(NOTHING, (8.0,), in_place=False))
        assert lifetimes.bytes_beside_kept(lifetimes.kernels) == beside
    lifetimes = Lifetimes()
    made = lifetimes.run(NOTHING, (8.0, 7.0), in_place=False)
    lifetimes.run(frozenset(made), (), in_place=False)
    lifetimes.kept |= set(lifetimes.run(NOTHING, (8.0,), in_place=False))
    assert lifetimes.bytes_beside_kept(lifetimes.kernels) == 7, "the smaller of two that are there together"


def test_where_a_kept_value_takes_anothers_place_there_is_room_only_once_that_was_read():
    """Of three values the first is made before the one that is there from the start is read, the second with that, the third behind."""
    for made_at, beside in ((0, 8.0), (1, 8.0), (2, 0.0)):
        lifetimes = Lifetimes()
        old = lifetimes.value()
        for position in range(3):
            reads = frozenset((old,)) if position == 1 else NOTHING
            lifetimes.run(reads, (8.0 if position == made_at else 0.0,), in_place=False)
        [new] = lifetimes.run(NOTHING, (8.0,), in_place=False)
        lifetimes.kept.add(new)
        assert lifetimes.bytes_beside_kept(lifetimes.kernels) == 0, "a place of its own"
        lifetimes.instead[new] = old
        assert lifetimes.bytes_beside_kept(lifetimes.kernels) == beside


def test_what_leaves_and_what_arrives_lie_in_memory_together_until_it_is_there():
    lifetimes = Lifetimes()
    sent = frozenset(lifetimes.run(NOTHING, (8.0,), in_place=False))
    arrived = lifetimes.exchange(sent, Collective(Lane(CollectiveKind.ALL_GATHER, (0,)), 4, 16.0, 16.0, 8, across=False))
    lifetimes.run(arrived, (16.0,), in_place=True)
    assert lifetimes.peak_bytes() == 24
    order = [lifetimes.kernels[0], lifetimes.kernels[1], lifetimes.kernels[2]]
    assert [kernel.ends for kernel in order] == [False, False, True]


def test_kept_values_save_no_more_than_they_are_and_cost_nothing():
    draw = random.Random(1)
    saved = 0
    for _ in range(300):
        lifetimes = Lifetimes()
        for _ in range(draw.randint(1, 12)):
            known = range(len(lifetimes.sizes))
            reads = frozenset(draw.sample(known, min(len(known), draw.randint(0, 3))))
            lifetimes.run(reads, (float(draw.randint(1, 5)),), in_place=draw.random() < 0.5)
        lifetimes.kept |= {value for value in range(len(lifetimes.sizes)) if draw.random() < 0.2}
        sizes = [0.0 if value in lifetimes.kept else size for value, size in enumerate(lifetimes.sizes)]
        without = Lifetimes(sizes).peak_bytes(lifetimes.kernels)
        beside = lifetimes.bytes_beside_kept(lifetimes.kernels)
        kept = sum(lifetimes.sizes[value] for value in lifetimes.kept)
        assert lifetimes.peak_bytes() - kept <= beside + 1e-9 and beside <= without
        saved += beside < without
    assert saved > 30


def test_what_nobody_reads_is_gone_at_once():
    lifetimes = Lifetimes()
    for _ in range(5):
        lifetimes.run(NOTHING, (8.0,), in_place=False)
    assert lifetimes.peak_bytes() == 8


def test_random_kernels_hold_what_a_count_of_living_values_says():
    draw = random.Random(0)
    shared = 0
    for _ in range(300):
        lifetimes = Lifetimes()
        for _ in range(draw.randint(1, 12)):
            known = range(len(lifetimes.sizes))
            reads = frozenset(draw.sample(known, min(len(known), draw.randint(0, 3))))
            lifetimes.run(reads, tuple(float(draw.randint(1, 5)) for _ in range(draw.randint(0, 2))), in_place=False)
        lifetimes.kept |= {value for value in range(len(lifetimes.sizes)) if draw.random() < 0.2}
        assert lifetimes.peak_bytes() == brute_force(lifetimes)
        shared += any(len([k for k in lifetimes.kernels if value in k.reads]) > 1 for value in range(len(lifetimes.sizes)))
    assert shared > 100, "values with several readers"


def brute_force(lifetimes: Lifetimes) -> float:
    """For each kernel the values that are there while it runs."""
    kernels = lifetimes.kernels
    made = {value: index for index, kernel in enumerate(kernels) for value in kernel.makes}
    ends = {value: max([made[value], *(i for i, kernel in enumerate(kernels) if value in kernel.reads)]) for value in made}
    ends |= dict.fromkeys(lifetimes.kept, len(kernels))
    held = [sum(lifetimes.sizes[value] for value in made if made[value] <= index <= ends[value]) for index in range(len(kernels))]
    return max(held, default=0.0)
