"""The words of a command line -> refused where what Hydra itself would say is no help; and the names that stand in conf/."""

import re
from collections.abc import Iterable

from alpa_hpc.errors import ConfigError
from alpa_hpc.launch.locations import config_folder

_NO_NAME = re.compile(r"null|true|false|[+-]?(\d[\d_]*\.?[\d_]*(e[+-]?\d+)?|inf|nan)", re.IGNORECASE)  # what Hydra reads as no text


def check_arguments(arguments: Iterable[str]) -> None:
    """ConfigError for `experiment=NAME`, where Hydra wants a plus, and for a number, true or null in place of the name of a config.

    Hydra's message on the first does not name the experiments, and on the others it ends with a traceback.
    """
    for argument in arguments:
        group, _, name = argument.lstrip("+").partition("=")
        if argument.startswith("experiment="):
            raise ConfigError(f"found {argument!r}, expected a plus before it: +experiment={name or 'NAME'}. {shipped_experiments()}")
        if _NO_NAME.fullmatch(name) and (config_folder() / group).is_dir():
            known = ", ".join(config_names(group))
            raise ConfigError(f"found {argument!r}, expected the name of one of: {known}, or of a config of your own")


def config_names(group: str) -> tuple[str, ...]:
    """The configs that are shipped in a group."""
    return tuple(sorted(path.stem for path in (config_folder() / group).glob("*.yaml")))


def shipped_experiments() -> str:
    """All experiments, for the end of a message."""
    return "Shipped experiments: " + ", ".join(config_names("experiment"))
