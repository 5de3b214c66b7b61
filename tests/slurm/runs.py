"""A bed and a command line -> runs on a real Slurm: what tests ask of them, and the ways in which they are made to fail."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa_hpc.launch.files import read_json
from alpa_hpc.launch.paths import RunPaths, open_run
from alpa_hpc.launch.submission import Submission, read_submissions
from tests.slurm.bed import Bed

NO_FLAGS = ("XLA_FLAGS", "JAX_PLATFORMS")  # the tests' own, for processes that pose as eight devices

HANG_SECONDS = 240.0  # four ranks compile for 25 s on two cores of their own, and for more than 60 s beside other tests

# Two nodes with two ranks each, planned without profiling: half a minute from command to first step.
SMALL = (
    "cluster.num_nodes=2",
    "cluster.devices_per_node=2",
    "profiling=analytic",
    "training.batch_size=16",
    "training.num_steps=2000",
    "training.evaluate_every=0",
)


@dataclass(frozen=True)
class Run:
    """A run that was submitted to a bed."""

    bed: Bed
    paths: RunPaths

    def status(self) -> dict[str, Any]:
        """What `status --json` says."""
        return json.loads(command(self.bed, "status", str(self.paths.root), "--json", expect=None).stdout)

    def states(self) -> dict[str, str]:
        """The state of each job by its name, and of the whole run as `run`."""
        found = self.status()
        return {job["job"]: job["state"] for job in found["jobs"]} | {"run": found["state"]}

    def submissions(self, kind: str) -> tuple[Submission, ...]:
        """What was handed to Slurm of one kind."""
        return tuple(one for one in read_submissions(self.paths) if one.kind.value == kind)

    def slurm_state(self, kind: str) -> tuple[str, ...]:
        """Slurm's words for the newest job of one kind."""
        return self.bed.states(self.submissions(kind)[-1].job_id)

    def result(self) -> Mapping[str, Any]:
        """result.json."""
        return read_json(self.paths.result)

    def log(self, kind: str) -> str:
        """All that jobs of one kind printed."""
        return "\n".join(path.read_text(errors="replace") for path in (self.paths.logs / kind).glob("*.out"))

    def ranks(self) -> dict[int, int]:
        """Process ids of the training ranks that run now, by rank."""
        script = f"train_rank.py\0{self.paths.root}\0".encode()
        return {int(facts["OMPI_COMM_WORLD_RANK"]): pid for pid, facts in processes(script) if "OMPI_COMM_WORLD_RANK" in facts}

    def wait_for_step(self, step: int) -> None:
        """Return when training has done `step` steps."""
        wait_until(lambda: self.paths.metrics.exists() and self.paths.metrics.read_text().count("\n") >= step, f"step {step}", self.tell)

    def tell(self) -> str:
        """What a person would look at when something is wrong."""
        return f"{self.status()}\n{self.log('plan')[-3000:]}\n{self.log('train')[-3000:]}"


def processes(command_part: bytes) -> list[tuple[int, dict[str, str]]]:
    """Processes whose command line has a part, with their environments."""
    found: list[tuple[int, dict[str, str]]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if command_part not in (folder / "cmdline").read_bytes():
                continue
            facts = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        found.append((int(folder.name), dict(fact.split("=", 1) for fact in facts if "=" in fact)))
    return found


def command(bed: Bed, *arguments: str, expect: int | None = 0) -> "subprocess.CompletedProcess[str]":
    """Run `python -m alpa_hpc ARGUMENTS` on the login node of a bed."""
    environ = {name: value for name, value in bed.environment.items() if name not in NO_FLAGS}
    words = (sys.executable, "-m", "alpa_hpc", *arguments)
    done = subprocess.run(words, env=environ, cwd=bed.state, capture_output=True, text=True, timeout=500, check=False)
    assert expect is None or done.returncode == expect, (
        f"{words} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done


def submit(bed: Bed, *overrides: str) -> Run:
    """Submit the quickstart with overrides, and return at once."""
    done = command(bed, "+experiment=quickstart", "launcher=slurm", f"runs={bed.state}/runs", *overrides)
    return Run(bed, folder_of(done.stdout))


def folder_of(printed: str) -> RunPaths:
    """The run folder that a command names last."""
    last = printed.strip().splitlines()[-1]
    assert last.startswith("run folder: "), printed
    return open_run(Path(last.removeprefix("run folder: ")))


def wait_until(condition: Callable[[], object], what: str, tell: Callable[[], str], seconds: float = HANG_SECONDS) -> float:
    """Seconds until a condition held; an error if it does not in time. Only what is promised in a time is given one of its own."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"no {what} within {seconds} s\n{tell()}"
        time.sleep(0.1)
    return time.monotonic() - began


def kill(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes of a run under test."""
    for pid in pids:
        os.kill(pid, number)
