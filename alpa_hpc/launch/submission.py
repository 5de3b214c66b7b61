"""What was handed to Slurm <-> `submissions/NAME.json`, one file a batch job or job array: how a job is found again, and cancelled.

The record is written before sbatch is asked, without a number, and again with it: a job whose submitter was killed in between is
still found by its name, which holds the run's.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from alpa_hpc.errors import StoreError
from alpa_hpc.launch.files import read_json, write_json
from alpa_hpc.launch.paths import JobKind, RunPaths


@dataclass(frozen=True, slots=True)
class Submission:
    """A batch job, or a job array, in Slurm's hands.

    tasks:     the numbers of its tasks, one array element each, in order; (0,) for a job that is no array
    is_array:  whether task `tasks[i]` is array element i
    job_id:    Slurm's number; empty while sbatch has not answered
    job_name:  as squeue shows it; no other run has the same
    script:    the batch script that was submitted
    submitted: seconds since 1970
    refusal:   why there is no such job, in sbatch's words; empty where it was not refused
    """

    kind: JobKind
    tasks: tuple[int, ...]
    is_array: bool
    job_id: str
    job_name: str
    script: str
    submitted: float
    refusal: str = ""

    @property
    def file_name(self) -> str:
        """`plan`, `train`, or `profile-0003` by the first task."""
        return f"{self.kind.value}-{self.tasks[0]:04d}" if self.is_array else self.kind.value

    def slurm_id(self, task: int) -> str:
        """How Slurm addresses one task: never by the number of the whole array, which would hit all of them."""
        return f"{self.job_id}_{self.tasks.index(task)}" if self.is_array else self.job_id


def write_submission(paths: RunPaths, submission: Submission) -> None:
    """Put the record where status, logs and cancel find it."""
    write_json(paths.submission_folder / f"{submission.file_name}.json", asdict(submission) | {"kind": submission.kind.value})


def read_submissions(paths: RunPaths) -> tuple[Submission, ...]:
    """All that was handed to Slurm for a run, in the order of time; StoreError where a record is torn or foreign."""
    return in_order(read_submission(path) for path in submission_files(paths))


def submission_files(paths: RunPaths) -> tuple[Path, ...]:
    """The files of the records."""
    return tuple(paths.submission_folder.glob("*.json"))


def in_order(submissions: Iterable[Submission]) -> tuple[Submission, ...]:
    """Submissions in the order of time."""
    return tuple(sorted(submissions, key=lambda one: one.submitted))


def read_submission(path: Path) -> Submission:
    """One record; StoreError where it is torn or foreign."""
    fields = read_json(path)
    try:
        return Submission(**(fields | {"kind": JobKind(fields["kind"]), "tasks": tuple(fields["tasks"])}))
    except (TypeError, KeyError, ValueError) as error:
        raise StoreError(f"{path} is not a submission of this version ({error}): is it from another alpa_hpc?") from error
