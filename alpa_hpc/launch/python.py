"""This process's interpreter -> the command that starts it in a job, where it must import what this one imports."""

import os
import shlex
import sys
import sysconfig
from pathlib import Path


def job_python() -> str:
    """The interpreter for a job: it imports what this process imports, alpa_hpc and a user's model alike, whatever the working folder."""
    # -P: else `python -m` would look into the working folder before all of them.
    return shlex.join(("env", f"PYTHONPATH={os.pathsep.join(import_folders())}", sys.executable, "-P"))


def import_folders() -> tuple[str, ...]:
    """This process's own additions to the interpreter's module path, absolute: the checkout, the working folder, PYTHONPATH."""
    package_root = str(Path(__file__).absolute().parents[2])
    working = str(Path.cwd())
    installed = package_root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    folders = [] if installed else [package_root]
    folders += [working] if working in sys.path or "" in sys.path else []
    folders += [str(Path(folder).absolute()) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return tuple(dict.fromkeys(folders))
