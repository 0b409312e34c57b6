"""Search the working directory for modules only after all installed packages, because it may be untrusted.

This module has only light imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import DistributionFinder, PathDistribution
from pathlib import Path
from types import ModuleType
from typing import Any

# numba reads its settings from the working directory. It runs code from the files in these settings.
_NUMBA_FILE = ".numba_config.yaml"
_NUMBA_SETTINGS = ("NUMBA_CACHE_DIR", "NUMBA_CACHE_LOCATOR_CLASSES", "NUMBA_CUDA_DRIVER", "NUMBA_GDB_BINARY")


def leave_out_working_directory() -> None:
    """Remove the working directory from the import path, where ``python -m`` and ``python -c`` put it first."""
    sys.path[:] = _paths_except(os.getcwd())
    if Path(_NUMBA_FILE).exists():
        for name in _NUMBA_SETTINGS:
            os.environ.setdefault(name, "")


def append_working_directory() -> None:
    """Put the working directory last on the import path, after all installed packages.

    Hydra's plugins are loaded first, so that Hydra does not load a plugin from the working directory. Worker processes
    inherit the order.
    """
    from hydra.core.plugins import Plugins

    leave_out_working_directory()
    Plugins.instance()
    folder = os.getcwd()
    sys.path.append(folder)
    if PathFinder in sys.meta_path:
        sys.meta_path[sys.meta_path.index(PathFinder)] = InstalledFirst
    InstalledFirst.folder = folder


class InstalledFirst(PathFinder):
    """Find modules on the import path, and use ``folder`` only for modules that are not found elsewhere.

    The last position on the path is not sufficient. Python prefers any package with an ``__init__.py`` to an installed
    package without this file, such as ``mpl_toolkits``. Entry points in ``folder`` are ignored, because libraries
    import entry points automatically.
    """

    folder = ""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, or None."""
        if path is not None or cls.folder not in sys.path:
            return PathFinder.find_spec(fullname, path, target)
        installed = PathFinder.find_spec(fullname, _paths_except(cls.folder), target)
        return installed or PathFinder.find_spec(fullname, [cls.folder], target)

    @classmethod
    def find_distributions(cls, context: DistributionFinder.Context | None = None) -> Iterable[PathDistribution]:
        """Return the matching installed distributions."""
        arguments: dict[str, Any] = {} if context is None else dict(vars(context))
        path = [entry for entry in arguments.pop("path", sys.path) if entry not in ("", cls.folder)]
        return PathFinder.find_distributions(DistributionFinder.Context(**arguments, path=path))


def _paths_except(folder: str) -> list[str]:
    return [entry for entry in sys.path if not _is_folder(entry, folder)]


def _is_folder(entry: str, folder: str) -> bool:
    return entry in ("", ".", folder) or (bool(entry) and os.path.realpath(entry) == os.path.realpath(folder))
