"""The contest's format: read exactly, solved, certified, rechecked by a script of its own; a wrong answer does not pass."""

import gzip
import json
import subprocess
import sys
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
    problem["nodes"]["costs"][3] = [10**16 + 1]
    cost, _ = exact_cost_and_peak(read_contest(_write(tmp_path, problem)), np.zeros(4, dtype=np.int64))
    assert cost == 1 + 0 + 2 + 10**16 + 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'{"problem": {"nodes": {}}}',
        gzip.compress(b"{}", mtime=0)[:9],
        b'{"problem": {"nodes": 3, "edges": {}, "usage_limit": 1}}',
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(StoreError, match="bad.json is not a problem"):
        read_contest(path)
    with pytest.raises(StoreError, match="is not a problem"):
        read_contest(tmp_path / "absent.json")


def test_lists_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    problem = _problem()
    problem["edges"]["costs"][1].pop()
    with pytest.raises(StoreError, match="lengths"):
        read_contest(_write(tmp_path, problem))


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
