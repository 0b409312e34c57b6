"""Read checkpoints without running code, and check each size against the file before allocating memory.

``torch.load(weights_only=True)`` does not run code, but it allocates bytearrays of any size, unpacks compressed records
and trusts shapes and strides. This reader supports the pickle operations that ``torch.save`` writes. It builds only
plain values and tensors. The data of the tensors comes from the records of the file.
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

_MAX_NATURAL = 1 << 62
_DAMAGE_ERRORS = (LookupError, TypeError, AttributeError, struct.error, UnicodeError, OverflowError, RuntimeError)
_STORAGES: dict[str, torch.dtype] = {
    "BFloat16": torch.bfloat16, "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "Double": torch.float64,
    "Float": torch.float32, "Half": torch.float16, "Int": torch.int32, "Long": torch.int64, "Short": torch.int16,
}  # fmt: skip
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_UNSUPPORTED_REBUILDS = {
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
        ValueError: The file is damaged or has compressed records, an object is neither a plain value nor a tensor, or
            the tensors are too large for the size of the file.
    """
    if not isinstance(source, str | Path):
        return _read(source, None)
    with open_regular(source) as file:
        return _read(file, Path(source) if mapped else None)


def _read(file: BinaryIO, mapped_path: Path | None) -> Any:
    unpickler = _Unpickler(Archive(file, mapped_path))
    try:
        return unpickler.load()
    except _DAMAGE_ERRORS as error:
        raise ValueError(f"its pickle is damaged: {type(error).__name__}: {error}") from error
    finally:
        vars(unpickler).clear()  # break the reference cycle, so that memory is released without the garbage collector


class _AllowedFunction:
    """A function that a pickle may call."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self.build = build


class _StorageType:
    """The dtype that a storage class in a pickle represents."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _TypedStorage:
    """A storage and its dtype."""

    def __init__(self, dtype: torch.dtype, storage: torch.UntypedStorage) -> None:
        self.dtype, self.storage = dtype, storage


class _ArgumentTuple(tuple[Any, ...]):
    """A tuple with a function, class or storage; a pickle may pass it to a function, but not store it as a value."""


class _Unpickler:
    """An interpreter of the pickle operations that torch.save writes, with size limits."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.data = archive.record("data.pkl")
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.remaining_bytes = max(ELEMENTS_LEAST, ELEMENTS_PER_BYTE * archive.size)
        self.names: dict[str, Any] = {
            "collections.OrderedDict": _AllowedFunction(_ordered_dict),
            "collections.Counter": _AllowedFunction(_counter),
            "builtins.set": _AllowedFunction(_set),
            "__builtin__.set": _AllowedFunction(_set),
            "builtins.complex": _AllowedFunction(_complex),
            "__builtin__.complex": _AllowedFunction(_complex),
            "_codecs.encode": _AllowedFunction(_encode),
            "torch.Size": _AllowedFunction(_size),
            "torch.device": _AllowedFunction(_device),
            "torch.serialization._get_layout": _AllowedFunction(lambda *_: None),  # for sparse tensors
            "torch.Tensor": Tensor,
            "torch.nn.parameter.Parameter": nn.Parameter,
            "torch.storage.UntypedStorage": _StorageType(torch.uint8),
            "torch._utils._rebuild_tensor_v2": _AllowedFunction(self._rebuild_tensor),
            "torch._utils._rebuild_tensor_v3": _AllowedFunction(self._rebuild_tensor_with_dtype),
            "torch._utils._rebuild_parameter": _AllowedFunction(_rebuild_parameter),
            "torch._tensor._rebuild_from_type_v2": _AllowedFunction(_rebuild_from_type),
            **{f"torch.{name}Storage": _StorageType(dtype) for name, dtype in _STORAGES.items()},
            **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
            # Placeholders for unsupported tensors; later checks reject them and name their key in the checkpoint.
            **{
                f"torch._utils.{name}": _AllowedFunction(lambda *_: torch.empty(0, device="meta"))
                for name in _UNSUPPORTED_REBUILDS
            },
        }

    def load(self) -> Any:
        """Run the pickle and return its value."""
        handlers, data = _OPERATIONS, self.data
        for _ in range(PICKLE_OPERATIONS):
            if self.position >= len(data):
                raise ValueError("its pickle ends without a value")
            code = data[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                if len(self.stack) != 1 or self.marks:
                    raise ValueError("its pickle must have exactly one value")
                return _check_value(self.stack[0])
            handler = handlers.get(code)
            if handler is None:
                raise ValueError(f"its pickle has the operation {bytes([code])!r}, which torch.save does not write")
            handler(self)
        raise ValueError(f"its pickle has more than {PICKLE_OPERATIONS} operations")

    # -- reading ---------------------------------------------------------------------------------------------------
    def read_number(self, form: struct.Struct) -> Any:
        """Read and return a number."""
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return value

    def read_bytes(self, count: int) -> bytes:
        """Read and return ``count`` bytes."""
        if count < 0 or self.position + count > len(self.data):
            raise ValueError("its pickle is truncated")
        self.position += count
        return self.data[self.position - count : self.position]

    def read_line(self) -> str:
        """Read and return a line of text."""
        end = self.data.find(b"\n", self.position, self.position + 256)
        if end < 0:
            raise ValueError("its pickle has a name of more than 256 characters")
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text

    def pop_to_mark(self) -> list[Any]:
        """Pop and return the values above the last mark."""
        if not self.marks:
            raise ValueError("its pickle lacks a mark")
        values, self.stack = self.stack, self.marks.pop()
        return values

    # -- building --------------------------------------------------------------------------------------------------
    def push_global(self) -> None:
        """Read a name, and push its object; raise ValueError if the name is not allowed."""
        name = f"{self.read_line()}.{self.read_line()}"
        value = self.names.get("torch.storage.UntypedStorage" if name == "torch.UntypedStorage" else name)
        if value is None:
            raise ValueError(f"it holds {name[:200]!r}, which is neither a plain value nor a tensor")
        self.stack.append(value)

    def call(self) -> None:
        """Call an allowed function and push its result."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _AllowedFunction) or not isinstance(arguments, tuple):
            raise ValueError("its pickle calls a value that is not a function")
        self.stack.append(function.build(*arguments))

    def set_attributes(self) -> None:
        """Set the attribute ``_metadata`` (module versions) of an ordered dict; other attributes are not supported."""
        state, value = self.stack.pop(), self.stack[-1]
        if type(value) is not OrderedDict or type(state) is not dict or not set(state) <= {"_metadata"}:
            raise ValueError("its pickle sets attributes of a value that has none")
        vars(value).update(state)

    def push_storage(self) -> None:
        """Read a storage from its record in the archive, and push it."""
        persistent_id = self.stack.pop()
        if not isinstance(persistent_id, tuple) or len(persistent_id) != 5 or persistent_id[0] != "storage":
            raise ValueError("its pickle has an invalid reference to a storage")
        _, storage_type, key, _, count = persistent_id
        if not isinstance(storage_type, _StorageType) or type(key) is not str or not _is_natural(count):
            raise ValueError("its pickle describes a storage by values that torch.save does not write")
        name = f"data/{key}"
        if count * storage_type.dtype.itemsize != self.archive.length(name):
            raise ValueError(
                f"the storage {key[:80]!r} declares {count} of {storage_type.dtype}, but its record has another size"
            )
        if name not in self.storages:
            self.storages[name] = self.archive.storage(name)
        self.stack.append(_TypedStorage(storage_type.dtype, self.storages[name]))

    def _rebuild_tensor(self, typed: Any, offset: Any, size: Any, stride: Any, *others: Any) -> Tensor:
        return self._view(typed.dtype, typed.storage, offset, size, stride)

    def _rebuild_tensor_with_dtype(
        self, typed: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *others: Any
    ) -> Tensor:
        if not isinstance(dtype, torch.dtype):
            raise ValueError("its pickle has a tensor without a dtype")
        return self._view(dtype, typed.storage, offset, size, stride)

    def _view(self, dtype: torch.dtype, storage: torch.UntypedStorage, offset: Any, size: Any, stride: Any) -> Tensor:
        """Return a tensor that views a storage; raise ValueError if shape and strides exceed the storage."""
        if not (
            isinstance(size, tuple)
            and isinstance(stride, tuple)
            and len(size) == len(stride) <= TENSOR_DIMENSIONS
            and all(map(_is_natural, (offset, *size, *stride)))
            and math.prod(max(1, length) for length in size) < _MAX_NATURAL
        ):
            raise ValueError("its pickle has a tensor with a shape or stride of other values than natural numbers")
        shape = list(size)
        count = math.prod(size)
        if any(step == 0 and length > 1 for length, step in zip(size, stride, strict=True)):
            raise ValueError(f"a tensor of shape {shape} repeats its numbers (stride 0); save it contiguous")
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if count else -1
        if (offset + last + 1) * dtype.itemsize > storage.nbytes():
            raise ValueError(f"a tensor of shape {shape} of {dtype} reaches beyond its {storage.nbytes()} bytes")
        self.remaining_bytes -= count * dtype.itemsize
        if self.remaining_bytes < 0:
            raise ValueError(
                f"its tensors have more than {ELEMENTS_PER_BYTE} times the {self.archive.size} bytes of the file"
            )
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


_ARGUMENT_TYPES = (_AllowedFunction, _StorageType, _TypedStorage, _ArgumentTuple, type)


def _is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NATURAL


def _check_value(value: Any) -> Any:
    """Return a value of a checkpoint; raise ValueError for objects that are valid only as arguments."""
    if isinstance(value, _ARGUMENT_TYPES):
        raise ValueError("its pickle has a name instead of a value")
    return value


def _check_key(value: Any) -> Any:
    """Return a dict key; raise ValueError unless it is None, a string, a number or a short tuple of these."""
    items = value if type(value) is tuple else (value,)
    if len(items) > KEY_PARTS or not all(item is None or type(item) in (str, int, float, bool) for item in items):
        raise ValueError("its pickle has a key that is neither a string nor a number")
    return value


def _ordered_dict(*arguments: Any) -> OrderedDict[Any, Any]:
    if arguments:
        raise ValueError("its pickle has an ordered dict with arguments")
    return OrderedDict()


def _counter(*arguments: Any) -> Counter[Any]:
    if len(arguments) > 1 or not all(type(argument) is dict for argument in arguments):
        raise ValueError("its pickle has a counter of another type than dict")
    return Counter(*arguments)


def _set(values: Any = ()) -> set[Any]:
    if type(values) not in (list, tuple):
        raise ValueError("its pickle has a set of another type than list")
    return set(map(_check_key, values))


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("its pickle has a complex number of other types than float")
    return complex(real, imaginary)


def _encode(string: Any, encoding: Any) -> bytes:
    if type(string) is not str or encoding != "latin1":
        raise ValueError("its pickle has bytes in an encoding that torch.save does not write")
    return string.encode(encoding)


def _size(lengths: Any) -> torch.Size:
    if type(lengths) is not tuple or len(lengths) > TENSOR_DIMENSIONS or not all(map(_is_natural, lengths)):
        raise ValueError("its pickle has a shape of other values than natural numbers")
    return torch.Size(lengths)


def _device(name: Any, index: Any = None) -> torch.device:
    if type(name) is not str or not name.isalpha() or len(name) > 16 or index not in (None, *range(128)):
        raise ValueError("its pickle has an unknown device")
    return torch.device(name) if index is None else torch.device(name, index)


def _rebuild_parameter(data: Any, *others: Any) -> nn.Parameter:
    if not isinstance(data, Tensor):
        raise ValueError("its pickle has a parameter without a tensor")
    return nn.Parameter(data, requires_grad=data.is_floating_point() and others[:1] != (False,))


def _rebuild_from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
    """Return a tensor without its Python attributes."""
    if (
        not isinstance(function, _AllowedFunction)
        or not isinstance(arguments, tuple)
        or kind not in (Tensor, nn.Parameter)
    ):
        raise ValueError("its pickle has a tensor of an unsupported class")
    value = function.build(*arguments)
    if not isinstance(value, Tensor):
        raise ValueError("its pickle has a tensor of an unsupported class")
    return value


def _append(unpickler: _Unpickler, values: list[Any]) -> None:
    target = unpickler.stack[-1]
    if type(target) is not list:
        raise ValueError("its pickle appends to a value that is not a list")
    target.extend(map(_check_value, values))


def _set_items(unpickler: _Unpickler, values: list[Any]) -> None:
    target = unpickler.stack[-1]
    if type(target) not in (dict, OrderedDict) or len(values) % 2:
        raise ValueError("its pickle sets items of a value that is not a dict")
    for key, value in zip(values[::2], values[1::2], strict=True):
        target[_check_key(key)] = _check_value(value)


def _tuple(unpickler: _Unpickler, count: int) -> None:
    if len(unpickler.stack) < count:
        raise ValueError("its pickle lacks values")
    begin = len(unpickler.stack) - count
    unpickler.stack[begin:] = [_as_tuple(unpickler.stack[begin:])]


def _tuple_to_mark(unpickler: _Unpickler) -> None:
    values = unpickler.pop_to_mark()
    unpickler.stack.append(_as_tuple(values))


def _as_tuple(values: list[Any]) -> tuple[Any, ...]:
    return _ArgumentTuple(values) if any(isinstance(value, _ARGUMENT_TYPES) for value in values) else tuple(values)


def _long_integer(unpickler: _Unpickler) -> None:
    count = unpickler.read_number(_BYTE)
    if count > PICKLE_DIGITS:
        raise ValueError(f"its pickle has an integer of {count} bytes, more than {PICKLE_DIGITS}")
    unpickler.stack.append(int.from_bytes(unpickler.read_bytes(count), "little", signed=True))


def _push_mark(unpickler: _Unpickler) -> None:
    unpickler.marks.append(unpickler.stack)
    unpickler.stack = []


def _protocol(unpickler: _Unpickler) -> None:
    if unpickler.read_number(_BYTE) != 2:
        raise ValueError("its pickle must have protocol 2, which torch.save writes")


def _pop(unpickler: _Unpickler, count: int) -> list[Any]:
    if len(unpickler.stack) <= count:
        raise ValueError("its pickle lacks values")
    values = unpickler.stack[-count:]
    del unpickler.stack[-count:]
    return values


_BYTE, _SHORT, _INT, _UINT, _DOUBLE = map(struct.Struct, ("<B", "<H", "<i", "<I", ">d"))
_OPERATIONS: dict[int, Callable[[_Unpickler], Any]] = {
    ord(code): operation
    for code, operation in {
        "\x80": _protocol,
        "c": _Unpickler.push_global,
        "R": _Unpickler.call,
        "b": _Unpickler.set_attributes,
        "Q": _Unpickler.push_storage,
        "(": _push_mark,
        "N": lambda unpickler: unpickler.stack.append(None),
        "\x88": lambda unpickler: unpickler.stack.append(True),
        "\x89": lambda unpickler: unpickler.stack.append(False),
        ")": lambda unpickler: unpickler.stack.append(()),
        "]": lambda unpickler: unpickler.stack.append([]),
        "}": lambda unpickler: unpickler.stack.append({}),
        "a": lambda unpickler: _append(unpickler, _pop(unpickler, 1)),
        "e": lambda unpickler: _append(unpickler, unpickler.pop_to_mark()),
        "s": lambda unpickler: _set_items(unpickler, _pop(unpickler, 2)),
        "u": lambda unpickler: _set_items(unpickler, unpickler.pop_to_mark()),
        "t": _tuple_to_mark,
        "\x85": lambda unpickler: _tuple(unpickler, 1),
        "\x86": lambda unpickler: _tuple(unpickler, 2),
        "\x87": lambda unpickler: _tuple(unpickler, 3),
        "J": lambda unpickler: unpickler.stack.append(unpickler.read_number(_INT)),
        "K": lambda unpickler: unpickler.stack.append(unpickler.read_number(_BYTE)),
        "M": lambda unpickler: unpickler.stack.append(unpickler.read_number(_SHORT)),
        "\x8a": _long_integer,
        "G": lambda unpickler: unpickler.stack.append(unpickler.read_number(_DOUBLE)),
        "X": lambda unpickler: unpickler.stack.append(
            unpickler.read_bytes(unpickler.read_number(_UINT)).decode("utf-8", "surrogatepass")
        ),
        "U": lambda unpickler: unpickler.stack.append(
            unpickler.read_bytes(unpickler.read_number(_BYTE)).decode("ascii")
        ),
        "h": lambda unpickler: unpickler.stack.append(unpickler.memo[unpickler.read_number(_BYTE)]),
        "j": lambda unpickler: unpickler.stack.append(unpickler.memo[unpickler.read_number(_UINT)]),
        "q": lambda unpickler: unpickler.memo.__setitem__(unpickler.read_number(_BYTE), unpickler.stack[-1]),
        "r": lambda unpickler: unpickler.memo.__setitem__(unpickler.read_number(_UINT), unpickler.stack[-1]),
    }.items()
}
