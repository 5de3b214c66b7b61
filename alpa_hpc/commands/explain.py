"""`python -m alpa_hpc explain [RUN]` -> the plan of a run: stages, meshes, layers, time, memory, bound, and why the others lost.

--layer N shows how a layer is split, --layer N --node NAME what every other strategy there would have cost.

Exit status: 0 there is a plan, 1 there is none that fits, 2 it cannot be told (planning has not ended, no such run).
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from alpa_hpc.commands.find import add_run_arguments, find_run
from alpa_hpc.commands.text import write_table
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.files import fields_of, read_json
from alpa_hpc.launch.paths import RunPaths
from alpa_hpc.launch.views import view_run
from alpa_hpc.report.explain import STAGE_HEADERS, overview_lines, runner_up_lines, stage_table
from alpa_hpc.units import bytes_words


def main(arguments: Sequence[str]) -> int:
    """Print why a run's plan is what it is."""
    parser = argparse.ArgumentParser(prog="python -m alpa_hpc explain", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--layer", type=int, metavar="N", help="how layer N is split: its nodes and their strategies")
    parser.add_argument("--node", metavar="NAME", help="of this node of the layer, every strategy and what it would have cost")
    asked = parser.parse_args(arguments)
    if asked.node is not None and asked.layer is None:
        parser.error("--node NAME is a node of a layer: say which by --layer N")
    paths = find_run(asked.run, asked.runs)
    result = read_json(paths.result) if paths.result.exists() else {}
    with fields_of(paths.result):
        if "infeasible" in result:
            write_infeasible(paths, result, sys.stdout)
            return 1
    if not paths.planning.exists():
        view = view_run(paths)
        raise LaunchError(f"{paths.root} has no plan: the run is {view.phase.value}{f' ({view.reason})' if view.reason else ''}")
    planning = read_json(paths.planning)
    if asked.layer is None:
        with fields_of(paths.planning):
            write_plan(paths, planning, sys.stdout)
    else:
        from alpa_hpc.commands.explain_layer import write_layer  # late: it traces the model, and takes jax to do so

        write_layer(paths, planning, asked.layer, asked.node, sys.stdout)
    return 0


def write_plan(paths: RunPaths, planning: dict[str, Any], stream: TextIO) -> None:
    """Write a plan for a person: the whole, a line a stage, a line for each plan that lost."""
    lines = [f"run         {paths.root}", f"experiment  {paths.name}", *overview_lines(planning)]
    if planning.get("searched_by", str(paths.root)) != str(paths.root):
        lines.append(f"searched by {planning['searched_by']}, which was asked the same")
    stages, lost = stage_table(planning), runner_up_lines(planning)
    stream.write("\n".join(lines) + "\n\n")
    write_table(STAGE_HEADERS, stages, stream)
    stream.write("\nwhat lost, and why:\n" + "\n".join(lost) + "\n" if lost else "\nno other plan was compared\n")


def write_infeasible(paths: RunPaths, result: dict[str, Any], stream: TextIO) -> None:
    """Write why there is no plan."""
    infeasible = result["infeasible"]
    missing = infeasible["missing_bytes"]
    stream.write(f"run         {paths.root}\nexperiment  {paths.name}\nsearch      {result['search']}\n")
    stream.write(f"plan        none fits{f': {bytes_words(missing)} a device are missing at least' if missing else ''}\n")
    stream.write(f"\n{infeasible['reason']}\n")
