"""A submission survives the round trip, and its tasks are addressed one by one."""

from dataclasses import replace
from pathlib import Path

import pytest

from alpa_hpc.errors import StoreError
from alpa_hpc.launch.paths import JobKind, new_run
from alpa_hpc.launch.submission import read_submissions, write_submission
from tests.launching import submission


def test_round_trip_in_the_order_of_time(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    train, array, plan = (
        submission(JobKind.TRAIN, submitted=3.0),
        submission(JobKind.PROFILE, 4, 5, submitted=2.0),
        submission(JobKind.PLAN, submitted=1.0),
    )
    for one in (train, array, plan):
        write_submission(paths, one)
    assert read_submissions(paths) == (plan, array, train)


def test_the_record_with_a_number_takes_the_place_of_the_one_without(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    asked = submission(JobKind.PROFILE, 3, 4, job_id="")
    write_submission(paths, asked)
    assert read_submissions(paths) == (asked,)
    write_submission(paths, replace(asked, job_id="77"))
    assert read_submissions(paths) == (replace(asked, job_id="77"),)


def test_arrays_of_one_run_are_told_apart_by_their_first_task(tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    first, second = submission(JobKind.PROFILE, 0, 1, submitted=1.0), submission(JobKind.PROFILE, 2, 3, submitted=2.0)
    for one in (first, second):
        write_submission(paths, one)
    assert read_submissions(paths) == (first, second)
    assert (first.file_name, submission(JobKind.PLAN).file_name) == ("profile-0000", "plan")


def test_a_task_has_its_own_address_in_slurm() -> None:
    array = submission(JobKind.PROFILE, 6, 7, 9)
    assert [array.slurm_id(task) for task in array.tasks] == ["12_0", "12_1", "12_2"], "the array's own number would hit all of them"
    assert submission(JobKind.PROFILE, 6).slurm_id(6) == "12_0", "an array of one is an array"
    assert submission(JobKind.TRAIN).slurm_id(0) == "12"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"kind": "plan", "tasks": [0]}', '{"kind": "dance", "tasks": [0]}', '{"kind": "plan"}'])
def test_a_foreign_record_is_refused_by_name(text: str, tmp_path: Path) -> None:
    paths = new_run(tmp_path, "demo")
    (paths.submission_folder / "plan.json").write_text(text)
    with pytest.raises(StoreError, match=r"plan\.json"):
        read_submissions(paths)
