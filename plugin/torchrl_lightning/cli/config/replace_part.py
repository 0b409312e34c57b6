"""Replace a part of a config by a part of another class, and drop the settings of the old class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from torchrl_lightning._hydra.schemas import GROUP, schema, schema_data

_TARGET = "_target_"
_DIRECTIVES = ("_partial_", "_convert_")  # Hydra's directives for parts of any class


def targets_in(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and class of each part in plain data, outer parts first.

    A top-level group such as ``data`` is not a part, because only a subclass with the same settings can replace it.

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


def targets_of(overrides: Iterable[Override]) -> list[tuple[str, str]]:
    """Return path and class of each part if the command line sets the class."""
    return [*targets_in(_plain(command_layer(overrides)))]


def command_layer(overrides: Iterable[Override]) -> DictConfig:
    """Return the settings of a command line as one config."""
    layer = OmegaConf.create()
    for override in overrides:
        if not override.is_delete() and not override.is_sweep_override() and override.package is None:
            OmegaConf.update(layer, override.key_or_group, override.value(), merge=True)
    return layer


def file_layers(loader: ConfigLoader, config_name: str | None, lines: list[str]) -> Iterator[Any]:
    """Yield the settings of each file of a composed config in Hydra's order, nested as in the config."""
    for default in loader.compute_defaults_list(config_name, lines, RunMode.RUN).defaults:
        path = str(default.config_path)
        source = next((source for source in loader.get_sources() if source.is_config(path)), None)
        if source is not None and not path.startswith((GROUP, "hydra/")):
            content: Any = source.load_config(path).config
            for key in reversed(default.package.split(".") if default.package else ()):
                content = {key: content}
            yield OmegaConf.create(content)


def renamed_parts(config: DictConfig) -> list[str]:
    """Return the paths of all parts with another class than in their schema."""
    return [path for path, target in targets_in(_plain(config)) if _schema_target(config, path) not in (None, target)]


def close_schemas(config: DictConfig) -> bool:
    """Close the schemas of a config again. Return False if a part has a setting that its schema lacks.

    Args:
        config: A config composed within :func:`~torchrl_lightning._hydra.schemas.open_schemas`.
    """
    is_complete = True
    for key in config:
        if key == "hydra" or OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, str(key)):
            continue
        node = config[key]
        if isinstance(node, DictConfig):
            is_complete = close_schemas(node) and is_complete
    schema_class: Any = OmegaConf.get_type(config)
    if is_dataclass(schema_class):
        OmegaConf.set_struct(config, None)
        is_complete = is_complete and set(config) <= {field.name for field in fields(schema_class)}
    return is_complete


def replace_part(config: DictConfig, path: str, target: str) -> None:
    """Replace a part of a config by a part of another class, which inherits only the directives of the old part."""
    outer, _, name = path.rpartition(".")
    holder = OmegaConf.select(config, outer)
    old = _plain(holder)[name]
    directives = {key: old[key] for key in _DIRECTIVES if isinstance(old, Mapping) and key in old}
    part = OmegaConf.create({_TARGET: target, **directives}, flags={"struct": False})
    if target in schema_data():  # the schema validates the settings
        part = OmegaConf.structured(schema(target))
    with flag_override(holder, ["struct", "readonly"], False):
        holder[name] = part


def replace_parts(config: DictConfig, paths: Iterable[str], layers: Sequence[Any]) -> dict[str, list[str]]:
    """Replace the parts that get a new class from a later layer, and drop their settings in earlier layers.

    Args:
        config: The composed config.
        paths: The parts, outer parts first.
        layers: The settings of each file, and of the command line, in order.

    Returns:
        A dict that maps each replaced part to the dropped settings of its old class.

    Raises:
        ConfigCompositionException: A class of this package does not have the setting.
    """
    dropped: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        if any(is_within(path, outer) for outer in dropped):
            continue
        target, settings, is_replaced = _schema_target(config, path), OmegaConf.create(), False
        old: list[str] = []
        for layer in layers:
            content = _part(layer, path)
            if content is None:
                continue
            layer_target = _plain(content).get(_TARGET, target)
            if target not in (None, layer_target):
                old += [str(key) for key in settings if not str(key).startswith("_")]
                directives = {key: value for key, value in _plain(settings).items() if key in _DIRECTIVES}
                settings, is_replaced = OmegaConf.create(directives), True
            target = layer_target
            settings.merge_with(content)
        if not is_replaced:
            continue
        assert target is not None
        replace_part(config, path, target)
        try:
            OmegaConf.update(config, path, settings, merge=True)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException(f"Could not override '{error.full_key}'.") from error
        dropped[path] = [key for key in dict.fromkeys(old) if key not in settings]
    return dropped


def is_within(key: str, outer: str) -> bool:
    """Return True if the setting ``key`` equals ``outer`` or is below ``outer``."""
    return key == outer or key.startswith((f"{outer}.", f"{outer}/"))


def _part(layer: DictConfig, path: str) -> DictConfig | None:
    node: Any = layer
    for key in path.split("."):
        if not isinstance(node, DictConfig) or OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
            return None
        node = node.get(key)
    return node if isinstance(node, DictConfig) else None


def _schema_target(config: DictConfig, path: str) -> str | None:
    """Return the class of a part's schema, or None."""
    schema_class: Any = OmegaConf.get_type(OmegaConf.select(config, path))
    targets = (
        (str(field.default) for field in fields(schema_class) if field.name == _TARGET)
        if is_dataclass(schema_class)
        else ()
    )
    return next(iter(targets), None)


def _plain(config: DictConfig) -> Any:
    return OmegaConf.to_container(config, resolve=False)
