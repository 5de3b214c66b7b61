"""A function -> the same in a process of its own, which the kernel ends when a call takes too long: for C code that does not stop.

The process is started at the first call and serves all later ones; after its end, by time or by fault, the next call starts another. A call
that is given up, by Ctrl-C or a fault on this side, ends it, too: it would answer the old question at the next call. When the process that
asks is gone, it ends at once, where the kernel tells (Linux) in the midst of a question.
"""

import fcntl
import os
import pickle
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Generic, TypeVar

from alpa_hpc.errors import SolverError

Answer = TypeVar("Answer")


class LateError(SolverError):
    """A call took longer than it may."""


class Worker(Generic[Answer]):
    """Calls `function`, which a module gives by its name, in another process; one call at a time."""

    def __init__(self, function: Callable[..., Answer]) -> None:
        self._names = (function.__module__, function.__qualname__)
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def call(self, seconds: float, *arguments: object) -> Answer:
        """What the function gives for `arguments`.

        Raises:
            LateError: there was no answer after `seconds`.
            SolverError: what the function raised, or how its process ended.
        """
        with self._lock:
            child = self._asked = self._running()
            self._child = None  # until it has answered: what interrupts a call leaves no process with an open question
            try:
                answer = _ask(child, seconds, arguments)
                self._child = child
            except (BrokenPipeError, EOFError, pickle.UnpicklingError) as error:
                raise _ended(child, seconds) from error
            finally:
                self._asked = None
                if self._child is None:
                    _dismiss(child)
        if isinstance(answer, SolverError):
            raise answer
        return answer

    def end(self) -> None:
        """End the process, if there is one; a call that another thread waits for raises SolverError there."""
        asked, idle = self._asked, self._child
        if asked is not None:
            asked.kill()  # who waits for it clears up
        elif idle is not None:
            self._child = None
            _dismiss(idle)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)}
        command = (sys.executable, "-P", "-m", "alpa_hpc.sharding.worker", *self._names)
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        weakref.finalize(self, _dismiss, child)
        return child


def _ask(child: subprocess.Popen[bytes], seconds: float, arguments: tuple[object, ...]) -> Any:
    assert child.stdin is not None and child.stdout is not None, "both are pipes"
    pickle.dump((seconds, arguments), child.stdin)
    child.stdin.flush()
    return pickle.load(child.stdout)  # noqa: S301 - it comes from our own child


def _ended(child: subprocess.Popen[bytes], seconds: float) -> SolverError:
    """Why a process gave no answer."""
    assert child.stderr is not None, "it is a pipe"
    said = child.stderr.read().decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
    code = child.wait()
    if code == -signal.SIGALRM:
        return LateError(f"no answer after {seconds:g} s")
    return SolverError(f"the solver's process ended with {code} (below zero: by that signal); its last words: {said[0]}")


def _dismiss(child: subprocess.Popen[bytes]) -> None:
    """Without questions to come the process ends; one that is still at work is not waited for."""
    if child.poll() is None:
        child.kill()
        child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with suppress(BrokenPipeError):  # half a question may wait in the buffer
                pipe.close()


def end_without_asker(pipe: int, pid: int) -> None:
    """From now on the kernel ends process `pid` when the last writer of `pipe`, which it reads, is gone, or when something is written."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, pid)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)  # SIGIO, which Linux lets end who does not handle it


@contextmanager
def _ended_without_asker(questions: BinaryIO) -> Generator[None]:
    """Meanwhile, this process does not outlive the one that asks, C code or not."""
    pipe = questions.fileno()
    flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
    end_without_asker(pipe, os.getpid())
    poll = select.poll()
    poll.register(pipe, select.POLLHUP)
    if poll.poll(0):  # it was gone before
        sys.exit("nobody waits for the answer")
    yield
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags)


def serve(function: Callable[..., object], questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions until there are no more."""
    while True:
        try:
            seconds, arguments = pickle.load(questions)  # noqa: S301 - they come from our own parent
        except EOFError:
            return
        with _ended_without_asker(questions):
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))  # nobody handles its signal, so it ends the process, C code or not
            try:
                answer = function(*arguments)
            except SolverError as error:
                answer = error
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        pickle.dump(answer, answers)
        answers.flush()


def main() -> None:
    """Serve the function that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the one that asks decides
    module, name = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what C code prints must not come between answers
    function = getattr(__import__(module, fromlist=[name]), name)
    serve(function, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
