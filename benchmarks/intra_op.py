"""What the sharding ILP gains over plans made by rule (the paper's Fig. 8): each is a restriction of the same problem, by the same solver.

    python benchmarks/intra_op.py [--repeats N] [gpt] [moe] [wide_resnet]

First on eight CPU devices of this machine: predicted seconds (rates and links are calibrated at the start), memory, bytes of the compiled
collectives, and measured seconds of whole steps, taken in turns. Then, unmeasured, on a node of the paper's cluster, for models as wide and
batches as small as its ablation has them. A plan has the mesh shape (and recomputation) that suits it best.
The last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from alpa_hpc.baselines.baseline import Baseline, Inapplicable, baseline_restriction
from alpa_hpc.baselines.optimum import Optimum, restricted_optimum
from alpa_hpc.baselines.restriction import FREE, Restriction
from alpa_hpc.cluster.hardware import ClusterSpec, DeviceSpec, Link, MeshShape, Submesh
from alpa_hpc.cluster.mesh import logical_mesh
from alpa_hpc.config import compose_experiment
from alpa_hpc.errors import InfeasibleError
from alpa_hpc.ir.reference import microbatch_inputs
from alpa_hpc.layers.options import LayerOptions
from alpa_hpc.models.gpt import GPT
from alpa_hpc.models.moe import MoE
from alpa_hpc.models.wide_resnet import WideResNet
from alpa_hpc.parts import num_values_of, prepared
from alpa_hpc.runtime.assemble import Assembly, assemble, compile_tasks, place_batch, place_state
from alpa_hpc.runtime.execute import Executor, run_iteration
from alpa_hpc.runtime.execute import prepare as ready
from alpa_hpc.runtime.instructions import Buffer, Run
from alpa_hpc.runtime.schedule import OneFOneB
from alpa_hpc.runtime.transport import in_process_transports
from alpa_hpc.sharding.pricing import MeshPrices
from alpa_hpc.sharding.workspace import chosen_workspace
from alpa_hpc.training.data import Split, SyntheticBatches
from alpa_hpc.training.model import Model
from alpa_hpc.training.options import OptimiserKind, ParamDtype, TrainingOptions
from alpa_hpc.training.prepare import Prepared, prepare
from alpa_hpc.verify.hlo import collectives

NUM_DEVICES = 8
NODE = Submesh(1, NUM_DEVICES)
SHAPES = (MeshShape(8, 1), MeshShape(4, 2), MeshShape(2, 4), MeshShape(1, 8))
OURS = "ours"


def training(optimiser: OptimiserKind, batch_size: int) -> TrainingOptions:
    return TrainingOptions(
        optimiser=optimiser,
        param_dtype=ParamDtype.FLOAT32,
        batch_size=batch_size,
        num_steps=1,
        learning_rate=1e-3,
        warmup_steps=0,
        weight_decay=0.01,
        clip_norm=0.0,
        seed=0,
        evaluate_every=0,
        evaluate_batches=1,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """A model small enough for two cores, and a paper's experiment with what makes it one of the ablation's: wide, few layers, few rows."""

    model: Model
    training: TrainingOptions
    num_layers: int
    experiment: str
    overrides: tuple[str, ...]


SETTINGS: Mapping[str, Setting] = {
    "gpt": Setting(
        GPT(num_layers=4, hidden=256, num_heads=8, vocab=1024, sequence=64),
        training(OptimiserKind.ADAMW, 16),
        4,
        "gpt2_6b",
        ("model.num_layers=4", "model.hidden=4096", "model.num_heads=32", "training.batch_size=32", "layers.num_layers=4"),
    ),
    "moe": Setting(
        MoE(num_layers=2, hidden=256, num_heads=8, num_experts=8, vocab=1024, sequence=64, group_size=64, mlp_factor=4),
        training(OptimiserKind.ADAMW, 16),
        2,
        "moe2_4b",
        ("model.num_layers=4", "model.hidden=2048", "training.batch_size=32", "layers.num_layers=4"),
    ),
    "wide_resnet": Setting(
        WideResNet(depth=14, channels=32, width=2, num_classes=64, image=32),
        training(OptimiserKind.SGD, 32),
        4,
        "wresnet2b",
        ("model.channels=640", "training.batch_size=64"),
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """A plan by name: its strategies, its seconds an iteration by the cost model, and the bytes a device that it needs."""

    name: str
    optimum: Optimum
    remat: bool
    num_bytes: int

    @property
    def seconds(self) -> float:
        """Predicted seconds of an iteration."""
        return self.optimum.solution.objective

    @property
    def words(self) -> str:
        """The mesh shape, and whether activations are recomputed."""
        shape = self.optimum.stage.shape
        return f"{shape.rows}x{shape.cols}{' remat' if self.remat else ''}"


def main(names: Sequence[str], repeats: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    here = this_machine()
    document: dict[str, Any] = {"machine": {"flops": here.device.flops_32bit, "bandwidth": here.intra_node.bandwidth}}
    for name in names:
        setting = SETTINGS[name]
        made = prepare(setting.model, setting.training, LayerOptions(num_layers=setting.num_layers, imbalance=1.0), num_microbatches=1)
        print(f"\n{name}: {setting.model}, batch of {setting.training.batch_size}, {NUM_DEVICES} CPU devices")
        plans, absent = all_plans(made, here, remat=(False,))
        document[name] = {"cpu": with_measurements(setting, made, plans, repeats), "inapplicable": absent}
        config = compose_experiment(setting.experiment, (*setting.overrides, "schedule.num_microbatches=1"))
        print(f"\n{name}: {config.model}, batch of {config.training.batch_size}, 8 V100 16 GB, not run")
        document[name]["v100"] = without_measurements(*all_plans(prepared(config), config.cluster, remat=(False, True)), config.cluster)
    print(json.dumps(document))


def all_plans(made: Prepared, cluster: ClusterSpec, remat: Sequence[bool]) -> tuple[list[Priced], dict[str, str]]:
    """Ours first, then each baseline that has a plan; of those that have none, why."""
    plans, absent = [best(OURS, lambda _: FREE, made, cluster, remat)], dict[str, str]()
    for baseline in Baseline:
        found = [baseline_restriction(baseline, made.step, shape) for shape in SHAPES]
        if all(isinstance(one, Inapplicable) for one in found):
            absent[baseline.value] = "; ".join(dict.fromkeys(one.reason for one in found if isinstance(one, Inapplicable)))
        else:
            restrictions = dict(zip(SHAPES, found, strict=True))
            plans.append(best(baseline.value, restrictions.__getitem__, made, cluster, remat))
    for reason in absent.values():
        print(f"no plan: {reason}")
    return plans, absent


def best(
    name: str, rule: Callable[[MeshShape], Restriction | Inapplicable], made: Prepared, cluster: ClusterSpec, remat: Sequence[bool]
) -> Priced:
    """The fastest plan that fits a device over all shapes, else the one that needs least."""
    found: list[Priced] = []
    for shape in SHAPES:
        restriction = rule(shape)
        if isinstance(restriction, Restriction):
            prices = MeshPrices(logical_mesh(cluster, NODE, shape))
            found += [
                plan for again in remat for plan in within_memory(name, made, prices, restriction, cluster.device.memory, remat=again)
            ]
    fitting = [plan for plan in found if plan.num_bytes <= cluster.device.memory]
    return min(fitting, key=lambda plan: plan.seconds) if fitting else min(found, key=lambda plan: plan.num_bytes)


def within_memory(name: str, made: Prepared, prices: MeshPrices, restriction: Restriction, memory: float, *, remat: bool) -> list[Priced]:
    """The fastest plan, and while it is too large the fastest in less: the solver does not count what lives only while a task runs."""
    plans: list[Priced] = []
    limit = float("inf")
    while not plans or (plans[-1].num_bytes > memory and limit > 0):
        try:
            optimum = restricted_optimum(made.step, prices, restriction, remat=remat, memory_limit=limit)
        except InfeasibleError:
            break
        held = optimum.solution.peak_bytes
        total = int(held + chosen_workspace(optimum.stage.layers, optimum.stage.shape, hiding=False))
        plans.append(Priced(name, optimum, remat, total))
        limit = min(held * 0.99, held - (total - memory))
    return plans


# ---- measured


@dataclass(slots=True, eq=False)
class Running:
    """A plan compiled for the devices of this process, and its state."""

    plan: Priced
    assembly: Assembly
    executor: Executor
    feed: Callable[[int, int], jax.Array]
    state: Mapping[Buffer, jax.Array]
    traffic: Mapping[str, int]

    def step(self) -> float:
        """Seconds of one iteration."""
        began = time.perf_counter()
        result = run_iteration(self.executor, self.state, self.feed)
        jax.block_until_ready((result.resident, result.results))
        self.state = result.resident
        return time.perf_counter() - began


def with_measurements(setting: Setting, made: Prepared, plans: Sequence[Priced], repeats: int) -> dict[str, Any]:
    """Run all plans in turns, and print what they cost by the model and by the clock."""
    running = [compiled(setting, made, plan) for plan in plans]
    for one in running * 2:  # the first steps are slow
        one.step()
    rounds = [[one.step() for one in running] for _ in range(repeats)]
    print(
        f"{'':20}{'mesh':>6}{'predicted ms':>14}{'measured ms':>13}{'/ ours (quartiles)':>22}{'MB':>7}  compiled kB a device, an iteration"
    )
    rows = {one.plan.name: timed(one, [(turn[place], turn[0]) for turn in rounds]) for place, one in enumerate(running)}
    faster = [name for name, row in rows.items() if row["over_ours"][2] < 1]
    print(f"faster than ours beyond noise (three in four turns): {', '.join(faster) or 'none'}")
    return rows


def timed(one: Running, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Print and give a plan's row; `pairs` = its seconds in each turn, and ours in the same."""
    low, middle, high = statistics.quantiles([seconds / ours for seconds, ours in pairs], n=4)
    measured = statistics.quantiles([seconds for seconds, _ in pairs], n=4)
    kinds = ", ".join(f"{kind} {num_bytes / 1e3:.0f}" for kind, num_bytes in one.traffic.items())
    plan, ratio = one.plan, f"{middle:.2f} ({low:.2f} to {high:.2f})"
    print(
        f"{plan.name:20}{plan.words:>6}{plan.seconds * 1e3:14.1f}{measured[1] * 1e3:13.1f}{ratio:>22}{plan.num_bytes / 1e6:7.1f}  {kinds}",
        flush=True,
    )
    return summary(plan) | {"measured": measured, "over_ours": [low, middle, high], "compiled_bytes": one.traffic}


def compiled(setting: Setting, made: Prepared, plan: Priced) -> Running:
    """Compile a plan, place a fresh state and a random batch, and count what its programs exchange in an iteration."""
    stage, traced, schedule = plan.optimum.stage, made.traced, OneFOneB()
    mesh = Mesh(np.array(jax.devices()[:NUM_DEVICES]).reshape(stage.shape.sizes), ("x", "y"))
    assembly = assemble(made.step, (stage,), schedule)
    tasks = compile_tasks(assembly, 0, mesh)
    state = made.train_step.init(jax.random.key(0))
    source = SyntheticBatches(setting.model, num_values_of(setting.model))
    leaves = {leaf: np.asarray(value) for leaf, value in enumerate(traced.layout.arrays(state))}
    inputs = microbatch_inputs(traced, leaves, source.batch(Split.TRAINING, setting.training.batch_size, seed=0, step=0))
    runs = Counter(one.task for one in assembly.programs[0].instructions if isinstance(one, Run))
    traffic: Counter[str] = Counter()
    for name, count in runs.items():
        for one in collectives(tasks[name].as_text() or ""):
            traffic[one.kind.value] += count * one.num_bytes
    executor = ready(assembly.programs[0], tasks, in_process_transports([mesh])[0])
    fed = {(k, m): place_batch(assembly, 0, mesh, k, np.asarray(value)) for m, part in enumerate(inputs) for k, value in enumerate(part)}
    return Running(plan, assembly, executor, lambda k, m: fed[k, m], place_state(assembly, 0, mesh, leaves), traffic)


def without_measurements(plans: Sequence[Priced], absent: Mapping[str, str], cluster: ClusterSpec) -> dict[str, Any]:
    """Print what plans cost on a cluster that is not here."""
    print(f"{'':20}{'mesh':>10}{'seconds':>10}{'/ ours':>8}{'GB':>7}")
    for plan in plans:
        mark = "" if plan.num_bytes <= cluster.device.memory else "  does not fit"
        ratio = plan.seconds / plans[0].seconds
        print(f"{plan.name:20}{plan.words:>10}{plan.seconds:10.4f}{ratio:8.2f}{plan.num_bytes / 1e9:7.2f}{mark}", flush=True)
    fits = {plan.name: plan.num_bytes <= cluster.device.memory for plan in plans}
    return {"plans": {plan.name: summary(plan) | {"fits": fits[plan.name]} for plan in plans}, "inapplicable": dict(absent)}


def summary(plan: Priced) -> dict[str, Any]:
    solution = plan.optimum.solution
    return {"mesh": plan.words, "seconds": plan.seconds, "lower_bound": solution.lower_bound, "bytes": plan.num_bytes}


# ---- this machine


def this_machine() -> ClusterSpec:
    """Eight devices that share this machine's cores, as they are when all of them work: FLOP/s, bytes/s, and an all-reduce's line."""
    mesh = Mesh(np.array(jax.devices()[:NUM_DEVICES]), ("x",))
    size, width = 256, 1 << 20
    start = seconds_of(mesh, lambda x: x + 1, (16,))
    product = seconds_of(mesh, lambda x: x @ x, (size, size)) - start
    pass_over = seconds_of(mesh, lambda x: x + 1, (width,)) - start
    small, large = (seconds_of(mesh, lambda x: lax.psum(x, "x"), (length,)) for length in (16, width))
    bandwidth = 2 * 4 * width * (NUM_DEVICES - 1) / NUM_DEVICES / (large - small)
    link = Link(bandwidth, max(small - start, 1e-6) / (2 * int(np.log2(NUM_DEVICES))))
    flops = 2 * size**3 / product
    device = DeviceSpec("cpu", 1 << 33, flops, flops, 2 * 4 * width / pass_over, 1.0)
    print(
        f"a device: {flops / 1e9:.1f} GFLOP/s, {device.memory_bandwidth / 1e9:.2f} GB/s of memory; "
        f"links: {bandwidth / 1e9:.2f} GB/s, {link.latency * 1e6:.0f} us"
    )
    return ClusterSpec("this machine", 1, NUM_DEVICES, device, link, link)


def seconds_of(mesh: Mesh, function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> float:
    """Seconds of a function of one array a device, on all devices at once: the median of several."""
    whole = jnp.ones((NUM_DEVICES * shape[0], *shape[1:]))
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False))
    x = run(whole)  # compiles, and places an array
    seconds: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        jax.block_until_ready(run(x))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SETTINGS), help=f"models: {', '.join(SETTINGS)} (all)")
    parser.add_argument("--repeats", type=int, default=15, help="measured steps of each plan")
    arguments = parser.parse_args()
    main(arguments.names, arguments.repeats)
