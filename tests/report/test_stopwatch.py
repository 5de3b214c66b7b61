"""Seconds of named steps."""

import time

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
