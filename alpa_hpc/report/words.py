"""Plain data of planning.json -> short texts for people: a plan in a line, seconds in the unit that reads best."""

from collections.abc import Mapping
from typing import Any

from alpa_hpc.units import bytes_words

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


def share_words(share: float) -> str:
    """`140 %`, `1.2 %`, `0.00013 %`; what is left of rounding is `0 %`."""
    if abs(share) < 1e-9:
        return "0 %"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def chosen_plan(planning: Row) -> Row:
    """The plan that was chosen among those that were compared."""
    return next(plan for plan in planning["plans"] if plan["chosen"])


def standing_words(plan: Row, planning: Row) -> str:
    """How a compared plan stands beside the chosen one: `slower by 1.2 %`, `out of memory by 0.31 GB on stage 2`."""
    peak = max(plan["stage_bytes"])
    if peak > planning["memory_bytes"]:
        return f"out of memory by {bytes_words(peak - planning['memory_bytes'])} on stage {plan['stage_bytes'].index(peak)}"
    return f"slower by {share_words(plan['simulated_seconds'] / chosen_plan(planning)['simulated_seconds'] - 1)}"


def bound_words(planning: Row) -> str:
    """What the stage DP minimises, of the chosen plan and at least of all others: not the simulated step, which may be less."""
    objective, bound = seconds_words(planning["objective_seconds"]), seconds_words(planning["lower_bound_seconds"])
    return (
        f"{objective} by Eq. 2, the objective that stages are searched by; it is at least {bound} for every plan of this search "
        f"(gap {share_words(planning['gap'])}), and the simulated step may be less, since there transfers overlap with work"
    )


def microbatches_words(planning: Row) -> str:
    """`32, chosen from 9 numbers: 16 gives 72.1 s, 64 gives 75.2 s, 6 have no plan, or none so fast`; where it was given, the number."""
    number, searched = planning["num_microbatches"], planning.get("microbatches")
    if searched is None:
        return str(number)
    others = [row for row in searched["tried"] if row["num_microbatches"] != number]
    plans = sorted((row for row in others if row["simulated_seconds"] is not None), key=lambda row: row["simulated_seconds"])
    words = [f"{row['num_microbatches']} gives {seconds_words(row['simulated_seconds'])}" for row in plans]
    left = len(others) - len(plans)
    words += [f"{left} {'has' if left == 1 else 'have'} no plan, or none so fast"] if left else []
    return f"{number}, chosen from {len(others) + 1} numbers{': ' if words else ''}{', '.join(words)}"


def cluster_words(planning: Row) -> str:
    """`2 x 4 v100`, what was planned for: nodes, devices of each, their kind."""
    return f"{planning['num_nodes']} x {planning['devices_per_node']} {planning['device_kind']}"


def chosen_words(planning: Row) -> str:
    """The plan that was chosen and its predicted step, in a line."""
    seconds = seconds_words(planning["predicted_step_seconds"])
    return f"{plan_words(chosen_plan(planning))}; predicted step {seconds} on the described cluster ({cluster_words(planning)})"


def measured_words(plan: Row) -> str:
    """How many stages of a plan were measured."""
    count = sum(stage["measured"] for stage in plan["stages"])
    return {0: "modelled", len(plan["stages"]): "measured"}.get(count, f"{count} of {len(plan['stages'])} measured")
