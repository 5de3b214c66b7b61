"""A user's own `with_sharding_constraint` -> the strategies that honour it.

It was written for the user's mesh, not for ours, so what is kept is which dims are split: those that it leaves whole are whole, and of
those that it splits as many are split as our mesh allows, over whatever axes. Dims that it leaves open may be either.
"""

from collections.abc import Iterable

from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.sharding.assignment import PlanTable, own_plans, table_of
from alpa_hpc.sharding.spec import Spec
from alpa_hpc.sharding.strategies.rule import OpRule, shape_of

CONSTRAINT = "sharding_constraint"


def honoured_plans(eqn: JaxprEqn, rule: OpRule, mesh: MeshShape) -> PlanTable:
    """The ways to run a constraint's equation (it changes nothing) in which its result lies as the user said."""
    table = own_plans(rule, mesh)
    is_open = {int(d) for d in eqn.params["unconstrained_dims"]}
    split = set(split_dims(eqn))
    allowed = [k for k, spec in enumerate(table.raw[0]) if _split(spec) <= split | is_open]
    most = max(len(_split(table.raw[0][k]) & split) for k in allowed)
    kept = [k for k in allowed if len(_split(table.raw[0][k]) & split) == most]
    return table_of(rule, tuple(table.labels[k] for k in kept), tuple(table.plans[k] for k in kept))


def split_dims(eqn: JaxprEqn) -> Iterable[int]:
    """The dims that a constraint splits: by the names in its spec, whatever the size of the user's mesh, else by the shape of a tile."""
    sharding, shape = eqn.params["sharding"], shape_of(eqn.outvars[0])
    if isinstance(sharding, NamedSharding):
        return [d for d, names in enumerate(sharding.spec) if names not in (None, (), PartitionSpec.UNCONSTRAINED)]
    return [d for d, (size, tile) in enumerate(zip(shape, sharding.shard_shape(shape), strict=True)) if tile < size]


def _split(spec: Spec) -> set[int]:
    return {d for d, axes in enumerate(spec.dims) if axes}
