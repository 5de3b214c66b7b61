"""Scopes of tables and an order of leaving -> the steps in which variables leave, and how the tables that they make are laid out.

Variables are called by when they leave: number k leaves in step k, and those that remain have the numbers after. What several functions
ask numpy for elsewhere is spelt out here: so the kernels compile in a third of the time.
"""

from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Real, Truth, Whole, copy_into, inner, kernel

WIDE = 2048  # entries of a joint table from which on it is worth while to form it from two smaller ones


class Steps(NamedTuple):
    """What to do with tables of given scopes and sizes (by number of the variable); step k makes the table number `tables given + k`.

    Table t is over `axes[axis_starts[t]:axis_starts[t + 1]]`, ascending, with `strides` likewise, its entries from `offsets[t]` on in a
    buffer of `num_entries`. Step k adds up `inputs[input_starts[k]:input_starts[k + 1]]`: those before `splits[k]`, in this order, those
    from there on, and both sums; bit d of `firsts[k]` and `seconds[k]` tells which sums have axis d of the new table. `left` = tables that
    no step takes, `constants` = those without axes.

    A new table has first the axes of both sums, then those of the first alone, then those of the second alone, the last one fastest.
    """

    sizes: Ints
    axis_starts: Ints
    axes: Ints
    strides: Ints
    offsets: Ints
    input_starts: Ints
    inputs: Ints
    splits: Ints
    firsts: Ints
    seconds: Ints
    left: Ints
    constants: Ints
    num_entries: Whole


@kernel
def make_steps(place: Ints, sizes: Ints, scope_starts: Ints, scopes: Ints, offsets: Ints, num_entries: Whole, count: int) -> Steps:
    """The steps in which the first `count` variables leave; `place[v]` is the number of variable v of `scopes`."""
    given, total = len(offsets), len(offsets) + count
    axis_starts, places = np.zeros(total + 1, np.int64), np.empty(total, np.int64)
    axes, strides = np.empty(2 * len(scopes), np.int64), np.empty(2 * len(scopes), np.int64)
    heads, nexts = np.full(len(sizes) + 1, -1, np.int64), np.empty(total, np.int64)
    for t in range(given):
        _place_axes(t, place, sizes, scopes[scope_starts[t] : scope_starts[t + 1]], axis_starts, axes, strides)
        places[t] = offsets[t]
        first = axes[axis_starts[t]]
        nexts[t], heads[first] = heads[first], t
    input_starts, inputs = np.zeros(count + 1, np.int64), np.empty(total, np.int64)
    splits, firsts, seconds = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    slots, rest = np.full(len(sizes), -1, np.int64), np.empty(len(sizes), np.int64)
    for k in range(count):
        begin, end = axis_starts[given + k], _gather(heads[k], nexts, inputs, input_starts[k])
        tables = inputs[input_starts[k] : end]
        width = _others(tables, axis_starts, axes, rest, slots)
        input_starts[k + 1], axis_starts[given + k + 1] = end, begin + width
        if begin + width > len(axes):
            axes, strides = _longer(axes, width), _longer(strides, width)
        copy_into(axes[begin : begin + width], rest)
        splits[k], firsts[k], seconds[k] = _split(tables, sizes, sizes[k], axis_starts, axes, rest[:width], slots)
        splits[k] += input_starts[k]
        places[given + k] = num_entries
        num_entries += _lay_out(sizes, rest, firsts[k], seconds[k], strides[begin : begin + width])
        first = rest[0] if width > 0 else len(sizes)
        nexts[given + k], heads[first] = heads[first], given + k
    left, constants = np.empty(total, np.int64), np.empty(count, np.int64)
    num_left = _gather_all(heads[count:-1], nexts, left)
    constants = constants[: _gather(heads[len(sizes)], nexts, constants, 0)]
    return Steps(
        sizes, axis_starts, axes, strides, places, input_starts, inputs, splits, firsts, seconds, left[:num_left], constants, num_entries
    )


@inner
def _place_axes(t: int, place: Ints, sizes: Ints, scope: Ints, axis_starts: Ints, axes: Ints, strides: Ints) -> None:
    """Axes of a table by number, ascending, with the strides that they have in the order of its scope."""
    begin = axis_starts[t]
    stride = 1
    for done in range(len(scope)):
        number = place[scope[len(scope) - 1 - done]]
        at = begin + done
        while at > begin and axes[at - 1] > number:
            axes[at], strides[at] = axes[at - 1], strides[at - 1]
            at -= 1
        axes[at], strides[at] = number, stride
        stride *= sizes[number]
    axis_starts[t + 1] = begin + len(scope)


@inner
def _gather(head: Whole, nexts: Ints, into: Ints, count: Whole) -> Whole:
    """Append the numbers of a linked list; how many there are then."""
    while head >= 0:
        into[count] = head
        count += 1
        head = nexts[head]
    return count


@inner
def _gather_all(heads: Ints, nexts: Ints, into: Ints) -> Whole:
    count = 0
    for head in heads:
        count = _gather(head, nexts, into, count)
    return count


@inner
def _longer(numbers: Ints, more: Whole) -> Ints:
    longer = np.empty(2 * len(numbers) + more, np.int64)
    copy_into(longer[: len(numbers)], numbers)
    return longer


@inner
def _others(tables: Ints, axis_starts: Ints, axes: Ints, rest: Ints, slots: Ints) -> int:
    """The variables that tables have beside their first ones, ascending, into `rest`, and their number. `slots` is -1 before and after."""
    width = 0
    for table in tables:
        for i in range(axis_starts[table] + 1, axis_starts[table + 1]):
            new = axes[i]
            if slots[new] < 0:
                slots[new] = 0
                at = width
                while at > 0 and rest[at - 1] > new:
                    rest[at] = rest[at - 1]
                    at -= 1
                rest[at] = new
                width += 1
    for d in range(width):
        slots[rest[d]] = -1
    return width


@inner
def _split(
    tables: Ints, sizes: Ints, num_states: Whole, axis_starts: Ints, axes: Ints, rest: Ints, slots: Ints
) -> tuple[int, Whole, Whole]:
    """Order a step's tables in two groups: how many the first has, and the axes of each, a bit for each axis of `rest`.

    A wide joint table is most often an outer sum: f(v, a, b) + g(v, a, c). Two groups that are small by themselves are added up first; the
    joint entries then cost one addition each. The second group is the one with more entries along its own axes: they are the rows. A
    narrow joint table is made from one group.
    """
    everything = (1 << len(rest)) - 1
    if _entries(sizes, rest, everything) * num_states < WIDE:
        return 0, 0, everything
    masks, keys = _masks(tables, axis_starts, axes, rest, slots), np.empty(len(tables))
    for i in range(len(tables)):
        keys[i] = -_entries(sizes, rest, masks[i])
    _sort(keys, tables, masks)
    first, second = 0, 0
    for i in range(len(tables)):
        if _goes_first(masks[i], first, second, sizes, rest):
            first, keys[i] = first | masks[i], 0.0
        else:
            second, keys[i] = second | masks[i], 1.0
    if _entries(sizes, rest, first & ~second) > _entries(sizes, rest, second & ~first):
        first, second = second, first
        for i in range(len(tables)):
            keys[i] = 1.0 - keys[i]
    _sort(keys, tables, masks)
    num_first = 0
    while num_first < len(tables) and keys[num_first] == 0.0:
        num_first += 1
    return num_first, first, second


@inner
def _masks(tables: Ints, axis_starts: Ints, axes: Ints, rest: Ints, slots: Ints) -> Ints:
    """The axes of each table, a bit for each of `rest`. `slots` is -1 before and after."""
    masks = np.zeros(len(tables), np.int64)
    for d in range(len(rest)):
        slots[rest[d]] = d
    for i in range(len(tables)):
        for j in range(axis_starts[tables[i]] + 1, axis_starts[tables[i] + 1]):
            masks[i] |= 1 << slots[axes[j]]
    for d in range(len(rest)):
        slots[rest[d]] = -1
    return masks


@inner
def _sort(keys: Floats, tables: Ints, masks: Ints) -> None:
    """By keys, equal ones as they were."""
    for i in range(1, len(keys)):
        key, table, mask, at = keys[i], tables[i], masks[i], i
        while at > 0 and keys[at - 1] > key:
            keys[at], tables[at], masks[at] = keys[at - 1], tables[at - 1], masks[at - 1]
            at -= 1
        keys[at], tables[at], masks[at] = key, table, mask


@inner
def _goes_first(mask: Whole, first: Whole, second: Whole, sizes: Ints, rest: Ints) -> Truth:
    """Whether a table goes into the first group: into the one that has all its axes, the smaller if both do, or that stays smaller."""
    fits_first, fits_second = mask | first == first, mask | second == second
    if fits_first != fits_second:
        return fits_first
    return _entries(sizes, rest, mask | first) < _entries(sizes, rest, mask | second)


@inner
def _entries(sizes: Ints, rest: Ints, mask: Whole) -> Real:
    """Entries of a table over the axes of a mask."""
    product = 1.0
    for d in range(len(rest)):
        if (mask >> d) & 1:
            product *= float(sizes[rest[d]])
    return product


@inner
def _lay_out(sizes: Ints, rest: Ints, first: Whole, second: Whole, strides: Ints) -> Whole:
    """Strides of a new table, and its number of entries."""
    stride = 1
    for mask in (second & ~first, first & ~second, first & second):
        for d in range(len(strides) - 1, -1, -1):
            if (mask >> d) & 1:
                strides[d] = stride
                stride *= sizes[rest[d]]
    return stride


@kernel
def tables_left(steps: Steps, entries: Floats) -> tuple[Ints, Ints, Ints, Floats]:
    """The tables that remain, by themselves: where scopes start, scopes by number, where entries start, entries."""
    num_left = len(steps.left)
    scope_starts, offsets = np.zeros(num_left + 1, np.int64), np.zeros(num_left + 1, np.int64)
    for i in range(num_left):
        begin, end = steps.axis_starts[steps.left[i]], steps.axis_starts[steps.left[i] + 1]
        scope_starts[i + 1] = scope_starts[i] + end - begin
        offsets[i + 1] = offsets[i] + int(_entries(steps.sizes, steps.axes[begin:end], -1))
    scopes, scores = np.empty(scope_starts[num_left], np.int64), np.empty(offsets[num_left])
    for i in range(num_left):
        begin, end, start = steps.axis_starts[steps.left[i]], steps.axis_starts[steps.left[i] + 1], steps.offsets[steps.left[i]]
        _by_stride(steps.axes[begin:end], steps.strides[begin:end], scopes[scope_starts[i] : scope_starts[i + 1]])
        copy_into(scores[offsets[i] : offsets[i + 1]], entries[start:])
    return scope_starts, scopes, offsets[:num_left], scores


@inner
def _by_stride(axes: Ints, strides: Ints, into: Ints) -> None:
    """Axes from the slowest to the fastest."""
    for d in range(len(axes)):
        place = 0
        for stride in strides:
            place += stride > strides[d]
        into[place] = axes[d]
