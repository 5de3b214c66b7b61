"""A cluster and a request -> rows measured on its ranks -> a cluster config: the login side of a calibration, and one of its ranks.

Its ranks are started as those of a profiling task on the whole cluster are, by the same launcher and the same job script.
"""

import os
import sys
from pathlib import Path
from typing import Any

from alpa_hpc.calibration.clusters import cluster_text
from alpa_hpc.calibration.fit import Fit, fit_cluster
from alpa_hpc.calibration.request import (
    CalibrationRequest,
    calibrated_name,
    calibration_key,
    request_from_json,
    request_to_json,
)
from alpa_hpc.calibration.rows import Calibration, newest_calibration, write_calibration
from alpa_hpc.calibration.trials import trials_of
from alpa_hpc.cluster.hardware import MeshShape
from alpa_hpc.config import ExperimentConfig, load_config, write_config
from alpa_hpc.errors import LaunchError
from alpa_hpc.launch.devices import local_device
from alpa_hpc.launch.files import write_json, write_text
from alpa_hpc.launch.launchers import Launcher, noting_a_stop
from alpa_hpc.launch.outcome import Died, Ended, NotStarted
from alpa_hpc.launch.paths import RunPaths, calibrated_config, calibrations_folder, new_run
from alpa_hpc.launch.profiling import ProfileTask
from alpa_hpc.launch.site import site_environment
from alpa_hpc.launch.status import this_node
from alpa_hpc.parts import whole_cluster
from alpa_hpc.profiling.keys import software_versions

TASK = 0  # the only one of a calibration's run


def calibrate(config: ExperimentConfig, request: CalibrationRequest, launcher: Launcher, *, again: bool) -> tuple[Fit, Path]:
    """The fitted cluster and its config, beside the store of what was measured; measures only what is not there, or `again`.

    Raises:
        LaunchError: the ranks cannot be started, or have failed.
        StoreError: what they measured does not tell bandwidths, or the folder holds files that are not ours.
    """
    folder, key = calibrations_folder(config.runs), key_of(config, request)
    found = None if again else newest_calibration(folder, key)
    if found is None:
        _measure(config, request, key, launcher)
        found = newest_calibration(folder, key)
    if found is None:
        raise LaunchError(f"the ranks ended well, but no calibration is in {folder}: is it on a file system that all nodes see?")
    fit = fit_cluster(config.cluster, found.rows, calibrated_name(config.cluster.name))
    path = calibrated_config(config.runs, fit.cluster.name)
    write_text(path, cluster_text(fit.cluster, _origin_words(found)))
    return fit, path


def key_of(config: ExperimentConfig, request: CalibrationRequest) -> str:
    """The key of a calibration of the config's cluster on its site."""
    flags = site_environment(config.site, os.environ)["XLA_FLAGS"]
    return calibration_key(config.cluster, request, software_versions(), flags)


def calibrate_rank(paths: RunPaths, task: int, document: dict[str, Any]) -> None:
    """One rank; the first one writes what all have seen."""
    from alpa_hpc.calibration.measure import measure_trials
    from alpa_hpc.runtime.groups import join_mesh  # late, since it starts MPI: only ranks may

    config = load_config(paths.config)
    request, key = request_from_json(document, str(paths.profile_request(task)))
    cluster = config.cluster
    device = local_device(config.site, cluster, os.environ)
    context = join_mesh((tuple(range(cluster.num_devices)),), (MeshShape(cluster.num_devices, 1),), device)
    nodes = ",".join(dict.fromkeys(context.world.allgather(this_node())))
    rows = measure_trials(context, trials_of(cluster, request.sizes), request.repeats)
    if context.rank == 0:
        write_calibration(calibrations_folder(config.runs), Calibration(key, cluster.name, nodes, software_versions(), rows))


def _measure(config: ExperimentConfig, request: CalibrationRequest, key: str, launcher: Launcher) -> None:
    """Run the calibration as a task in a run folder of its own."""
    paths = new_run(config.runs, config.name)
    write_config(config, paths.config)
    write_json(paths.profile_request(TASK), request_to_json(request, key))
    sys.stderr.write(f"measuring {len(trials_of(config.cluster, request.sizes))} primitives; run folder: {paths.root}\n")
    with noting_a_stop(paths):
        outcome = launcher.profile(paths, [ProfileTask(TASK, whole_cluster(config), ())])[TASK]
    match outcome:
        case Ended():
            return
        case Died(reason) | NotStarted(reason):
            raise LaunchError(f"the calibration {reason}\nIts run folder is {paths.root}")


def _origin_words(calibration: Calibration) -> str:
    return f"measured by `python -m alpa_hpc calibrate cluster={calibration.cluster}` on {calibration.nodes}, with {calibration.versions}"
