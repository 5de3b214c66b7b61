"""Steps of elimination in compiled code: tables -> those that remain, and on the way back the states of the variables that left.

A variable v leaves by adding up all tables that hold it and taking the minimum over its states,

    new(rest) = min_v  sum_(tables t that hold v) t(rest, v).

The sum is formed as two, f(shared, own, v) + g(shared, v, row), which are small where the sum is large; so this is a product of matrices
with min for + and + for *, made row by row. Which state it was is asked only for the one assignment that is wanted in the end: then the
sum is formed again there, by the same additions in the same order.
"""

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Whole, copy_into, inner, kernel
from alpa_hpc.sharding.min_sum_steps import Steps

CHUNK = 512  # entries of a row that are made at a time: with all states of the leaving variable they stay in a core's first cache


@kernel
def run_steps(steps: Steps, scores: Floats) -> Floats:
    """The buffer with all tables made; `scores` are the entries of those that are given."""
    entries = np.empty(steps.num_entries)
    copy_into(entries[: len(scores)], scores)
    given = len(steps.offsets) - len(steps.splits)
    slots = np.empty(len(steps.sizes), np.int64)
    leaving = np.empty(1, np.int64)
    for k in range(len(steps.splits)):
        axes = steps.axes[steps.axis_starts[given + k] : steps.axis_starts[given + k + 1]]
        shared = _chosen(axes, steps.firsts[k] & steps.seconds[k])
        own, row = _chosen(axes, steps.firsts[k] & ~steps.seconds[k]), _chosen(axes, steps.seconds[k] & ~steps.firsts[k])
        leaving[0] = k
        first = _add_up(steps, entries, steps.inputs[steps.input_starts[k] : steps.splits[k]], shared, own, leaving, slots)
        second = _add_up(steps, entries, steps.inputs[steps.splits[k] : steps.input_starts[k + 1]], shared, leaving, row, slots)
        made = entries[steps.offsets[given + k] :]
        _multiply(first, second, _size(steps, shared), _size(steps, own), steps.sizes[k], _size(steps, row), made)
    return entries


@inner
def _chosen(axes: Ints, mask: Whole) -> Ints:
    """The axes whose bits are set."""
    chosen = np.empty(len(axes), np.int64)
    count = 0
    for d in range(len(axes)):
        if (mask >> d) & 1:
            chosen[count] = axes[d]
            count += 1
    return chosen[:count]


@inner
def _size(steps: Steps, axes: Ints) -> Whole:
    size = 1
    for axis in axes:
        size *= steps.sizes[axis]
    return size


@inner
def _add_up(steps: Steps, entries: Floats, tables: Ints, slow: Ints, middle: Ints, fast: Ints, slots: Ints) -> Floats:
    """The sum of tables over the axes `slow`, `middle` and `fast` (which hold all that they have), the last one fastest."""
    width = len(slow) + len(middle) + len(fast)
    shape, strides = np.empty(width, np.int64), np.empty(width, np.int64)
    d, num_entries = 0, 1
    for axes in (slow, middle, fast):
        for axis in axes:
            slots[axis], shape[d] = d, steps.sizes[axis]
            num_entries *= shape[d]
            d += 1
    total = np.zeros(num_entries)
    for table in tables:
        strides[:] = 0
        for i in range(steps.axis_starts[table], steps.axis_starts[table + 1]):
            strides[slots[steps.axes[i]]] = steps.strides[i]
        _add_table(entries, steps.offsets[table], shape, strides, total)
    return total


@inner
def _add_table(entries: Floats, start: Whole, shape: Ints, strides: Ints, total: Floats) -> None:
    """Add the table that begins at `start` and has `strides` along the axes of `total`."""
    shape, strides = _merged(shape, strides)
    last = len(shape) - 1
    length, step = shape[last], strides[last]
    index = np.zeros(len(shape), np.int64)
    for begin in range(0, len(total), length):
        row = total[begin : begin + length]
        if step == 1:
            _add(row, entries[start : start + length])
        else:
            for j in range(length):
                row[j] += entries[start + j * step]
        start = _advance(index, shape, strides, start)


@inner
def _add(total: Floats, row: Floats) -> None:
    for j in range(len(total)):
        total[j] += row[j]


@inner
def _merged(shape: Ints, strides: Ints) -> tuple[Ints, Ints]:
    """The same with neighbouring axes made one where a table steps through both alike: rows become longer."""
    sizes, steps = shape.copy(), strides.copy()
    last = len(shape) - 1
    at = last
    for d in range(last - 1, -1, -1):
        if strides[d] == steps[at] * sizes[at]:
            sizes[at] *= shape[d]
        else:
            at -= 1
            sizes[at], steps[at] = shape[d], strides[d]
    return sizes[at:], steps[at:]


@inner
def _advance(index: Ints, shape: Ints, strides: Ints, start: Whole) -> Whole:
    """Where the next row of a table begins: the last axis but one turns fastest."""
    for d in range(len(shape) - 2, -1, -1):
        index[d] += 1
        start += strides[d]
        if index[d] < shape[d]:
            return start
        index[d] = 0
        start -= strides[d] * shape[d]
    return start


@inner
def _multiply(first: Floats, second: Floats, num_shared: Whole, num_own: Whole, num_states: Whole, length: Whole, made: Floats) -> None:
    """made[shared, own, row] = min_v first[shared, own, v] + second[shared, v, row]."""
    for shared in range(num_shared):
        for begin in range(0, length, CHUNK):
            end = min(begin + CHUNK, length)
            for own in range(shared * num_own, (shared + 1) * num_own):
                best = made[own * length + begin : own * length + end]
                best[:] = np.inf
                for state in range(num_states):
                    base = first[own * num_states + state]
                    if base < np.inf:
                        at = (shared * num_states + state) * length
                        _lower(best, base, second[at + begin : at + end])


@inner
def _lower(best: Floats, base: float, row: Floats) -> None:
    for j in range(len(best)):
        cost = base + row[j]
        best[j] = cost if cost < best[j] else best[j]


@kernel
def states_back(steps: Steps, entries: Floats, states: Ints) -> None:
    """Complete `states` (by number) of the variables that remained by the best ones of those that left; of equal states the lowest."""
    for k in range(len(steps.splits) - 1, -1, -1):
        least = np.inf
        states[k] = 0
        row = np.zeros((2, steps.sizes[k]))
        for i in range(steps.input_starts[k], steps.input_starts[k + 1]):
            table = steps.inputs[i]
            first = steps.axis_starts[table]
            at = steps.offsets[table]
            for j in range(first + 1, steps.axis_starts[table + 1]):
                at += states[steps.axes[j]] * steps.strides[j]
            for state in range(steps.sizes[k]):
                row[int(i >= steps.splits[k]), state] += entries[at + state * steps.strides[first]]
        for state in range(steps.sizes[k]):
            cost = row[0, state] + row[1, state]
            if cost < least:
                least, states[k] = cost, state
