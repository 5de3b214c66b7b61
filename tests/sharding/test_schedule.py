"""Kernels put in order keep what they need of each other; siblings become one, and what nobody waits for hides collectives."""

import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.build import Program
from alpa_hpc.sharding.fusion import lifetimes_of
from alpa_hpc.sharding.kernel_seconds import MEMORY_BANDWIDTH, Collective, collective_seconds, product_seconds
from alpa_hpc.sharding.lifetimes import Kernel, Lifetimes
from alpa_hpc.sharding.resharding import CollectiveKind, Lane
from alpa_hpc.sharding.schedule import COMBINED_BYTES, as_scheduled, with_collectives_joined
from alpa_hpc.sharding.strategies.rule import Combine
from alpa_hpc.sharding.tiles import Compute, Exchange, Origin, Tile
from alpa_hpc.sharding.work_kind import Work

NOTHING = frozenset[int]()
ELEMENTS = 8.0
GATHER = Lane(CollectiveKind.ALL_GATHER, (0,))
SCATTER = Lane(CollectiveKind.REDUCE_SCATTER, (0,))
REDUCE = Lane(CollectiveKind.ALL_REDUCE, (0,))


def elementwise(lifetimes: Lifetimes, *reads: int, elements: float = ELEMENTS) -> int:
    """A kernel that goes through an array; what it makes."""
    (made,) = lifetimes.run(frozenset(reads), (elements,), in_place=True, elements=elements, seconds=1.0)
    return made


def product(lifetimes: Lifetimes, *reads: int, seconds: float = 1.0) -> int:
    (made,) = lifetimes.run(frozenset(reads), (ELEMENTS,), in_place=False, seconds=seconds)
    return made


def exchanged(lane: Lane, num_bytes: float, itemsize: int = 4) -> Collective:
    return Collective(lane, itemsize, num_bytes, num_bytes, 8, across=False)


def collective(lifetimes: Lifetimes, read: int, seconds: float) -> tuple[int, int]:
    """A start and an end; what arrives, and what says that it is there. Of so many bytes that no other becomes one with it."""
    many = 1e12
    rate = many / (collective_seconds(exchanged(GATHER, 2 * many)) - collective_seconds(exchanged(GATHER, many)))
    moved = (seconds - collective_seconds(exchanged(GATHER, 0.0))) * rate
    arriving, arrived = sorted(lifetimes.exchange(frozenset((read,)), exchanged(GATHER, moved)))
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
            known.append(lifetimes.exchange(reads, exchanged(GATHER, 2 * COMBINED_BYTES)))
    return lifetimes


def test_every_order_is_one_that_could_run_and_makes_everything_once():
    draw = random.Random(0)
    joined = moved = absorbed = 0
    for _ in range(500):
        lifetimes = random_kernels(draw)
        order = as_scheduled(lifetimes, hiding=True)
        made = {value: position for position, kernel in enumerate(order) for value in kernel.makes}
        gone = {value for kernel in lifetimes.kernels for value in kernel.makes} - made.keys()
        assert sum(len(kernel.makes) for kernel in order) == len(made)
        for position, kernel in enumerate(order):
            assert all(made.get(value, -1) < position for value in kernel.reads)
            assert gone.isdisjoint(kernel.reads), "what became part of another kernel is not read"
        under_way = [kernel.ends for kernel in order if kernel.ends or kernel.starts]
        assert under_way == [False, True] * (len(under_way) // 2), "one collective at a time"
        absorbed += len(gone)
        joined += len(order) < len(lifetimes.kernels)
        moved += [value for kernel in order for value in kernel.makes] != sorted(made)
    assert joined > 50 and moved > 50 and absorbed > 50


def test_siblings_are_joined_until_none_are_left_that_could_be():
    draw = random.Random(1)
    kept = 0
    for _ in range(300):
        order = as_scheduled(random_kernels(draw), hiding=True)
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
    order = as_scheduled(lifetimes, hiding=True)
    assert place(order, probabilities) > place(order, gradient)
    assert lifetimes.peak_bytes() == 2 * ELEMENTS < lifetimes.peak_bytes(order) == 3 * ELEMENTS


def test_arrays_of_other_sizes_are_gone_through_by_kernels_of_their_own():
    lifetimes = Lifetimes()
    common = lifetimes.value()
    elementwise(lifetimes, common)
    elementwise(lifetimes, common, elements=2 * ELEMENTS)
    assert len(as_scheduled(lifetimes, hiding=True)) == 2


def run_with_products(num_collectives: int, seconds: float) -> tuple[list[Kernel], list[int], list[tuple[int, int]]]:
    """The order of collectives in a row, each of what a product makes of the one before, and of six products beside them.

    Also what the last three of these make, which wait for the other three, and starts and ends.
    """
    lifetimes = Lifetimes()
    made = [product(lifetimes, product(lifetimes, lifetimes.value())) for _ in range(3)]
    pairs = [(lifetimes.value(), lifetimes.value())]
    for _ in range(num_collectives):
        pairs.append(collective(lifetimes, product(lifetimes, *pairs[-1]), seconds))
    product(lifetimes, *pairs[-1])
    return as_scheduled(lifetimes, hiding=True), made, pairs[1:]


def test_collectives_hide_behind_as_many_products_as_take_as_long():
    for seconds, under in ((0.9, 1), (1.9, 2), (100.0, 2)):
        order, made, pairs = run_with_products(2, seconds)
        start, end = pairs[-1]
        assert place(order, made[-1]) > place(order, end), "the last one listed: something comes between the end and what reads it"
        assert sum(place(order, start) < place(order, value) for value in made[:-1]) == under, seconds


def test_a_collective_that_waits_for_none_begins_before_all_that_can_wait():
    for num_collectives in (1, 2):
        for seconds in (1.0, 4.0, 100.0):
            order, made, [(start, _), *_] = run_with_products(num_collectives, seconds)
            assert place(order, start) < min(place(order, value) for value in made)


def test_of_what_has_as_much_before_it_that_runs_beside_a_collective_which_takes_about_as_long():
    for seconds, nearest in ((1.1, 0), (3.2, 1), (9.0, 2)):
        lifetimes = Lifetimes()
        made = [product(lifetimes, lifetimes.value(), seconds=one) for one in (1.0, 3.0, 9.0)]
        start, end = collective(lifetimes, product(lifetimes, lifetimes.value()), seconds)
        product(lifetimes, start, end)
        product(lifetimes, lifetimes.value())  # comes between the end and what reads it
        order = as_scheduled(lifetimes, hiding=True)
        beside = [value for value in made if place(order, value) < place(order, end)]
        assert max(beside, key=lambda value: place(order, value)) == made[nearest]


def joined(*collectives: Collective) -> list[Collective]:
    """What there is under way where each goes to a place of its own."""
    lifetimes = Lifetimes()
    for one in collectives:
        product(lifetimes, *lifetimes.exchange(frozenset((lifetimes.value(),)), one))
    return [kernel.starts for kernel in with_collectives_joined(lifetimes) if kernel.starts]


def test_collectives_of_a_kind_become_one_up_to_as_much_as_xla_allows():
    third = COMBINED_BYTES / 3
    [one] = joined(*[exchanged(SCATTER, third)] * 3)
    assert one == exchanged(SCATTER, COMBINED_BYTES)
    assert [one.arriving for one in joined(*[exchanged(SCATTER, third)] * 4)] == [COMBINED_BYTES, third]
    assert len(joined(exchanged(SCATTER, third), exchanged(SCATTER, third, itemsize=2))) == 2, "a sum is of one dtype"
    assert len(joined(exchanged(GATHER, third), exchanged(GATHER, third, itemsize=2))) == 1, "what is gathered need not be"
    for others in ((SCATTER, GATHER), (GATHER, Lane(GATHER.kind, (1,))), (Lane(CollectiveKind.ALL_TO_ALL, (0,)),) * 2):
        assert len(joined(*(exchanged(lane, third) for lane in others))) == 2


def test_what_waits_for_a_collective_is_not_part_of_it():
    lifetimes = Lifetimes()
    between = product(lifetimes, *lifetimes.exchange(frozenset((lifetimes.value(),)), exchanged(SCATTER, 1.0)))
    lifetimes.exchange(frozenset((between,)), exchanged(SCATTER, 1.0))
    assert with_collectives_joined(lifetimes) == lifetimes.kernels


def test_sums_of_several_arrays_go_through_one_that_lies_beside_them_until_the_last_of_them_is_copied_out():
    lifetimes = Lifetimes()
    arrived = [lifetimes.exchange(frozenset((lifetimes.value(),)), exchanged(REDUCE, num_bytes)) for num_bytes in (2.0, 3.0)]
    lifetimes.kept.update(*arrived)
    for kernels in (with_collectives_joined(lifetimes), as_scheduled(lifetimes, hiding=True)):
        [start] = [kernel for kernel in kernels if kernel.starts]
        assert start.starts == exchanged(REDUCE, 5.0)
        assert sum(lifetimes.sizes[value] for value in start.makes) == 0, "it is where it was"
        assert sorted(value for kernel in kernels for value in kernel.makes if value in lifetimes.kept) == sorted(lifetimes.kept)
        assert lifetimes.bytes_beside_kept(kernels) == 5.0


def test_a_single_sum_goes_where_it_is_wanted():
    lifetimes = Lifetimes()
    lifetimes.kept |= lifetimes.exchange(frozenset((lifetimes.value(),)), exchanged(REDUCE, 2.0))
    assert with_collectives_joined(lifetimes) == lifetimes.kernels


def test_collectives_are_joined_in_the_order_of_the_results_that_they_are_for():
    """Of three, of which two may be one, that of the last result is by itself, wherever it is listed."""
    half = exchanged(SCATTER, COMBINED_BYTES / 2)
    for alone in range(3):
        lifetimes = Lifetimes()
        sums = [lifetimes.run(lifetimes.exchange(frozenset((lifetimes.value(),)), half), (0.0,), in_place=True)[0] for _ in range(3)]
        lifetimes.results = [*(value for value in sums if value != sums[alone]), sums[alone]]
        [small] = [kernel for kernel in as_scheduled(lifetimes, hiding=True) if kernel.starts == half]
        assert any(small.makes[0] in kernel.reads and sums[alone] in kernel.makes for kernel in lifetimes.kernels)


def test_what_one_elementwise_kernel_alone_reads_is_not_made():
    """As the sum of which one kernel makes what is positive, and where."""
    for elements, gone in ((ELEMENTS, True), (2 * ELEMENTS, False)):
        lifetimes = Lifetimes()
        total = elementwise(lifetimes, lifetimes.value(), lifetimes.value(), elements=elements)
        positive, where = elementwise(lifetimes, total), elementwise(lifetimes, total)
        product(lifetimes, positive)
        order = as_scheduled(lifetimes, hiding=True)
        made = {value for kernel in order for value in kernel.makes}
        assert made >= {positive, where}
        assert (total not in made) == gone
        lifetimes.kept.add(total)
        assert total in {value for kernel in as_scheduled(lifetimes, hiding=True) for value in kernel.makes}, "it is a result"


def test_without_collectives_and_siblings_nothing_is_moved():
    draw = random.Random(2)
    for _ in range(100):
        lifetimes = Lifetimes()
        for _ in range(draw.randint(1, 12)):
            known = range(len(lifetimes.sizes))
            product(lifetimes, *draw.sample(known, min(len(known), draw.randint(0, 3))))
        assert as_scheduled(lifetimes, hiding=True) == lifetimes.kernels


def test_where_collectives_are_not_hidden_kernels_run_as_they_are_listed_once_what_they_read_is_there():
    draw = random.Random(3)
    as_listed = 0
    for _ in range(200):
        lifetimes = random_kernels(draw)
        order = as_scheduled(lifetimes, hiding=False)
        made = {value: position for position, kernel in enumerate(order) for value in kernel.makes}
        assert all(made.get(value, -1) < position for position, kernel in enumerate(order) for value in kernel.reads)
        as_listed += order == lifetimes.kernels
    assert as_listed > 50, "nothing was joined"


def test_what_is_joined_waits_for_the_last_of_it_and_holds_nothing_else_up():
    """Gradients of two layers that are summed at once: those of the first one made, and what follows, run when they are listed."""
    lifetimes = Lifetimes()
    first = product(lifetimes, lifetimes.value())
    arrived = lifetimes.exchange(frozenset((first,)), exchanged(SCATTER, 1.0))
    [sums] = lifetimes.run(arrived, (0.0,), in_place=True)
    chain = product(lifetimes, product(lifetimes, lifetimes.value()))
    second = product(lifetimes, chain)
    lifetimes.exchange(frozenset((second,)), exchanged(SCATTER, 1.0))
    order = as_scheduled(lifetimes, hiding=False)
    assert place(order, first) < place(order, chain) < place(order, second) < place(order, sums)


@pytest.mark.parametrize("kind", [kind for kind in CollectiveKind if kind is not CollectiveKind.COLLECTIVE_PERMUTE])
def test_a_collective_among_few_takes_less_long_than_one_among_many(kind: CollectiveKind):
    seconds = [
        collective_seconds(Collective(Lane(kind, (0,)), 4, 1e6, 1e6, devices, across))
        for devices, across in ((2, False), (8, False), (8, True))
    ]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == len(seconds)


def test_a_collective_is_among_the_devices_along_its_axes():
    for axes, devices in (((0,), 2), ((1,), 4), ((0, 1), 8)):
        lane = Lane(CollectiveKind.ALL_REDUCE, axes)
        program = jax.make_jaxpr(jnp.sin)(1.0)
        sent, made = (Tile(4.0, "float32", 4) for _ in range(2))
        step = Exchange(lane, sent, made, Origin(Program(program, (), (), ()), 0), Combine.SUM)
        [start, _] = lifetimes_of([step], mesh=MeshShape(2, 4)).kernels
        assert start.starts == Collective(lane, 4, 4.0, 4.0, devices, across=False)


@pytest.mark.parametrize(
    ("dtype", "shape", "seconds"),
    [
        ("float32", (2048, 64, 4096), 7.3e-6),
        ("float32", (4096, 256, 4096), 45.8e-6),
        ("float32", (4096, 1024, 4096), 111e-6),
        ("float32", (4096, 4096, 4096), 341e-6),
        ("bfloat16", (4096, 256, 4096), 21.6e-6),
        ("bfloat16", (4096, 4096, 4096), 176e-6),
        ("float16", (2048, 64, 4096), 28.3e-6),
        ("float16", (4096, 4096, 4096), 1409e-6),
    ],
)
def test_products_take_as_long_as_xla_says_of_them(dtype: str, shape: tuple[int, int, int], seconds: float):
    """Rows, what is summed over, columns; seconds of XLA's log."""
    rows, summed, columns = shape
    read = (rows + columns) * summed * (4.0 if dtype == "float32" else 2.0)
    found = product_seconds(2.0 * rows * summed * columns, float(rows * columns), read, dtype)
    assert 0.75 * seconds <= found <= 1.25 * seconds


def test_an_addition_reads_all_that_the_summand_is_made_of_and_no_more_of_each_than_it_holds():
    """The gradient of a weight that is read at several steps in time, as a part of a larger product at each."""

    def added(*products: float) -> float:
        made = [Tile(num_bytes, "float32", 4) for num_bytes in products]
        total = Tile(4e6, "float32", 4)
        steps = [Compute(Work.CONTRACTION, (Tile(4.0, "float32", 4),), (tile,)) for tile in made]
        return lifetimes_of([*steps, Compute(Work.FUSED, tuple(made), (total,), name="add")], added=[total]).kernels[-1].seconds

    assert added(4e6, 4e6) - added(4e6) == pytest.approx(4e6 / MEMORY_BANDWIDTH)
    assert added(8e6) == added(4e6)
