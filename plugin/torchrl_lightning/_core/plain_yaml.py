"""Read untrusted YAML files as plain data, with limited size, depth and aliases, and without tags."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.file_limits import YAML_BYTES, YAML_DEPTH, YAML_INTERPOLATION, YAML_REFERENCES, YAML_VALUES
from torchrl_lightning._core.untrusted import printable, read_regular

_TAG_PREFIX = "tag:yaml.org,2002:"
_TAGS = {None, "!", *(f"{_TAG_PREFIX}{kind}" for kind in ("bool", "float", "int", "map", "null", "seq", "str"))}
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_config(path: str | Path) -> DictConfig:
    """Read the mapping in a YAML file as a config, without resolving its interpolations.

    Raises:
        OSError: The file does not exist, or is not a regular file.
        ValueError: The file is not a YAML mapping of plain values, or exceeds a limit; the message is one line.
    """
    data = read_regular(path, YAML_BYTES)
    try:
        text = data.decode()
        _check_limits(text)
        config = OmegaConf.load(io.StringIO(text))
        if not isinstance(config, DictConfig):
            raise ValueError(f"it is a {type(config).__name__}")
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, OSError, RecursionError) as error:
        reason = printable(" ".join(str(error).split()))
        raise UserError(f"{printable(path)} must be a YAML mapping of plain values: {reason}") from error
    return config


def check_yaml_file(path: str | Path, *, is_mapping: bool = True) -> None:
    """Validate the limits of a YAML file that another library reads; that library reports syntax errors.

    Args:
        path: The file.
        is_mapping: Whether the file must contain a mapping.

    Raises:
        OSError: The file does not exist, or is not a regular file.
        ValueError: The file exceeds a limit, or has a tag; the message is one line.
    """
    data = read_regular(path, YAML_BYTES)
    try:
        _check_limits(data.decode(), is_mapping)
    except (yaml.YAMLError, UnicodeDecodeError):
        return
    except ValueError as error:
        raise UserError(f"{printable(path)} must be a YAML mapping of plain values: {printable(error)}") from error


def raw_value(config: Any, key: str) -> Any:
    """Return the plain value at a dotted key of a config, such as ``a.b.c``, or None.

    A plain reference such as ``${seed}`` is replaced by its value. Other interpolations may compute anything, so they
    are returned unresolved.
    """
    for _ in range(YAML_REFERENCES):
        value: Any = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        is_reference = isinstance(value, str) and value.startswith("${") and value.endswith("}")
        if not is_reference or not value[2:-1].replace(".", "").replace("_", "").isalnum():
            return value
        key = value[2:-1]
    return None


def _check_limits(text: str, is_mapping: bool = True) -> None:
    """Validate size, depth, aliases and tags of a YAML text; raise ValueError if they exceed a limit."""
    sizes: dict[str, int] = {}  # values below each anchor
    open_collections: list[
        tuple[str | None, int]
    ] = []  # anchor of each open collection, and number of values before it
    count = 0
    for event in yaml.parse(text, Loader=_Parser):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias *{event.anchor} refers to a node that contains it, or to a missing anchor")
            count += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            if is_mapping and not count and not isinstance(event, yaml.MappingStartEvent):
                raise ValueError("it begins with a list or a string")
            if event.tag not in _TAGS:
                raise ValueError(f"the tag {event.tag} is not a tag of plain values")
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_collections.append((event.anchor, count - 1))
            else:
                if event.anchor is not None:
                    sizes[event.anchor] = 1
                if "${" in event.value and len(event.value) > YAML_INTERPOLATION:
                    raise ValueError(f"an interpolation has more than {YAML_INTERPOLATION:,} characters")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, count_before = open_collections.pop()
            if anchor is not None:
                sizes[anchor] = count - count_before
        if len(open_collections) > YAML_DEPTH:
            raise ValueError(f"it has more than {YAML_DEPTH} levels")
        if count > YAML_VALUES:
            raise ValueError(
                f"it has more than {YAML_VALUES:,} values, counting each alias as all values of its anchor"
            )
