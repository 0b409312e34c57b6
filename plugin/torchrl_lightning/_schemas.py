"""Typed configs of our parts; Hydra checks names and types of every field against them.

They are made of ``schemas.json``, which ``tests/wiring.py`` derives from the constructors. Only our own commands merge
them: a schema has a value for each setting, which would replace the value of an app that merges it later. No torch is
imported, because the search-path plugin stores them in every Hydra application of the environment.
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
    # ``value`` is TorchRL's group for the modules of its ModuleTransform.
    "value": ("transform", "value"),
    "transform": ("transform",),
    "buffer": ("replay_buffer",),
}
"""The groups of TorchRL that have the classes of a group of ours, too."""
_PLAIN = (bool, int, float, str)
_TYPES: dict[str, Any] = {
    "Any": Any,
    "None": None,
    **{kind.__name__: kind for kind in _PLAIN},
    **{f"list[{kind.__name__}]": list[kind] for kind in _PLAIN},  # type: ignore[valid-type]
}


@cache
def schema_data() -> dict[str, dict[str, Any]]:
    """Read the group and name of each class in configs, and the type and default of its constructor's arguments.

    An argument without a default has a type only. A program passes the arguments in ``handed_over``.
    """
    described: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("schemas.json").read_text())
    return described


def config_class(
    target: str,
    name: str,
    *,
    left_out: Collection[str] = (),
    bases: tuple[type[Any], ...] = (),
    **directives: bool | str,
) -> type[Any]:
    """Make the dataclass of a part's arguments but those left out, with directives for Hydra."""
    fields: list[tuple[str, Any, Any]] = [("_target_", str, target), ("_convert_", str, "all")]
    fields += [(f"_{directive}_", type(value), value) for directive, value in directives.items()]
    for argument, (kind, *default) in schema_data()[target]["arguments"].items():
        if argument not in left_out:
            union = reduce(operator.or_, (_TYPES[member] for member in kind.split(" | ")))
            value = default[0] if default else MISSING
            fields.append((argument, union, field(default_factory=value.copy) if isinstance(value, list) else value))
    namespace = {"__doc__": f"Arguments of :class:`{target}`.", "__module__": __name__}
    return make_dataclass(name, fields, bases=bases, namespace=namespace)


@cache
def schema(target: str) -> type[Any]:
    """Make the config of a part without what a program hands over to it.

    Examples:
        >>> schema("torchrl_lightning.UniformSampler")()
        UniformSamplerSchema(_target_='torchrl_lightning.UniformSampler', _convert_='all', with_replacement=True, \
stratified=False)
    """
    part = schema_data()[target]
    return config_class(target, _name(target), left_out=part["handed_over"], **part["directives"])


class _Schema(ConfigNode):
    """An entry of Hydra's store whose config is made when it is read: of all schemas an application reads a few."""

    made: DictConfig | None = None
    is_open = False

    def __init__(self, name: str, target: str, group: str) -> None:
        self.name, self.target, self.group = name, target, group
        self.package, self.provider = None, "torchrl-lightning"

    @property
    def node(self) -> DictConfig:
        """The config, which whoever loads it may change."""
        if self.made is None:
            self.made = OmegaConf.structured(schema(self.target))
        OmegaConf.set_struct(self.made, False if _Schema.is_open else None)
        return self.made

    @node.setter
    def node(self, node: DictConfig) -> None:
        self.made = node


@contextmanager
def open_schemas() -> Iterator[None]:
    """Let files and command lines add settings that a schema lacks, for parts that get another class."""
    _Schema.is_open = True
    try:
        yield
    finally:
        _Schema.is_open = False


def register_schemas() -> None:
    """Store every schema in Hydra's ConfigStore; storing twice changes nothing."""
    for target, part in schema_data().items():
        group, nodes = f"{GROUP}/{part['group']}", ConfigStore.instance().repo
        for level in group.split("/"):
            nodes = nodes.setdefault(level, {})
        file = f"{part['name']}.yaml"
        nodes[file] = _Schema(file, target, group)


def __getattr__(name: str) -> Any:
    """Find a schema again by its name, as pickle does."""
    target = next((each for each in schema_data() if _name(each) == name), None)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return schema(target)


def _name(target: str) -> str:
    return target.rpartition(".")[2].removesuffix("Module") + "Schema"
