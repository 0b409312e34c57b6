"""Import the names of a package on first use; its ``__init__.pyi`` is the only list of the names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from opcode import opmap
from typing import Any

from lazy_loader import attach_stub

from torchrl_lightning._core.suggestions import did_you_mean


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package; errors suggest similar names."""
    exported, _, names = attach_stub(package, file)

    def lazy_getattr(name: str) -> Any:
        if name in names:
            return exported(name)
        caller = sys._getframe(1)
        # Python adds a suggestion to an AttributeError, but `from package import name` drops it.
        if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"] and f"{package}.{name}" not in sys.modules:
            raise ImportError(f"cannot import name {name!r} from {package!r}{did_you_mean(name, names)}", name=package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return lazy_getattr, names.copy, names
