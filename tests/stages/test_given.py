"""Stages in words: what is printed of a plan is read back as the same stages, and words that are no stage are refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_hpc.cluster.hardware import MeshShape, Submesh
from alpa_hpc.errors import ConfigError
from alpa_hpc.report.planning import stage_rows
from alpa_hpc.report.words import stage_words
from alpa_hpc.stages.candidate import StageCandidate
from alpa_hpc.stages.cost_table import StageOption
from alpa_hpc.stages.given import parse_stage
from alpa_hpc.stages.objective import StageChoice, StagePartition


def printed(stage: StageCandidate) -> str:
    option = StageOption(stage.shape, stage.remat, 0, 1.0, 0.0, 0.0, 0.0, 0.0, measured=False)
    [row] = stage_rows(StagePartition((StageChoice(stage.start, stage.stop, stage.submesh, option),), 1.0, 1.0))
    return stage_words(row)


@given(st.integers(0, 50), st.integers(1, 50), st.sampled_from([(1, 1), (1, 8), (2, 4), (16, 12)]), st.booleans(), st.data())
def test_what_is_printed_is_read_back(start: int, length: int, size: tuple[int, int], remat: bool, data: st.DataObject) -> None:
    devices = size[0] * size[1]
    rows = data.draw(st.sampled_from([rows for rows in range(1, devices + 1) if devices % rows == 0]))
    stage = StageCandidate(start, start + length, Submesh(*size), MeshShape(rows, devices // rows), remat)
    assert parse_stage(printed(stage)) == stage
    assert parse_stage("  " + printed(stage).replace(" ", "   ")) == stage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "is no stage: say it as a plan is printed"),
        ("layers 0-1 on 4 as 2x2", "is no stage"),
        ("layers 0-1 on 1x4 as 2x2 recomputed", "is no stage"),
        ("layers 0-1 on 1x4", "is no stage"),
        ("layers -1-1 on 1x4 as 2x2", "is no stage"),
        ("layers 3-1 on 1x4 as 2x2", "ends before it starts"),
        ("layer 0 on 1x4 as 2x4", "has 4 devices and sees them as 2 x 4 = 8"),
        ("layer 0 on 0x4 as 0x4", "at least one"),
    ],
)
def test_what_is_no_stage_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_stage(words)


def test_one_layer_may_be_said_in_two_ways() -> None:
    ways = ["layer 3 on 1x2 as 2x1", "layers 3-3 on 1x2 as 2x1", "layers 3 on 1x2 as 2x1"]
    assert all(parse_stage(a) == parse_stage(b) for a, b in itertools.pairwise(ways))
