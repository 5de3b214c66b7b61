"""planning.json -> lines for people: what each stage runs, where and how long; the bound; and why the other plans lost."""

from collections.abc import Mapping, Sequence
from typing import Any

from alpa_hpc.report.words import (
    bound_words,
    chosen_plan,
    cluster_words,
    microbatches_words,
    plan_words,
    seconds_words,
    share_words,
    standing_words,
)
from alpa_hpc.units import bytes_words

Row = Mapping[str, Any]

STAGE_HEADERS = ("stage", "layers", "devices", "of", "mesh", "backward", "a microbatch", "memory", "of the limit", "idle")


def overview_lines(planning: Row) -> list[str]:
    """The plan as a whole."""
    chosen, counts = chosen_plan(planning), planning["counts"]
    num_devices = sum(map(len, chosen["devices"]))
    priced = counts.get("candidates_priced", counts["candidates"])  # a run of an older version priced all of them
    cluster = [f"cluster     {cluster_words(planning)}"] if "num_nodes" in planning else []  # a run of an older version does not tell it
    return [
        *cluster,
        f"search      {planning['search']}: {counts['candidates']} candidates, {priced} priced, {len(planning['plans'])} plans simulated",
        f"plan        number of stages: {len(chosen['stages'])}, of layers: {counts['layers']}, of devices: {num_devices}, "
        f"of microbatches: {microbatches_words(planning)}",
        f"step        {seconds_words(planning['predicted_step_seconds'])} simulated, {planning['predicted_pflops']:.4g} PFLOPS, "
        f"{planning['predicted_tflops_per_device']:.4g} TFLOPS a device",
        f"bound       {bound_words(planning)}",
    ]


def stage_table(planning: Row) -> list[tuple[str, ...]]:
    """A row for each stage of the chosen plan, in the order of STAGE_HEADERS."""
    chosen = chosen_plan(planning)
    parts = zip(chosen["stages"], chosen["devices"], chosen["stage_bytes"], planning["bubble_fractions"], strict=True)
    return [_stage_row(index, *part, planning["memory_bytes"]) for index, part in enumerate(parts)]


def _stage_row(index: int, stage: Row, devices: Sequence[int], num_bytes: float, idle: float, limit: float) -> tuple[str, ...]:
    first, stop = stage["layers"]
    nodes, width = stage["submesh"]
    rows, cols = stage["shape"]
    return (
        str(index),
        str(first) if stop - first == 1 else f"{first}-{stop - 1}",
        str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}",
        f"{nodes}x{width}",
        f"{rows}x{cols}",
        "remat" if stage["remat"] else "keeps",
        seconds_words(stage["seconds_a_microbatch"]) + ("" if stage["measured"] else " modelled"),
        bytes_words(num_bytes),
        share_words(num_bytes / limit),
        share_words(idle),
    )


def runner_up_lines(planning: Row) -> list[str]:
    """Why each other plan that was compared lost, and what could not be compared."""
    others = sorted((plan for plan in planning["plans"] if not plan["chosen"]), key=lambda plan: plan["simulated_seconds"])
    lines = [f"{seconds_words(plan['simulated_seconds']):>12}  {standing_words(plan, planning)}: {plan_words(plan)}" for plan in others]
    lines += [f"  infeasible  {one['way']}: {one['reason']}" for one in planning["infeasible"]]
    lines += [f"{one['outcome']:>12}  {one['label']}: {one['reason']}" for one in planning["not_measured"]]
    return lines
