"""`python -m alpa_hpc calibrate cluster=NAME [KEY=VALUE ...] [--again] [--quick] [--repeats N]` -> cluster=NAME_calibrated.

Times collectives, messages, matrix products and passes over memory once on the cluster's real ranks (launcher=local or slurm), keeps every
row in RUNS/calibrations, and fits the constants of the cost model to them. A second call measures nothing, unless --again says so.

Exit status: 0 the cluster is calibrated, 2 it could not be.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alpa_hpc.commands.text import write_table
from alpa_hpc.config import ExperimentConfig, compose_calibration
from alpa_hpc.errors import ConfigError
from alpa_hpc.launch.arguments import check_own_configs
from alpa_hpc.launch.options import LauncherKind
from alpa_hpc.launch.site import Platform
from alpa_hpc.units import bytes_words

if TYPE_CHECKING:
    from alpa_hpc.calibration.fit import Fit  # it needs jax, which --help and a wrong name do not
    from alpa_hpc.calibration.request import CalibrationRequest

REPEATS = 15
MOST_UNREST = 0.15
HEADERS = ("primitive", "rows", "predicted / measured: least", "median", "most")


def main(arguments: Sequence[str]) -> int:
    """Calibrate a cluster, and print what came of it."""
    asked = _parser().parse_intermixed_args(arguments)
    check_own_configs(asked.overrides, [asked.config_dir] if asked.config_dir else [])
    config = checked(compose_calibration((*own_configs(asked.config_dir), *asked.overrides)))
    from alpa_hpc.calibrate_job import calibrate
    from alpa_hpc.experiment import launcher_for

    request, launcher = request_for(config, asked.repeats, quick=asked.quick), launcher_for(config)
    launcher.check()
    fit, path = calibrate(config, request, launcher, again=asked.again)
    write_fit(fit, path)
    return 0


def own_configs(folder: Path | None) -> tuple[str, ...]:
    """What has Hydra look for configs in a folder of one's own, too: what --config-dir does for a run. ConfigError if it is none."""
    if folder is None:
        return ()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder} is not a folder, expected one with groups of configs, such as {folder}/cluster/mine.yaml")
    return (f"hydra.searchpath=['file://{folder.absolute()}']",)


def checked(config: ExperimentConfig) -> ExperimentConfig:
    """`config` itself, unless its cluster or launcher cannot be calibrated."""
    from alpa_hpc.calibration.request import CALIBRATED, is_calibrated

    name = config.cluster.name
    if is_calibrated(name):
        raise ConfigError(
            f"cluster {name!r} was calibrated already: name the one that it came from, cluster={name.removesuffix(CALIBRATED)}"
        )
    if config.launcher.kind is LauncherKind.INPROCESS:
        raise ConfigError("launcher=inprocess starts no ranks, and links between ranks are to be measured: use launcher=local or slurm")
    return config


def request_for(config: ExperimentConfig, repeats: int, *, quick: bool) -> "CalibrationRequest":
    """What is measured on the config's devices."""
    from alpa_hpc.calibration.request import CalibrationRequest
    from alpa_hpc.calibration.trials import CPU_SIZES, GPU_SIZES, QUICK_SIZES

    sizes = GPU_SIZES if config.site.platform is Platform.CUDA else CPU_SIZES
    return CalibrationRequest(QUICK_SIZES if quick else sizes, repeats)


def write_fit(fit: "Fit", path: Path) -> None:
    """Print a fitted cluster for a person."""
    cluster, device = fit.cluster, fit.cluster.device
    rows = [(one.label, str(one.num_rows), *(f"{ratio:.2f}" for ratio in (one.least, one.middle, one.largest))) for one in fit.agreement]
    write_table(HEADERS, rows, sys.stdout)
    links = ((name, link) for name, link in (("inside a node", cluster.intra_node), ("between nodes", cluster.inter_node)))
    lines = [f"{name:14} {bytes_words(link.bandwidth)}/s, {link.latency * 1e6:.5g} us" for name, link in links]
    lines[1] += ", as described: there is no second node" if cluster.num_nodes == 1 else ""
    rates = f"{device.flops_32bit / 1e9:.4g} GFLOP/s at best (16 bits: {device.flops_16bit / 1e9:.4g})"
    lines.append(f"{'a device':14} {rates}, {device.efficiency:.0%} of it on the whole, {bytes_words(device.memory_bandwidth)}/s of memory")
    if fit.unrest > MOST_UNREST:
        lines.append(f"repeats of one primitive differ by {fit.unrest:.0%}: other work disturbed them; measure --again when it is over")
    sys.stdout.write("\n".join(("", *lines, f"cluster={cluster.name} is {path}")) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m alpa_hpc calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="cluster=NAME, and others such as launcher=slurm or runs=FOLDER")
    parser.add_argument(
        "--config-dir", "-cd", type=Path, metavar="FOLDER", help="a folder of your own whose cluster/ has the config NAME, too"
    )
    parser.add_argument("--again", action="store_true", help="measure, whatever is known")
    parser.add_argument("--quick", action="store_true", help="small sizes alone: to try it out, no basis for a plan")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"timed runs of each primitive (default: {REPEATS})")
    return parser
