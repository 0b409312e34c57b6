"""Start our own processes faster by importing libraries without their rarely used dependencies.

Lightning imports torch's compiler and all metrics of TorchMetrics, which imports SciPy and matplotlib. TorchRL imports
Ray and MuJoCo. Numba imports SciPy's linear algebra, which our kernels do not use.
Stubs replace these modules while the libraries are imported. A later import loads the real module, and names bound to a
stub resolve on first use. Only our commands and the processes of collectors use this module.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pkgutil import resolve_name
from types import FunctionType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"
_METRICS = (
    *("classification", "clustering", "detection", "image", "multimodal", "nominal", "regression", "retrieval"),
    *("segmentation", "shape", "text", "video"),
)
DEFERRED = (
    *(COMPILER, "scipy", "ray", "mujoco", "torchmetrics.utilities.plot"),
    *(f"torchmetrics.{group}{name}" for group in ("", "functional.") for name in _METRICS),
)
"""The modules that are not imported with the libraries."""
COLLECTING = ("tensordict.nn", "torchrl.envs", "gymnasium")
"""The libraries of a process that only collects."""
_ALL = ("lightning", *COLLECTING, "torchrl.modules")
_NUMBA = "numba.np.arraymath"  # the module of numba that imports SciPy's linear algebra


def import_libraries(names: Sequence[str] = _ALL) -> None:
    """Import libraries without the deferred modules; modules that are already imported do not change."""
    if all(name in sys.modules for name in names):
        return
    calls = DeferredCompilerCalls()
    with _garbage_collection_paused(), stub_modules({**{name: {} for name in DEFERRED}, COMPILER: calls.decorators()}):
        for name in names:
            import_module(name)
    calls.repeat_on_import()
    if _NUMBA not in sys.modules:
        sys.meta_path.insert(0, _NumbaFinder())


class CollectingTarget:
    """The target function of a collecting process, as ``module:name``; unpickling imports the libraries first."""

    def __init__(self, function: str) -> None:
        self.function = function

    def __setstate__(self, state: dict[str, str]) -> None:
        import_libraries(COLLECTING)  # in the new process, before the function's arguments are unpickled
        self.function = state["function"]

    def __call__(self, *arguments: Any) -> None:
        """Call the function."""
        resolve_name(self.function)(*arguments)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    # Each collection would visit hundreds of thousands of objects that are never freed.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def stub_modules(contents: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Replace modules and their submodules by stubs during a block that imports other modules.

    Args:
        contents: The modules by name, each with the attributes of its stub. Already imported modules are not replaced.

    Examples:
        >>> with stub_modules({"mailbox": {}}):
        ...     import mailbox
        >>> type(mailbox).__name__, "mailbox" in sys.modules
        ('StubModule', False)
    """
    finder = _StubFinder({name: content for name, content in contents.items() if name not in sys.modules})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in list(finder.contents):
            finder.remove_stub(name)


class StubModule(ModuleType):
    """Stub that replaces a module until one of its names is used."""

    def __init__(self, name: str, finder: _StubFinder) -> None:
        super().__init__(name)
        vars(self).update(finder.contents.get(name, {}), _finder=finder)

    def load(self) -> ModuleType:
        """Import the module."""
        self._finder.remove_stub(self.__name__)
        return import_module(self.__name__)

    def __getattr__(self, name: str) -> Any:
        if not self._finder.root_of(self.__name__):
            return getattr(self.load(), name)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return LazyAttribute(self, name)


class LazyAttribute:
    """An attribute of a stub; the module is imported when the attribute is used."""

    def __init__(self, stub: StubModule, name: str) -> None:
        self._stub, self._name = stub, name

    def _load(self) -> Any:
        return getattr(self._stub.load(), self._name)

    def _is_imported(self) -> bool:
        return not isinstance(sys.modules.get(self._stub.__name__, self._stub), StubModule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Import the module and call the attribute."""
        return self._load()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # other libraries probe for special methods
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __instancecheck__(self, instance: object) -> bool:
        # A class that was never imported has no instances.
        return self._is_imported() and isinstance(instance, self._load())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._is_imported() and issubclass(subclass, self._load())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._load(),)


class _StubFinder(MetaPathFinder, Loader):
    """An import hook that finds and loads stubs."""

    def __init__(self, contents: dict[str, Mapping[str, Any]]) -> None:
        self.contents = contents

    def root_of(self, name: str) -> str | None:
        """Return the name in ``contents`` that is the module or a package above the module; None without one."""
        return next((root for root in self.contents if f"{name}.".startswith(f"{root}.")), None)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a stub for an installed module."""
        real_spec = PathFinder.find_spec(name, path, target) if self.root_of(name) else None
        if real_spec is None:
            return None
        spec = ModuleSpec(name, self, origin=real_spec.origin)
        spec.submodule_search_locations = real_spec.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a stub."""
        return StubModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""

    def remove_stub(self, name: str) -> None:
        """Remove the stubs of a replaced module and its submodules, so that the real modules can be imported."""
        root = self.root_of(name)
        if root is None:
            return
        del self.contents[root]
        for module_name, module in list(sys.modules.items()):
            if f"{module_name}.".startswith(f"{root}.") and isinstance(module, StubModule):
                del sys.modules[module_name]  # the parent module keeps the stub, which imports the real module on use


class _NumbaFinder(MetaPathFinder):
    """An import hook that stubs SciPy's linear algebra while numba is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find numba's module once; stub SciPy's linear algebra during the module's import."""
        if name != _NUMBA:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = stub_modules({"scipy.linalg": {}})(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


class DeferredCompilerCalls(MetaPathFinder):
    """Store calls to torch's compiler, such as ``disable``, and repeat them when the compiler is imported."""

    def __init__(self) -> None:
        self._calls: list[Callable[[ModuleType], object]] = []

    def decorators(self) -> dict[str, Callable[..., Any]]:
        """Return the replacements of the compiler's functions, by name."""
        return {method.__name__: method for method in (self.disable, self.allow_in_graph, self.assume_constant_result)}

    def disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return a wrapper that calls ``fn``, or the compiler's ``disable(fn)`` once the compiler is imported."""
        if fn is None:
            return lambda fn: self.disable(fn, *args, **kwargs)
        if not isinstance(fn, FunctionType):  # a class, which the compiler changes in place
            self._calls.append(lambda compiler: compiler.disable(fn, *args, **kwargs))
            return fn
        target: Callable[..., Any] = fn

        @wraps(fn)
        def uncompiled(*call_args: Any, **call_kwargs: Any) -> Any:
            return target(*call_args, **call_kwargs)

        def repeat(compiler: ModuleType) -> None:
            nonlocal target
            target = compiler.disable(fn, *args, **kwargs)
            marks = {name: value for name, value in vars(target).items() if name.startswith("_torchdynamo_")}
            vars(uncompiled).update(marks, _torchdynamo_wrapper_id=id(uncompiled))

        self._calls.append(repeat)
        return uncompiled

    def allow_in_graph(self, fn: Any) -> Any:
        """Return ``fn``, and store the call of ``allow_in_graph``."""
        self._calls.append(lambda compiler: compiler.allow_in_graph(fn))
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        """Return ``fn``, and store the call of ``assume_constant_result``."""
        self._calls.append(lambda compiler: compiler.assume_constant_result(fn))
        return fn

    def repeat_on_import(self) -> None:
        """Repeat the calls when the compiler is imported, or immediately if it is already imported."""
        if COMPILER in sys.modules:
            self._repeat(sys.modules[COMPILER])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the compiler's module once, and repeat the stored calls after its import."""
        if name != COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def run_and_repeat(module: ModuleType) -> None:
                exec_module(module)
                self._repeat(module)

            spec.loader.exec_module = run_and_repeat  # type: ignore[method-assign]
        return spec

    def _repeat(self, compiler: ModuleType) -> None:
        for call in self._calls:
            call(compiler)
