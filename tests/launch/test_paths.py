"""A run's folder is unique, private and recognised; a stranger's is refused."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from alpa_hpc.errors import ConfigError, LaunchError, StoreError
from alpa_hpc.launch.files import read_json, write_json, write_text
from alpa_hpc.launch.paths import JobKind, RunPaths, new_run, open_run


def test_many_runs_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: new_run(tmp_path, "quickstart"), range(64)))
    assert len({run.root for run in runs}) == 64
    assert all(run.root.parent == tmp_path / "quickstart" for run in runs)
    assert all(run.root.stat().st_mode & 0o777 == 0o700 for run in runs)


def test_a_place_where_no_folder_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match=r"cannot make a run folder in .*/runs/demo .*runs=FOLDER"):
        new_run(tmp_path / "runs", "demo")


def test_a_run_is_found_again_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = new_run(Path("runs"), "demo")
    assert run.root.is_absolute()
    assert open_run(run.root.relative_to(tmp_path)) == run
    assert run.name == "demo"
    assert run.costs == tmp_path / "runs" / "costs"
    assert new_run(Path("runs"), "other").costs == run.costs, "one run reuses what another measured"


def test_all_files_of_a_run_are_different_and_inside_it(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    files = [run.marker, run.config, run.plan, run.planning, run.result, run.metrics]
    files += [run.status(kind, task) for kind in JobKind for task in ((0, 1) if kind is JobKind.PROFILE else (0,))]
    files += [run.profile_request(0), run.profile_request(1), run.profile_answer(0)]
    files += [
        run.training,
        run.submission_folder,
        run.failures(JobKind.TRAIN),
        run.failures(JobKind.PROFILE, 0),
        run.failures(JobKind.PROFILE, 1),
    ]
    files += [run.batch_log_folder(kind) for kind in (JobKind.PLAN, JobKind.PROFILE, JobKind.TRAIN)]
    assert len(set(files)) == len(files)
    assert all(file.is_relative_to(tmp_path) for file in files)
    assert run.status(JobKind.PROFILE, 3).name == "profile-0003.json"


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "costs", "a b"])
def test_names_that_are_no_folder_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a run folder"):
        new_run(tmp_path, name)


def test_what_is_no_run_of_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="no run folder"):
        open_run(tmp_path / "absent")
    with pytest.raises(StoreError, match=r"run\.json is not there"):
        open_run(tmp_path)
    write_json(tmp_path / "run.json", {"format": "alpa_hpc run", "version": 99})
    with pytest.raises(StoreError, match="99"):
        open_run(tmp_path)
    run = new_run(tmp_path, "demo")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(LaunchError, match="belongs to user"):
        open_run(run.root)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"a": [1, 2.5, None, "ä"]})
    assert read_json(path) == {"a": [1, 2.5, None, "ä"]}

    def full_disk(_: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StoreError, match="no space left"):
        write_text(path, "half of")
    assert read_json(path) == {"a": [1, 2.5, None, "ä"]}
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_a_torn_json_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for torn in (b'{"a": 1', b"", b"\xff\xfe"):
        path.write_bytes(torn)
        with pytest.raises(StoreError, match=r"plan\.json is not a JSON file"):
            read_json(path)
