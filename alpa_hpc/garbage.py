"""How often Python looks for cyclic garbage where many small objects are made that stay, as jaxprs and sharding problems are."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

YOUNG, MIDDLE, OLD = 100_000, 50, 1000  # new objects, and rounds of younger generations, after which a generation is looked through


@contextmanager
def seldom_collected() -> Generator[None]:
    """Look for cycles a hundredth as often as is usual: that is a third of tracing a step, a sixth of a search, and finds next to none."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
