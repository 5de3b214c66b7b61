"""`python -m alpa_hpc explain [RUN] --layer N [--node NAME]` -> how a layer is split, and what else would have cost at a node."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from alpa_hpc.commands.text import write_table
from alpa_hpc.errors import LaunchError
from alpa_hpc.ir.work import LayeredStep
from alpa_hpc.launch.files import fields_of
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.parts import config_of_run, prepared
from alpa_hpc.plan.plan import ParallelPlan
from alpa_hpc.planner.lookup import stage_of_plan
from alpa_hpc.report.words import chosen_plan, seconds_words, stage_words
from alpa_hpc.sharding.apply import ChosenLayer
from alpa_hpc.sharding.explain import Alternative, ExplainOptions, Impossible, Possible, explain_stage
from alpa_hpc.sharding.solve import SolverOptions
from alpa_hpc.stages.pricing import StagePricer
from alpa_hpc.train_job import read_plan
from alpa_hpc.units import bytes_words

NODE_HEADERS = ("node", "what it is", "strategy", "of")
ALTERNATIVE_HEADERS = ("", "strategy", "seconds an iteration", "bytes all iteration", "bytes a microbatch in flight")
LEAST = 1e-12  # what is left of rounding


def write_layer(paths: RunPaths, planning: Mapping[str, Any], index: int, node: str | None, stream: TextIO) -> None:
    """Write the strategies of layer `index` of a run's plan, or what the others at one of its nodes would have cost."""
    config, plan = config_of_run(paths), read_plan(paths)
    number = stage_with(plan, index)
    with fields_of(paths.planning):
        row = chosen_plan(planning)["stages"][number]
        words = stage_words(row)
    header = f"run         {paths.root}\nlayer       {index}, of stage {number}: {words}\n\n"
    step, stage = prepared(config).step, plan.stages[number]
    layers = stage_of_plan(stage, plan.strategy_table, step, config.cluster).layers
    place = index - stage.start
    if node is None:
        stream.write(header)
        write_table(NODE_HEADERS, node_rows(layers[place], step), stream)
        return
    if "variant" not in row:
        raise LaunchError(f"{paths.planning} does not say what memory was worth: it was written by an older version. Plan again.")
    price = StagePricer(step, config.cluster).memory_price(row["variant"])
    options = ExplainOptions(price, general=SolverOptions(time_limit_seconds=config.search.solver_seconds))
    found = explain_stage(step, layers, place, node_number(layers[place], node), options)
    stream.write(header)
    write_table(ALTERNATIVE_HEADERS, alternative_rows(found), stream)
    worth = f"a GB held all iteration counts as {seconds_words(price.fixed * 1e9)}" if price.fixed else "memory was free"
    stream.write(f"\neach beside what was chosen, with the best choices everywhere else in the stage; {worth}\n")


def stage_with(plan: ParallelPlan, index: int) -> int:
    """The number of the stage that has a layer."""
    for number, stage in enumerate(plan.stages):
        if stage.start <= index < stage.stop:
            return number
    raise LaunchError(f"--layer {index}: the plan has layers 0 to {plan.stages[-1].stop - 1}")


def node_number(layer: ChosenLayer, name: str) -> int:
    """The node of a name."""
    names = layer.problem.problem.names
    if name not in names:
        alike = [other for other, labels in zip(names, layer.problem.labels, strict=True) if name in other and len(labels) > 1]
        known = ", ".join(alike[:6]) or "see `explain --layer` without --node"
        raise LaunchError(f"--node {name}: the layer has no node of this name ({known})")
    return names.index(name)


def node_rows(layer: ChosenLayer, step: LayeredStep) -> list[tuple[str, ...]]:
    """The nodes that have a choice: parameters, then what the programs make."""
    problem = layer.problem
    rows = zip(problem.problem.names, problem.labels, layer.choices, strict=True)
    return [(name, meaning(layer, name, step), labels[choice], str(len(labels))) for name, labels, choice in rows if len(labels) > 1]


def meaning(layer: ChosenLayer, name: str, step: LayeredStep) -> str:
    """The name of a parameter in the model's state; nothing for what names itself."""
    kind, _, rest = name.partition(".")
    if kind not in ("param", "update") or not rest.isdecimal():
        return ""
    owners = layer.problem.layer.params if kind == "param" else [update.work.param for update in layer.problem.updates]
    return ("update of " if kind == "update" else "") + step.state_names[owners[int(rest)]]


def alternative_rows(found: Sequence[Alternative]) -> list[tuple[str, ...]]:
    """The chosen strategy, then the others from the cheapest on, then those that cannot be taken."""
    possible = sorted((one for one in found if isinstance(one, Possible)), key=lambda one: (not one.is_chosen, one.score))
    rows = [
        (
            "->" if one.is_chosen else "",
            one.label,
            signed(one.seconds, seconds_words(abs(one.seconds))),
            signed(one.fixed_bytes, bytes_words(abs(one.fixed_bytes))),
            signed(one.inflight_bytes, bytes_words(abs(one.inflight_bytes))),
        )
        for one in possible
    ]
    return [*rows, *(("", one.label, one.obstacle.value, "", "") for one in found if isinstance(one, Impossible))]


def signed(value: float, words: str) -> str:
    """`+1.20 ms`, `-3.1 GB`, `0`."""
    return f"{'+' if value > 0 else '-'}{words}" if abs(value) > LEAST else "0"
