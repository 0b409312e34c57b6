"""Compile kernels with numba.

A kernel is a plain function. Functions of this package that a kernel calls are compiled together with the kernel. This
module has placeholders for numba's own functions, so that numba is imported only with the first kernel. The import
takes half a second.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

logger = logging.getLogger(__name__)
PACKAGE = __name__.partition(".")[0]
COMPILING = "Compiling (first run only)"
_FASTMATH_KERNELS: set[Callable[..., Any]] = set()
_COMPILE_CALLBACKS: list[Callable[[], None]] = []


def fastmath(function: Callable[..., Any]) -> Callable[..., Any]:
    """Allow the compiler to reorder a kernel's sums and products, so that it can vectorise them; return the kernel.

    NaN and infinity are still computed correctly.
    """
    _FASTMATH_KERNELS.add(function)
    return function


@functools.cache
def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel and the functions that it calls, once per process, with a cache on disk.

    Examples:
        >>> def double(x):
        ...     return 2 * x
        >>> jitted(double)(1.5)
        3.0
    """
    numba = _numba()
    assert isinstance(function, FunctionType)
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if function in _FASTMATH_KERNELS:
        options["fastmath"] = {"reassoc", "contract", "nsz"}
    namespace = function.__globals__
    callees = {name: _callee(namespace[name]) for name in function.__code__.co_names if name in namespace}
    function = FunctionType(function.__code__, {**namespace, **callees}, function.__name__, None, function.__closure__)
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # numba finds no writable folder for its cache
        return numba.njit(function, **options)


@functools.cache
def _numba() -> Any:
    import numba

    _listen_to_compilation()
    return numba


def when_compiling(callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` instead of logging when a kernel starts to compile; return a function to remove ``callback``.

    Compiling all kernels of a run can take many seconds. Kernels from the cache on disk are not compiled.
    """
    _COMPILE_CALLBACKS.append(callback)
    return lambda: _COMPILE_CALLBACKS.remove(callback)


def _listen_to_compilation() -> None:
    from numba.core import event

    class CompileListener(event.Listener):  # type: ignore[misc, name-defined, unused-ignore]
        is_announced = False

        def on_start(self, event: Any) -> None:
            for callback in tuple(_COMPILE_CALLBACKS):
                callback()
            if not (self.is_announced or _COMPILE_CALLBACKS):
                logger.info("%s: kernels are compiled once and cached on disk.", COMPILING)
                self.is_announced = True

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", CompileListener())


def _callee(value: Any) -> Any:
    if isinstance(value, Intrinsic):
        return _intrinsics()[value.name]
    if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == PACKAGE:
        return jitted(value)
    return value


class Intrinsic:
    """A placeholder for a function that only a compiled kernel can call."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        """Raise a TypeError, because Python cannot run this function."""
        raise TypeError(f"{self.name} can only be called by compiled kernels; call the kernel through jitted().")


prefetch = Intrinsic("prefetch")  # (address): requests the address's cache line without waiting; any address is valid
copy_bytes = Intrinsic("copy_bytes")  # (target address, source address, size)
load = Intrinsic("load")  # (address): the int64 at this address
pointer = Intrinsic("pointer")  # (address): a pointer for ``carray``
carray = Intrinsic("carray")  # (pointer, shape, dtype): the array at this pointer


@functools.cache
def _intrinsics() -> dict[str, Any]:
    from llvmlite import ir
    from numba import carray, types  # type: ignore[attr-defined]
    from numba.core import cgutils
    from numba.extending import intrinsic

    int32, byte_pointer = ir.IntType(32), ir.IntType(8).as_pointer()

    @intrinsic
    def prefetch(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], function_type)
            # The constants mean: read (0), nearest cache (3), data (1).
            builder.call(function, [builder.inttoptr(arguments[0], byte_pointer), int32(0), int32(3), int32(1)])
            return context.get_dummy_value()

        return types.void(types.intp), generate

    @intrinsic
    def copy_bytes(_: Any, target: Any, source: Any, size: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target_pointer, source_pointer = (builder.inttoptr(address, byte_pointer) for address in arguments[:2])
            cgutils.raw_memcpy(builder, target_pointer, source_pointer, arguments[2], 1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), generate

    @intrinsic
    def load(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))

        return types.int64(types.intp), generate

    @intrinsic
    def pointer(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.voidptr(types.intp), generate

    return {"prefetch": prefetch, "copy_bytes": copy_bytes, "load": load, "pointer": pointer, "carray": carray}
