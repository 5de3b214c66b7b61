"""Operators that move, cut, widen or make dims."""

from math import gcd

from jax.extend.core import JaxprEqn

from alpa_hpc.sharding.strategies.rule import UNSPLIT, OpRule, RuleDraft, shape_of


def transpose_rule(eqn: JaxprEqn) -> OpRule:
    """Result dim i is operand dim permutation[i]."""
    shape = shape_of(eqn.invars[0])
    permutation = tuple(eqn.params["permutation"])
    return OpRule(shape, (tuple(range(len(shape))),), (permutation,), linear=True)


def broadcast_rule(eqn: JaxprEqn) -> OpRule:
    """Kept dims share the factor of their operand dim; new dims are factors of their own."""
    operand, shape = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    targets = eqn.params["broadcast_dimensions"]
    dims = tuple(t if operand[i] == shape[t] else UNSPLIT for i, t in enumerate(targets))
    return OpRule(shape, (dims,), (tuple(range(len(shape))),), linear=True)


def squeeze_rule(eqn: JaxprEqn) -> OpRule:
    """Dims of size 1 disappear."""
    shape = shape_of(eqn.invars[0])
    gone = {d % len(shape) for d in eqn.params["dimensions"]}
    kept = tuple(d for d in range(len(shape)) if d not in gone)
    return OpRule(shape, (tuple(range(len(shape))),), (kept,), linear=True)


def reshape_rule(eqn: JaxprEqn) -> OpRule | None:
    """Dims that are merged or split keep the outermost part as a factor: only contiguous blocks are tiles of both shapes."""
    if eqn.params.get("dimensions") is not None:
        return None
    source, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    operand, result = [UNSPLIT] * len(source), [UNSPLIT] * len(target)
    sizes: list[int] = []
    for source_dims, target_dims in reshape_groups(source, target):
        major_source = next((d for d in source_dims if source[d] > 1), None)
        major_target = next((d for d in target_dims if target[d] > 1), None)
        if major_source is None or major_target is None:
            continue
        operand[major_source] = result[major_target] = len(sizes)
        sizes.append(gcd(source[major_source], target[major_target]))
    return OpRule(tuple(sizes), (tuple(operand),), (tuple(result),), linear=True)


def reshape_groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of dims with equal products, such as ([0], [0]), ([1, 2], [1])."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) and j < len(target):
        left, right = [i], [j]
        products = [source[i], target[j]]
        i, j = i + 1, j + 1
        while products[0] != products[1]:
            if products[0] < products[1]:
                products[0] *= source[i]
                left.append(i)
                i += 1
            else:
                products[1] *= target[j]
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


def slice_rule(eqn: JaxprEqn) -> OpRule:
    """Dims that are taken whole stay factors."""
    shape = shape_of(eqn.invars[0])
    strides = eqn.params["strides"] or (1,) * len(shape)
    cuts = zip(shape, eqn.params["start_indices"], eqn.params["limit_indices"], strides, strict=True)
    dims = tuple(d if (start, limit, stride) == (0, size, 1) else UNSPLIT for d, (size, start, limit, stride) in enumerate(cuts))
    return OpRule(shape, (dims,), (dims,), linear=True)


def pad_rule(eqn: JaxprEqn) -> OpRule:
    """Dims without padding stay factors; the padding value is a scalar (zero where gradients are padded)."""
    shape = shape_of(eqn.invars[0])
    dims = tuple(d if config == (0, 0, 0) else UNSPLIT for d, config in enumerate(eqn.params["padding_config"]))
    return OpRule(shape, (dims, ()), (dims,), linear=False)


def concatenate_rule(eqn: JaxprEqn) -> OpRule:
    """All dims but the joined one are factors."""
    shape = shape_of(eqn.outvars[0])
    dims = tuple(UNSPLIT if d == eqn.params["dimension"] else d for d in range(len(shape)))
    return OpRule(shape, (dims,) * len(eqn.invars), (dims,), linear=True)


def split_rule(eqn: JaxprEqn) -> OpRule:
    """All dims but the cut one are factors."""
    shape = shape_of(eqn.invars[0])
    dims = tuple(UNSPLIT if d == eqn.params["axis"] else d for d in range(len(shape)))
    return OpRule(shape, (dims,), (dims,) * len(eqn.outvars), linear=True)


def rev_rule(eqn: JaxprEqn) -> OpRule:
    """Dims that keep their order are factors."""
    shape = shape_of(eqn.invars[0])
    dims = tuple(UNSPLIT if d in eqn.params["dimensions"] else d for d in range(len(shape)))
    return OpRule(shape, (dims,), (dims,), linear=True)


def dynamic_slice_rule(eqn: JaxprEqn) -> OpRule:
    """Dims that are taken whole stay factors; the start indices are scalars."""
    shape = shape_of(eqn.invars[0])
    dims = tuple(d if size == cut else UNSPLIT for d, (size, cut) in enumerate(zip(shape, eqn.params["slice_sizes"], strict=True)))
    return OpRule(shape, (dims, *((),) * (len(eqn.invars) - 1)), (dims,))


def dynamic_update_slice_rule(eqn: JaxprEqn) -> OpRule:
    """Dims that are overwritten whole stay factors."""
    shape, update = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    dims = tuple(d if size == cut else UNSPLIT for d, (size, cut) in enumerate(zip(shape, update, strict=True)))
    return OpRule(shape, (dims, dims, *((),) * (len(eqn.invars) - 2)), (dims,))


def stack_rule(eqn: JaxprEqn) -> OpRule:
    """All dims but the new one are factors."""
    shape, axis = shape_of(eqn.outvars[0]), eqn.params["axis"]
    operand = tuple(d for d in range(len(shape)) if d != axis)
    return OpRule(shape, (operand,) * len(eqn.invars), (tuple(UNSPLIT if d == axis else d for d in range(len(shape))),), linear=True)


def unstack_rule(eqn: JaxprEqn) -> OpRule:
    """All dims but the one taken apart are factors."""
    shape, axis = shape_of(eqn.invars[0]), eqn.params["axis"]
    result = tuple(d for d in range(len(shape)) if d != axis)
    operand = tuple(UNSPLIT if d == axis else d for d in range(len(shape)))
    return OpRule(shape, (operand,), (result,) * len(eqn.outvars), linear=True)


def tile_rule(eqn: JaxprEqn) -> OpRule:
    """Dims that are not repeated are factors."""
    shape = shape_of(eqn.invars[0])
    dims = tuple(d if times == 1 else UNSPLIT for d, times in enumerate(eqn.params["reps"]))
    return OpRule(shape, (dims,), (dims,), linear=True)


def bitcast_rule(eqn: JaxprEqn) -> OpRule:
    """Dims that both shapes have are factors; one that holds the pieces of an element stays whole."""
    shape = min(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), key=len)
    dims = tuple(range(len(shape)))

    def padded(rank: int) -> tuple[int, ...]:
        return dims + (UNSPLIT,) * (rank - len(dims))

    return OpRule(shape, (padded(len(shape_of(eqn.invars[0]))),), (padded(len(shape_of(eqn.outvars[0]))),))


def iota_rule(eqn: JaxprEqn) -> OpRule:
    """Each device can count its own piece."""
    draft = RuleDraft.of(eqn)
    for d, size in enumerate(shape_of(eqn.outvars[0])):
        draft.factor(size, {}, {0: d})
    return draft.rule()


def together_rule(eqn: JaxprEqn) -> OpRule:
    """Several values that pass side by side, each by itself: every dim of each is a factor."""
    draft = RuleDraft.of(eqn)
    for position, atom in enumerate(eqn.invars):
        for d, size in enumerate(shape_of(atom)):
            draft.factor(size, {position: d}, {position: d})
    return draft.rule()
