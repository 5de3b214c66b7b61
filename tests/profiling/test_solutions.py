"""Solved runs come back as they were written, from however many shards; damage and strangers count as missing."""

from pathlib import Path

import h5py
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.profiling.solutions import MOST_SHARDS, read_solutions, write_solutions
from alpa_hpc.sharding.build import SpecSpace
from alpa_hpc.sharding.solved import Solved, StageValue

NUMBERS = st.floats(0, allow_nan=False)
KEYS = st.text("0123456789abcdef", min_size=32, max_size=32)
ROWS = st.dictionaries(KEYS, st.builds(Solved, st.builds(StageValue, NUMBERS, NUMBERS, NUMBERS), st.sampled_from(SpecSpace)), max_size=5)


def row(number: int) -> dict[str, Solved]:
    return {f"{number:032x}": Solved(StageValue(number + 0.1, 2.0, 3.0), SpecSpace.FULL)}


@settings(max_examples=25, deadline=None)
@given(st.lists(ROWS, max_size=4))
def test_rows_come_back_as_written(tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, Solved]]) -> None:
    folder = tmp_path_factory.mktemp("store")
    expected: dict[str, Solved] = {}
    for rows in written:
        fresh = {key: one for key, one in rows.items() if key not in expected}
        write_solutions(folder, fresh)
        expected |= fresh
    assert read_solutions(folder) == expected


def test_an_absent_store_knows_nothing(tmp_path: Path) -> None:
    assert read_solutions(tmp_path / "absent") == {}


def test_many_shards_become_one_and_lose_nothing(tmp_path: Path) -> None:
    for number in range(MOST_SHARDS + 3):
        write_solutions(tmp_path, row(number))
    assert len(list(tmp_path.glob("*.h5"))) == 3
    assert len(read_solutions(tmp_path)) == MOST_SHARDS + 3


@pytest.mark.parametrize("name", ["", "shard-node7-17-abc.h5"])
@pytest.mark.parametrize("damage", ["cut", "changed", "foreign", "empty"])
def test_damage_counts_as_missing_and_goes_with_the_next_compaction(tmp_path: Path, damage: str, name: str) -> None:
    write_solutions(tmp_path, row(1))
    (shard,) = tmp_path.glob("*.h5")
    shard = shard.rename(tmp_path / (name or shard.name))  # those of older versions do not tell what their bytes are
    match damage:
        case "cut":
            shard.write_bytes(shard.read_bytes()[:-200])
        case "changed":
            with h5py.File(shard, "r+") as file:
                seconds = file["seconds"]
                assert isinstance(seconds, h5py.Dataset)
                seconds[0] = 7.0
        case "foreign":
            with h5py.File(shard, "w") as file:
                file.attrs["format"] = "another"
        case _:
            shard.write_bytes(b"")
    write_solutions(tmp_path, row(2))
    assert read_solutions(tmp_path) == row(2)
    for number in range(3, MOST_SHARDS + 3):
        write_solutions(tmp_path, row(number))
    assert not shard.exists()
    assert len(read_solutions(tmp_path)) == MOST_SHARDS + 1


def test_strangers_among_the_shards_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder.h5").mkdir()
    (tmp_path / "link.h5").symlink_to(tmp_path / "nothing")
    for number in range(MOST_SHARDS + 1):
        write_solutions(tmp_path, row(number))
    assert len(read_solutions(tmp_path)) == MOST_SHARDS + 1
    assert len([path for path in tmp_path.glob("shard-*.h5") if path.is_file()]) < MOST_SHARDS, "they were compacted"


def test_where_it_cannot_be_kept_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "solutions").touch()
    write_solutions(tmp_path / "solutions", row(1))
    assert f"warning: nothing more is kept in {tmp_path}/solutions (File exists)" in capsys.readouterr().err
    assert read_solutions(tmp_path / "solutions") == {}
