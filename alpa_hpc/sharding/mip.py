"""PuLP model -> values of its variables by a MIP solver within a time limit: CBC in a child process, or HiGHS in this one.

PuLP writes CBC's files and reads its answer, but CBC is started here: PuLP cuts the command line at spaces, waits for CBC however long it
takes, and leaves its files behind when interrupted. What a solver says is believed only as `sol_status`: after a time limit PuLP's
`status` is "Optimal" too. CBC does not notice a full disk, so an answer counts only where all of it is there.
"""

import os
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import pulp

from alpa_hpc.errors import SolverError
from alpa_hpc.sharding.worker import end_without_asker

# CBC looks at the clock between its steps; one that is this late is stopped.
GRACE_SECONDS = 5.0


class AbstractMipSolver(ABC):
    """A MIP solver behind PuLP, proving optimality with one thread unless time is over."""

    @abstractmethod
    def run(self, model: pulp.LpProblem, time_limit_seconds: float) -> float:
        """Solve `model` in place (values, `sol_status`); the seconds of the solver alone, without handing the model over.

        Raises SolverError if the solver is absent or fails.
        """


@dataclass(frozen=True, slots=True)
class Cbc(AbstractMipSolver):
    """The binary that PuLP brings along, with its files in a private folder that is always removed."""

    path: str = pulp.PULP_CBC_CMD.pulp_cbc_path

    def run(self, model: pulp.LpProblem, time_limit_seconds: float) -> float:
        """See base class."""
        place = "a temporary folder"
        try:
            place = gettempdir()
            with TemporaryDirectory(prefix="sharding-cbc-", dir=place) as folder:
                return self._run_in(Path(folder), model, time_limit_seconds)
        except OSError as error:
            raise SolverError(f"CBC ({self.path}) cannot be run: {error}. {_advice(place)}") from error

    def _run_in(self, folder: Path, model: pulp.LpProblem, time_limit_seconds: float) -> float:
        written: Any = model.writeMPS(str(folder / "model.mps"), rename=True)
        variables, variable_names, row_names, _ = written
        options = f"-sec {time_limit_seconds:g} -timeMode elapsed -threads 1 -ratio 0 -allow 0"
        command = [self.path, "model.mps", *options.split(), "-solve", "-printingOptions", "all", "-solution", "model.sol"]
        started = time.monotonic()
        try:
            code, said = _run_attached(command, folder, time_limit_seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            model.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)
            return time.monotonic() - started
        seconds = time.monotonic() - started
        answer = folder / "model.sol"
        if code != 0 or not answer.is_file():
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            raise SolverError(f"CBC ended with exit code {code} and no answer; its last words: {last}. {_advice(str(folder.parent))}")
        _check_whole(answer, [*variable_names.values(), *row_names.values()])
        read = pulp.COIN_CMD(path=self.path, msg=False).readsol_MPS(str(answer), model, variables, variable_names, row_names)
        status, values, _, _, _, sol_status = read
        if status == pulp.LpStatusInfeasible and seconds >= time_limit_seconds:
            # Stopped while it prepares a model, CBC calls it infeasible (seen with one that is not): no proof when time is over.
            status, sol_status = pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        model.assignVarsVals(values)
        model.assignStatus(status, sol_status)
        return seconds


def _advice(place: str) -> str:
    return f"Its files go to a temporary folder in {place}: where that is full or closed, set TMPDIR to another"


def _run_attached(command: list[str], folder: Path, seconds: float) -> tuple[int, bytes]:
    """Exit code and output of a command that does not outlive this process: the kernel (Linux) ends it when the other end is gone."""
    its_end, our_end = os.pipe()
    try:
        with subprocess.Popen(command, cwd=folder, stdin=its_end, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            try:
                end_without_asker(its_end, child.pid)
                said, _ = child.communicate(timeout=seconds)
            finally:
                child.kill()  # whatever interrupts the wait, and nothing to one that has ended
        return child.returncode, said
    finally:
        os.close(its_end)
        os.close(our_end)


def _check_whole(answer: Path, names: list[str]) -> None:
    """A file whose end is there, with a line for each row and column; that a model is infeasible needs none.

    Raises SolverError if some is missing.
    """
    text = answer.read_text(errors="replace")
    status, _, rest = text.partition("\n")
    lines = [line.removeprefix("**").split() for line in rest.splitlines()]  # number, name, value, reduced cost
    is_bare_denial = not lines and status.startswith(("Infeasible ", "Integer infeasible "))
    found = [fields[1] for fields in lines if len(fields) == 4]
    if not text.endswith("\n") or not (is_bare_denial or (sorted(found) == sorted(names) and len(lines) == len(names))):
        raise SolverError(
            f"CBC's answer is torn: {len(found)} of its {len(names)} rows and columns are there. {_advice(str(answer.parents[1]))}"
        )


class Highs(AbstractMipSolver):
    """HiGHS through its Python wheel: no files, no child process."""

    def run(self, model: pulp.LpProblem, time_limit_seconds: float) -> float:
        """See base class."""
        if find_spec("highspy") is None or not pulp.HiGHS(msg=False).available():
            raise SolverError("HiGHS is absent or cannot be loaded: pip install --force-reinstall highspy, or choose CBC")
        solver = pulp.HiGHS(
            msg=False,
            threads=1,
            timeLimit=time_limit_seconds,
            gapRel=0.0,
            gapAbs=0.0,
            mip_feasibility_tolerance=1e-9,
            primal_feasibility_tolerance=1e-9,
        )
        try:
            model.solve(solver)
        except pulp.PulpSolverError as error:
            raise SolverError(f"HiGHS failed: {error}") from error
        highs: Any = model.solverModel
        return float(highs.getRunTime())
