"""A function in a process of its own: its answers are the function's, one that does not stop is stopped, one that dies is no riddle."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from alpa_hpc.errors import SolverError
from alpa_hpc.sharding.worker import LateError, Worker

FUNCTIONS = """
import ctypes
import os
import pathlib
import sys
import time

from alpa_hpc.errors import SolverError


def doubled(number):
    print("not an answer")
    return 2 * number


def own_pid():
    return os.getpid()


def refused():
    raise SolverError("no such model")


def died():
    sys.stderr.write("out of memory")
    sys.stderr.flush()
    os.kill(os.getpid(), 9)


def doubled_late(number):
    time.sleep(number)
    return 2 * number


def stuck_and_known(path):
    pathlib.Path(path).write_text(str(os.getpid()))
    stuck()


def stuck():
    ctypes.PyDLL(None).sleep(60)  # C code that holds the interpreter: no handler of Python's would run
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """A module that this process and its children can import."""
    (tmp_path / "worker_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "worker_functions"
    sys.modules.pop("worker_functions", None)


def worker(module: str, name: str) -> Worker[int]:
    return Worker(getattr(__import__(module), name))


def test_one_process_answers_all_questions(functions: str) -> None:
    pid, doubled = worker(functions, "own_pid"), worker(functions, "doubled")
    assert pid.call(20.0) == pid.call(20.0) != os.getpid()
    assert [doubled.call(20.0, number) for number in range(50)] == [2 * number for number in range(50)]


def test_what_the_function_refuses_is_told_and_the_process_goes_on(functions: str) -> None:
    refused = worker(functions, "refused")
    for _ in range(2):
        with pytest.raises(SolverError, match="no such model"):
            refused.call(20.0)


def test_a_process_that_dies_is_told_and_replaced(functions: str) -> None:
    died = worker(functions, "died")
    for _ in range(2):
        with pytest.raises(SolverError, match=r"-9.*out of memory"):
            died.call(20.0)


def test_c_code_that_does_not_stop_is_stopped(functions: str) -> None:
    stuck = worker(functions, "stuck")
    started = time.monotonic()
    with pytest.raises(LateError):
        stuck.call(1.5)
    assert time.monotonic() - started < 30


def test_a_process_whose_parent_is_gone_goes_too(functions: str, tmp_path: Path) -> None:
    imports = f"import os; from {functions} import own_pid; from alpa_hpc.sharding.worker import Worker"
    script = f"{imports}; w = Worker(own_pid); print(w.call(20.0), flush=True); os.kill(os.getpid(), 9)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))}
    parent = subprocess.run((sys.executable, "-c", script), env=environment, capture_output=True, text=True, check=False)
    child = int(parent.stdout)
    end = time.monotonic() + 20
    while _is_alive(child):
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def interrupted_after(seconds: float) -> Generator[None]:
    """Ctrl-C for who waits, at a time that no other thread has to keep."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_call_that_is_interrupted_leaves_no_answer_to_the_next(functions: str) -> None:
    late = worker(functions, "doubled_late")
    assert late.call(20.0, 0) == 0
    with interrupted_after(0.2):
        late.call(20.0, 0.7)
    assert late.call(20.0, 0.1) == 0.2


def test_a_call_is_ended_from_another_thread(functions: str, tmp_path: Path) -> None:
    stuck, known = worker(functions, "stuck_and_known"), tmp_path / "pid"
    with ThreadPoolExecutor(1) as pool:
        began, call = time.monotonic(), pool.submit(stuck.call, 50.0, str(known))
        while not known.exists():
            time.sleep(0.01)
        stuck.end()
        with pytest.raises(SolverError, match="ended with -9"):
            call.result(timeout=20.0)
    assert time.monotonic() - began < 20.0
    stuck.end()  # now there is none


def test_a_process_that_is_not_needed_any_more_is_ended(functions: str) -> None:
    asked = worker(functions, "own_pid")
    pid = asked.call(20.0)
    asked.end()
    assert asked.call(20.0) != pid, "the next call starts another"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class Unpicklable:
    def __reduce__(self) -> str:
        raise ValueError("cannot be told")


def test_a_question_that_breaks_off_half_way_is_forgotten(functions: str) -> None:
    doubled = worker(functions, "doubled")
    for length in (10, 1_000_000):
        with pytest.raises(ValueError, match="cannot be told"):
            doubled.call(20.0, (b"x" * length, Unpicklable()))
        assert doubled.call(20.0, 3) == 6


def test_a_process_in_the_midst_of_a_question_goes_with_its_parent(functions: str, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    imports = f"from {functions} import stuck_and_known; from alpa_hpc.sharding.worker import Worker"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))}
    parent = subprocess.Popen((sys.executable, "-c", f"{imports}; Worker(stuck_and_known).call(50.0, {str(told)!r})"), env=environment)
    end = time.monotonic() + 20
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    parent.terminate()
    assert parent.wait() == -signal.SIGTERM
    end = time.monotonic() + 5
    while _is_alive(int(told.read_text())):
        assert time.monotonic() < end
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
