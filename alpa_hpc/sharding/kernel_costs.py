"""A kernel -> the seconds that XLA's fusion thinks it takes on a GPU; fusion weighs these when it asks whether to work a thing out twice.

An array is read once, as fast as memory allows; what is spread over a larger one is read again and again out of a cache, as fast as the
blocks that run at once can ask for it. So it is slow in a kernel of few blocks, such as one that sums few long columns: there it may take
longer than an array that lies ready. All figures are XLA's own of an H100, whatever the cluster, as it logs them
(`TF_CPP_VMODULE=gpu_performance_model=10`), and cycles those of 32 bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from alpa_hpc.sharding.kernel_seconds import MEMORY_BANDWIDTH

NUM_CORES, UNITS_PER_CORE, THREADS_PER_CORE, CLOCK = 132, 128, 2048, 1.98e9
BLOCK_BANDWIDTH = 32 * CLOCK  # bytes/s: a core asks for that much in a cycle
L1_BYTES, L1_BANDWIDTH = 256 * 1024 * NUM_CORES, 20 * MEMORY_BANDWIDTH
L2_BYTES, L2_BANDWIDTH = 50 << 20, 2.5 * MEMORY_BANDWIDTH
LAUNCH = 1e-6
HIDDEN = 0.95  # of what is shorter, arithmetic or memory, runs behind the other
WARP, LONGEST_COLUMN, LONGEST_ROW = 32, 32 * 128, 1024 * 16  # above that XLA reduces in two steps
CYCLES = {
    "add": 7, "add_any": 7, "sub": 7, "mul": 3, "div": 19, "sqrt": 75, "rsqrt": 75, "pow": 510, "exp": 79, "expm1": 190, "log": 166,
    "log1p": 229, "tanh": 467, "cbrt": 178, "sin": 958, "cos": 978, "atan2": 431, "broadcast_in_dim": 0,
}  # fmt: skip
OTHER_CYCLES = 3


@dataclass(frozen=True, slots=True)
class Reduction:
    """An array [major, reduced, minor] loses its middle dim; `minor` is 1 where it sums rows."""

    major: int
    reduced: int
    minor: int


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes that a kernel reads of an array, again and again if they are more than it has; `itemsize` of its elements."""

    num_bytes: float
    of: float
    itemsize: int


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What a kernel does: `elements` that it makes, or how it reduces; `flop` in cycles of a unit; bytes that it writes."""

    reads: tuple[Read, ...]
    elements: int
    reduction: Reduction | None
    flop: float
    written: float


def work_seconds(work: KernelWork) -> float:
    """Of a kernel by itself, without its launch."""
    blocks, threads = _launch(work)
    units = min(blocks, NUM_CORES) * min(threads, UNITS_PER_CORE)
    arithmetic = work.flop / (2 * CLOCK * units)
    memory = sum(_read_seconds(read, blocks) for read in work.reads) + work.written / MEMORY_BANDWIDTH
    return arithmetic + memory - HIDDEN * min(arithmetic, memory)


def _read_seconds(read: Read, blocks: int) -> float:
    asked = blocks * BLOCK_BANDWIDTH
    first = min(read.of, read.num_bytes)
    cache = L1_BANDWIDTH if first < L1_BYTES else L2_BANDWIDTH if first < L2_BYTES else MEMORY_BANDWIDTH
    return first / min(MEMORY_BANDWIDTH, asked) + (read.num_bytes - first) / min(cache, asked)


def _launch(work: KernelWork) -> tuple[int, int]:
    """Blocks, and threads of each; a short sum is a thread's."""
    reduction = work.reduction
    if reduction is None or reduction.reduced < WARP:
        at_once = 4 if work.elements >= NUM_CORES * THREADS_PER_CORE else 1
        return max(1, ceil(work.elements / (128 * at_once))), 128
    if reduction.minor == 1:
        return _rows(reduction)
    return reduction.major * ceil(reduction.minor / (WARP * _vector(work.reads, reduction.minor))), WARP * WARP


def _rows(reduction: Reduction) -> tuple[int, int]:
    """Of sums of rows: a thread takes 16 elements, and where that leaves a block small, it has several rows."""
    threads = min(1024, WARP * ceil(reduction.reduced / 16 / WARP))
    together = max(1, min(reduction.major, 256 // threads))
    return ceil(reduction.major / together), threads * together


def _vector(reads: Iterable[Read], minor: int) -> int:
    """Columns that a thread takes at once: more of what has fewer bits."""
    widest = 2 if all(read.itemsize >= 4 for read in reads) else 4
    return next((size for size in (widest, 2) if minor % size == 0 and minor >= WARP * size), 1)
