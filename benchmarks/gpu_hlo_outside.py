"""Does code for GPUs do what a plan says, with models of other libraries? `python benchmarks/gpu_hlo_outside.py [NAME ...]`.

The rows of tests/outside in their large size, each planned as one stage on two meshes of 8 described H100s and compiled without a GPU.
Prints what `gpu_hlo.py` prints, and exits as it does. Needs its wheels, and the libraries: pip install '.[gpu-check,outside-models]'.
"""

import sys
import time
import warnings
from collections.abc import Sequence

from gpu_hlo import ON_A_NODE, Checked, can_compile, check_stage, finish

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.config import compose_experiment
from alpa_hpc.ir.trace import trace_step
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.layers.layered import cut_layers
from tests.outside.cases import LARGE
from tests.outside.models import ROWS

SHAPES = (MeshShape(2, 4), MeshShape(8, 1))
BATCH_ROWS, NUM_MICROBATCHES, NUM_LAYERS = 512, 2, 4  # rows of a microbatch


def main(names: Sequence[str]) -> int:
    if not can_compile():
        return 2
    warnings.simplefilter("ignore")  # what other libraries warn of is theirs
    return finish([check(name, shape) for name in ROWS if not names or name in names for shape in SHAPES])


def check(name: str, shape: MeshShape) -> Checked:
    begun = time.monotonic()
    print(f"{name} on {shape.rows}x{shape.cols}")
    step = step_of(name)
    checked = check_stage(step, compose_experiment("gpt350m", ON_A_NODE).cluster, (0, len(step.layers)), shape, remat=False)
    print(f"  {time.monotonic() - begun:.0f} s", flush=True)
    return checked


def step_of(name: str) -> LayeredStep:
    case = ROWS[name](LARGE)
    traced = trace_step(case.step, case.state, case.batch(BATCH_ROWS * NUM_MICROBATCHES), num_microbatches=NUM_MICROBATCHES)
    return cut_layers(traced, num_layers=NUM_LAYERS, imbalance=3.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
