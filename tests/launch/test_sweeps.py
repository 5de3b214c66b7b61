"""A sweep's folder tells how many runs there are to be, and which of them ended with an error of ours."""

from pathlib import Path

import pytest

from alpa_hpc.errors import ConfigError, InfeasibleError, LaunchError
from alpa_hpc.launch.paths import ALONE, Origin, new_run, run_origin
from alpa_hpc.launch.sweeps import SWEEPS, Refused, SweepPlace, as_part_of, find_sweep


def place(runs: Path, number: int, name: str = "20260101-000000-000001") -> SweepPlace:
    folder = runs / SWEEPS / name
    folder.mkdir(parents=True, exist_ok=True)
    return SweepPlace(folder, number, 3)


def test_errors_of_ours_are_noted_and_go_on_their_way(tmp_path: Path) -> None:
    with as_part_of(place(tmp_path, 0), ("a=1",)):
        pass
    for number, error in ((1, ConfigError("b is wrong")), (2, InfeasibleError("too large", 7.5))):
        with pytest.raises(type(error), match=str(error)), as_part_of(place(tmp_path, number), ("a=2", "b=x")):
            raise error
    found = find_sweep("", tmp_path)
    assert (found.id, found.total) == ("20260101-000000-000001", 3)
    assert found.refused == {1: Refused(("a=2", "b=x"), "b is wrong", 0.0), 2: Refused(("a=2", "b=x"), "too large", 7.5)}


def test_other_errors_are_no_affair_of_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), as_part_of(place(tmp_path, 0), ()):
        raise ZeroDivisionError
    assert find_sweep("", tmp_path).refused == {}


def test_a_sweep_is_meant_by_the_start_of_its_id_and_by_nothing_if_it_is_the_newest(tmp_path: Path) -> None:
    for name in ("20260101-000000-000001", "20260102-000000-000001"):
        with as_part_of(place(tmp_path, 0, name), ()):
            pass
    assert find_sweep("", tmp_path).id.startswith("20260102")
    assert find_sweep("20260101", tmp_path).id.startswith("20260101")
    with pytest.raises(LaunchError, match="'2026' is the start of 2 sweeps in .*20260102-000000-000001, 20260101"):
        find_sweep("2026", tmp_path)
    with pytest.raises(LaunchError, match="'9' is no sweep in .*the newest are: 20260102"):
        find_sweep("9", tmp_path)
    with pytest.raises(LaunchError, match="is no sweep in .*the newest are: none"):
        find_sweep("", tmp_path / "elsewhere")


def test_a_run_remembers_its_sweep(tmp_path: Path) -> None:
    origin = Origin(("a=1", "b=[2,3]"), "20260101-000000-000001", 4)
    assert run_origin(new_run(tmp_path, "demo", origin)) == origin
    assert run_origin(new_run(tmp_path, "demo")) == ALONE
