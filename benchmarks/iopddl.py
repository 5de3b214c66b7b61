"""Solve problems of the ASPLOS 2025 contest on intra-operator parallelism and print a certificate for each.

    python benchmarks/iopddl.py FILE... [--seconds N] [--seed S] [--assignments FOLDER]

Compilation (or reading compiled kernels from disk) comes first and is printed apart; `--seconds` is for a file's solve, its reduction
included, without loading. The last line of a file is JSON, with the assignment or, with `--assignments`, the path it was written to;
`benchmarks/iopddl_check.py FILE ASSIGNMENT` checks it.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from alpa_hpc.errors import AlpaError, SolverError
from alpa_hpc.kernels import compile_seconds
from alpa_hpc.sharding.contest import ContestProblem, exact_cost_and_peak, read_contest
from alpa_hpc.sharding.search import Deadline, FlatAnswer, SearchOptions, search
from alpa_hpc.sharding.shortage import find_shortage
from alpa_hpc.sharding.shrink import NoRoomError
from alpa_hpc.sharding.warm import warm_up


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was found for a file, and what it took; cost, peak and limit are the file's own integers."""

    name: str
    cost: int
    bound: float
    gap: float
    status: str
    method: str
    peak_bytes: int
    limit_bytes: int
    load_seconds: float
    compile_seconds: float
    reduce_seconds: float
    solve_seconds: float
    nodes_left: int
    entries_left: int
    seed: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Solve problems of the ASPLOS 2025 contest on intra-operator parallelism.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a file's solve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--assignments", type=Path, metavar="FOLDER", help="write assignments there instead of printing them")
    arguments = parser.parse_args()
    if not 0 < arguments.seconds < math.inf:
        parser.error(f"--seconds is {arguments.seconds}, expected a time limit of more than 0")
    if not 0 <= arguments.seed < 2**31:
        parser.error(f"--seed is {arguments.seed}, expected 0 to {2**31 - 1}")
    started = time.monotonic()
    warm_up()
    compiled = time.monotonic() - started
    print(f"kernels ready in {compiled:.2f} s, {compile_seconds():.2f} s of it compilation")
    try:
        return max([_solved(file, arguments) for file in arguments.files])
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _solved(file: Path, arguments: argparse.Namespace) -> int:
    """Solve one file; 1 where that fails, which is told and stops no other file."""
    try:
        _run(file, arguments.seconds, arguments.seed, arguments.assignments)
    except (AlpaError, OSError) as error:
        print(f"error: {file.name}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _run(file: Path, seconds: float, seed: int, folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # before any work, should it not be possible
    started = time.monotonic()
    problem = read_contest(file)
    loaded, compiled = time.monotonic(), compile_seconds()
    options = SearchOptions(seed=seed)
    try:
        answer = search(problem.flat, options, Deadline(loaded + seconds))
    except NoRoomError as error:
        raise SolverError(_shortage(problem, options)) from error
    if answer.bound == math.inf:
        raise SolverError("no assignment is allowed: there is none that keeps the limit and pays a finite cost")
    if not len(answer.choices):
        raise SolverError(f"no assignment was found in {seconds:g} s, none costs less than {answer.bound:.0f}")
    solved = time.monotonic() - loaded
    certificate = _certify(problem, answer, (loaded - started, compile_seconds() - compiled, solved), seed)
    _print(certificate)
    print(json.dumps(asdict(certificate) | _assignment(problem, answer, folder)), flush=True)


def _certify(problem: ContestProblem, answer: FlatAnswer, seconds: tuple[float, float, float], seed: int) -> Certificate:
    """The certificate, or an error if the file's own integers say otherwise."""
    cost, peak = exact_cost_and_peak(problem, answer.choices)
    if peak > problem.usage_limit or cost != answer.cost or answer.bound > cost:
        raise SolverError(f"cost {answer.cost}, bound {answer.bound} are refused: it costs {cost}, holds {peak}")
    gap = (cost - answer.bound) / cost if cost else 0.0
    return Certificate(
        name=problem.name,
        cost=cost,
        bound=answer.bound,
        gap=gap,
        status="optimal" if gap == 0 else "time limit",
        method=answer.method.name.lower(),
        peak_bytes=peak,
        limit_bytes=problem.usage_limit,
        load_seconds=round(seconds[0], 3),
        compile_seconds=round(seconds[1], 3),
        reduce_seconds=round(answer.shrink_seconds, 3),
        solve_seconds=round(seconds[2], 3),
        nodes_left=answer.size_left.nodes,
        entries_left=answer.size_left.edge_costs,
        seed=seed,
    )


def _print(one: Certificate) -> None:
    print(
        f"{one.name}: cost {one.cost}, bound {one.bound:.0f}, gap {100 * one.gap:.2f} %, {one.status} by {one.method}; "
        f"holds {one.peak_bytes} of {one.limit_bytes}; load {one.load_seconds:.2f} s, compile {one.compile_seconds:.2f} s, "
        f"solve {one.solve_seconds:.2f} s (reduce {one.reduce_seconds:.2f} s)"
    )


def _assignment(problem: ContestProblem, answer: FlatAnswer, folder: Path | None) -> dict[str, object]:
    choices = answer.choices.tolist()
    if folder is None:
        return {"assignment": choices}
    path = folder / f"{problem.name}.assignment.json"
    path.write_text(json.dumps(choices))
    return {"assignment_path": str(path)}


def _shortage(problem: ContestProblem, options: SearchOptions) -> str:
    short = find_shortage(problem.flat, options, Deadline(time.monotonic() + 30.0))
    nodes = ", ".join(f"{node} ({num_bytes:.0f})" for node, num_bytes in short.largest)
    return (
        f"nothing fits. At time {short.time} at least {short.least_bytes:.0f} bytes are held, the limit is "
        f"{problem.usage_limit}: {short.missing_bytes:.0f} are missing. The largest nodes then: {nodes}"
    )


if __name__ == "__main__":
    sys.exit(main())
