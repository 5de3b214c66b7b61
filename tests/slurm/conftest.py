"""Fixtures on a real Slurm: `bed`, which a session shares, empty before each test, and `start_bed`, for a bed of a test's own."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.slurm.bed import Bed, missing_daemons, running

StartBed = Callable[..., Bed]


@pytest.fixture(scope="session")
def slurm_is_here() -> None:
    """Skip where Slurm is not installed, unless ALPA_HPC_REQUIRE_SLURM=1: then `cluster.sh up` installs it, or the test fails."""
    missing = missing_daemons()
    if missing and os.environ.get("ALPA_HPC_REQUIRE_SLURM") != "1":
        pytest.skip(f"no {', '.join(missing)} on this machine: apt-get install slurm-wlm munge (ALPA_HPC_REQUIRE_SLURM=1 does, as root)")


@pytest.fixture(scope="session")
def shared_bed(slurm_is_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Four idle nodes of 4 cores and 2 fake GPUs."""
    with running(tmp_path_factory.mktemp("bed")) as bed:
        yield bed


@pytest.fixture
def bed(shared_bed: Bed) -> Iterator[Bed]:
    """The bed of the session, for one test: its jobs end with it."""
    yield shared_bed
    shared_bed.leave_empty()


@pytest.fixture
def start_bed(slurm_is_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartBed]:
    """`start_bed(MAX_ARRAY_SIZE=4)` gives a bed with these knobs of cluster.sh (half a second), down when the test ends."""
    with ExitStack() as beds:

        def start(**knobs: str | int) -> Bed:
            state: Path = tmp_path_factory.mktemp("bed")
            return beds.enter_context(running(state, **knobs))

        yield start
