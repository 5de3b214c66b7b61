"""scan, while, cond -> rule: which dims stay split all the way through the nested programs.

Dims that an inner operator splits together form a class, joined over what goes in, out and around. Such a class is a factor of the whole
equation unless an inner operator must have one of its dims whole, or needs a sum over it completed. A sum that is only added up (the
gradient of a weight in the carry) may stay partial until the equation is over. As classes are joined both ways, this is the fixed point.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import gcd

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from alpa_hpc.ir.graph import Atom, variables
from alpa_hpc.sharding.strategies.dim_sets import Dim, DimSets, dims_of, factor_dims, whole_dims
from alpa_hpc.sharding.strategies.nests import Nest, Passage, nest_of
from alpa_hpc.sharding.strategies.rule import UNSPLIT, Combine, OpRule, Reduction, RuleDraft, RuleFunction, shape_of

Roots = frozenset[Dim]
Ruled = list[tuple[JaxprEqn, OpRule]]
NO_ROOTS: Roots = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class InnerStep:
    """An inner equation with its own rule; `outer[f]` = factor of the whole equation to which its factor f belongs, or UNSPLIT."""

    eqn: JaxprEqn
    rule: OpRule
    outer: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NestedSplit:
    """How a nest can be split: `rule` is that of the equation.

    `dims[v][d]` = factor of dim d of an inner variable, or UNSPLIT; `sums[v]` = factors over which the variable is a partial sum.
    """

    nest: Nest
    rule: OpRule
    steps: tuple[tuple[InnerStep, ...], ...]
    dims: Mapping[Var, tuple[int, ...]]
    sums: Mapping[Var, frozenset[int]]

    def sums_of(self, atom: Atom) -> frozenset[int]:
        """Factors over which an inner value is a partial sum."""
        return frozenset() if isinstance(atom, Literal) else self.sums.get(atom, frozenset())


def nested_rule(rule_of: RuleFunction, eqn: JaxprEqn) -> OpRule:
    """The rule of a scan, while or cond equation; `rule_of` gives those of the equations inside."""
    return nested_split(rule_of, eqn).rule


@lru_cache(maxsize=1024)
def nested_split(rule_of: RuleFunction, eqn: JaxprEqn) -> NestedSplit:
    """Classes of dims and partial sums of a nest, and the rule that follows."""
    nest = nest_of(eqn)
    ruled = [[(inner, rule_of(inner) or RuleDraft.of(inner).rule()) for inner in program.jaxpr.eqns] for program in nest.programs]
    flat = list(chain.from_iterable(ruled))
    sets = _joined(nest, flat)
    _mark_whole(flat, sets)
    sums = _partial_sums(nest, flat, sets)
    for program in nest.programs:
        _mark_clashes(program.jaxpr, sets, sums)
    sizes = _sizes(nest, flat, sets)
    factors = {root: number for number, root in enumerate(sizes)}

    def outer(inner: JaxprEqn, rule: OpRule) -> tuple[int, ...]:
        found = [UNSPLIT] * len(rule.sizes)
        for factor, dim in factor_dims(inner, rule):
            found[factor] = factors.get(sets.find(dim), UNSPLIT)
        return tuple(found)

    every = [var for program in nest.programs for var in _variables(program.jaxpr)]
    dims = {var: tuple(factors.get(sets.find(dim), UNSPLIT) for dim in dims_of(var)) for var in every}
    kept = {var: frozenset(factors[root] for root in roots if root in factors) for var, roots in sums.items()}
    steps = tuple(tuple(InnerStep(inner, rule, outer(inner, rule)) for inner, rule in program) for program in ruled)
    return NestedSplit(nest, _rule(nest, tuple(sizes.values()), dims, kept), steps, dims, kept)


def _joined(nest: Nest, ruled: Ruled) -> DimSets:
    """Dims of one factor are one class, and so are the dims of a value by all its names."""
    sets = DimSets()
    for inner, rule in ruled:
        first: dict[int, Dim] = {}
        for factor, dim in factor_dims(inner, rule):
            sets.join(dim, first.setdefault(factor, dim))
    groups = [variables(passage.atoms) for passage in (*nest.operands, *nest.results)] + [variables(flow) for flow in nest.flows]
    for group in groups:
        for var in group[1:]:
            for a, b in zip(dims_of(group[0]), dims_of(var), strict=True):
                sets.join(a, b)
    return sets


def _mark_whole(ruled: Ruled, sets: DimSets) -> None:
    """Mark what an inner operator must have whole, joins at once (a maximum), or would have to split twice."""
    for inner, rule in ruled:
        for dim in whole_dims(inner, rule):
            sets.mark(dim)
        combined = {reduction.factor for reduction in rule.reduced if reduction.combine is not Combine.SUM}
        factor_of: dict[Dim, int] = {}
        for factor, dim in factor_dims(inner, rule):
            if factor in combined or factor_of.setdefault(sets.find(dim), factor) != factor:
                sets.mark(dim)


def _partial_sums(nest: Nest, ruled: Ruled, sets: DimSets) -> dict[Var, Roots]:
    """The classes over which each variable is a partial sum if they are split; those that cannot stay so are marked."""
    sums: dict[Var, Roots] = {}

    def add(var: Var, roots: Roots) -> None:
        sums[var] = sums.get(var, NO_ROOTS) | roots

    before = -1
    while before != (before := sum(map(len, sums.values()))):
        for inner, rule in ruled:
            roots = {factor: sets.find(dim) for factor, dim in factor_dims(inner, rule)}
            brought = NO_ROOTS.union(*(sums.get(var, NO_ROOTS) for var in variables(inner.invars)))
            for root in brought if not rule.linear else brought.intersection(roots.values()):
                sets.mark(root)
            for position, var in enumerate(inner.outvars):
                add(var, brought | {roots[one.factor] for one in rule.reduced if position in one.results})
        for source, target in nest.flows:
            if isinstance(source, Var):
                add(target, sums.get(source, NO_ROOTS))
    return sums


def _mark_clashes(program: Jaxpr, sets: DimSets, sums: Mapping[Var, Roots]) -> None:
    """Mark a class of which a variable has two dims, or a dim while it is a sum over the class."""
    for var in _variables(program):
        seen = set(sums.get(var, NO_ROOTS))
        for dim in dims_of(var):
            root = sets.find(dim)
            if root in seen:
                sets.mark(dim)
            seen.add(root)


def _sizes(nest: Nest, ruled: Ruled, sets: DimSets) -> dict[Dim, int]:
    """The classes that nothing forbids and that the equation's own operands or results have -> what axes given to them must divide."""
    marked = sets.marked_roots()
    sizes: dict[Dim, int] = {}
    for var in (var for passage in (*nest.operands, *nest.results) for var in variables(passage.atoms)):
        for dim, size in zip(dims_of(var), shape_of(var), strict=True):
            if (root := sets.find(dim)) not in marked:
                sizes[root] = gcd(sizes.get(root, 0), size)
    for inner, rule in ruled:
        for factor, dim in factor_dims(inner, rule):
            if (root := sets.find(dim)) in sizes:
                sizes[root] = gcd(sizes[root], rule.sizes[factor])
    return {root: size for root, size in sizes.items() if size != 1}


def _rule(nest: Nest, sizes: tuple[int, ...], dims: Mapping[Var, tuple[int, ...]], sums: Mapping[Var, frozenset[int]]) -> OpRule:
    def outside(passage: Passage) -> tuple[int, ...]:
        inside = next((dims[var] for var in variables(passage.atoms)), ())
        return (UNSPLIT,) * passage.stacked + inside

    made = [frozenset[int]().union(*(sums.get(var, frozenset()) for var in variables(passage.atoms))) for passage in nest.results]
    reduced = ((factor, tuple(i for i, partial in enumerate(made) if factor in partial)) for factor in range(len(sizes)))
    return OpRule(
        sizes,
        tuple(map(outside, nest.operands)),
        tuple(map(outside, nest.results)),
        tuple(Reduction(factor, Combine.SUM, results) for factor, results in reduced if results),
    )


def _variables(program: Jaxpr) -> list[Var]:
    """Each variable of a flat program once."""
    inner = (atom for eqn in program.eqns for atom in (*eqn.invars, *eqn.outvars))
    return list(dict.fromkeys(variables((*program.constvars, *program.invars, *inner, *program.outvars))))
