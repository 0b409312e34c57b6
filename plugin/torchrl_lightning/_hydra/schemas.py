"""Build typed config schemas of this package's components, so that Hydra validates names and types of all fields.

The schemas are built from ``schemas.json``, which ``tests/wiring.py`` derives from the constructors. Only the commands
of this package merge the schemas into configs, because the defaults in a schema would replace the values of another
application. This file does not import torch, because the search-path plugin registers the schemas in every Hydra
application of the environment.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

GROUP = "torchrl_lightning/schema"
TORCHRL_GROUPS = {
    "storage": ("storage",),
    "writer": ("writer",),
    "sampler": ("sampler",),
    # TorchRL's group ``value`` contains the modules of its ModuleTransform.
    "value": ("transform", "value"),
    "transform": ("transform",),
    "buffer": ("replay_buffer",),
}
"""TorchRL's config groups for the classes of each group of this package."""
_PLAIN = (bool, int, float, str)
_TYPES: dict[str, Any] = {
    "Any": Any,
    "None": None,
    **{kind.__name__: kind for kind in _PLAIN},
    **{f"list[{kind.__name__}]": list[kind] for kind in _PLAIN},  # type: ignore[valid-type]
}


@cache
def schema_data() -> dict[str, dict[str, Any]]:
    """Return the config group and name of each class, and the types and defaults of its constructor arguments.

    A required argument has only a type. Code passes the arguments in ``handed_over``; configs do not set them.
    """
    data: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("schemas.json").read_text())
    return data


def config_class(
    target: str,
    name: str,
    *,
    excluded: Collection[str] = (),
    bases: tuple[type[Any], ...] = (),
    **directives: bool | str,
) -> type[Any]:
    """Build a dataclass of a component's arguments, except ``excluded``, with Hydra directives."""
    fields: list[tuple[str, Any, Any]] = [("_target_", str, target), ("_convert_", str, "all")]
    fields += [(f"_{directive}_", type(value), value) for directive, value in directives.items()]
    for argument, (annotation, *default) in schema_data()[target]["arguments"].items():
        if argument not in excluded:
            union = reduce(operator.or_, (_TYPES[member] for member in annotation.split(" | ")))
            value = default[0] if default else MISSING
            fields.append((argument, union, field(default_factory=value.copy) if isinstance(value, list) else value))
    namespace = {"__doc__": f"Arguments of :class:`{target}`.", "__module__": __name__}
    return make_dataclass(name, fields, bases=bases, namespace=namespace)


@cache
def schema(target: str) -> type[Any]:
    """Return the config class of a component, without the arguments in ``handed_over``.

    Examples:
        >>> schema("torchrl_lightning.UniformSampler")()
        UniformSamplerSchema(_target_='torchrl_lightning.UniformSampler', _convert_='all', with_replacement=True, \
stratified=False)
    """
    data = schema_data()[target]
    return config_class(target, _schema_name(target), excluded=data["handed_over"], **data["directives"])


class _Schema(ConfigNode):
    """An entry of Hydra's ConfigStore that builds its config on first read, because most schemas are never read."""

    group: str
    own_config: DictConfig | None = None  # of the copy of this entry that Hydra makes for each read

    def __init__(self, name: str, target: str, group: str) -> None:
        self.name, self.target, self.group = name, target, group
        self.package, self.provider = None, "torchrl-lightning"

    @property
    def node(self) -> DictConfig:
        """The config. All copies of an entry share it until Hydra assigns them a copy of the config."""
        return _config(self.target, _are_open) if self.own_config is None else self.own_config

    @node.setter
    def node(self, node: DictConfig) -> None:
        self.own_config = node

    def __deepcopy__(self, memo: dict[int, Any]) -> _Schema:
        """Return this entry: Hydra copies its whole store for each config, and copies a node when it reads it."""
        return self


@cache
def _config(target: str, is_open: bool) -> DictConfig:
    config: DictConfig = OmegaConf.structured(schema(target))
    if is_open:
        OmegaConf.set_struct(config, False)
    return config


_are_open = False  # whether configs accept settings outside their schema


@contextmanager
def open_schemas() -> Iterator[None]:
    """Allow settings outside the schema in a ``with`` block, for components configured with another class."""
    global _are_open
    _are_open = True
    try:
        yield
    finally:
        _are_open = False


def register_schemas() -> None:
    """Store every schema in Hydra's ConfigStore; repeated calls are allowed."""
    for entry in _schemas():
        nodes = ConfigStore.instance().repo
        for level in entry.group.split("/"):
            nodes = nodes.setdefault(level, {})
        nodes[entry.name] = entry


@cache
def _schemas() -> list[_Schema]:
    """Return one entry for each class."""
    return [
        _Schema(f"{part['name']}.yaml", target, f"{GROUP}/{part['group']}") for target, part in schema_data().items()
    ]


def __getattr__(name: str) -> Any:
    """Return a schema by its class name, for pickle."""
    target = next((candidate for candidate in schema_data() if _schema_name(candidate) == name), None)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return schema(target)


def _schema_name(target: str) -> str:
    return target.rpartition(".")[2].removesuffix("Module") + "Schema"
