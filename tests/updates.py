"""Updates of one matrix on one device, and how many arrays as large as it lie in memory inside, by what XLA compiles for an H100."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import optax

from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.layered import cut_layers
from alpa_hpc.runtime.stage import Stage
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.stage import MemoryPrice, StageSolver
from tests.random_plans import optax_step

LONE = MeshShape(1, 1)
DEVICE = DeviceSpec("gpu", memory=80 << 30, flops_32bit=6e13, flops_16bit=9e14, memory_bandwidth=3e12, efficiency=0.5)
CLUSTER = ClusterSpec("one", 1, 1, DEVICE, intra_node=Link(4e11, 1e-5), inter_node=Link(5e10, 2e-5))


def clipped_factored() -> optax.GradientTransformation:
    """A clipped gradient that four kernels read: sums of its rows, of its columns and of all, and the new parameter."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-2, min_dim_size_to_factor=8))


def clipped_columns() -> optax.GradientTransformation:
    """A clipped gradient that two kernels read: sums of its columns, and the new parameter."""

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        return jax.tree.map(lambda one: one / (1e-3 + jnp.mean(one * one, axis=0)), updates)

    return optax.chain(optax.clip_by_global_norm(1.0), optax.stateless(update), optax.sgd(1e-2))


def unfactored() -> optax.GradientTransformation:
    """A gradient by a power of its second moment, then by its own mean square: a power is too much arithmetic to be worked out twice."""
    return optax.adafactor(1e-2, factored=False)


def layerwise() -> optax.GradientTransformation:
    """Adam by the ratio of two norms: three kernels read it, and it has a root and divisions."""
    return optax.lamb(1e-2)


@dataclass(frozen=True, slots=True)
class UpdateCase:
    """An optimiser on a matrix, and the arrays that lie inside."""

    optimiser: Callable[[], optax.GradientTransformation]
    shape: tuple[int, int]
    num_arrays: int

    @property
    def num_bytes(self) -> int:
        """Of the matrix."""
        return 4 * self.shape[0] * self.shape[1]


UPDATES = (
    UpdateCase(clipped_factored, (512, 8192), 1),  # sums of columns run in 64 blocks
    UpdateCase(clipped_factored, (512, 16384), 0),  # in 128
    UpdateCase(clipped_factored, (8192, 512), 0),  # in many, as columns are summed in two steps
    UpdateCase(clipped_columns, (512, 4096), 1),
    UpdateCase(clipped_columns, (512, 16384), 0),
    UpdateCase(unfactored, (768, 2304), 1),
    UpdateCase(layerwise, (768, 2304), 1),
)


def name_of(case: UpdateCase) -> str:
    """What tells it apart."""
    rows, cols = case.shape
    return f"{case.optimiser.__name__}-{rows}x{cols}"


@cache
def step_of(case: UpdateCase) -> LayeredStep:
    """The mean square of rows by the matrix."""
    rows, _ = case.shape
    state = jax.eval_shape(lambda: {"params": [jnp.ones(case.shape)], "optimiser": case.optimiser().init([jnp.ones(case.shape)])})
    step = optax_step(lambda params, x: jnp.mean((x @ params[0]) ** 2), case.optimiser())
    return cut_layers(
        trace_step(step, state, jax.ShapeDtypeStruct((16, rows), jnp.float32), num_microbatches=2), num_layers=1, imbalance=1.0
    )


@cache
def stage_of(case: UpdateCase) -> Stage:
    """It on one device."""
    solver = StageSolver(step_of(case), MeshPrices(logical_mesh(CLUSTER, Submesh(1, 1), LONE)), remat=False)
    return Stage(LONE, solver.choose(0, 1, MemoryPrice(0.0, 0.0)))
