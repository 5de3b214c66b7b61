"""The words of a command line -> refused where what Hydra itself would say is no help; and the names that stand in conf/."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from alpa_hpc.errors import ConfigError
from alpa_hpc.launch.locations import config_folder

_NO_NAME = re.compile(r"null|true|false|[+-]?(\d[\d_]*\.?[\d_]*(e[+-]?\d+)?|inf|nan)", re.IGNORECASE)  # what Hydra reads as no text

_FOLDER_FLAGS = ("--config-dir", "-cd")


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


def config_folders(words: Sequence[str]) -> tuple[Path, ...]:
    """The folders of one's own that --config-dir names on a command line."""
    following = [value for flag, value in pairwise(words) if flag in _FOLDER_FLAGS]
    joined = [value for flag, _, value in (word.partition("=") for word in words) if flag in _FOLDER_FLAGS and value]
    return tuple(map(Path, (*following, *joined)))


def check_own_configs(words: Iterable[str], folders: Iterable[Path]) -> None:
    """ConfigError if a config that words choose from a folder of one's own is no YAML mapping: Hydra would end in a traceback."""
    chosen = [word.lstrip("+").partition("=") for word in words]
    for folder in folders:
        for path in (folder / group / f"{name}.yaml" for group, _, names in chosen for name in names.split(",")):
            if path.is_file():
                _check_yaml(path)


def _check_yaml(path: Path) -> None:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        words = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"{path} is no YAML: {words}") from error
    if not isinstance(found, dict | None):
        raise ConfigError(f"{path} holds {found!r}, expected KEY: VALUE in each line")


def config_names(group: str) -> tuple[str, ...]:
    """The configs that are shipped in a group."""
    return tuple(sorted(path.stem for path in (config_folder() / group).glob("*.yaml")))


def shipped_experiments() -> str:
    """All experiments, for the end of a message."""
    return "Shipped experiments: " + ", ".join(config_names("experiment"))
