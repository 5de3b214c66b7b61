"""Values lie in memory from the kernel that makes them to the last one that reads them: against a count by brute force."""

import random

from alpa_hpc.sharding.lifetimes import Lifetimes

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
    assert lifetimes.peak_bytes() == lifetimes.kept_bytes == 24


def test_only_a_value_of_the_same_size_is_written_over():
    lifetimes = Lifetimes()
    first = frozenset(lifetimes.run(NOTHING, (8.0, 4.0), in_place=True))
    lifetimes.run(first, (4.0, 4.0), in_place=True)
    assert lifetimes.peak_bytes() == 16


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
