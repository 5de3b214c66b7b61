"""What of process groups needs no mpirun: the world's size, ports, addresses."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from alpa_hpc.errors import LaunchError
from alpa_hpc.runtime.groups import check_reachable, check_world, coordinator_host, let_helpers_wait, reserved_port


def test_a_process_alone_is_told_how_to_start() -> None:
    with pytest.raises(LaunchError, match=r"(?s)world has 1 ranks, the plan needs 3.*alone in its world.*mpirun -n 3 python"):
        check_world(1, ((0, 1), (2,)))
    check_world(3, ((2, 1), (0,)))


def test_ranks_must_be_shared_out_once_each() -> None:
    with pytest.raises(AssertionError, match="share out the ranks 0 to 2"):
        check_world(3, ((0, 1), (1,)))


def test_reserved_port_is_refused_to_others_and_open_to_the_coordinator() -> None:
    with reserved_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", port))
        with socket.socket(socket.AF_INET6) as coordinator:
            coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            coordinator.bind(("::", port))
            coordinator.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                coordinator.accept()[0].close()


def test_many_reserved_ports_differ() -> None:
    first, second, third = reserved_port(), reserved_port(), reserved_port()
    with first as one, second as two, third as three:
        assert len({one, two, three}) == 3


def test_one_node_meets_on_loopback_and_several_refuse_it() -> None:
    assert coordinator_host(["a", "a"]) == "127.0.0.1"
    assert check_reachable("10.0.0.7", ["a", "b"]) == "10.0.0.7"
    with pytest.raises(LaunchError, match=r"node a has only the loopback address 127.0.1.1 for a mesh over nodes \['a', 'b'\]"):
        check_reachable("127.0.1.1", ["a", "b"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this policy")
def test_threads_started_later_wait_where_each_rank_has_a_core() -> None:
    cores = len(os.sched_getaffinity(0))

    def policies(num_peers: int) -> tuple[int, int]:
        let_helpers_wait(num_peers)
        with ThreadPoolExecutor(1) as later:
            return os.sched_getscheduler(0), later.submit(os.sched_getscheduler, 0).result()

    for num_peers, expected in ((cores, os.SCHED_BATCH), (cores + 1, os.sched_getscheduler(0))):
        with ThreadPoolExecutor(1) as rank:  # the policy is a thread's own: this test's stays
            assert rank.submit(policies, num_peers).result() == (expected, expected)


def test_where_the_kernel_forbids_the_policy_ranks_start_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    before = os.sched_getscheduler(0)
    let_helpers_wait(1)
    assert os.sched_getscheduler(0) == before
