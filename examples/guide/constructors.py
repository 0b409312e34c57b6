"""Griffe extension that adds constructors to classes with settings; their source does not contain ``__init__``."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

KINDS = {kind.value: kind for kind in griffe.ParameterKind}


class SettingsAsParameters(griffe.Extension):
    """Add the constructor parameters of classes that define settings instead of ``__init__``."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Add an ``__init__`` with the signature of the imported class."""
        if "__init__" in cls.members:
            return
        made: Any = griffe.dynamic_import(cls.path)
        if not getattr(made, "settings_of_class", None):
            return
        parameters = [_parameter(each) for each in inspect.signature(made).parameters.values()]
        constructor = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), lineno=cls.lineno)
        cls.set_member("__init__", constructor)


def _parameter(given: inspect.Parameter) -> griffe.Parameter:
    empty, default = inspect.Parameter.empty, given.default
    return griffe.Parameter(
        given.name,
        kind=KINDS[given.kind.description],
        annotation=None if given.annotation is empty else str(given.annotation),
        default=None if default is empty else getattr(default, "__qualname__", repr(default)),
    )
