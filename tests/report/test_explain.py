"""A plan in words: its stages in a table, the bound, and why each other plan lost."""

from typing import Any

import pytest

from alpa_hpc.report.explain import STAGE_HEADERS, overview_lines, runner_up_lines, stage_table
from alpa_hpc.report.words import chosen_words, share_words, standing_words


def stage(first: int, stop: int, devices: int, *, measured: bool = False) -> dict[str, Any]:
    return {
        "layers": [first, stop],
        "submesh": [1, devices],
        "shape": [devices, 1],
        "remat": first == 0,
        "seconds_a_microbatch": 0.0125 * (stop - first),
        "measured": measured,
    }


def plan(seconds: float, stage_bytes: list[int], *, chosen: bool = False) -> dict[str, Any]:
    stages = [stage(0, 3, 2), stage(3, 4, 1, measured=True)]
    return {
        "chosen": chosen,
        "simulated_seconds": seconds,
        "objective_seconds": seconds,
        "stages": stages,
        "devices": [[0, 1], [2]],
        "stage_bytes": stage_bytes,
    }


PLANNING: dict[str, Any] = {
    "search": "megatron",
    "counts": {"candidates": 12, "candidates_priced": 5, "layers": 4},
    "num_microbatches": 8,
    "predicted_step_seconds": 0.5,
    "predicted_pflops": 0.25,
    "predicted_tflops_per_device": 83.3333,
    "objective_seconds": 0.51,
    "lower_bound_seconds": 0.5,
    "gap": 0.02,
    "stage_bytes": [8_000_000_000, 5_000_000],
    "memory_bytes": 10_000_000_000,
    "bubble_fractions": [0.1, 0.25],
    "device_kind": "v100",
    "num_nodes": 1,
    "devices_per_node": 3,
    "plans": [
        plan(0.6, [9_000_000_000, 100]),
        plan(0.5, [8_000_000_000, 5_000_000], chosen=True),
        plan(0.4, [100, 10_310_000_000]),
    ],
    "infeasible": [{"way": "dp1 tp1 pp3", "reason": "no partition fits: 5 bytes are missing", "missing_bytes": 5.0}],
    "not_measured": [{"label": "layers 0-2 on 2x1", "outcome": "failed", "reason": "out of device memory"}],
}


def test_the_plan_names_the_cluster_that_it_is_for() -> None:
    assert "predicted step 500.00 ms on the described cluster (1 x 3 v100)" in chosen_words(PLANNING)
    older = {name: value for name, value in PLANNING.items() if name not in ("num_nodes", "devices_per_node")}
    assert not any(line.startswith("cluster") for line in overview_lines(older))


def test_the_whole_plan_is_told_with_its_bound() -> None:
    text = "\n".join(overview_lines(PLANNING))
    assert "cluster     1 x 3 v100" in text
    assert "megatron: 12 candidates, 5 priced, 3 plans simulated" in text
    assert "number of stages: 2, of layers: 4, of devices: 3, of microbatches: 8" in text
    assert "500.00 ms simulated, 0.25 PFLOPS, 83.33 TFLOPS a device" in text
    assert "510.00 ms by Eq. 2, the objective that stages are searched by; it is at least 500.00 ms for every plan of this search" in text
    assert "(gap 2 %), and the simulated step may be less, since there transfers overlap with work" in text


def test_a_number_of_microbatches_that_was_chosen_is_told_with_what_the_others_give() -> None:
    tried = [(4, 0.75, ""), (8, 0.5, ""), (16, None, "Eq. 2 is at least 0.9 s for every plan"), (32, None, "out of memory")]
    rows = [{"num_microbatches": number, "simulated_seconds": seconds, "reason": reason} for number, seconds, reason in tried]
    text = "\n".join(overview_lines(PLANNING | {"microbatches": {"chosen": 8, "tried": rows}}))
    assert "of microbatches: 8, chosen from 4 numbers: 4 gives 750.00 ms, 2 have no plan, or none so fast\n" in text


def test_each_stage_has_its_layers_devices_time_and_memory() -> None:
    first, second = (dict(zip(STAGE_HEADERS, row, strict=True)) for row in stage_table(PLANNING))
    assert (first["layers"], first["devices"], first["of"], first["mesh"], first["backward"]) == ("0-2", "0-1", "1x2", "2x1", "remat")
    assert (first["a microbatch"], first["memory"], first["of the limit"], first["idle"]) == ("37.50 ms modelled", "8 GB", "80 %", "10 %")
    assert (second["layers"], second["devices"], second["backward"], second["a microbatch"]) == ("3", "2", "keeps", "12.50 ms")
    assert (second["memory"], second["of the limit"], second["idle"]) == ("5 MB", "0.05 %", "25 %")


def test_what_lost_is_told_with_its_reason_the_fastest_first() -> None:
    lines = [line.strip() for line in runner_up_lines(PLANNING)]
    words = "layers 0-2 on 1x2 as 2x1 remat | layer 3 on 1x1 as 1x1"
    assert lines == [
        f"400.00 ms  out of memory by 0.31 GB on stage 1: {words}",
        f"600.00 ms  slower by 20 %: {words}",
        "infeasible  dp1 tp1 pp3: no partition fits: 5 bytes are missing",
        "failed  layers 0-2 on 2x1: out of device memory",
    ]


@pytest.mark.parametrize(("share", "text"), [(1.4, "140 %"), (0.1, "10 %"), (0.0123, "1.2 %"), (0.0, "0 %"), (1e-6, "0.0001 %")])
def test_shares(share: float, text: str) -> None:
    assert share_words(share) == text


def test_a_plan_that_is_as_fast_is_slower_by_nothing() -> None:
    assert standing_words(plan(0.5, [1, 2]), PLANNING) == "slower by 0 %"
