"""Read a checkpoint of plain values and tensors safely: check each size against the file before allocating memory.

``torch.load(weights_only=True)`` does not run code, but it allocates bytearrays of any size, unpacks compressed records
and trusts shapes and strides. This reader supports the pickle operations that ``torch.save`` writes. It builds only
plain values, and tensors over the records of the file.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from torchrl_lightning._core.checkpoint_archive import Archive
from torchrl_lightning._core.file_limits import (
    ELEMENTS_LEAST,
    ELEMENTS_PER_BYTE,
    KEY_PARTS,
    PICKLE_DIGITS,
    PICKLE_OPERATIONS,
    TENSOR_DIMENSIONS,
)
from torchrl_lightning._core.untrusted import open_regular

_LARGEST = 1 << 62
_DAMAGED = (LookupError, TypeError, AttributeError, struct.error, UnicodeError, OverflowError, RuntimeError)
_STORAGES: dict[str, torch.dtype] = {
    "BFloat16": torch.bfloat16, "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "Double": torch.float64,
    "Float": torch.float32, "Half": torch.float16, "Int": torch.int32, "Long": torch.int64, "Short": torch.int16,
}  # fmt: skip
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_FOREIGN = {
    "_rebuild_sparse_tensor", "_rebuild_meta_tensor_no_storage", "_rebuild_qtensor", "_rebuild_nested_tensor",
    "_rebuild_wrapper_subclass", "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy",
}  # fmt: skip


def load_checkpoint(source: str | Path | BinaryIO, *, mapped: bool = False) -> Any:
    """Return the content of a file of ``torch.save``, on the CPU.

    Args:
        source: A path or a file that is open for reading.
        mapped: Memory-map the tensors instead of reading them; requires a path.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, or contains compressed records, other objects than plain values and tensors,
            or tensors too large for the size of the file.
    """
    if not isinstance(source, str | Path):
        return _read(source, None)
    with open_regular(source) as file:
        return _read(file, Path(source) if mapped else None)


def _read(file: BinaryIO, mapped: Path | None) -> Any:
    machine = _Unpickler(Archive(file, mapped))
    try:
        return machine.load()
    except _DAMAGED as error:
        raise ValueError(f"its pickle is damaged: {type(error).__name__}: {error}") from error
    finally:
        vars(machine).clear()  # break the reference cycle, so that memory is released without the garbage collector


class _Mark:
    """A function that a pickle may call."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self.build = build


class _Storage:
    """A storage class, given by its dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _Memory:
    """A storage and its dtype."""

    def __init__(self, dtype: torch.dtype, storage: torch.UntypedStorage) -> None:
        self.dtype, self.storage = dtype, storage


class _Arguments(tuple[Any, ...]):
    """A tuple with a function, class or storage: valid only as arguments, not as a checkpoint value."""


class _Unpickler:
    """An interpreter of the pickle operations that torch.save writes, with size limits."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.data = archive.record("data.pkl")
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.memories: dict[str, torch.UntypedStorage] = {}
        self.left = max(ELEMENTS_LEAST, ELEMENTS_PER_BYTE * archive.size)
        self.names: dict[str, Any] = {
            "collections.OrderedDict": _Mark(_ordered_dict),
            "collections.Counter": _Mark(_counter),
            "builtins.set": _Mark(_set),
            "__builtin__.set": _Mark(_set),
            "builtins.complex": _Mark(_complex),
            "__builtin__.complex": _Mark(_complex),
            "_codecs.encode": _Mark(_encoded),
            "torch.Size": _Mark(_size),
            "torch.device": _Mark(_device),
            "torch.serialization._get_layout": _Mark(lambda *_: None),  # for sparse tensors
            "torch.Tensor": Tensor,
            "torch.nn.parameter.Parameter": nn.Parameter,
            "torch.storage.UntypedStorage": _Storage(torch.uint8),
            "torch._utils._rebuild_tensor_v2": _Mark(self._tensor),
            "torch._utils._rebuild_tensor_v3": _Mark(self._tensor_of_dtype),
            "torch._utils._rebuild_parameter": _Mark(_parameter),
            "torch._tensor._rebuild_from_type_v2": _Mark(_of_type),
            **{f"torch.{name}Storage": _Storage(dtype) for name, dtype in _STORAGES.items()},
            **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
            # Placeholders for unsupported tensors; later checks reject them and name their key in the checkpoint.
            **{f"torch._utils.{name}": _Mark(lambda *_: torch.empty(0, device="meta")) for name in _FOREIGN},
        }

    def load(self) -> Any:
        """Run the pickle and return its value."""
        operations, data = _OPERATIONS, self.data
        for _ in range(PICKLE_OPERATIONS):
            if self.at >= len(data):
                raise ValueError("its pickle ends without a value")
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                if len(self.stack) != 1 or self.marks:
                    raise ValueError("its pickle holds no single value")
                return _plain(self.stack[0])
            operation = operations.get(code)
            if operation is None:
                raise ValueError(f"its pickle has the operation {bytes([code])!r}, which torch.save does not write")
            operation(self)
        raise ValueError(f"its pickle has more than {PICKLE_OPERATIONS} operations")

    # -- reading ---------------------------------------------------------------------------------------------------
    def number(self, form: struct.Struct) -> Any:
        """Read and return a number."""
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def take(self, count: int) -> bytes:
        """Read and return ``count`` bytes."""
        if count < 0 or self.at + count > len(self.data):
            raise ValueError("its pickle is truncated")
        self.at += count
        return self.data[self.at - count : self.at]

    def line(self) -> str:
        """Read and return a line of text."""
        end = self.data.find(b"\n", self.at, self.at + 256)
        if end < 0:
            raise ValueError("its pickle has a name of more than 256 characters")
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def above(self) -> list[Any]:
        """Pop and return the values above the last mark."""
        if not self.marks:
            raise ValueError("its pickle lacks a mark")
        values, self.stack = self.stack, self.marks.pop()
        return values

    # -- building --------------------------------------------------------------------------------------------------
    def named(self) -> None:
        """Push the object for an allowed name."""
        name = f"{self.line()}.{self.line()}"
        value = self.names.get("torch.storage.UntypedStorage" if name == "torch.UntypedStorage" else name)
        if value is None:
            raise ValueError(f"it holds {name[:200]!r}, which is neither a plain value nor a tensor")
        self.stack.append(value)

    def called(self) -> None:
        """Call an allowed function and push its result."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Mark) or not isinstance(arguments, tuple):
            raise ValueError("its pickle calls a value that is no function")
        self.stack.append(function.build(*arguments))

    def attributes(self) -> None:
        """Set ``_metadata`` (module versions) of an ordered dict, the only supported attribute."""
        state, value = self.stack.pop(), self.stack[-1]
        if type(value) is not OrderedDict or type(state) is not dict or not set(state) <= {"_metadata"}:
            raise ValueError("its pickle sets attributes of a value that has none")
        vars(value).update(state)

    def memory(self) -> None:
        """Push a storage from its record in the archive."""
        described = self.stack.pop()
        if not isinstance(described, tuple) or len(described) != 5 or described[0] != "storage":
            raise ValueError("its pickle names no storage")
        _, kind, key, _, count = described
        if not isinstance(kind, _Storage) or type(key) is not str or not _natural(count):
            raise ValueError("its pickle describes a storage by other values than torch.save")
        name = f"data/{key}"
        if count * kind.dtype.itemsize != self.archive.length(name):
            raise ValueError(f"the storage {key[:80]!r} declares {count} of {kind.dtype}, other than its record holds")
        if name not in self.memories:
            self.memories[name] = self.archive.storage(name)
        self.stack.append(_Memory(kind.dtype, self.memories[name]))

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> Tensor:
        return self._view(storage.dtype, storage.storage, offset, size, stride)

    def _tensor_of_dtype(
        self, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *others: Any
    ) -> Tensor:
        if not isinstance(dtype, torch.dtype):
            raise ValueError("its pickle has a tensor without a dtype")
        return self._view(dtype, storage.storage, offset, size, stride)

    def _view(self, dtype: torch.dtype, memory: torch.UntypedStorage, offset: Any, size: Any, stride: Any) -> Tensor:
        """Return a tensor over a storage; raise ValueError if shape and strides exceed the storage."""
        if not (
            isinstance(size, tuple)
            and isinstance(stride, tuple)
            and len(size) == len(stride) <= TENSOR_DIMENSIONS
            and all(map(_natural, (offset, *size, *stride)))
            and math.prod(max(1, each) for each in size) < _LARGEST
        ):
            raise ValueError("its pickle has a tensor whose shape is no list of natural numbers")
        shape = list(size)
        count = math.prod(size)
        if any(step == 0 and length > 1 for length, step in zip(size, stride, strict=True)):
            raise ValueError(f"a tensor of shape {shape} repeats its numbers (stride 0); write it contiguous")
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if count else -1
        if (offset + last + 1) * dtype.itemsize > memory.nbytes():
            raise ValueError(f"a tensor of shape {shape} of {dtype} reaches beyond its {memory.nbytes()} bytes")
        self.left -= count * dtype.itemsize
        if self.left < 0:
            raise ValueError(
                f"its tensors have more than {ELEMENTS_PER_BYTE} times the {self.archive.size} bytes of the file"
            )
        return torch.empty(0, dtype=dtype).set_(memory, offset, size, stride)


_ARGUMENTS = (_Mark, _Storage, _Memory, _Arguments, type)


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _plain(value: Any) -> Any:
    """Return a value of a checkpoint; raise ValueError for objects that are valid only as arguments."""
    if isinstance(value, _ARGUMENTS):
        raise ValueError("its pickle holds a name in the place of a value")
    return value


def _key(value: Any) -> Any:
    """Return a dict key; raise ValueError unless it is None, a string, a number or a short tuple of these."""
    parts = value if type(value) is tuple else (value,)
    if len(parts) > KEY_PARTS or not all(each is None or type(each) in (str, int, float, bool) for each in parts):
        raise ValueError("its pickle has a key that is no text and no number")
    return value


def _ordered_dict(*arguments: Any) -> OrderedDict[Any, Any]:
    if arguments:
        raise ValueError("its pickle has an ordered dict with arguments")
    return OrderedDict()


def _counter(*arguments: Any) -> Counter[Any]:
    if len(arguments) > 1 or not all(type(each) is dict for each in arguments):
        raise ValueError("its pickle has a counter that counts nothing")
    return Counter(*arguments)


def _set(values: Any = ()) -> set[Any]:
    if type(values) not in (list, tuple):
        raise ValueError("its pickle has a set of no list")
    return set(map(_key, values))


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("its pickle has a complex number of no numbers")
    return complex(real, imaginary)


def _encoded(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("its pickle has bytes in another encoding than torch.save writes")
    return text.encode(encoding)


def _size(lengths: Any) -> torch.Size:
    if type(lengths) is not tuple or len(lengths) > TENSOR_DIMENSIONS or not all(map(_natural, lengths)):
        raise ValueError("its pickle has a shape of no natural numbers")
    return torch.Size(lengths)


def _device(name: Any, index: Any = None) -> torch.device:
    if type(name) is not str or not name.isalpha() or len(name) > 16 or index not in (None, *range(128)):
        raise ValueError("its pickle has a device of another name")
    return torch.device(name) if index is None else torch.device(name, index)


def _parameter(data: Any, *others: Any) -> nn.Parameter:
    if not isinstance(data, Tensor):
        raise ValueError("its pickle has a parameter without a tensor")
    return nn.Parameter(data, requires_grad=data.is_floating_point() and others[:1] != (False,))


def _of_type(function: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
    """Return a tensor without its Python attributes."""
    if not isinstance(function, _Mark) or not isinstance(arguments, tuple) or kind not in (Tensor, nn.Parameter):
        raise ValueError("its pickle has a tensor of a class of its own")
    value = function.build(*arguments)
    if not isinstance(value, Tensor):
        raise ValueError("its pickle has a tensor of a class of its own")
    return value


def _append(machine: _Unpickler, values: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise ValueError("its pickle appends to no list")
    target.extend(map(_plain, values))


def _set_items(machine: _Unpickler, values: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) not in (dict, OrderedDict) or len(values) % 2:
        raise ValueError("its pickle sets items of no dict")
    for key, value in zip(values[::2], values[1::2], strict=True):
        target[_key(key)] = _plain(value)


def _tuple(machine: _Unpickler, count: int) -> None:
    if len(machine.stack) < count:
        raise ValueError("its pickle lacks values")
    begin = len(machine.stack) - count
    machine.stack[begin:] = [_as_tuple(machine.stack[begin:])]


def _marked_tuple(machine: _Unpickler) -> None:
    values = machine.above()
    machine.stack.append(_as_tuple(values))


def _as_tuple(values: list[Any]) -> tuple[Any, ...]:
    return _Arguments(values) if any(isinstance(each, _ARGUMENTS) for each in values) else tuple(values)


def _long(machine: _Unpickler) -> None:
    count = machine.number(_BYTE)
    if count > PICKLE_DIGITS:
        raise ValueError(f"its pickle has an integer of {count} bytes, more than {PICKLE_DIGITS}")
    machine.stack.append(int.from_bytes(machine.take(count), "little", signed=True))


def _marked(machine: _Unpickler) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _protocol(machine: _Unpickler) -> None:
    if machine.number(_BYTE) != 2:
        raise ValueError("its pickle has another protocol than 2, which torch.save writes")


def _popped(machine: _Unpickler, count: int) -> list[Any]:
    if len(machine.stack) <= count:
        raise ValueError("its pickle lacks values")
    values = machine.stack[-count:]
    del machine.stack[-count:]
    return values


_BYTE, _SHORT, _INT, _UINT, _DOUBLE = map(struct.Struct, ("<B", "<H", "<i", "<I", ">d"))
_OPERATIONS: dict[int, Callable[[_Unpickler], Any]] = {
    ord(code): operation
    for code, operation in {
        "\x80": _protocol,
        "c": _Unpickler.named,
        "R": _Unpickler.called,
        "b": _Unpickler.attributes,
        "Q": _Unpickler.memory,
        "(": _marked,
        "N": lambda machine: machine.stack.append(None),
        "\x88": lambda machine: machine.stack.append(True),
        "\x89": lambda machine: machine.stack.append(False),
        ")": lambda machine: machine.stack.append(()),
        "]": lambda machine: machine.stack.append([]),
        "}": lambda machine: machine.stack.append({}),
        "a": lambda machine: _append(machine, _popped(machine, 1)),
        "e": lambda machine: _append(machine, machine.above()),
        "s": lambda machine: _set_items(machine, _popped(machine, 2)),
        "u": lambda machine: _set_items(machine, machine.above()),
        "t": _marked_tuple,
        "\x85": lambda machine: _tuple(machine, 1),
        "\x86": lambda machine: _tuple(machine, 2),
        "\x87": lambda machine: _tuple(machine, 3),
        "J": lambda machine: machine.stack.append(machine.number(_INT)),
        "K": lambda machine: machine.stack.append(machine.number(_BYTE)),
        "M": lambda machine: machine.stack.append(machine.number(_SHORT)),
        "\x8a": _long,
        "G": lambda machine: machine.stack.append(machine.number(_DOUBLE)),
        "X": lambda machine: machine.stack.append(machine.take(machine.number(_UINT)).decode("utf-8", "surrogatepass")),
        "U": lambda machine: machine.stack.append(machine.take(machine.number(_BYTE)).decode("ascii")),
        "h": lambda machine: machine.stack.append(machine.memo[machine.number(_BYTE)]),
        "j": lambda machine: machine.stack.append(machine.memo[machine.number(_UINT)]),
        "q": lambda machine: machine.memo.__setitem__(machine.number(_BYTE), machine.stack[-1]),
        "r": lambda machine: machine.memo.__setitem__(machine.number(_UINT), machine.stack[-1]),
    }.items()
}
