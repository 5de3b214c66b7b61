"""Layouts as jax arrays: (Layout, host buffers) -> one global array on a mesh, and checks the other way.

A buffer handed to `place` belongs to the array from then on: a CPU device keeps a 64-byte aligned buffer as the array itself, without a
copy.
"""

import math
from functools import cache
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_hpc.errors import ProgramError
from alpa_hpc.runtime.instructions import Layout
from alpa_hpc.sharding.collectives import AXIS_NAMES
from alpa_hpc.sharding.spec import Spec

HostArray = np.ndarray[Any, Any]
ALIGNMENT: Final = 64  # bytes; from here on jax takes a numpy buffer over without a copy


def partition_spec(spec: Spec) -> PartitionSpec:
    """A spec in jax's words, with one entry for each dim."""
    return PartitionSpec(
        *(tuple(AXIS_NAMES[axis] for axis in dim) if len(dim) > 1 else AXIS_NAMES[dim[0]] if dim else None for dim in spec.dims)
    )


@cache
def named_sharding(spec: Spec, mesh: Mesh) -> NamedSharding:
    """The jax sharding of an array that lies as `spec` on `mesh`."""
    return NamedSharding(mesh, partition_spec(spec))


def check_layout(array: jax.Array, layout: Layout, mesh: Mesh, where: str) -> None:
    """Raise ProgramError where an array does not lie as its Send says: its bytes would arrive in the wrong places, unnoticed."""
    expected = named_sharding(layout.spec, mesh)
    if array.shape != layout.shape or array.dtype.name != layout.dtype:
        raise ProgramError(
            f"{where}: the array is {array.dtype.name}{list(array.shape)}, the instruction says {layout.dtype}{list(layout.shape)}. "
            "The task that made it and the emitted program differ; emit both from one plan."
        )
    if array.sharding != expected and not array.sharding.is_equivalent_to(expected, array.ndim):
        raise ProgramError(
            f"{where}: the array lies as {array.sharding}, the instruction says {layout.spec} ({expected}). "
            "The task that made it and the emitted program differ; emit both from one plan."
        )


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
    """A fresh uninitialised array that starts at a multiple of 64 bytes, so that a CPU device can keep it as its own buffer."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return aligned_bytes(num_bytes)[:num_bytes].view(dtype).reshape(shape)


def aligned_bytes(num_bytes: int) -> HostArray:
    """Fresh uninitialised bytes that start at a multiple of 64."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + num_bytes]


def place(layout: Layout, mesh: Mesh, buffers: list[HostArray]) -> jax.Array:
    """One global array of which this process brings `buffers`, one a local device in mesh order; they belong to the array from here on."""
    arrays = jax.device_put(buffers, list(mesh.local_devices))
    return jax.make_array_from_single_device_arrays(layout.shape, named_sharding(layout.spec, mesh), arrays)


def replicate(value: HostArray, mesh: Mesh) -> jax.Array:
    """The same value on every device of the mesh; each process brings it itself, so no message is needed."""
    devices = list(mesh.local_devices)
    arrays = jax.device_put([value] * len(devices), devices)
    return jax.make_array_from_single_device_arrays(value.shape, NamedSharding(mesh, PartitionSpec()), arrays)
