"""Does a run's loss curve equal that of one device? `python benchmarks/curve.py RUN_DIR`.

Trains the run's config again on one device, microbatch by microbatch and without any plan, and prints both losses of every tenth step and
the largest relative difference of all steps. Sums in another order round differently, and training amplifies that: exit status 1 beyond
TOLERANCE. The quickstart's gentle warm-up is what keeps it below.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from alpa_hpc.ir.reference import reference_step
from alpa_hpc.launch.paths import RunPaths, open_run
from alpa_hpc.parts import config_of_run, open_training_data, prepared
from alpa_hpc.training.data import Split
from alpa_hpc.training.metrics import read_metrics

TOLERANCE = 1e-4


def main(folder: str) -> int:
    jax.config.update("jax_platforms", "cpu")
    paths = open_run(Path(folder))
    losses = [row["loss"] for row in read_metrics(paths.metrics)]
    if not losses:
        print(f"{paths.metrics} has no steps to compare")
        return 1
    differences = [compare(step, found, expected) for step, (found, expected) in enumerate(zip(losses, one_device(paths), strict=False), 1)]
    worst = max(differences)
    print(f"{len(differences)} steps compared; largest relative difference {worst:.2e} at step {differences.index(worst) + 1}")
    return int(worst > TOLERANCE)


def compare(step: int, found: float, expected: float) -> float:
    difference = abs(found - expected) / abs(expected)
    if step % 10 == 0 or step == 1:
        print(f"step {step:4d}  run {found:.6f}  one device {expected:.6f}  relative difference {difference:.1e}", flush=True)
    return difference


def one_device(paths: RunPaths) -> Iterator[float]:
    config = config_of_run(paths)
    made, data, training = prepared(config), open_training_data(config), config.training
    state = jax.jit(made.train_step.init)(jax.random.key(training.seed))
    step = jax.jit(lambda state, batch: reference_step(made.traced, state, batch))
    for number in range(training.num_steps):
        state, figures = step(state, data.batch(Split.TRAINING, training.batch_size, training.seed, number))
        yield float(figures["loss"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
