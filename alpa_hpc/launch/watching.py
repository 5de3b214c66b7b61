"""A run in progress -> what a person who follows it sees on stderr: the queue's words as they change, and the steps of training."""

import re
import shlex
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.queue import QueueState
from alpa_hpc.launch.submission import Submission
from alpa_hpc.training.metrics import read_metrics, show_progress


@dataclass(slots=True, eq=False)
class QueueTeller:
    """Tells each change of what Slurm says of a job, once."""

    told: dict[str, str] = field(default_factory=dict)

    def watch(self, states: Mapping[str, QueueState]) -> None:
        """Print what is new."""
        for slurm_id, state in states.items():
            words = state.describe()
            if self.told.get(slurm_id) != words:
                self.told[slurm_id] = words
                sys.stderr.write(f"job {slurm_id}: {words}\n")


def tell_submitted(paths: RunPaths, submitted: Sequence[Submission]) -> None:
    """Say what is in the queue, and how to go on from here."""
    names = ", ".join(f"{one.kind.value} job {one.job_id}" for one in submitted)
    root = shlex.quote(str(paths.root))
    sys.stderr.write(f"submitted {names}; `python -m alpa_hpc status {root}` shows the run, `cancel` in its place ends it\n")


def job_output(paths: RunPaths, kind: JobKind) -> Callable[[], None]:
    """A function to call at every poll, which hands on to stderr what a local job has printed since the last one."""
    told: dict[Path, int] = {}

    def advance() -> None:
        for log in sorted(paths.log_folder(kind).glob("*.out")):
            text = log.read_text(encoding="utf-8", errors="replace")
            whole = text.rpartition("\n")[0]
            sys.stderr.write("".join(f"{line}\n" for line in whole[told.get(log, 0) :].splitlines() if line and not SUBMITIT.match(line)))
            told[log] = len(whole)

    return advance


SUBMITIT = re.compile(r"submitit (INFO|WARNING) \(")  # its lines about pickles, which are no news to a person


@contextmanager
def training_progress(paths: RunPaths, num_steps: int) -> Generator[Callable[[], None]]:
    """A function to call at every poll, which shows the steps that metrics.jsonl has gained."""
    shown = 0
    with show_progress("training", num_steps, sys.stderr) as display:

        def advance() -> None:
            nonlocal shown
            for figures in read_metrics(paths.metrics)[shown:]:
                shown += 1
                display.advance(shown, {name: value for name, value in figures.items() if name != "step"})

        yield advance
        advance()
