"""`python -m alpa_hpc doctor [--site cuda|cpu] [--launcher local|slurm] [--runs FOLDER] [KEY=VALUE ...]` -> a table of checks, exit code.

For a machine that has never run alpa_hpc, a GPU node above all: each line says what is there, and where it is not, what to do.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from alpa_hpc.commands import checks
from alpa_hpc.commands.checks import Finding, Verdict
from alpa_hpc.config import compose_site
from alpa_hpc.launch.devices import visible_gpus
from alpa_hpc.launch.options import LauncherKind
from alpa_hpc.launch.site import Platform, SiteOptions

NAME_WIDTH, VERDICT_WIDTH = 18, 9


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table; `needs` are the checks without which it makes no sense."""

    name: str
    find: Callable[[], Finding]
    needs: tuple[str, ...] = ()


def main(arguments: Sequence[str]) -> int:
    """Make all checks and print them; 0 where all that is needed is well, else 1. ConfigError for overrides that cannot be."""
    asked = _parser().parse_args(arguments)
    overrides = (f"site={asked.site or _site_found(os.environ)}", *asked.overrides)
    site = compose_site(overrides)
    sys.stdout.write(f"site={site.platform.value}{'' if asked.site else ' (by what is visible here; choose by --site)'}\n")
    findings = run_checks(all_checks(site, overrides, asked.runs, os.environ))
    return exit_code(findings, slurm_needed=asked.launcher is LauncherKind.SLURM)


def all_checks(site: SiteOptions, overrides: Sequence[str], runs: Path, environ: Mapping[str, str]) -> tuple[Check, ...]:
    """The checks, the ones that explain the failures of others first."""
    gpus = (Check("GPUs", partial(checks.check_gpus, environ)),) if site.platform is Platform.CUDA else ()
    return (
        Check("Python", checks.check_python),
        Check("packages", partial(checks.check_packages, site)),
        *gpus,
        Check("devices", partial(checks.check_devices, site, environ), needs=("packages", *(gpu.name for gpu in gpus))),
        Check("MPI", partial(checks.check_mpi, environ)),
        Check("Slurm", partial(checks.check_slurm, environ)),
        Check("runs folder", partial(checks.check_folder, runs.absolute(), environ)),
        Check("compiled stage", partial(checks.check_stage, site, overrides, environ), needs=("devices",)),
        Check("one-rank training", partial(checks.check_training, overrides, environ), needs=("devices", "MPI", "compiled stage")),
    )


def run_checks(all_of_them: Sequence[Check]) -> dict[str, Finding]:
    """Make each check, and print it as soon as it is made."""
    findings: dict[str, Finding] = {}
    for check in all_of_them:
        missing = [name for name in check.needs if findings[name].verdict is not Verdict.OK]
        began = time.monotonic()
        findings[check.name] = Finding(Verdict.SKIPPED, f"needs: {', '.join(missing)}") if missing else check.find()
        sys.stdout.write(as_text(check.name, findings[check.name], time.monotonic() - began))
        sys.stdout.flush()
    return findings


def as_text(name: str, finding: Finding, seconds: float) -> str:
    """A check's line of the table, and below it what to do and the end of a log."""
    indent = " " * (NAME_WIDTH + VERDICT_WIDTH)
    lines = [f"{name:<{NAME_WIDTH}}{finding.verdict.value:<{VERDICT_WIDTH}}{finding.found} [{seconds:.1f} s]"]
    lines += [f"{indent}-> {finding.advice}"] if finding.advice else []
    lines += [f"{indent}|  {line}" for line in finding.details.splitlines()]
    return "\n".join(lines) + "\n"


def exit_code(findings: Mapping[str, Finding], *, slurm_needed: bool) -> int:
    """0 where nothing that is needed is missing. Slurm is needed by who says so."""
    lacking = [name for name, finding in findings.items() if finding.verdict in (Verdict.FAILED, Verdict.SKIPPED)]
    lacking += ["Slurm"] if slurm_needed and findings["Slurm"].verdict is Verdict.ABSENT else []
    sys.stdout.write(f"not ready: {', '.join(lacking)}\n" if lacking else "all that is needed is there\n")
    return 1 if lacking else 0


def _site_found(environ: Mapping[str, str]) -> str:
    return (Platform.CUDA if visible_gpus(environ) else Platform.CPU).value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m alpa_hpc doctor", description="Check what a run needs on this machine.")
    parser.add_argument(
        "--site", choices=[one.value for one in Platform], default="", help="what ranks compute on; default: what is visible"
    )
    parser.add_argument(
        "--launcher", type=LauncherKind, metavar="local|slurm", default=LauncherKind.LOCAL, help="slurm: Slurm is needed, too"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs, which all nodes must see")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as site.memory_fraction=0.5")
    return parser
