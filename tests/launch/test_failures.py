"""Of all that ranks say about their end, the first in time is what the job says."""

import json
from pathlib import Path

import pytest

from alpa_hpc.errors import LaunchError, PlanError, StoreError
from alpa_hpc.launch.failures import RankFailure, explained_by_ranks, first_failure, recording_failure
from alpa_hpc.launch.files import write_json
from alpa_hpc.launch.mpirun import RankKilledError

MPIRUN = LaunchError("mpirun with 2 ranks ended with exit code 1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "failures" / "train"


def record(folder: Path, name: str, time: float, *, is_explained: bool, message: str = "said") -> None:
    fields = {
        "time": time,
        "rank": name,
        "node": "n7",
        "kind": "OddError",
        "message": message,
        "is_explained": is_explained,
        "traceback": f"Traceback: {name}\n",
    }
    write_json(folder / f"n7-{name}.json", fields)


def test_the_earliest_failure_is_told_whatever_its_file_is_called(folder: Path) -> None:
    with pytest.raises(LaunchError, match=r"^rank 1 on n7 failed: OddError: said\nTraceback: 1$"), explained_by_ranks(folder):
        for name, time in (("0", 12.0), ("1", 11.5), ("2", 11.9)):
            record(folder, name, time, is_explained=False)
        raise MPIRUN
    assert first_failure(folder) == RankFailure(11.5, "1", "n7", "OddError", "said", is_explained=False, traceback="Traceback: 1\n")


def test_an_error_that_speaks_for_itself_keeps_its_message_and_no_traceback(folder: Path) -> None:
    with pytest.raises(LaunchError, match=r"^rank 0 on n7 failed: too little memory\nask for more$"), explained_by_ranks(folder):
        record(folder, "0", 1.0, is_explained=True, message="too little memory\nask for more")
        raise MPIRUN


def test_a_rank_that_was_killed_is_told_before_the_peer_that_saw_its_connection_close(folder: Path) -> None:
    killed = RankKilledError("rank 6 on n7 was ended by signal 9 (Killed); mpirun with 8 ranks ended with exit code 137")
    with pytest.raises(LaunchError) as caught, explained_by_ranks(folder):
        record(folder, "5", 1.0, is_explained=False, message="closed by peer")
        raise killed
    first_line, traceback = str(caught.value).split("\n", 1)
    assert first_line == f"{killed}. Of its peers the first to fail: rank 5 on n7 failed: OddError: closed by peer"
    assert traceback == "Traceback: 5"
    with pytest.raises(LaunchError, match=r"^rank 5 on n7 failed: too little memory$"), explained_by_ranks(folder):
        record(folder, "5", 1.0, is_explained=True, message="too little memory")
        raise killed


def test_a_lost_connection_is_told_only_where_no_rank_tells_more_and_says_that_another_rank_was_lost(folder: Path) -> None:
    lost = "Gloo AllGather failed: Read error [127.0.0.1]:16564: Connection reset by peer"
    told = r"^rank 4 on n7 failed: OddError: .* reset by peer; so another rank ended before it, without a word: killed, perhaps"
    with pytest.raises(LaunchError, match=told), explained_by_ranks(folder):
        record(folder, "4", 1.0, is_explained=False, message=lost)
        record(folder, "6", 1.1, is_explained=False, message=lost)
        raise MPIRUN
    with pytest.raises(LaunchError, match=r"^rank 0 on n7 failed: OddError: said\n"), explained_by_ranks(folder):
        record(folder, "4", 1.0, is_explained=False, message=lost)
        record(folder, "0", 1.2, is_explained=False)  # by another node's clock
        raise MPIRUN


def test_what_an_earlier_attempt_left_is_not_told(folder: Path) -> None:
    folder.mkdir(parents=True)
    record(folder, "0", 1.0, is_explained=True)
    with pytest.raises(LaunchError) as caught, explained_by_ranks(folder):
        assert first_failure(folder) is None
        raise MPIRUN
    assert caught.value is MPIRUN, "no rank said anything, so mpirun's own word stays"


def test_a_block_that_ends_well_and_an_error_of_ours_stay_what_they_are(folder: Path) -> None:
    with explained_by_ranks(folder):
        record(folder, "0", 1.0, is_explained=True)
    with pytest.raises(ZeroDivisionError), explained_by_ranks(folder):
        record(folder, "0", 1.0, is_explained=True)
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "message", "is_explained"),
    [(PlanError("stage 1\nis empty"), "stage 1\nis empty", True), (ValueError("odd"), "odd", False), (KeyboardInterrupt(), "", False)],
)
def test_a_rank_puts_its_failure_on_record_and_fails(
    error: BaseException, message: str, is_explained: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    monkeypatch.setenv("SLURMD_NODENAME", "node3")
    with pytest.raises(type(error)) as caught, recording_failure(folder):
        raise error
    assert caught.value is error
    failure = first_failure(folder)
    assert failure is not None
    assert (failure.rank, failure.node, failure.message, failure.is_explained) == ("5", "node3", message, is_explained)
    assert "test_failures.py" in failure.traceback


def test_a_rank_that_ends_well_says_nothing(folder: Path) -> None:
    folder.mkdir(parents=True)
    with recording_failure(folder):
        pass
    assert first_failure(folder) is None


def test_a_foreign_record_is_refused_by_name(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "n7-1.json").write_text(json.dumps({"time": 1}))
    with pytest.raises(StoreError, match=r"n7-1\.json"):
        first_failure(folder)
