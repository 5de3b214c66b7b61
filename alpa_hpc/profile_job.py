"""A request file of a run -> rows of the cost store: the profiling task as a batch job, as one of its ranks, or inside another process."""

import os

import jax

from alpa_hpc.calibrate_job import calibrate_rank
from alpa_hpc.calibration.request import is_calibration
from alpa_hpc.launch.devices import check_devices_here, local_device
from alpa_hpc.launch.failures import explained_by_ranks
from alpa_hpc.launch.files import read_json
from alpa_hpc.launch.locations import job_script
from alpa_hpc.launch.mpirun import run_ranks
from alpa_hpc.launch.paths import JobKind, RunPaths
from alpa_hpc.launch.profiling import measure_all
from alpa_hpc.launch.site import use_site
from alpa_hpc.launch.status import reporting, this_node
from alpa_hpc.parts import config_of_run, cost_store, prepared, ranks_on, whole_cluster
from alpa_hpc.planner.requests import ProfileRequest, requests_from_json
from alpa_hpc.planner.timing import joined_rows, measure_here, measure_request_on_mesh
from alpa_hpc.profiling.outcome import Failed, explain_failure
from alpa_hpc.profiling.store import ProfileRow


def profile_run(paths: RunPaths, task: int) -> None:
    """A profiling task: time the stages of its request file, on this process's device or with a rank on each device of their mesh.

    A request file may also ask for a calibration, which takes a rank on each device of the cluster.
    """
    config, to_calibrate = config_of_run(paths), is_calibration(read_json(paths.profile_request(task)))
    submesh = whole_cluster(config) if to_calibrate else profile_requests(paths, task)[0].submesh
    if submesh.num_devices == 1 and not to_calibrate:
        profile_alone(paths, task)
        return
    with explained_by_ranks(paths.failures(JobKind.PROFILE, task)):
        run_ranks(ranks_on(config, submesh), (str(job_script("profile_rank")), str(paths.root), str(task)), os.environ)


def profile_here(paths: RunPaths, task: int) -> None:
    """A profiling task in this process, which reports as a job of its own would."""
    with reporting(paths, JobKind.PROFILE, task):
        profile_alone(paths, task)


def profile_alone(paths: RunPaths, task: int) -> None:
    """Time the stages of a request file in this process; one that does not compile or fit has failed, and the others go on."""
    config, requests = config_of_run(paths), profile_requests(paths, task)
    use_site(config.site)
    check_devices_here(config.site, config.cluster, os.environ)
    step = prepared(config).step

    def measure(request: ProfileRequest) -> ProfileRow | Failed:
        try:
            return measure_here(step, config.cluster, request, config.profiling.repeats, this_node())
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            return Failed(explain_failure(error))

    measure_all(paths, task, cost_store(config, paths), requests, measure)


def profile_rank(paths: RunPaths, task: int) -> None:
    """One rank of a profiling task that has a device for each rank; the first one writes."""
    document = read_json(paths.profile_request(task))
    if is_calibration(document):
        calibrate_rank(paths, task, document)
        return
    from alpa_hpc.runtime.groups import join_mesh  # late, since it starts MPI: only ranks may

    config, requests = config_of_run(paths), profile_requests(paths, task)
    ranks = tuple(range(requests[0].submesh.num_devices))
    context = join_mesh((ranks,), (requests[0].stage.shape,), local_device(config.site, config.cluster, os.environ))
    step, repeats, barrier = prepared(config).step, config.profiling.repeats, context.world.Barrier

    def measure(request: ProfileRequest) -> ProfileRow:
        row = measure_request_on_mesh(step, config.cluster, request, repeats, context.mesh, barrier, this_node())
        return joined_rows(context.world.allgather(row))

    if context.rank == 0:
        measure_all(paths, task, cost_store(config, paths), requests, measure)
    else:
        for request in requests:
            measure(request)


def profile_requests(paths: RunPaths, task: int) -> tuple[ProfileRequest, ...]:
    """What a profiling task shall measure."""
    path = paths.profile_request(task)
    return requests_from_json(read_json(path), str(path))
