"""Read the fields of a config from the constructor that it describes: the one place where signatures become configs."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING

PRIMITIVES = (bool, int, float, str)


def config_fields(component: type, left_out: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """Return name, type and default of a constructor's arguments but those left out, which it must have."""
    parameters = inspect.signature(component).parameters
    unknown = sorted(set(left_out) - set(parameters))
    if unknown:
        raise ValueError(f"{component.__name__} takes no {', '.join(unknown)}.")
    return [
        (name, checked_type(_annotation(component, each)), _default(component, each))
        for name, each in parameters.items()
        if name not in left_out
    ]


def checked_type(annotation: Any) -> Any:
    """Return the type that OmegaConf checks for an annotation: ``Any`` where it cannot, e.g. for keys and factories."""
    if annotation in PRIMITIVES:
        return annotation
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        kinds = {type(each) for each in arguments}
        return kinds.pop() if len(kinds) == 1 else Any
    if origin in (list, Sequence) or (origin is tuple and arguments[1:] == (...,)):
        return types.GenericAlias(list, (arguments[0],)) if arguments[0] in PRIMITIVES else Any
    if origin in (typing.Union, types.UnionType):
        named = (type(None), torch.device, torch.dtype, Path)  # but for None, they are written as texts
        members = [checked_type(each) for each in arguments if each not in named]
        kinds = set(members)
        if Any in kinds or (len(kinds) > 1 and not kinds <= set(PRIMITIVES)):
            return Any
        union = members[0]
        for member in members[1:]:
            union |= member
        return union | None if type(None) in arguments else union
    return Any


def _annotation(component: type, parameter: inspect.Parameter) -> Any:
    known = component.__init__.__annotations__.get(parameter.name, parameter.annotation)  # type: ignore[misc]
    if not isinstance(known, str):
        return known
    try:
        return eval(parameter.annotation, component.__init__.__globals__)  # type: ignore[misc]
    except NameError:  # imported for type checkers alone
        return Any


def _default(component: type, parameter: inspect.Parameter) -> Any:
    default = parameter.default
    if dataclasses.is_dataclass(component):
        field = next(field for field in dataclasses.fields(component) if field.name == parameter.name)
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
    if default is parameter.empty or isinstance(default, type):
        return MISSING  # a config has no classes
    if isinstance(default, torch.dtype):
        return str(default).removeprefix("torch.")
    return list(default) if isinstance(default, tuple) else default
