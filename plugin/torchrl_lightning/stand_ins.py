"""Import libraries without modules that they name and hardly ever use, by stand-ins that are gone afterwards.

Whoever imports such a module later finds the module itself, and so does what was bound meanwhile, once it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Ready = Mapping[str, Callable[..., Any]]
"""What a stand-in holds by itself."""


@contextmanager
def standing_in(modules: Mapping[str, Ready]) -> Iterator[None]:
    """Let stand-ins take the places of modules, and of all below them, while this context imports others.

    Args:
        modules: The names, each with what its stand-in has ready. Modules that are imported already stay.

    Examples:
        >>> with standing_in({"mailbox": {}}):
        ...     import mailbox
        >>> type(mailbox).__name__, "mailbox" in sys.modules
        ('StandIn', False)
    """
    finder = _Finder({name: ready for name, ready in modules.items() if name not in sys.modules})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in list(finder.modules):
            finder.withdraw(name)


class Later:
    """What a module holds under a name; the module is imported when this is used."""

    def __init__(self, stand_in: StandIn, name: str) -> None:
        self._stand_in, self._name = stand_in, name

    def _found(self) -> Any:
        return getattr(self._stand_in.module(), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._found()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # by which others look what this is
            raise AttributeError(name)
        return getattr(self._found(), name)

    def __instancecheck__(self, instance: object) -> bool:
        # Nothing is an instance of a class that was never imported.
        return self._stand_in.is_imported() and isinstance(instance, self._found())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._stand_in.is_imported() and issubclass(subclass, self._found())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._found(),)


class StandIn(ModuleType):
    """Stands for a module."""

    def __init__(self, name: str, finder: _Finder, ready: Ready) -> None:
        super().__init__(name)
        vars(self).update(ready, _finder=finder)

    def is_imported(self) -> bool:
        """Return whether the module itself was imported meanwhile."""
        return not isinstance(sys.modules.get(self.__name__, self), StandIn)

    def module(self) -> ModuleType:
        """Import the module itself."""
        self._finder.withdraw(self.__name__)
        return import_module(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if not self._finder.roots(self.__name__):
            return getattr(self.module(), name)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return Later(self, name)


class _Finder(MetaPathFinder, Loader):
    """Finds and loads the stand-ins."""

    def __init__(self, modules: dict[str, Ready]) -> None:
        self.modules = modules

    def roots(self, name: str) -> list[str]:
        """Return what is stood in for at present and has this name, or a module of this name below it."""
        return [root for root in self.modules if f"{name}.".startswith(f"{root}.")]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a stand-in where there is a module."""
        found = PathFinder.find_spec(name, path, target) if self.roots(name) else None
        if found is None:
            return None
        spec = ModuleSpec(name, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a stand-in."""
        return StandIn(spec.name, self, self.modules.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""

    def withdraw(self, name: str) -> None:
        """Take the stand-in of a module away, and those that came with it, so that it can be imported."""
        for root in self.roots(name):
            del self.modules[root]
            for each, module in list(sys.modules.items()):
                if f"{each}.".startswith(f"{root}.") and isinstance(module, StandIn):
                    del sys.modules[each]
                    parent, _, child = each.rpartition(".")
                    holder = sys.modules.get(parent)
                    if holder is not None and vars(holder).get(child) is module:
                        delattr(holder, child)
