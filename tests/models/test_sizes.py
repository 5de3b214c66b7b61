"""A model of sizes that cannot be is refused where it is made, by the field and what would do."""

from typing import Any

import pytest

from alpa_hpc.models.gpt import GPT
from alpa_hpc.models.llama import Llama
from alpa_hpc.models.moe import MoE
from alpa_hpc.models.wide_resnet import WideResNet

TEXT = {"num_layers": 2, "hidden": 16, "num_heads": 2, "vocab": 32, "sequence": 8}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "gpt": (GPT, TEXT),
    "moe": (MoE, {**TEXT, "num_experts": 4}),
    "llama": (Llama, {**TEXT, "num_kv_heads": 2, "mlp_width": 24}),
    "wide resnet": (WideResNet, {"depth": 14, "channels": 4, "width": 2, "num_classes": 10, "image": 32}),
}
OF_ONE = {
    "gpt": [("dropout", rate) for rate in (1.5, 1.0, -0.1, float("nan"), "a", True)],
    "moe": [
        *(("capacity_factor", factor) for factor in (0, -1.0, float("nan"), float("inf"))),
        *(("aux_weight", weight) for weight in (-0.1, float("nan"), float("inf"))),
        *((size, 0) for size in ("group_size", "mlp_factor")),
    ],
    "llama": [("rotary_base", base) for base in (0, -1.0, float("nan"))],
    "wide resnet": [("num_classes", 1), ("image", 0), ("image", -32)],
}
BAD = [
    *((name, size, value) for name, (_, sizes) in MODELS.items() for size in sizes for value in (0, -2, 1.5, "abc", None, True)),
    *((name, "dtype", dtype) for name in MODELS for dtype in ("int32", "foo", "", "bool", "complex64", "float64", None)),
    *((name, "vocab", 1) for name in ("gpt", "moe", "llama")),
    *((name, field, value) for name, cases in OF_ONE.items() for field, value in cases),
]


@pytest.mark.parametrize(("name", "field", "value"), BAD)
def test_what_cannot_be_is_refused_by_its_name(name: str, field: str, value: object) -> None:
    make, sizes = MODELS[name]
    with pytest.raises(ValueError, match=f"^{field} is {value!r}, expected "):
        make(**{**sizes, field: value})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_can_be_is_made(name: str, dtype: str) -> None:
    make, sizes = MODELS[name]
    smallest = {} if name == "wide resnet" else {"sequence": 1, "vocab": 2}
    assert make(**{**sizes, **smallest, "dtype": dtype}).dtype == dtype
