"""The watchdog reports a stuck executor once, and leaves working and idle ones alone."""

import time
from pathlib import Path
from threading import Event

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.errors import ConfigError
from alpa_hpc.runtime.execute import Executor, StepResult, prepare
from alpa_hpc.runtime.instructions import Buffer, Feed, Free, Layout, MeshProgram, Recv, Run
from alpa_hpc.runtime.transport import in_process_transports
from alpa_hpc.runtime.watchdog import WatchdogLimits, watched
from alpa_hpc.sharding.spec import Spec

VALUE = Buffer("value.7", 4)
LAYOUT = Layout((), "float32", Spec(()), MeshShape(1, 1))


def executor_of(*instructions: Feed | Recv | Run | Free) -> Executor:
    meshes = [Mesh(np.array([[device]]), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto)) for device in jax.devices()[:2]]
    program = MeshProgram(0, (*instructions, Run("use", (VALUE,), ()), Free(VALUE)), (), ())
    return prepare(program, {"use": lambda value: ()}, in_process_transports(meshes)[0])


def feed(batch_input: int, microbatch: int) -> jax.Array:
    return jax.numpy.zeros(())


def test_stuck_receive_is_reported_once_with_position_and_stacks(tmp_path: Path) -> None:
    executor = executor_of(Recv(VALUE, LAYOUT, LAYOUT, 1, 9))
    aborted: list[float] = []
    fired = Event()
    report = tmp_path / "report.txt"
    executor.start({}, feed)
    with (
        report.open("w") as stream,
        watched(executor, 3, WatchdogLimits(0.2, 60.0), stream, lambda: (aborted.append(time.monotonic()), fired.set())[0]),
    ):
        assert executor.step() is StepResult.BLOCKED
        assert fired.wait(5)
        time.sleep(0.4)
    text = report.read_text()
    assert len(aborted) == 1
    assert "[mesh 0, rank 3] watchdog: no instruction finished for 0 s; " in text
    assert "stuck at mesh 0, instruction 0 of 3, microbatch 4: recv value.7@4 <- mesh 1 tag 9" in text
    assert "test_watchdog.py" in text, "the stack of the main thread"


def test_later_iterations_have_their_own_limit(tmp_path: Path) -> None:
    executor = executor_of(Feed(VALUE, 0))
    fired = Event()
    with (tmp_path / "report.txt").open("w") as stream, watched(executor, 0, WatchdogLimits(60.0, 0.2), stream, fired.set):
        executor.start({}, feed)
        executor.step()
        assert not fired.wait(0.5), "the first iteration may take a minute"
        while executor.step() is not StepResult.DONE:
            pass
        executor.finish()
        assert not fired.wait(0.5), "idle between iterations"
        executor.start({}, feed)
        assert fired.wait(5), "the second may not"


def test_steady_progress_is_left_alone(tmp_path: Path) -> None:
    executor = executor_of(Feed(VALUE, 0))
    fired = Event()
    with (tmp_path / "report.txt").open("w") as stream, watched(executor, 0, WatchdogLimits(0.5, 0.5), stream, fired.set):
        for _ in range(3):
            executor.start({}, feed)
            while executor.step() is not StepResult.DONE:
                time.sleep(0.2)
            executor.finish()
    assert not fired.is_set()


def test_limits_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        WatchdogLimits(0.0, 1.0)
