"""What the models ask of the values that they are made of, which come from a config: ValueError says which one, and what would do."""

import math
from numbers import Integral, Real

DTYPES = ("float32", "bfloat16", "float16")  # of a computation; parameters are float32


def check_counts(model: object, **least: int) -> None:
    """Raise ValueError for a field that is no whole number of at least what is given for it."""
    for name, smallest in least.items():
        value = getattr(model, name)
        if not isinstance(value, Integral) or isinstance(value, bool) or value < smallest:
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least {smallest}")


def check_positive(model: object, *names: str) -> None:
    """Raise ValueError for a field that is no finite number above 0."""
    for name in names:
        value = getattr(model, name)
        if not _is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}, expected a finite number above 0")


def check_share(model: object, name: str, below: float = math.inf) -> None:
    """Raise ValueError for a field that is no number from 0 to `below`, which it must not reach."""
    value = getattr(model, name)
    if not _is_number(value) or not 0 <= value < below:
        raise ValueError(f"{name} is {value!r}, expected a number with 0 <= {name} < {below} (0 turns it off)")


def check_dtype(dtype: object) -> None:
    """Raise ValueError for what is not the name of a dtype that the models compute in."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected the floating dtype of the computation, one of {', '.join(DTYPES)}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
