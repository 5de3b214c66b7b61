"""Kernels are plain functions, compiled; without a folder for compiled code they still work."""

import linecache
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from alpa_hpc.kernels import compile_seconds, inner, kernel


def test_a_kernel_gives_what_its_function_gives_and_compilation_is_counted() -> None:
    def double(values: Any) -> Any:
        return 2.0 * values.sum()

    compiled, before = inner(double), compile_seconds()

    def outer(values: Any) -> Any:
        return compiled(values) + 1.0

    assert numba.njit(outer)(np.arange(4.0)) == double(np.arange(4.0)) + 1.0
    assert compile_seconds() > before


def test_no_folder_for_compiled_code_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(function: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("alpa_hpc.kernels._Cache", nowhere)

    def total(values: Any) -> Any:
        return values.sum()

    assert kernel(total)(np.arange(4.0)) == 6.0


@contextmanager
def longest_file(num_bytes: int) -> Generator[None]:
    """A write beyond fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_source(folder: Path, factor: int) -> None:
    (folder / "scaled.py").write_text(f"def scaled(x):\n    return {factor} * x\n")
    linecache.clearcache()


def scaled(folder: Path) -> Any:
    """A kernel as a new process makes it of what is on disk."""
    path = folder / "scaled.py"
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    return kernel(scope["scaled"])


@pytest.mark.parametrize("room", [0, 2000])
def test_a_full_disk_is_no_obstacle_and_leaves_no_older_code_behind(room: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With room for 2000 bytes numba's index is written, but not the code."""
    write_source(tmp_path, 2)
    assert scaled(tmp_path)(5) == 10
    kept = {path.suffix for path in (tmp_path / "__pycache__").iterdir()}
    assert kept == {".nbi", ".nbc"}
    assert capsys.readouterr().err == ""
    write_source(tmp_path, 3)
    with longest_file(room):
        assert scaled(tmp_path)(5) == 15
        assert scaled(tmp_path)(5) == 15
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert str(tmp_path) in said[0]
    assert scaled(tmp_path)(5) == 15


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_files_of_compiled_code_that_a_crash_has_emptied_are_made_anew(suffix: str, tmp_path: Path) -> None:
    write_source(tmp_path, 2)
    assert scaled(tmp_path)(5) == 10
    (emptied,) = (tmp_path / "__pycache__").glob(f"*{suffix}")
    emptied.write_bytes(b"")
    for _ in range(2):
        assert scaled(tmp_path)(5) == 10
    again = scaled(tmp_path)
    assert again(5) == 10
    assert sum(again.stats.cache_hits.values()) == 1
