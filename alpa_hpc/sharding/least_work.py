"""Layer + mesh shape -> seconds below which no strategy runs it: its contractions, each split over as many devices as its factors allow."""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from jax.extend.core import ClosedJaxpr

from alpa_hpc.cluster.compute import flop_rate
from alpa_hpc.cluster.hardware import DeviceSpec, MeshShape
from alpa_hpc.ir.flops import equation_flops
from alpa_hpc.ir.inline import HEAVY
from alpa_hpc.ir.work import Layer
from alpa_hpc.sharding.assignment import most_devices
from alpa_hpc.sharding.equation_work import itemsize_of
from alpa_hpc.sharding.strategies.registry import rule_of
from alpa_hpc.sharding.strategies.rule import OpRule

Contractions = Mapping[tuple[OpRule, int], int]  # FLOP of equal ones together, by rule and bytes an element


def least_seconds(layer: Layer, shape: MeshShape, device: DeviceSpec, *, remat: bool) -> float:
    """Seconds a microbatch of the layer's contractions alone, forward and backward; recomputed, the forward runs twice."""
    forward, backward = (_seconds(_contractions(program), shape, device) for program in (layer.forward, layer.backward))
    return (2 if remat else 1) * forward + backward


def _seconds(contractions: Contractions, shape: MeshShape, device: DeviceSpec) -> float:
    return sum(flop / most_devices(rule, shape) / flop_rate(device, itemsize) for (rule, itemsize), flop in contractions.items())


@lru_cache(maxsize=512)
def _contractions(program: ClosedJaxpr) -> Contractions:
    found: Counter[tuple[OpRule, int]] = Counter()
    for eqn in program.jaxpr.eqns:
        rule = rule_of(eqn) if eqn.primitive.name in HEAVY else None
        if rule is not None:
            found[rule, itemsize_of(eqn.invars[0])] += equation_flops(eqn)
    return found
