"""What a job that is gone says about itself decides what became of it."""

from dataclasses import replace

from alpa_hpc.launch.outcome import Died, Ended, NotStarted, account, outcome_of
from alpa_hpc.launch.paths import JobKind
from alpa_hpc.launch.status import JobState, JobStatus

RUNNING = JobStatus(JobKind.TRAIN, 0, JobState.RUNNING, None, "host", "node7", 17, 1.0, None, "", is_explained=True, traceback="")
FAILED = replace(RUNNING, state=JobState.FAILED, exit_code=1, message="out of paper", traceback="Traceback ...\nErr: out\n")


def test_each_last_word_has_its_outcome() -> None:
    assert outcome_of(replace(RUNNING, state=JobState.DONE)) == Ended()
    assert outcome_of(None) == NotStarted("ended before it could report anything")
    assert outcome_of(RUNNING) == Died("(process 17 on node7) ended without a report. Killed, or out of memory?")
    assert outcome_of(FAILED) == Died("failed on node7: out of paper")


def test_only_an_error_that_does_not_speak_for_itself_brings_its_traceback() -> None:
    assert account(FAILED) == "out of paper"
    assert account(replace(FAILED, is_explained=False)) == "Traceback ...\nErr: out"
