"""The cost store survives what clusters do to files: concurrent tasks, killed writers, damage, strangers, two compactions."""

import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_hpc.errors import StoreError
from alpa_hpc.profiling import lock, store
from alpa_hpc.profiling.lock import holding_lock
from alpa_hpc.profiling.store import ProfileRow, compact, compact_when_many, median_seconds, read_store, relative_spread, write_shard

SPAWN = multiprocessing.get_context("spawn")


def make_row(key: str, time_unix: float = 1.0, seconds: float = 0.25) -> ProfileRow:
    return ProfileRow(
        key=key,
        stage="layers 2-4 on (1, 4) of 1x4",
        seconds_forward=(seconds, seconds * 1.5),
        seconds_backward=(2 * seconds,),
        seconds_update=(0.0, 0.125, 0.5),
        compile_seconds=1.5,
        host="node7",
        pid=17,
        time_unix=time_unix,
        device_kind="cpu",
        versions="jax 0.10.2, jaxlib 0.10.2",
        nodes="node7,node8",
        num_devices=4,
    )


def write_some(folder: Path, writer: int) -> None:
    for shard in range(3):
        write_shard(folder, tuple(make_row(f"w{writer}s{shard}r{row}") for row in range(4)))


def write_and_compact(folder: Path, writer: int) -> None:
    for shard in range(6):
        write_shard(folder, (make_row(f"c{writer}s{shard}"),))
        compact(folder)
        assert f"c{writer}s{shard}" in read_store(folder).rows, "a row is readable as soon as it is written, whoever compacts"


def run_processes(target: object, folder: Path, count: int) -> None:
    processes = [SPAWN.Process(target=target, args=(folder, number)) for number in range(count)]  # pyright: ignore[reportArgumentType]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    rows = {row.key: row for row in (make_row("a"), replace(make_row("b"), stage="Schicht ä", device_kind=""))}
    write_shard(tmp_path, tuple(rows.values()))
    assert read_store(tmp_path).rows == rows
    assert read_store(tmp_path / "absent").rows == {}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.floats(0, 9)), min_size=1, max_size=6))
def test_the_newest_row_wins_in_whatever_order_files_are_read(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[str, int, float]]
) -> None:
    contents = []
    for order in (written, written[::-1]):
        folder = tmp_path_factory.mktemp("store")
        for key, time_unix, seconds in order:
            write_shard(folder, (make_row(key, time_unix, seconds),))
        contents.append(read_store(folder).rows)
        compact(folder)
        assert read_store(folder).rows == contents[0]
    assert contents[0] == contents[1]
    for key, row in contents[0].items():
        assert row.time_unix == max(time for k, time, _ in written if k == key)


def test_six_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    run_processes(write_some, tmp_path, 6)
    contents = read_store(tmp_path)
    assert contents.torn == ()
    assert sorted(contents.rows) == sorted(f"w{w}s{s}r{r}" for w in range(6) for s in range(3) for r in range(4))


def test_compacting_and_writing_at_once_lose_nothing(tmp_path: Path) -> None:
    run_processes(write_and_compact, tmp_path, 3)
    assert sorted(read_store(tmp_path).rows) == sorted(f"c{w}s{s}" for w in range(3) for s in range(6))
    compact(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1, "one shard, no lock, no temporary file"
    assert len(read_store(tmp_path).rows) == 18


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from alpa_hpc.profiling import store
sys.path.insert(0, sys.argv[2])
from test_store import make_row
folder = Path(sys.argv[1])
for shard in range(2):
    store.write_shard(folder, [make_row(f"s{shard}r{row}") for row in range(10)])
sizes = [path.stat().st_size for path in folder.iterdir()]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in range(1000, sum(sizes), 4000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        store.compact(folder)
    except OSError:
        pass
    else:
        assert len(list(folder.iterdir())) == 1, "all is in one shard"
"""


def test_a_compaction_on_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """HDF5 itself reports success there, now and then, and leaves half a file."""
    environment = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[2])}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(Path(__file__).parent)]
    subprocess.run(command, check=True, env=environment, timeout=60)
    assert len(read_store(tmp_path).rows) == 20
    assert read_store(tmp_path).torn == ()


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from alpa_hpc.profiling import store
sys.path.insert(0, sys.argv[2])
from test_store import make_row
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
store.write_shard(Path(sys.argv[1]), (make_row("killed"),))
"""


def test_a_killed_writer_leaves_only_a_temporary_name(tmp_path: Path) -> None:
    write_shard(tmp_path, (make_row("kept"),))
    environment = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[2])}
    folder = str(Path(__file__).parent)
    killed = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path), folder], check=False, env=environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".writing-")]
    assert len(left) == 1
    assert list(read_store(tmp_path).rows) == ["kept"]
    assert read_store(tmp_path).torn == ()

    alive = tmp_path / f".writing-{socket.gethostname()}-{os.getpid()}-00"
    alive.touch()
    compact(tmp_path)
    assert not left[0].exists()
    assert alive.exists(), "a writer that lives keeps its file"


def unsealed(shard: Path) -> Path:
    """A shard under a name that does not tell what its bytes are, as those of older versions are called."""
    return shard.rename(shard.with_name("shard-node7-17-abc.h5"))


@pytest.mark.parametrize("named", [Path, unsealed])
@pytest.mark.parametrize("damage", ["truncated", "empty", "zeros", "flipped"])
def test_a_damaged_shard_counts_as_missing_and_is_set_aside(tmp_path: Path, damage: str, named: Callable[[Path], Path]) -> None:
    write_shard(tmp_path, (make_row("kept"),))
    shard = named(write_shard(tmp_path, (make_row("lost", seconds=0.111),)))
    whole = shard.read_bytes()
    match damage:
        case "truncated":
            shard.write_bytes(whole[: len(whole) // 2])
        case "empty":
            shard.write_bytes(b"")
        case "zeros":
            shard.write_bytes(bytes(len(whole)))
        case _:
            with h5py.File(shard, "r+") as file:
                file["lost/seconds_forward"][0] = 0.112  # pyright: ignore[reportIndexIssue]
    contents = read_store(tmp_path)
    assert list(contents.rows) == ["kept"]
    assert [torn.path for torn in contents.torn] == [shard]
    assert contents.torn[0].reason
    compact(tmp_path)
    assert read_store(tmp_path).torn == ()
    assert shard.with_suffix(".torn").exists()


@pytest.mark.parametrize("named", [Path, unsealed])
def test_every_truncation_is_noticed(tmp_path: Path, named: Callable[[Path], Path]) -> None:
    shard = named(write_shard(tmp_path, (make_row("lost"),)))
    whole = shard.read_bytes()
    for length in range(8, len(whole), 97):
        shard.write_bytes(whole[:length])
        contents = read_store(tmp_path)
        assert contents.rows == {}, length
        assert len(contents.torn) == 1, length


def test_bytes_that_a_disk_has_changed_are_noticed_before_hdf5_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some of them the library ends the process."""
    shard = write_shard(tmp_path, (make_row("lost"),))
    whole = shard.read_bytes()
    monkeypatch.setattr(h5py, "File", None)
    for place in range(0, len(whole), 101):
        shard.write_bytes(bytes((*whole[:place], whole[place] ^ 0x55, *whole[place + 1 :])))
        contents = read_store(tmp_path)
        assert [torn.path for torn in contents.torn] == [shard], place


def test_a_shard_that_may_not_be_read_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_shard(tmp_path, (make_row("a"),))

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreError, match=rf"{shard.name} is a shard that this user may not read"):
        read_store(tmp_path)


def test_a_strangers_file_is_refused_by_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(StoreError, match=r"theirs\.h5.*somebody else"):
        read_store(tmp_path)
    (tmp_path / "theirs.h5").write_text("key,seconds\n")
    with pytest.raises(StoreError, match=r"theirs\.h5.*no HDF5 file"):
        read_store(tmp_path)
    with pytest.raises(StoreError, match=r"theirs\.h5"):
        compact(tmp_path)
    assert (tmp_path / "theirs.h5").exists()
    (tmp_path / "theirs.h5").unlink()
    (tmp_path / "theirs.h5").mkdir()
    with pytest.raises(StoreError, match=r"theirs\.h5 is a folder"):
        read_store(tmp_path)
    assert not (tmp_path / "compaction.lock").exists(), "a refused compaction gives its lock back"


def test_another_version_is_refused(tmp_path: Path) -> None:
    with h5py.File(unsealed(write_shard(tmp_path, (make_row("a"),))), "r+") as file:
        file.attrs["version"] = 99
    with pytest.raises(StoreError, match="version 99.*expected at most 2"):
        read_store(tmp_path)


def as_version_1(shard: Path) -> None:
    """Make a shard what the first version wrote: rows without nodes and num_devices."""
    with h5py.File(shard, "r+") as file:
        found = []
        for key, group in file.items():
            del group.attrs["nodes"], group.attrs["num_devices"]
            found.append(store._read_fields(key, group))
        file.attrs["version"] = 1
        file.attrs["sha256"] = store._digest(found)


def test_rows_of_version_1_are_read_and_compacted(tmp_path: Path) -> None:
    as_version_1(unsealed(write_shard(tmp_path, (make_row("old"),))))
    write_shard(tmp_path, (make_row("new"),))
    rows = {"new": make_row("new"), "old": replace(make_row("old"), nodes="", num_devices=1)}
    assert read_store(tmp_path).rows == rows
    assert compact(tmp_path) == 2
    assert read_store(tmp_path).rows == rows


def test_a_store_is_compacted_when_it_has_many_shards(tmp_path: Path) -> None:
    assert compact_when_many(tmp_path / "absent") == 0
    for key in "abc":
        write_shard(tmp_path, (make_row(key),))
    assert compact_when_many(tmp_path, 3) == 0
    write_shard(tmp_path, (make_row("d"),))
    assert compact_when_many(tmp_path, 3) == 4
    assert len(list(tmp_path.glob("*.h5"))) == 1
    assert sorted(read_store(tmp_path).rows) == ["a", "b", "c", "d"]


def test_a_lock_is_respected_while_its_owner_lives_and_broken_after(tmp_path: Path) -> None:
    for key in "ab":
        write_shard(tmp_path, (make_row(key),))
    path = tmp_path / "compaction.lock"
    path.write_text(f'{{"host": "{socket.gethostname()}", "pid": {os.getpid()}}}')
    assert compact(tmp_path) == 0
    assert path.exists()
    dead = subprocess.Popen(["true"])
    dead.wait()
    path.write_text(f'{{"host": "{socket.gethostname()}", "pid": {dead.pid}}}')
    assert compact(tmp_path) == 2
    assert not path.exists()
    assert sorted(read_store(tmp_path).rows) == ["a", "b"]


def test_the_lock_of_another_host_is_broken_only_when_old(tmp_path: Path) -> None:
    for key in "ab":
        write_shard(tmp_path, (make_row(key),))
    path = tmp_path / "compaction.lock"
    path.write_text('{"host": "elsewhere", "pid": 1}')
    assert compact(tmp_path) == 0
    os.utime(path, (1, 1))
    assert compact(tmp_path) == 2


@pytest.mark.parametrize("owner", ["[]", "7", "{}", "\xff", '{"host": "HERE", "pid": 1e999}', '{"host": "HERE", "pid": "x"}', "a folder"])
def test_a_lock_that_names_nobody_holds_until_it_is_old(tmp_path: Path, owner: str) -> None:
    for key in "ab":
        write_shard(tmp_path, (make_row(key),))
    path = tmp_path / "compaction.lock"
    if owner == "a folder":
        path.mkdir()
    else:
        path.write_bytes(owner.replace("HERE", socket.gethostname()).encode("latin-1"))
    assert compact(tmp_path) == 0
    os.utime(path, (1, 1))
    assert compact(tmp_path) == 2


def test_an_old_lock_holds_while_its_owner_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.0)  # all files are old now
    path = tmp_path / "compaction.lock"
    path.write_text(f'{{"host": "{socket.gethostname()}", "pid": {os.getpid()}}}')
    with holding_lock(path) as is_mine:
        assert not is_mine
    path.write_text('{"host": "elsewhere", "pid": 1}')
    with holding_lock(path) as is_mine:
        assert is_mine, "of another host's process only the age can be told"


def test_an_old_lock_is_broken_though_a_process_of_its_number_lives(tmp_path: Path) -> None:
    for key in "ab":
        write_shard(tmp_path, (make_row(key),))
    path = tmp_path / "compaction.lock"
    path.write_text(f'{{"host": "{socket.gethostname()}", "pid": {os.getpid()}}}')
    os.utime(path, (1, 1))
    assert compact(tmp_path) == 2


def test_files_that_no_writer_of_ours_left_stay(tmp_path: Path) -> None:
    names = {".writing-", ".writing-note", ".writing-host-x-y", f".writing-{socket.gethostname()}-{1 << 40}-ab"}
    for name in names:
        (tmp_path / name).touch()
    for key in "ab":
        write_shard(tmp_path, (make_row(key),))
    assert compact(tmp_path) == 2
    assert {path.name for path in tmp_path.glob(".writing-*")} == names


def test_rows_that_are_no_measurement_are_refused() -> None:
    for wrong in ((), (-1.0,), (float("nan"),)):
        with pytest.raises(ValueError, match="seconds_backward"):
            replace(make_row("a"), seconds_backward=wrong)


def test_median_and_spread() -> None:
    assert median_seconds((3.0, 1.0, 2.0)) == 2.0
    assert relative_spread((3.0, 1.0, 2.0)) == 1.0
    assert relative_spread((2.0, 2.0)) == 0.0
    assert relative_spread((0.0,)) == 0.0


def test_files_say_their_units(tmp_path: Path) -> None:
    with h5py.File(write_shard(tmp_path, (make_row("a"),)), "r") as file:
        assert file["a/seconds_forward"].attrs["unit"] == "seconds"
        assert "seconds since 1970" in str(file.attrs["unit"])
