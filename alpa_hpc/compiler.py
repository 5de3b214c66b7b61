"""XLA's compiler, where it is asked for code: what it fails on for GPUs is asked for once more, with less of XLA's own."""

from collections.abc import Iterable
from typing import Protocol

import jax
from jax.stages import Compiled, Lowered

LIBRARY_PRODUCTS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}


class Device(Protocol):
    """What is asked of a device of jax."""

    @property
    def platform(self) -> str:
        """The word "cpu", or the one of a make of GPUs."""
        ...


def compiled(lowered: Lowered, devices: Iterable[Device]) -> Compiled:
    """Code for `devices`, there or described.

    XLA's own kernels of matrix products fail on some shapes ("Couldn't find output tile sizes", seen of a product of width 1026), and the
    whole program with them; then all its products are the library's. Raises JaxRuntimeError where that is of no help.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) or not is_of_gpus(devices):
            raise
        return lowered.compile(compiler_options=LIBRARY_PRODUCTS)


def is_of_gpus(devices: Iterable[Device]) -> bool:
    """Whether devices, there or described, are GPUs."""
    return all(device.platform != "cpu" for device in devices)
