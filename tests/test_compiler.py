"""A program that XLA's own products for GPUs fail on is compiled with those of a library; on CPUs, and for good, a failure is one."""

from dataclasses import dataclass, field
from typing import Any, cast

import jax
import pytest
from jax.stages import Lowered

from alpa_hpc.compiler import LIBRARY_PRODUCTS, compiled


@dataclass
class Device:
    platform: str


@dataclass
class Program:
    """Fails with each set of options but the one that works for it."""

    works: dict[str, Any] | None
    fault: str = "INTERNAL: no tile sizes"
    asked: list[dict[str, Any] | None] = field(default_factory=list)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> str:
        self.asked.append(compiler_options)
        if compiler_options != self.works:
            raise jax.errors.JaxRuntimeError(self.fault)
        return "code"


def code(program: Program, *platforms: str) -> object:
    return compiled(cast(Lowered, program), [Device(one) for one in platforms])


def test_what_compiles_is_compiled_once() -> None:
    program = Program(None)
    assert code(program, "cuda") == "code"
    assert program.asked == [None]


def test_what_fails_for_gpus_is_compiled_with_a_librarys_products() -> None:
    program = Program(LIBRARY_PRODUCTS)
    assert code(program, "cuda", "cuda") == "code"
    assert program.asked == [None, LIBRARY_PRODUCTS]


@pytest.mark.parametrize(("program", "platform"), [(Program(LIBRARY_PRODUCTS), "cpu"), (Program({"never": True}), "cuda")])
def test_a_failure_that_this_does_not_help_is_told(program: Program, platform: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="no tile sizes"):
        code(program, platform)


def test_what_memory_is_too_small_for_is_not_compiled_twice() -> None:
    program = Program(LIBRARY_PRODUCTS, "RESOURCE_EXHAUSTED: out of memory")
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        code(program, "cuda")
    assert program.asked == [None]
