"""Import the libraries that a run uses, without what they would import for others: more than half of the time.

Lightning names torch's compiler and TorchMetrics, which brings SciPy and matplotlib; TorchRL brings Ray and MuJoCo.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pkgutil import resolve_name
from types import FunctionType, ModuleType
from typing import Any

from torchrl_lightning.stand_ins import Ready, standing_in

COMPILER = "torch._dynamo"
SPARED = (COMPILER, "scipy", "torchmetrics.utilities.plot", "ray", "mujoco")
"""What is not imported with them."""
COLLECTING = ("tensordict.nn", "torchrl.envs", "gymnasium")
"""What is enough for a process that collects."""
_ALL = ("lightning", *COLLECTING, "torchrl.modules")


def import_libraries(names: Sequence[str] = _ALL) -> None:
    """Import them, in a process of ours and before anybody else's code; what was imported earlier stays as it is."""
    if all(name in sys.modules for name in names):
        return
    notes = CompilerNotes()
    with _uncollected(), standing_in({**{name: {} for name in SPARED}, COMPILER: notes.ready()}):
        for name in names:
            import_module(name)
    notes.watch()


class Libraries:
    """The first argument of a process for collecting: it imports them where it arrives, before the others do."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Sequence[str]]]:
        return import_libraries, (COLLECTING,)


def call(_: Libraries, function: str, *arguments: Any) -> None:
    """Call a function, ``module:name``, in a process that has imported nothing of ours but this."""
    resolve_name(function)(*arguments)


@contextmanager
def _uncollected() -> Iterator[None]:
    # Each search for garbage would go through hundreds of thousands of objects, which all stay, now and later.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


class CompilerNotes(MetaPathFinder):
    """What libraries tell torch's compiler of their functions; it is told when it is imported."""

    def __init__(self) -> None:
        self._notes: list[Callable[[ModuleType], object]] = []

    def ready(self) -> Ready:
        """Return what stands for the compiler's own functions."""
        return {each.__name__: each for each in (self.disable, self.allow_in_graph, self.assume_constant_result)}

    def disable(self, fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Keep the compiler from a function: call it as it is for as long as there is no compiler."""
        if fn is None:
            return lambda fn: self.disable(fn, *args, **kwargs)
        if not isinstance(fn, FunctionType):  # but a class, which is changed
            self._notes.append(lambda compiler: compiler.disable(fn, *args, **kwargs))
            return fn
        called: Callable[..., Any] = fn

        @wraps(fn)
        def uncompiled(*own: Any, **named: Any) -> Any:
            return called(*own, **named)

        def note(compiler: ModuleType) -> None:
            nonlocal called
            called = compiler.disable(fn, *args, **kwargs)
            marks = {name: value for name, value in vars(called).items() if name.startswith("_torchdynamo_")}
            vars(uncompiled).update(marks, _torchdynamo_wrapper_id=id(uncompiled))

        self._notes.append(note)
        return uncompiled

    def allow_in_graph(self, fn: Any) -> Any:
        """Let the compiler take a function as it is."""
        self._notes.append(lambda compiler: compiler.allow_in_graph(fn))
        return fn

    def assume_constant_result(self, fn: Any) -> Any:
        """Let the compiler call a function once."""
        self._notes.append(lambda compiler: compiler.assume_constant_result(fn))
        return fn

    def watch(self) -> None:
        """Hand the notes over when the compiler is imported, or now."""
        if COMPILER in sys.modules:
            self._hand_over(sys.modules[COMPILER])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the compiler, once."""
        if name != COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_hand_over(module: ModuleType) -> None:
                run(module)
                self._hand_over(module)

            spec.loader.exec_module = run_and_hand_over  # type: ignore[method-assign]
        return spec

    def _hand_over(self, compiler: ModuleType) -> None:
        for note in self._notes:
            note(compiler)
