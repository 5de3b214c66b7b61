"""Kernels are plain functions, compiled; without a folder for compiled code they still work."""

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
    made = numba.njit

    def without_cache(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return made(**options)

    monkeypatch.setattr(numba, "njit", without_cache)

    def total(values: Any) -> Any:
        return values.sum()

    assert kernel(total)(np.arange(4.0)) == 6.0
