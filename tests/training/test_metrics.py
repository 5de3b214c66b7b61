"""Metrics are whole lines that a reader may follow; progress is a bar on a terminal and lines elsewhere."""

import io
from pathlib import Path

import pytest

from alpa_hpc.training.metrics import ProgressBar, ProgressLines, open_metrics, read_metrics, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_appended_and_read_while_they_grow(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == ()
    with open_metrics(path) as writer:
        writer.write(1, {"loss": 5.5})
        assert read_metrics(path) == ({"step": 1, "loss": 5.5},)
    with open_metrics(path) as writer:
        writer.write(2, {"loss": 4.5, "held_out_loss": 4.75})
    with path.open("a") as stream:
        stream.write('{"step": 3, "lo')
    assert read_metrics(path) == ({"step": 1, "loss": 5.5}, {"step": 2, "loss": 4.5, "held_out_loss": 4.75})


def test_a_pipe_gets_the_first_the_last_and_some_lines() -> None:
    stream = io.StringIO()
    with show_progress("training", 50, stream, seconds_between=1e9) as progress:
        assert isinstance(progress, ProgressLines)
        for step in range(1, 51):
            progress.advance(step, {"loss": 5.0 / step})
    assert stream.getvalue().splitlines() == ["training 1/50  loss 5", "training 50/50  loss 0.1"]
    stream = io.StringIO()
    with show_progress("training", 50, stream, seconds_between=0.0) as progress:
        for step in range(1, 51):
            progress.advance(step, {})
    assert len(stream.getvalue().splitlines()) == 50


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with show_progress("training", 4, stream) as progress:
        assert isinstance(progress, ProgressBar)
        for step in range(1, 5):
            progress.advance(step, {"loss": 1.25})
    assert "4/4" in stream.getvalue()
    assert "loss 1.25" in stream.getvalue()
