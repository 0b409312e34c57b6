"""Typed configs of the l2r-lab buffers; errors name the invalid field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_lightning._core.plain_yaml import read_config

WRAPPER_KEYS = {"name", "config"}


class Configurable:
    """Mixin that builds a class from a YAML file or a dict and validates the config with a typed ``schema``.

    A config contains the parameters directly, or in l2r-lab's form ``{name: <class>, config: {<parameters>}}``. A
    number may contain underscores (``200_000``), and an integer is valid for a float.
    """

    schema: ClassVar[type]
    """Dataclass of the documented parameters; the default ``omegaconf.MISSING`` marks a required parameter."""

    @classmethod
    def instantiate_from_config(cls, config_file_location: str | Path) -> Self:
        """Build an instance from a YAML file.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is not a YAML mapping, or a field is missing, unknown or has the wrong type.
        """
        try:
            config = read_config(config_file_location)
        except ValueError as error:
            names = [field.name for field in fields(cls.schema)]
            raise ValueError(f"{config_file_location} must be a YAML mapping of {names}: {error}") from error
        return cls._build(config, str(config_file_location))

    @classmethod
    def instantiate_from_config_dict(cls, config: Mapping[str, Any] | DictConfig) -> Self:
        """Build an instance from a dict.

        Raises:
            ValueError: ``config`` is not a mapping, or a field is missing, unknown or has the wrong type.
        """
        return cls._build(config, "the config")

    @classmethod
    def _build(cls, config: Any, source: str) -> Self:
        field_list = ", ".join(
            f"{field.name}: {field.type if isinstance(field.type, str) else field.type.__name__}"
            + ("" if field.default == MISSING else f" = {field.default!r}")
            for field in fields(cls.schema)
        )
        if not isinstance(config, Mapping | DictConfig):
            raise ValueError(f"{source} must be a mapping with {field_list}, got a {type(config).__name__}.")
        if non_strings := [key for key in config if not isinstance(key, str)]:
            raise ValueError(f"{source}: field {non_strings[0]!r} is unknown. The fields are {field_list}.")
        if set(config) == WRAPPER_KEYS:
            if config["name"] != cls.__name__:
                raise ValueError(f"{source}: field 'name' is {config['name']!r}, expected {cls.__name__!r}.")
            return cls._build(config["config"], f"{source}, field 'config'")
        try:
            merged = OmegaConf.merge(OmegaConf.structured(cls.schema), config)
            missing = sorted(OmegaConf.missing_keys(merged))
            resolved: Any = {} if missing else OmegaConf.to_container(merged, resolve=True)
        except OmegaConfBaseException as error:
            problem = f"{str(error.full_key or error.key)!r} of {cls.__name__} is invalid: {str(error).splitlines()[0]}"
            raise ValueError(f"{source}: field {problem}. The fields are {field_list}.") from error
        if missing:
            problem = f"{', '.join(map(repr, missing))} of {cls.__name__} is missing"
            raise ValueError(f"{source}: field {problem}. The fields are {field_list}.")
        return cls(**resolved)
