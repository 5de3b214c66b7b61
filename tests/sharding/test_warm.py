"""What warming up promises: no kernel is left to be compiled in the midst of a solve."""

import pkgutil
from importlib import import_module
from typing import Any

from alpa_hpc import sharding
from alpa_hpc.sharding.warm import warm_up

OUTGROWN = {"pack_spans", "pack_tables"}  # called where reductions fill arrays of a million entries


def kernels() -> dict[str, Any]:
    """The compiled functions of the solver that Python calls, by name."""
    modules = [import_module(f"{sharding.__name__}.{one.name}") for one in pkgutil.iter_modules(sharding.__path__) if not one.ispkg]
    found = {name: value for module in modules for name, value in vars(module).items() if hasattr(value, "nopython_signatures")}
    return {name: one for name, one in found.items() if not one.targetoptions.get("no_cpython_wrapper")}


def test_no_kernel_is_left_to_be_compiled() -> None:
    warm_up()
    assert len(kernels()) > 20
    assert [name for name, one in kernels().items() if not one.nopython_signatures and name not in OUTGROWN] == []
