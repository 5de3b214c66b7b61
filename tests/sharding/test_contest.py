"""The contest's format: read exactly, solved, certified, rechecked by a script of its own; a wrong answer does not pass."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alpa_hpc.errors import StoreError
from alpa_hpc.sharding.contest import exact_cost_and_peak, read_contest
from alpa_hpc.sharding.flat import evaluate_flat
from tests.sharding.flat_problems import all_flat_choices, flat_optimum

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _problem() -> dict[str, Any]:
    """Four nodes, the last without memory; the cheapest choices do not fit at time 2, and one pair is forbidden."""
    return {
        "nodes": {
            "intervals": [[0, 3], [2, 5], [2, 4], [0, 0]],
            "costs": [[1, 5], [0, 7, 9], [2, 4], [3]],
            "usages": [[10, 2], [10, 4, 4], [10, 3], [99]],
        },
        "edges": {"nodes": [[0, 1], [2, 1]], "costs": [[0, 10**18, 2, 1, 1, 1], [0, 0, 1, 1, 0, 0]]},
        "usage_limit": 17,
    }


def _write(folder: Path, problem: object) -> Path:
    path = folder / "tiny.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"problem": problem}).encode()))
    return path


def test_a_file_is_read_exactly(tmp_path: Path) -> None:
    problem = read_contest(_write(tmp_path, _problem()))
    assert problem.name == "tiny"
    assert (problem.flat.num_nodes, problem.flat.num_strategies, problem.flat.num_entries) == (4, 8, 12)
    for choices in all_flat_choices(problem.flat):
        cost, peak = exact_cost_and_peak(problem, choices)
        found = evaluate_flat(problem.flat, choices)
        assert found.excess == peak - 17
        assert found.cost == (cost if cost < 10**17 else np.inf)


def test_large_costs_are_added_up_without_loss(tmp_path: Path) -> None:
    problem = _problem()
    problem["nodes"]["costs"][3] = [2**53 - 9]
    cost, _ = exact_cost_and_peak(read_contest(_write(tmp_path, problem)), np.zeros(4, dtype=np.int64))
    assert cost == 1 + 0 + 2 + 2**53 - 9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no whole JSON document"),
        (b"{", "no whole JSON document"),
        (gzip.compress(b"{}", mtime=0)[:9], "no whole JSON document"),
        (gzip.compress(b"{}" * 99, mtime=0)[:10] + b"xxxx", "no whole JSON document"),
        (b"[" * 100_000, "no whole JSON document"),
        (b"\xff", "no whole JSON document"),
        (b"{}", "it has no problem"),
        (b'{"problem": {"nodes": {}}}', "it has no problem.nodes.costs"),
        (b'{"problem": {"nodes": 3, "edges": {}, "usage_limit": 1}}', "it has no problem.nodes.costs"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(StoreError, match=f"bad.json is not a problem in the contest's format: {says}"):
        read_contest(path)
    with pytest.raises(StoreError, match=r"absent.json cannot be read: No such file"):
        read_contest(tmp_path / "absent.json")


Change = Callable[[dict[str, Any]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "table short": (lambda p: p["edges"]["costs"][1].pop(), "edge 1 has 5 costs, expected 6: the lengths"),
    "table missing": (lambda p: p["edges"]["costs"].pop(), "edges has 2 pairs of nodes and 1 tables"),
    "edge missing": (lambda p: p["edges"]["nodes"].pop(), "edges has 1 pairs of nodes and 2 tables"),
    "usages shifted": (lambda p: p["nodes"].update(usages=[[10], [2, 10, 4, 4], [10, 3], [99]]), "node 0 has 2 costs and 1 usages"),
    "usages missing": (lambda p: p["nodes"]["usages"].pop(), "nodes has 4 costs, 3 usages and 4 intervals"),
    "no strategy": (lambda p: (p["nodes"]["costs"].__setitem__(3, []), p["nodes"]["usages"].__setitem__(3, [])), "node 3 has 0 costs"),
    "self-edge": (lambda p: p["edges"]["nodes"].__setitem__(0, [1, 1]), "edge 0 has the ends"),
    "negative end": (lambda p: p["edges"]["nodes"].__setitem__(0, [-1, 1]), "edge 0 has the ends"),
    "no such node": (lambda p: p["edges"]["nodes"].__setitem__(0, [0, 7]), "expected two different nodes of 0 to 3"),
    "three ends": (lambda p: p["edges"]["nodes"].__setitem__(0, [0, 1, 2]), "edge 0 has the ends"),
    "flat edges": (lambda p: p["edges"].update(nodes=[0, 1, 2, 1]), "edges.nodes is no list of lists"),
    "before time": (lambda p: p["nodes"]["intervals"].__setitem__(0, [-1, 2]), "node 0 has the interval"),
    "backwards": (lambda p: p["nodes"]["intervals"].__setitem__(0, [3, 2]), "node 0 has the interval"),
    "fraction": (lambda p: p["nodes"]["costs"].__setitem__(3, [1.5]), "nodes.costs holds values of type float"),
    "word": (lambda p: p["nodes"]["usages"].__setitem__(3, ["3"]), "nodes.usages holds values of type str"),
    "truth": (lambda p: p["edges"]["nodes"].__setitem__(0, [True, 0]), "edges.nodes holds values of type bool"),
    "negative bytes": (lambda p: p["nodes"]["usages"].__setitem__(3, [-1]), "node 3 has usages from -1"),
    "inexact cost": (lambda p: p["nodes"]["costs"].__setitem__(3, [2**53 + 1]), "node 3 costs"),
    "huge cost": (lambda p: p["edges"]["costs"][0].__setitem__(0, 2**63), "edge 0 costs"),
    "limit": (lambda p: p.update(usage_limit=-1), "usage_limit is -1"),
    "no nodes": (lambda p: p["nodes"].update(costs=[], usages=[], intervals=[]), "it has no nodes"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_together_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    problem, (change, says) = _problem(), WRONG[kind]
    change(problem)
    with pytest.raises(StoreError, match=re.escape(says)):
        read_contest(_write(tmp_path, problem))


def test_times_may_be_any_numbers(tmp_path: Path) -> None:
    problem = _problem()
    problem["nodes"]["intervals"] = [[100 * begin, 10**17 * end] for begin, end in problem["nodes"]["intervals"]]
    found, plain = read_contest(_write(tmp_path, problem)), read_contest(_write(tmp_path, _problem()))
    assert flat_optimum(found.flat) == flat_optimum(plain.flat)
    for choices in all_flat_choices(plain.flat):
        assert exact_cost_and_peak(found, choices) == exact_cost_and_peak(plain, choices)


def _run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_benchmark_prints_a_certificate_that_its_own_script_confirms(tmp_path: Path) -> None:
    file = _write(tmp_path, _problem())
    done = _run("iopddl.py", file, "--seconds", 10)
    assert done.returncode == 0, done.stderr
    certificate = json.loads(done.stdout.splitlines()[-1])
    assert certificate["cost"] == flat_optimum(read_contest(file).flat)
    assert (certificate["name"], certificate["status"], certificate["gap"]) == ("tiny", "optimal", 0.0)
    answer = tmp_path / "answer.json"
    answer.write_text(done.stdout.splitlines()[-1])
    assert _run("iopddl_check.py", file, answer).returncode == 0
    for wrong in ([0, 0, 0, 0], [1, 1, 1]):
        answer.write_text(json.dumps(wrong))
        assert _run("iopddl_check.py", file, answer).returncode != 0
    answer.write_text(json.dumps(certificate | {"cost": certificate["cost"] - 1}))
    assert _run("iopddl_check.py", file, answer).returncode != 0


def test_the_benchmark_says_what_is_missing(tmp_path: Path) -> None:
    problem = _problem() | {"usage_limit": 8}
    done = _run("iopddl.py", _write(tmp_path, problem))
    assert done.returncode == 1
    assert "At time 2 at least 9 bytes are held, the limit is 8: 1 are missing. The largest nodes then: 1 (4), 2 (3), 0 (2)" in done.stderr


def test_a_bad_file_stops_no_other_and_bad_options_are_refused(tmp_path: Path) -> None:
    good, bad = _write(tmp_path, _problem()), tmp_path / "bad.json"
    bad.write_text("{}")
    done = _run("iopddl.py", bad, good, "--seconds", 10, "--assignments", tmp_path / "answers")
    assert done.returncode == 1 and "error: bad.json: " in done.stderr
    answer = tmp_path / "answer.json"
    answer.write_text(done.stdout.splitlines()[-1])
    assert _run("iopddl_check.py", good, answer).returncode == 0
    for options in (("--seconds", 0), ("--seconds", "nan"), ("--seed", 2**80), ("--assignments", bad)):
        done = _run("iopddl.py", good, *options)
        assert done.returncode != 0 and "Traceback" not in done.stderr
    answer.write_text("[0, 1, 0, 0]")  # takes the pair that is not allowed
    assert "TAKES WHAT IS NOT ALLOWED" in _run("iopddl_check.py", good, answer).stdout
    for wrong in ("", "null", "{}", "[0, 0, 0.5, 0]"):
        answer.write_text(wrong)
        done = _run("iopddl_check.py", good, answer)
        assert done.returncode == 1 and "Traceback" not in done.stderr
