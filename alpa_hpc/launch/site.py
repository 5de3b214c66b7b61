"""The kind of devices that a machine has (SiteOptions) -> the environment of every process that uses them.

Only processes that touch devices (ranks, profiling tasks) get `site_environment`; those that merely plan get `host_environment`, so that
they take no GPU away. What jax and XLA read here they read once, at their start: it must be in the environment before Python runs.
"""

import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from alpa_hpc.errors import ConfigError

_FLAG = re.compile(r"--xla_\w+(=\S*)?")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OF_OTHER_OPTIONS = {
    "JAX_PLATFORMS": "site.platform",
    "XLA_FLAGS": "site.xla_flags",
    "XLA_CLIENT_MEM_FRACTION": "site.memory_fraction",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "site.memory_fraction",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "site.preallocate",
}


class Platform(enum.Enum):
    """What ranks compute on."""

    CPU = "cpu"
    """CPU devices; no GPU is touched"""
    CUDA = "cuda"
    """NVIDIA GPUs, one a rank"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteOptions:
    """How a site's devices are used.

    memory_fraction: part of a GPU's memory that XLA may take; without effect on CPU, as is the next
    preallocate:     take that part at the start
    xla_flags:       such as "--xla_gpu_enable_latency_hiding_scheduler=true"; a name that XLA does not know ends the process
    environment:     further variables, such as {NCCL_SOCKET_IFNAME: ib0}
    """

    platform: Platform
    memory_fraction: float
    preallocate: bool
    xla_flags: tuple[str, ...]
    environment: dict[str, str | int]

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction is {self.memory_fraction}, expected more than 0 and at most 1")
        for flag in self.xla_flags:
            if _FLAG.fullmatch(flag) is None:
                raise ConfigError(f"xla_flags has {flag!r}, expected one flag of the form --xla_NAME=VALUE, without spaces")
        for name, value in self.environment.items():
            _check_variable(name, value)


def site_environment(site: SiteOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process on the site's devices needs, to be put over `environ`, its environment without them.

    XLA takes the last of equal flags, so those of `environ` come last: a flag tried out in the shell wins. What is there stays as it is.
    """
    flags = dict.fromkeys((*site.xla_flags, *environ.get("XLA_FLAGS", "").split()))
    return {
        "JAX_PLATFORMS": _PLATFORMS[site.platform],
        "XLA_FLAGS": " ".join(flags),
        **_memory_variables(site),
        **{name: str(value) for name, value in site.environment.items()},
    }


def host_environment() -> dict[str, str]:
    """The variables of a process that only traces and plans: it takes no GPU, and needs none."""
    return {"JAX_PLATFORMS": _PLATFORMS[Platform.CPU]}


def use_site(site: SiteOptions) -> None:
    """Have this process itself use the site's devices, before anything touches one: for whoever starts no other process."""
    import jax

    os.environ.update(site_environment(site, os.environ))
    jax.config.update("jax_platforms", _PLATFORMS[site.platform])  # jax has read the variable when it was imported


# With CUDA the host stays a second platform: state that is made there does not fill the GPU.
_PLATFORMS = {Platform.CPU: "cpu", Platform.CUDA: "cuda,cpu"}


def _memory_variables(site: SiteOptions) -> dict[str, str]:
    match site.platform:
        case Platform.CPU:
            return {}
        case Platform.CUDA:
            return {
                "XLA_CLIENT_MEM_FRACTION": str(site.memory_fraction),
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "",  # the variable's old name: jax refuses to start where both say something
                "XLA_PYTHON_CLIENT_PREALLOCATE": "true" if site.preallocate else "false",
            }


def _check_variable(name: str, value: object) -> None:
    if _VARIABLE.fullmatch(name) is None:
        raise ConfigError(f"environment has {name!r}, expected the name of a variable: letters, digits and '_'")
    if name in _OF_OTHER_OPTIONS:
        raise ConfigError(f"environment has {name}, which {_OF_OTHER_OPTIONS[name]} says: set that one")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"environment.{name} is {value!r}, expected a text or a whole number: put it in quotes")
