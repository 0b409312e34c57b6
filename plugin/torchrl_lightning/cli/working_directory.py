"""Import modules of the working directory, after all installed ones: it may be a folder that somebody sent.

Imports nothing heavy.
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

# numba reads its settings from the working directory. These name files and modules whose code it would run.
_NUMBA_FILE = ".numba_config.yaml"
_NUMBA_SETTINGS = ("NUMBA_CACHE_DIR", "NUMBA_CACHE_LOCATOR_CLASSES", "NUMBA_CUDA_DRIVER", "NUMBA_GDB_BINARY")


def leave_out_working_directory() -> None:
    """Remove the working directory from the import path, which ``python -m`` and ``python -c`` put first."""
    sys.path[:] = _without(os.getcwd())
    if Path(_NUMBA_FILE).exists():
        for name in _NUMBA_SETTINGS:
            os.environ.setdefault(name, "")


def append_working_directory() -> None:
    """Put the working directory last on the import path, behind whatever is installed.

    Hydra's plugins are found before, so that none comes from the working directory. Worker processes inherit the order.
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
    """Find modules on the import path, in one folder only if they are nowhere else.

    Python prefers a package with an ``__init__.py``, wherever it is on the path, to an installed one without, such as
    ``mpl_toolkits``. Entry points, which libraries import by themselves, are never read from the folder.
    """

    folder = ""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, or None."""
        if path is not None or cls.folder not in sys.path:
            return PathFinder.find_spec(fullname, path, target)
        installed = PathFinder.find_spec(fullname, _without(cls.folder), target)
        return installed or PathFinder.find_spec(fullname, [cls.folder], target)

    @classmethod
    def find_distributions(cls, context: DistributionFinder.Context | None = None) -> Iterable[PathDistribution]:
        """Return the installed distributions that match."""
        asked: dict[str, Any] = {} if context is None else dict(vars(context))
        path = [entry for entry in asked.pop("path", sys.path) if entry not in ("", cls.folder)]
        return PathFinder.find_distributions(DistributionFinder.Context(**asked, path=path))


def _without(folder: str) -> list[str]:
    return [entry for entry in sys.path if not _is_folder(entry, folder)]


def _is_folder(entry: str, folder: str) -> bool:
    return entry in ("", ".", folder) or (bool(entry) and os.path.realpath(entry) == os.path.realpath(folder))
