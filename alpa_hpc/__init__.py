"""Train a JAX model that is too large for one device; the names for use as a library (README, "As a library").

Importing this package imports no jax: each name is fetched from its module at first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alpa_hpc.api import load_plan, parallelize, save_plan
    from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link
    from alpa_hpc.ir.grad import AuxKind, Mean, SumCount, value_and_grad
    from alpa_hpc.plan.plan import ParallelPlan

__all__ = [
    "AuxKind",
    "ClusterSpec",
    "DeviceSpec",
    "Link",
    "Mean",
    "ParallelPlan",
    "SumCount",
    "load_plan",
    "parallelize",
    "save_plan",
    "value_and_grad",
]

_MODULES = {
    "AuxKind": "alpa_hpc.ir.grad",
    "ClusterSpec": "alpa_hpc.cluster.hardware",
    "DeviceSpec": "alpa_hpc.cluster.hardware",
    "Link": "alpa_hpc.cluster.hardware",
    "Mean": "alpa_hpc.ir.grad",
    "ParallelPlan": "alpa_hpc.plan.plan",
    "SumCount": "alpa_hpc.ir.grad",
    "load_plan": "alpa_hpc.api",
    "parallelize": "alpa_hpc.api",
    "save_plan": "alpa_hpc.api",
    "value_and_grad": "alpa_hpc.ir.grad",
}


def __getattr__(name: str) -> object:
    """Fetch a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'alpa_hpc' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
