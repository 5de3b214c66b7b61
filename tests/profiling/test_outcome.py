"""Rows and exceptions become outcomes: medians that say what they are of, and reasons of one line."""

import jax.numpy as jnp
import pytest

from alpa_hpc.profiling.options import Extent
from alpa_hpc.profiling.outcome import MeasuredTasks, MeasuredWork, explain_failure, measured
from alpa_hpc.profiling.store import ProfileRow

ROW = ProfileRow("ab", "layers 0-1", (3.0, 1.0, 2.0), (4.0,), (0.5, 0.5), 1.0, "h", 1, 1.0, "cpu", "jax 1", "n1,n2", 4)


def test_a_row_is_measured_work_or_whole_tasks_by_its_extent() -> None:
    assert measured(ROW, Extent.LONE) == MeasuredWork(2.0, 4.0, 0.5)
    assert measured(ROW, Extent.MESH) == MeasuredTasks(2.0, 4.0, 0.5)


def test_a_device_out_of_memory_says_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        jnp.zeros((1 << 45,)).block_until_ready()
    assert explain_failure(caught.value) == f"out of device memory: Out of memory allocating {4 << 45} bytes."


def test_any_failure_is_one_line() -> None:
    assert explain_failure(ValueError("\n  no such thing\nat all")) == "ValueError: no such thing"
    assert explain_failure(MemoryError()) == "out of host memory: no message"
    told = 'INTERNAL: calling back: Traceback (most recent call last):\n  File "m.py", line 1\n    f()\nmine.OddError: unwell\n'
    assert explain_failure(RuntimeError(told)) == "RuntimeError: INTERNAL: calling back: mine.OddError: unwell"
    assert explain_failure(RuntimeError(told.partition("mine")[0])).endswith("Traceback (most recent call last):")
    assert explain_failure(RuntimeError("RESOURCE_EXHAUSTED: not jax's")).startswith("RuntimeError")
