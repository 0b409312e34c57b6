"""Replace a part of a config by one of another class: settings that were written for the old one do not apply to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, flag_override

from torchrl_lightning._lazy import wiring
from torchrl_lightning._schemas import schema

_TARGET = "_target_"
_DIRECTIVES = ("_partial_", "_convert_")  # how the program builds a part, of whatever class it is


def targets_in(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each part in plain data and the class that is named for it, outer parts first.

    A whole group such as ``data`` is no part: another class for it is a subclass, which takes the same settings.

    Examples:
        >>> [*targets_in({"data": {"_target_": "a.B", "buffer": {"_target_": "c.D", "sampler": {"_target_": "e.F"}}}})]
        [('data.buffer', 'c.D'), ('data.buffer.sampler', 'e.F')]
    """
    if not isinstance(node, Mapping):
        return
    target = node.get(_TARGET)
    if "." in path and isinstance(target, str):
        yield path, target
    for key, value in node.items():
        if path or key != "hydra":
            yield from targets_in(value, f"{path}.{key}" if path else str(key))


def targets_of(overrides: Iterable[Override]) -> Iterator[tuple[str, str]]:
    """Yield the path of each part whose class a command line names, and the class."""
    for override in overrides:
        if not override.is_delete() and not override.is_sweep_override():
            node: Any = override.value()
            for name in reversed(override.key_or_group.split(".")):
                node = {name: node}
            yield from targets_in(node)


def plain_layer(config: Any) -> Any:
    """Return what a file says as plain data, without Hydra's own settings."""
    if not isinstance(config, DictConfig) or config._is_none() or config._is_missing():
        return {}
    return {
        str(key): OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
        for key, value in config.items_ex(resolve=False)
        if key != "hydra"
    }


class Replacements:
    """The parts of one config that were replaced while it was composed."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        self._dropped: dict[str, tuple[str, ...]] = {}  # settings of each replaced part that files have written

    def note(self, layer: Any, path: str = "") -> None:
        """Remember which settings a file writes."""
        for key, value in layer.items() if isinstance(layer, Mapping) else ():
            here = f"{path}.{key}" if path else str(key)
            self._written.add(here)
            self.note(value, here)

    def replace(self, config: DictConfig, targets: Iterable[tuple[str, str]]) -> None:
        """Put new parts in the places of those that have another class, with directives but without settings."""
        for path, target in targets:
            outer, _, name = path.rpartition(".")
            holder = OmegaConf.select(config, outer)
            old = plain_layer(holder._get_node(name)) if isinstance(holder, DictConfig) and name in holder else {}
            if old.get(_TARGET, target) == target:
                continue
            written = (key for key in old if not key.startswith("_") and f"{path}.{key}" in self._written)
            self._dropped[path] = (*self._dropped.get(path, ()), *written)
            self._written = {key for key in self._written if not key.startswith(f"{path}.")}
            with flag_override(holder, ["struct", "readonly"], False):
                holder[name] = _new_part(target, {key: old[key] for key in _DIRECTIVES if key in old})

    def told(self, config: DictConfig) -> str:
        """Name the settings that were dropped and not written anew, in one line; "" if there are none."""
        lost = [
            f"{path}.{key}"
            for path, keys in self._dropped.items()
            for key in dict.fromkeys(keys)
            if key not in (OmegaConf.select(config, path) or {})
        ]
        if not lost:
            return ""
        return f"note: left out, as written for parts that are replaced: {', '.join(lost)}."


def _new_part(target: str, directives: dict[str, Any]) -> DictConfig:
    """Return the config of a part: our own is checked against its schema, another one takes any settings."""
    if target in wiring()["parts"]:
        return OmegaConf.structured(schema(target))
    return OmegaConf.create({_TARGET: target, **directives}, flags={"struct": False})
