"""The door to MIP solvers: a model solved in a process of its own is the model solved here."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pulp
import pytest

from alpa_hpc.errors import SolverError
from alpa_hpc.sharding.linear import CbcSolver, HighsSolver, LinearModel, installed_solver
from alpa_hpc.sharding.mip import Cbc


def covering(seed: int, num_columns: int = 40, num_rows: int = 30) -> LinearModel:
    """Choose columns at least cost so that every row has one of its four."""
    rng = np.random.default_rng(seed)
    columns = np.stack([np.sort(rng.choice(num_columns, 4, replace=False)) for _ in range(num_rows)]).reshape(-1)
    return LinearModel(
        costs=rng.integers(1, 20, num_columns).astype(float),
        upper=np.ones(num_columns),
        is_whole=np.ones(num_columns, dtype=np.bool_),
        row_starts=np.arange(0, 4 * num_rows + 1, 4),
        columns=columns,
        coefficients=np.ones(4 * num_rows),
        row_lower=np.ones(num_rows),
        row_upper=np.full(num_rows, 4.0),
        start=np.ones(num_columns),
        gap=0.5,
    )


def test_a_large_model_is_solved_in_a_process_as_it_is_here(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        model = covering(seed)
        here, there = HighsSolver().solve(model, 20.0), HighsSolver(child_size=1).solve(model, 20.0)
        assert np.array_equal(here.values.round(), there.values.round())
        assert here.bound == there.bound > 0
    assert capfd.readouterr().out == ""


def test_a_solver_that_is_late_has_found_nothing() -> None:
    answer = HighsSolver(grace_seconds=0.0).solve(covering(0, num_columns=6000, num_rows=4000), 0.0)
    assert len(answer.values) == 0
    assert answer.bound == -np.inf


def script(path: Path, *lines: str) -> CbcSolver:
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o700)
    return CbcSolver(Cbc(str(path)))


def test_an_answer_of_cbc_counts_only_as_a_whole(tmp_path: Path) -> None:
    """As a full disk leaves it: cut at any byte, or without a block in its midst."""
    model, answer = covering(0, num_columns=8, num_rows=3), tmp_path / "answer"
    kept = script(tmp_path / "kept", f'{pulp.PULP_CBC_CMD.pulp_cbc_path} "$@" && cp model.sol {answer}').solve(model, 20.0)
    assert kept.bound == HighsSolver().solve(model, 20.0).bound
    whole, copied = answer.read_bytes(), script(tmp_path / "copied", f"cp {answer} model.sol")
    pieces = [whole[:cut] for cut in (*range(0, len(whole), 29), len(whole) - 2, len(whole) - 1)]
    pieces += [whole[:cut] + whole[cut + 64 :] for cut in range(0, len(whole) - 64, 29)]
    assert {b"\n" in piece for piece in pieces} == {piece.endswith(b"\n") for piece in pieces} == {True, False}
    for piece in pieces:
        answer.write_bytes(piece)
        with pytest.raises(SolverError, match=r"torn.*set TMPDIR"):
            copied.solve(model, 20.0)
    answer.write_bytes(whole)
    assert np.array_equal(copied.solve(model, 20.0).values, kept.values)


def test_a_full_disk_is_told_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pulp.LpProblem, "writeMPS", full)
    with pytest.raises(SolverError, match=f"No space left.*{tmp_path}.*set TMPDIR"):
        CbcSolver().solve(covering(0), 20.0)


@pytest.mark.parametrize("module", ["raise ImportError('its library is of another machine')", "absent"])
def test_cbc_is_taken_where_highs_is_absent_or_broken(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(installed_solver(), HighsSolver)
    monkeypatch.delitem(sys.modules, "highspy")
    if module == "absent":
        monkeypatch.setitem(sys.modules, "highspy", None)
    (tmp_path / "highspy.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(installed_solver(), CbcSolver)
    with pytest.raises(SolverError, match="HiGHS cannot be loaded.*pip install.*CBC"):
        HighsSolver().solve(covering(0), 20.0)


def test_cbc_goes_with_the_process_that_waits_for_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    script(tmp_path / "endless", f"echo $$ > {told}", "exec sleep 60")
    imports = "import pulp; from alpa_hpc.sharding.mip import Cbc"
    model = "model = pulp.LpProblem(); model += model.add_variable('x', 0, 1)"
    parent = subprocess.Popen(
        (sys.executable, "-c", f"{imports}; {model}; Cbc({str(tmp_path / 'endless')!r}).run(model, 50.0)"), cwd=tmp_path
    )
    end = time.monotonic() + 20
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGTERM)
    parent.wait()
    end = time.monotonic() + 5
    while Path(f"/proc/{told.read_text().strip()}/cmdline").exists() and Path(f"/proc/{told.read_text().strip()}/cmdline").read_bytes():
        assert time.monotonic() < end
        time.sleep(0.02)
