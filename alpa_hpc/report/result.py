"""planning.json + training.json -> result.json and a few lines for people."""

import enum
import math
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from alpa_hpc.errors import InfeasibleError
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.report.planning import Basis
from alpa_hpc.report.words import bound_words, cluster_words, measured_words, microbatches_words, plan_words, seconds_words, standing_words
from alpa_hpc.units import bytes_words
from alpa_hpc.verify.plan import mismatch_words, not_compiled_words


class Unit(enum.Enum):
    """What a batch is counted in."""

    TOKENS = "tokens"
    EXAMPLES = "examples"

    @property
    def rate(self) -> str:
        """The key of its rate in result.json."""
        return f"{self.value}_per_second"


@dataclass(frozen=True, slots=True)
class Work:
    """What a step gets through."""

    unit: Unit
    count: int


def write_result(paths: RunPaths, name: str, num_devices: int, work: Work) -> dict[str, Any]:
    """Put the figures of all jobs into result.json."""
    result: dict[str, Any] = {"experiment": name, "planning": read_json(paths.planning)}
    if paths.training.is_file():
        result["training"] = training_figures(read_json(paths.training), result["planning"], num_devices, work)
    write_json(paths.result, result)
    return result


@contextmanager
def infeasible_noted(paths: RunPaths, name: str, search: str) -> Generator[None]:
    """Where the block finds that nothing fits, result.json says so, in place of figures; the error goes on its way."""
    try:
        yield
    except InfeasibleError as error:
        infeasible = {"reason": str(error), "missing_bytes": error.missing_bytes}
        write_json(paths.result, {"experiment": name, "search": search, "infeasible": infeasible})
        raise


def training_figures(training: dict[str, float], planning: dict[str, Any], num_devices: int, work: Work) -> dict[str, float]:
    """What was measured in training, with the rates that follow from it."""
    seconds, flop = training["step_seconds"], planning["iteration_flop"]
    return {
        **training,
        work.unit.rate: work.count / seconds,
        "tflops_per_device": flop / seconds / num_devices / 1e12,
        "pflops": flop / seconds / 1e15,
    }


def print_result(result: dict[str, Any]) -> None:
    """The figures a person looks for first."""
    planning = result["planning"]
    steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in planning["seconds"].items())
    plans = sorted(planning["plans"], key=lambda row: row["simulated_seconds"])
    counts = planning["counts"]
    lines = [f"planned in {sum(planning['seconds'].values()):.1f} s: {steps}"]
    if counts["profile_tasks_new"] or counts["profile_tasks_reused"]:
        lines.append(f"timed {counts['profile_tasks_new']} stages, and took {counts['profile_tasks_reused']} timings from the cost store")
    if "microbatches" in planning:
        lines.append(f"microbatches: {microbatches_words(planning)}")
    lines.append("compared, by simulation; a stage is its layers, its devices (nodes x devices), its logical mesh:")
    lines += [_plan_line(row, planning) for row in plans]
    lines.append(
        f"predicted step {seconds_words(planning['predicted_step_seconds'])} on the described cluster ({cluster_words(planning)}), "
        f"{planning['predicted_pflops']:.4g} PFLOPS, "
        f"peak {bytes_words(max(planning['stage_bytes']))} of {bytes_words(planning['memory_bytes'])}"
    )
    lines.append(bound_words(planning))
    if planning["check"]["tasks"] or planning["check"]["not_compiled"]:
        lines.append(check_line(planning["check"]))
    if planning["not_measured"]:
        lines.append(not_measured_line(planning["not_measured"]))
    replicated = planning["replicated"]
    if replicated["operators"]:
        names = ", ".join(sorted(replicated["operators"]))
        shares = f"{replicated['flop_share']:.1%} of FLOP, {replicated['bytes_share']:.1%} of bytes"
        lines.append(f"run whole on every device: {names} ({shares})")
    if "training" in result:
        lines += _training_lines(result["training"], planning)
    sys.stdout.write("\n".join(lines) + "\n")


def _plan_line(row: Mapping[str, Any], planning: Mapping[str, Any]) -> str:
    mark, standing = ("->", "") if row["chosen"] else ("  ", f", {standing_words(row, planning)}")
    return f"{mark} {seconds_words(row['simulated_seconds']):>12}  {plan_words(row)}  ({measured_words(row)}{standing})"


def check_line(check: Mapping[str, Any]) -> str:
    """How the compiled code compares with the plan (`report.planning.check_report`): the worst ratios, and the first mismatch."""
    tasks = check["tasks"]
    exchanges = [one for task in tasks for one in task["collectives"]]
    ratios = [one["planned_bytes"] / max(one["compiled_bytes"], 1) for one in exchanges]
    peaks = [task["planned_peak_bytes"] / max(task["compiled_peak_bytes"], 1) for task in tasks]
    parts = [
        f"checked against code for {check['target']}: planned / compiled bytes of {len(exchanges)} kinds and groups of collectives"
        f"{_span(ratios)}, peak memory of {len(tasks)} programs{_span(peaks)}"
    ]
    if wrong := check["mismatches"]:
        parts.append(f"{len(wrong)} not as planned, first: {wrong[0].partition(chr(10))[0]}")
    if failed := check["not_compiled"]:
        names = ", ".join(f"stage {one['stage']}, {one['task']}" for one in failed)
        parts.append(f"{len(failed)} not checked, since the compiler failed: {names}")
    return "; ".join(parts) + (" (all in planning.json)" if wrong or failed else "")


def _span(ratios: Sequence[float]) -> str:
    return f" {min(ratios):.3f} to {max(ratios):.3f}" if ratios else ""


def check_warnings(check: Mapping[str, Any]) -> list[str]:
    """What a person should know of a check, a sentence each: what does not agree, and what the compiler failed on."""
    failed = [not_compiled_words(check["target"], one["stage"], one["task"], one["reason"]) for one in check["not_compiled"]]
    return [*map(mismatch_words, check["mismatches"]), *failed]


def not_measured_line(blanks: Sequence[Mapping[str, str]]) -> str:
    """How many requests gave no seconds (rows of `report.planning.not_measured_rows`), and why the first did not."""
    failed = sum(one["outcome"] == "failed" for one in blanks)
    kept = len(blanks) - failed
    parts = [f"{failed} failed and {'is' if failed == 1 else 'are'} in no plan"] if failed else []
    parts += [f"{kept} {'keeps its' if kept == 1 else 'keep their'} analytic cost"] if kept else []
    reason = blanks[0]["reason"].partition("\n")[0]
    return f"not measured: {', '.join(parts)}; first: {blanks[0]['label']}: {reason} (all in planning.json)"


def _training_lines(training: Mapping[str, float], planning: Mapping[str, Any]) -> list[str]:
    held_out = f", held out {training['first_held_out_loss']:.3f} -> {training['last_held_out_loss']:.3f}"
    return [
        f"loss {training['first_loss']:.3f} -> {training['last_loss']:.3f}"
        f"{'' if math.isnan(training['last_held_out_loss']) else held_out} in {training['num_steps']} steps",
        f"measured step {seconds_words(training['step_seconds'])} (median), {_rate_words(training)}, "
        f"{training['tflops_per_device']:.4g} TFLOPS a device",
        *_this_machine_lines(planning),
    ]


def _rate_words(training: Mapping[str, float]) -> str:
    [(unit, rate)] = [(unit, training[unit.rate]) for unit in Unit if unit.rate in training]
    return f"{rate:.0f} {unit.value}/s" if rate >= 100 else f"{rate:.3g} {unit.value}/s"


def _this_machine_lines(planning: Mapping[str, Any]) -> list[str]:
    """What was predicted for the machine itself; of CPU devices that share its cores the described cluster tells nothing."""
    seconds = seconds_words(planning["predicted_step_seconds_this_machine"])
    match Basis(planning["prediction_for_this_machine"]):
        case Basis.CALIBRATION:
            return [f"predicted step {seconds} on the cluster as it was calibrated"]
        case Basis.WORK_ALONE if planning["device_kind"] == "cpu":
            return [
                f"(the described cluster is not this machine: where all devices share its cores, their work alone takes {seconds} a step)"
            ]
        case Basis.WORK_ALONE:
            return []
