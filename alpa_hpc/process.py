"""(process number, when its job said so) -> whether that very process still runs on this machine, and a way to ask it to stop."""

import os
import signal
import time
from pathlib import Path

CLOCK_SECONDS = 60.0  # clocks get set; and the number of a process that ended as shortly ago as this is not given to another yet


def is_running(pid: int, since: float) -> bool:
    """Whether process `pid`, which ran at `since` (seconds since 1970), still does; another one of the same number does not count."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # a process that we may not ask is another user's, who got the number later
        return False
    return not is_dead_or_younger(pid, since)


def ask_to_stop(pid: int, since: float) -> bool:
    """Send SIGTERM to that very process; False if it does not run any more."""
    if not is_running(pid, since):
        return False
    os.kill(pid, signal.SIGTERM)
    return True


def is_dead_or_younger(pid: int, since: float) -> bool | None:
    """Whether the process is a zombie or began after `since` (seconds since 1970); None where the system does not say (no /proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        seconds_up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return None
    began = time.time() - seconds_up + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] == "Z" or began > since + CLOCK_SECONDS
