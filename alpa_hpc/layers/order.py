"""Forward equations as numbers -> the linear order in which they are cut into layers: as traced, or branch after branch.

The paper cuts a list of operators (section 5.2) and takes that of the program. A program may go through its branches in turns (two towers,
one layer of each at a time); then every cut goes through both, and a stage of one tower alone does not exist. Where taking the branches one
by one keeps clearly less alive between operators, that is the order. A program without branches has but one order worth taking.
"""

from collections.abc import Sequence

import numpy as np

from alpa_hpc.layers.received import Crossing

_CLEARLY_LESS = 0.9


def linear_order(flops: Sequence[float], crossings: Sequence[Crossing]) -> list[int]:
    """Positions of the equations in the order in which they are to be cut; what is read comes before who reads it.

    `crossings` are all values that one equation makes and others read.
    """
    traced = list(range(len(flops)))
    branchwise = _branch_after_branch(len(flops), crossings)
    if _kept_alive(branchwise, flops, crossings) < _CLEARLY_LESS * _kept_alive(traced, flops, crossings):
        return branchwise
    return traced


def _branch_after_branch(num_equations: int, crossings: Sequence[Crossing]) -> list[int]:
    """Depth first: before an equation all that its first operand needs, then what the second one does; operands in the order of tracing."""
    makers: list[list[int]] = [[] for _ in range(num_equations)]
    for one in sorted(crossings, key=lambda crossing: crossing.producer):
        for reader in one.readers:
            makers[reader].append(one.producer)
    read = {one.producer for one in crossings}
    order: list[int] = []
    placed = [False] * num_equations
    for end in (position for position in range(num_equations) if position not in read):
        path = [(end, iter(makers[end]))]
        while path:
            position, operands = path[-1]
            following = next((maker for maker in operands if not placed[maker]), None)
            if following is not None:
                path.append((following, iter(makers[following])))
            else:
                placed[position] = True
                order.append(position)
                path.pop()
    return order


def _kept_alive(order: Sequence[int], flops: Sequence[float], crossings: Sequence[Crossing]) -> float:
    """Bytes times the FLOP during which they are alive: what a cut goes through on average, times all FLOP."""
    place = np.empty(len(order), np.int64)
    place[list(order)] = np.arange(len(order))
    after = np.cumsum([flops[position] for position in order])
    return float(sum(one.size * (after[max(place[list(one.readers)])] - after[place[one.producer]]) for one in crossings))
