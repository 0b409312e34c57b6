"""Import the names of a package on first use: those that its ``__init__.pyi`` imports, the only list of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from opcode import opmap
from typing import Any

from lazy_loader import attach_stub

from torchrl_lightning.suggestions import did_you_mean


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package; a misspelt name gets a suggestion."""
    exported, _, names = attach_stub(package, file)

    def lazy_getattr(name: str) -> Any:
        if name in names:
            return exported(name)
        caller = sys._getframe(1)
        # An AttributeError gets Python's own suggestion, which `from package import name` takes away.
        if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"] and f"{package}.{name}" not in sys.modules:
            raise ImportError(f"cannot import name {name!r} from {package!r}{did_you_mean(name, names)}", name=package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return lazy_getattr, names.copy, names
