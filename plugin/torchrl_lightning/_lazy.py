"""Export the names of the package and of its rooms, each imported when it is first asked for. Imports nothing heavy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from opcode import opmap
from pathlib import Path
from typing import Any

from torchrl_lightning.suggestions import did_you_mean


@cache
def wiring() -> dict[str, Any]:
    """Read what ``tests/wiring.py`` derives from the modules: names, and the arguments of the parts."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("wiring.json").read_text(encoding="utf-8"))
    return found


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of the package or of one of its rooms (PEP 562)."""
    module_of: dict[str, str] = wiring()["exports"][package]

    def lazy_getattr(name: str) -> Any:
        if name not in module_of:
            caller = sys._getframe(1)
            # An AttributeError gets Python's own suggestion, which `from package import name` takes away.
            if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"] and f"{package}.{name}" not in sys.modules:
                meant = did_you_mean(name, module_of)
                raise ImportError(f"cannot import name {name!r} from {package!r}{meant}", name=package)
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    for name, module in module_of.items():
        if module == f"{package}.{name}":  # which would be found instead of what it defines
            lazy_getattr(name)
    names = sorted(module_of)
    return lazy_getattr, lambda: sorted(names), names
