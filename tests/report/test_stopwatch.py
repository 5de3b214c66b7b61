"""Seconds of named steps."""

import time

import pytest

from alpa_hpc.report import stopwatch
from alpa_hpc.report.stopwatch import Stopwatch, process_age_seconds


def test_a_step_taken_twice_adds_up() -> None:
    watch = Stopwatch()
    assert watch.time("sleep", lambda: time.sleep(0.02)) is None
    once = watch.seconds["sleep"]
    watch.time("sleep", lambda: time.sleep(0.02))
    assert watch.seconds["sleep"] >= once + 0.02 >= 0.04


def test_the_process_grows_older() -> None:
    age = process_age_seconds()
    time.sleep(0.05)
    assert age > 0
    assert 0.03 <= process_age_seconds() - age <= 5


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopwatch, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(stopwatch, "SECONDS_BETWEEN", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_long_step_tells_how_far_it_is() -> None:
    told: list[str] = []
    watch = Stopwatch(tell=told.append)
    watch.time("quick", lambda: None)
    assert told == []
    assert watch.time("solve", lambda: time.sleep(0.25) or "solved") == "solved"
    assert told[0] == "planning: solve, 0 s so far"
    assert len(told) >= 3 and told[-1] == "planning: solve took 0 s"


@pytest.mark.usefixtures("impatient")
def test_a_step_that_fails_is_told_of_no_more() -> None:
    told: list[str] = []

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Stopwatch(tell=told.append).time("fails", fails)
    time.sleep(0.25)
    assert told == []


@pytest.mark.usefixtures("impatient")
def test_the_lines_are_for_people_and_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    Stopwatch().time("slow", lambda: time.sleep(0.15))
    found = capsys.readouterr()
    assert found.out == "" and found.err.startswith("planning: slow, 0 s so far\n")
