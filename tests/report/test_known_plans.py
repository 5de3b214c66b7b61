"""A cache of plans is never in the way: what cannot be read is not known, what cannot be written is not kept."""

import os
from pathlib import Path

import pytest

from alpa_hpc.planner.microbatches import TriedNumber
from alpa_hpc.report.kept import key_of
from alpa_hpc.report.known_numbers import read_number, write_number
from alpa_hpc.report.known_plans import FoundPlan, read_known, write_known
from tests.plan.test_codec import PLAN

KEY = key_of(("a question",))
FOUND = FoundPlan(PLAN, {"gap": 0.01}, "/runs/demo/1")


def test_what_was_found_is_known(tmp_path: Path) -> None:
    assert read_known(tmp_path / "absent", KEY) is None
    write_known(tmp_path / "plans", KEY, FOUND)
    found = read_known(tmp_path / "plans", KEY)
    assert found is not None
    assert (found.plan, found.planning, found.searched_by) == (PLAN, FOUND.planning, FOUND.searched_by)
    assert read_known(tmp_path / "plans", key_of(("another",))) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"sha256": null}'])
def test_what_is_damaged_is_not_known(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{KEY}.json").write_bytes(content)
    assert read_known(tmp_path, KEY) is None


def test_any_changed_byte_makes_it_unknown(tmp_path: Path) -> None:
    write_known(tmp_path, KEY, FOUND)
    path = tmp_path / f"{KEY}.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 53):
        path.write_bytes(whole[:place] + b"7" + whole[place + 1 :])
        assert read_known(tmp_path, KEY) is None or whole[place : place + 1] == b"7", place


def test_what_may_not_be_read_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{KEY}.json").mkdir()
    assert read_known(tmp_path, KEY) is None
    write_known(tmp_path / "plans", KEY, FOUND)

    def refuse(path: Path, encoding: str = "") -> None:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "exists", refuse)  # a folder that this user may not enter does not even tell that
    assert read_known(tmp_path / "plans", KEY) is None


def test_where_it_cannot_be_kept_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plans").touch()
    write_known(tmp_path / "plans", KEY, FOUND)
    assert f"warning: nothing more is kept in {tmp_path}/plans (File exists)" in capsys.readouterr().err
    (tmp_path / "folder" / f"{KEY}.json").mkdir(parents=True)
    write_known(tmp_path / "folder", KEY, FOUND)
    assert f"warning: nothing more is kept in {tmp_path}/folder (Is a directory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tried", "is_kept"),
    [
        (TriedNumber(8, 1.25, 1.5), True),
        (TriedNumber(4, reason="0.5 GB a device are missing", missing_bytes=5e8), True),
        (TriedNumber(2, reason="no plan takes less than 3 s by Eq. 2"), False),
    ],
    ids=["plan", "memory", "given up"],
)
def test_numbers_searched_to_the_end_are_known(tmp_path: Path, tried: TriedNumber, is_kept: bool) -> None:
    write_number(tmp_path, KEY, tried)
    assert read_number(tmp_path, KEY) == (tried if is_kept else None)
    assert read_known(tmp_path, KEY) is None
    write_known(tmp_path, KEY, FOUND)
    assert read_number(tmp_path, KEY) is None
