"""A file is whole or absent; where it cannot be written, read or looked for, its name and the reason are told."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from alpa_hpc.errors import ConfigError, StoreError
from alpa_hpc.launch.files import fields_of, is_there, read_json, write_json, write_text
from alpa_hpc.launch.paths import new_run


def refusing(number: int) -> Any:
    def refuse(*_arguments: Any, **_more: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_on_a_full_disk_the_old_file_stays_and_the_new_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
    with pytest.raises(StoreError, match=r"plan\.json cannot be written \(No space left on device\): is the disk full"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


def test_where_no_folder_is_the_name_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere/plan\.json cannot be written \(No such file or directory\)"):
        write_text(tmp_path / "nowhere" / "plan.json", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match=r"folder cannot be read \(Is a directory\)"):
        read_json(tmp_path / "folder")


def test_what_may_not_be_looked_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_there(tmp_path) and not is_there(tmp_path / "nothing")
    monkeypatch.setattr(Path, "exists", refusing(errno.EACCES))
    with pytest.raises(StoreError, match=r"file cannot be looked for \(Permission denied\)"):
        is_there(tmp_path / "file")


def test_a_run_folder_that_cannot_be_made_whole_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Path.mkdir

    def full(path: Path, *arguments: Any, **more: Any) -> None:
        (refusing(errno.ENOSPC) if path.name == "logs" else made)(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ConfigError, match=r"cannot make a run folder in .* \(No space left on device\).*runs=FOLDER"):
        new_run(tmp_path, "demo")


@pytest.mark.parametrize("document", [{}, [], None, 5, {"a": "x"}])
def test_fields_that_lack_are_told_with_their_file(document: Any) -> None:
    with (
        pytest.raises(StoreError, match=r"runs/result\.json lacks or garbles a field .* another version"),
        fields_of(Path("runs/result.json")),
    ):
        int(document["a"])
