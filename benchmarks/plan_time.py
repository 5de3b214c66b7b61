"""Seconds of each step of planning from nothing, by analytic costs on this machine, one process a point; beside the paper's.

    python benchmarks/plan_time.py [--seconds 900] [--gigabytes 12] [POINT ...]

A point is an experiment, or gpt175b (1024 GPUs) or gpt1t (3072 GPUs): GPT-3's and Megatron's sizes on nodes of 8 H100, by override.
Not like for like: the paper compiles and profiles its candidates on the cluster that it plans for, and starts after imports and tracing;
ours models them, on the cores of one machine. Kernels that numba had to compile, which it keeps for the next process, are counted apart.
The last line is one JSON object.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from alpa_hpc.config import compose_experiment
from alpa_hpc.errors import AlpaError
from alpa_hpc.experiment import IMPORT_SECONDS, launcher_for, plan_experiment
from alpa_hpc.kernels import compile_seconds
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.parts import prepared
from alpa_hpc.report.planning import counts
from alpa_hpc.report.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class Point:
    """An experiment with overrides."""

    experiment: str
    overrides: tuple[str, ...] = ()


GPTS = ("gpt350m", "gpt1_3b", "gpt2_6b", "gpt6_7b", "gpt15b", "gpt39b")
H100 = ("cluster=dgx_h100", "model.sequence=2048", "layers.num_layers=0")
OWN_POINTS: Mapping[str, Point] = {
    # Brown et al. 2020, Table 2.1
    "gpt175b": Point(
        "gpt39b",
        (*H100, "model.hidden=12288", "model.num_layers=96", "model.num_heads=96", "cluster.num_nodes=128", "training.batch_size=1536")
        + ("schedule.num_microbatches=96",),
    ),
    # Narayanan et al. 2021, Table 1, its last row
    "gpt1t": Point(
        "gpt39b",
        (*H100, "model.hidden=25600", "model.num_layers=128", "model.num_heads=160", "cluster.num_nodes=384", "training.batch_size=3072")
        + ("schedule.num_microbatches=512",),
    ),
}
DEFAULT = (*GPTS, "moe70b", "wresnet13b", *OWN_POINTS)
# Table 5, on 64 GPUs; Fig. 10 grows from some 1000 s on 2 GPUs to that.
PAPER = {"gpt39b": {"compilation": 1582.66, "profiling": 804.48, "stage construction": 1.65, "other": 4.47, "total": 2393.26}}
FAILED = "failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*", default=DEFAULT, metavar="POINT")
    parser.add_argument("--seconds", type=float, default=900.0, help="give a point up after so long")
    parser.add_argument("--gigabytes", type=float, default=12.0, help="give a point up that needs more memory")
    parser.add_argument("--here", action="store_true", help="plan the one point in this process; print JSON alone")
    arguments = parser.parse_args()
    if arguments.here:
        limit = int(arguments.gigabytes * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        print(json.dumps(plan(arguments.points[0])))
        return
    rows = {}
    for name in arguments.points:
        rows[name] = in_its_own_process(name, arguments.seconds, arguments.gigabytes)
        print_row(name, rows[name])
    print(json.dumps({"ours": rows, "paper": PAPER}))


def in_its_own_process(name: str, seconds: float, gigabytes: float) -> dict[str, Any]:
    started, command = time.perf_counter(), [sys.executable, __file__, "--here", "--gigabytes", str(gigabytes), name]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {FAILED: f"took more than {seconds:.0f} s"}
    if done.returncode:
        return {FAILED: f"status {done.returncode}"}
    return {"wall_seconds": time.perf_counter() - started, **json.loads(done.stdout.splitlines()[-1])}


def plan(name: str) -> dict[str, Any]:
    """Seconds and counts of one point, or why it cannot be planned."""
    jax.config.update("jax_platforms", "cpu")  # nothing is run: models are traced
    point, watch = OWN_POINTS.get(name, Point(name)), Stopwatch({"import": IMPORT_SECONDS})
    config = compose_experiment(point.experiment, ["mode=plan", *point.overrides])
    try:
        made = prepared(config, watch.time)
        with tempfile.TemporaryDirectory() as folder:
            _, record = plan_experiment(config, made, RunPaths(Path(folder) / name / "run"), launcher_for(config), watch)
    except AlpaError as error:
        return {FAILED: str(error), "seconds": watch.seconds}
    except MemoryError:
        return {FAILED: "it needs more than the memory that it may have", "seconds": watch.seconds}
    return {
        "devices": config.cluster.num_devices,
        "layers": len(made.step.layers),
        "seconds": watch.seconds,
        "compile_seconds": compile_seconds(),
        "counts": counts(record, made.step),
        "iteration_seconds": record.chosen.timeline.seconds,
    }


def print_row(name: str, row: Mapping[str, Any]) -> None:
    if FAILED in row:
        print(f"\n{name}: not planned: {row[FAILED]}", flush=True)
        return
    steps: Mapping[str, float] = row["seconds"]
    print(f"\n{name}: {row['devices']} devices, {row['layers']} layers, " + ", ".join(f"{n} {what}" for what, n in row["counts"].items()))
    print("  ours:  " + in_words(steps) + f", total {sum(steps.values()):.1f} s; of it kernels compiled {row['compile_seconds']:.1f} s")
    if name in PAPER:
        ratio = PAPER[name]["total"] / sum(steps.values())
        print("  paper: " + in_words(PAPER[name]) + f" s on 64 GPUs, compiling and profiling: {ratio:.0f} times as long", flush=True)


def in_words(steps: Mapping[str, float]) -> str:
    return ", ".join(f"{step} {seconds:.2f}" for step, seconds in steps.items())


if __name__ == "__main__":
    main()
