"""PuLP model -> values of its variables by a MIP solver within a time limit: CBC in a child process, or HiGHS in this one.

PuLP writes CBC's files and reads its answer, but CBC is started here: PuLP cuts the command line at spaces, waits for CBC however long it
takes, and leaves its files behind when interrupted. What a solver says is believed only as `sol_status`: after a time limit PuLP's
`status` is "Optimal" too.
"""

import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pulp

from alpa_hpc.errors import SolverError

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
        try:
            with TemporaryDirectory(prefix="sharding-cbc-") as folder:
                return self._run_in(Path(folder), model, time_limit_seconds)
        except OSError as error:
            raise SolverError(f"CBC ({self.path}) cannot be run: {error}. Its files go to a temporary folder, see TMPDIR") from error

    def _run_in(self, folder: Path, model: pulp.LpProblem, time_limit_seconds: float) -> float:
        variables, variable_names, row_names, _ = model.writeMPS(str(folder / "model.mps"), rename=True)
        options = f"-sec {time_limit_seconds:g} -timeMode elapsed -threads 1 -ratio 0 -allow 0"
        command = [self.path, "model.mps", *options.split(), "-solve", "-printingOptions", "all", "-solution", "model.sol"]
        started = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=time_limit_seconds + GRACE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            model.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)
            return time.monotonic() - started
        seconds = time.monotonic() - started
        answer = folder / "model.sol"
        if done.returncode != 0 or not answer.is_file():
            said = done.stdout.decode(errors="replace").strip().splitlines()[-1:]
            raise SolverError(f"CBC ended with exit code {done.returncode} and no answer; its last words: {said}")
        read = pulp.COIN_CMD(path=self.path, msg=False).readsol_MPS(str(answer), model, variables, variable_names, row_names)
        status, values, _, _, _, sol_status = read
        if status == pulp.LpStatusInfeasible and seconds >= time_limit_seconds:
            # Stopped while it prepares a model, CBC calls it infeasible (seen with one that is not): no proof when time is over.
            status, sol_status = pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        model.assignVarsVals(values)
        model.assignStatus(status, sol_status)
        return seconds


class Highs(AbstractMipSolver):
    """HiGHS through its Python wheel: no files, no child process."""

    def run(self, model: pulp.LpProblem, time_limit_seconds: float) -> float:
        """See base class."""
        if find_spec("highspy") is None:
            raise SolverError("HiGHS is not installed: pip install highspy, or choose CBC")
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
