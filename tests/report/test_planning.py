"""What was to be measured and was not stands in planning.json, and a line of it in what is printed."""

from dataclasses import replace
from typing import Any

import pytest

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.plan.plan import StagePlan
from alpa_hpc.planner.evidence import NO_EVIDENCE, NotMeasured, Signature
from alpa_hpc.planner.refine import Refinement
from alpa_hpc.planner.requests import ProfileRequest
from alpa_hpc.profiling.options import Extent
from alpa_hpc.profiling.outcome import Failed, Unmeasured
from alpa_hpc.report.planning import iteration_flop, not_measured_rows, recomputed_share
from alpa_hpc.report.result import not_measured_line
from alpa_hpc.stages.cost_table import CostTable


def blank(label: str, outcome: Failed | Unmeasured) -> NotMeasured:
    stage = StagePlan(0, 1, Submesh(1, 1), MeshShape(1, 1), (), False, (0,))
    return NotMeasured(ProfileRequest("ab", label, Extent.MESH, stage, ()), outcome)


def refinement(*blanks: NotMeasured) -> Refinement:
    names = [Signature((), Submesh(1, 1), MeshShape(1, 1), False, number) for number in range(len(blanks))]
    evidence = replace(NO_EVIDENCE, not_measured=dict(zip(names, blanks, strict=True)))
    table = CostTable(1, {}, (0.0,))
    return Refinement(table, table, (), evidence, 1)


def test_each_request_stands_once_with_its_outcome():
    failed, none = blank("layers 0-2", Failed("out of device memory: 3 GB")), blank("layers 2-4", Unmeasured("no 4 nodes"))
    assert not_measured_rows(refinement(none, failed, failed)) == [
        {"label": "layers 0-2", "outcome": "failed", "reason": "out of device memory: 3 GB"},
        {"label": "layers 2-4", "outcome": "unmeasured", "reason": "no 4 nodes"},
    ]
    assert not_measured_rows(refinement()) == []


@pytest.mark.parametrize(
    ("outcomes", "text"),
    [
        (["failed"], "not measured: 1 failed and is in no plan; first: layers 0: why 0 (all in planning.json)"),
        (["unmeasured"] * 2, "not measured: 2 keep their analytic cost; first: layers 0: why 0 (all in planning.json)"),
        (
            ["failed", "failed", "unmeasured"],
            "not measured: 2 failed and are in no plan, 1 keeps its analytic cost; first: layers 0: why 0 (all in planning.json)",
        ),
    ],
)
def test_one_line_says_how_many_and_why_the_first(outcomes: list[str], text: str):
    rows = [{"label": f"layers {number}", "outcome": outcome, "reason": f"why {number}"} for number, outcome in enumerate(outcomes)]
    assert not_measured_line(rows) == text


class Formula:
    """A model that states what it recomputes."""

    def iteration_flops(self, batch_size: int, remat: bool) -> float:  # noqa: FBT001 - the formula's own switch
        return batch_size * (96.0 if remat else 72.0)


@pytest.mark.parametrize(("remat", "share", "flop"), [((False, False), 0, 144), ((True, False), 0.25, 156), ((True, True), 1, 192)])
def test_only_what_a_plan_recomputes_is_counted_twice(remat: tuple[bool, bool], share: float, flop: float):
    cuts = [(0, 1), (1, 3)]
    stages = [StagePlan(*cut, Submesh(1, 1), MeshShape(1, 1), (), again, (0,)) for cut, again in zip(cuts, remat, strict=True)]
    assert recomputed_share(stages, [10.0, 10.0, 20.0]) == share
    step: Any = None  # which is for the count alone
    assert iteration_flop(Formula(), step, 2, recomputed=share, count=lambda _: 7.0) == flop
    assert iteration_flop(object(), step, 2, recomputed=share, count=lambda _: 7.0) == 7.0
