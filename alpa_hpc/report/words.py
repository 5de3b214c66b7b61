"""Plain data of planning.json -> short texts for people: a plan in a line, seconds in the unit that reads best."""

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def plan_words(plan: Row) -> str:
    """`layers 0-1 on 1x4 as 2x2 | layer 2 on 1x2 as 2x1`: the devices of each stage (nodes x devices), and its logical mesh."""
    return " | ".join(stage_words(stage) for stage in plan["stages"])


def stage_words(stage: Row) -> str:
    """One stage of a plan; `layers` is a half-open range, which people get with both ends."""
    first, stop = stage["layers"]
    layers = f"layer {first}" if stop - first == 1 else f"layers {first}-{stop - 1}"
    rows, cols = stage["shape"]
    nodes, devices = stage["submesh"]
    return f"{layers} on {nodes}x{devices} as {rows}x{cols}{' remat' if stage['remat'] else ''}"


def seconds_words(seconds: float) -> str:
    """`51.42 ms`, `103.4 s`."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 10 else f"{seconds:.1f} s"


def chosen_words(planning: Row) -> str:
    """The plan that was chosen and its predicted step, in a line."""
    chosen = next(plan for plan in planning["plans"] if plan["chosen"])
    return f"{plan_words(chosen)}; predicted step {seconds_words(planning['predicted_step_seconds'])} on the described cluster"


def measured_words(plan: Row) -> str:
    """How many stages of a plan were measured."""
    count = sum(stage["measured"] for stage in plan["stages"])
    return {0: "modelled", len(plan["stages"]): "measured"}.get(count, f"{count} of {len(plan['stages'])} measured")
