"""Where the configs and the job scripts are: the folders of a checkout, or the data that the wheel carries inside alpa_hpc.

They are named `_conf` and `_jobs` in the wheel, so that nothing called `conf` or `jobs` lands in site-packages.
"""

from importlib.resources import files
from pathlib import Path

from alpa_hpc.errors import LaunchError


def config_folder() -> Path:
    """The folder of the shipped Hydra configs; LaunchError if the installation lacks it."""
    return _shipped("conf")


def job_script(name: str) -> Path:
    """The script of the job called `name` ("plan", "train", ...); LaunchError if there is none."""
    script = _shipped("jobs") / f"{name}.py"
    if not script.is_file():
        known = ", ".join(sorted(path.stem for path in script.parent.glob("*.py")))
        raise LaunchError(
            f"there is no job script {script}; the known jobs are {known or '(none)'}. Install alpa_hpc again if one is missing."
        )
    return script


def _shipped(name: str) -> Path:
    package = Path(str(files("alpa_hpc")))
    candidates = (package / f"_{name}", package.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise LaunchError(
        f"found neither {candidates[0]} (wheel) nor {candidates[1]} (checkout): install alpa_hpc again, or run it from its checkout"
    )
