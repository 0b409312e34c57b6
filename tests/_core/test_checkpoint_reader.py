"""The checkpoint reader loads plain values from torch.save, and rejects content that costs more than the file."""

from __future__ import annotations

import collections
import io
import os
import pickle
import random
import resource
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchrl_lightning._core.checkpoint_reader import load_checkpoint
from torchrl_lightning._core.checksums import checksum, copy_expanded_tensors, invalid_tensors, verify_checksums
from torchrl_lightning._core.file_limits import PICKLE_OPERATIONS

MB = 1 << 20


def saved(content: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file, **options)
    file.seek(0)
    return file


def rewritten(
    pickled: bytes | None = None,
    *,
    content: Any = None,
    compression: int = zipfile.ZIP_STORED,
    more: dict[str, bytes] | None = None,
) -> io.BytesIO:
    """Return a file of torch.save with another pickle or with additional records."""
    target, source = io.BytesIO(), zipfile.ZipFile(saved({"x": torch.zeros(8)} if content is None else content))
    with source, zipfile.ZipFile(target, "w", compression) as archive:
        for record in source.infolist():
            is_pickle = pickled is not None and record.filename.endswith("data.pkl")
            archive.writestr(record.filename, pickled if is_pickle else source.read(record))
        for name, data in (more or {}).items():
            archive.writestr(name, data)
    target.seek(0)
    return target


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        flat = torch.arange(12.0)
        self.register_buffer("rows", flat.view(3, 4))
        self.register_buffer("part", flat[2:7])
        self.register_buffer("turned", flat.view(3, 4).t())
        self.register_buffer("empty", torch.zeros(0, 5))
        self.lstm = nn.LSTM(3, 4)


def stepped(kind: type[torch.optim.Optimizer], **settings: Any) -> Any:
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = kind([parameter], **settings)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 5])
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    scheduler.step()
    return [optimizer.state_dict(), scheduler.state_dict()]


LEGAL: dict[str, Callable[[], Any]] = {
    "a module with tied weights and views": lambda: {"state_dict": Tied().state_dict()},
    "optimizers": lambda: [stepped(torch.optim.Adam), stepped(torch.optim.SGD, momentum=0.9)],
    "plain values": lambda: {
        "none": None, "flags": [True, False], "numbers": [0, 255, 256, -1, 1 << 31, 1 << 63, -(1 << 100), 0.5],
        "special": [float("inf"), float("-inf")], "texts": ["", "ä€😀", "x" * 3000],
        "tuples": [(), (1,), (1, 2), (1, 2, 3, 4)],
        "nested": {"a": {"b": [{"c": ()}]}}, 3: "a number", ("a", "b"): "a tuple", "bytes": b"\x00\xff",
        "set": {1, "a"},
        "complex": 1 + 2j, "counter": collections.Counter("aab"), "ordered": collections.OrderedDict(a=1),
        "size": torch.Size([1, 2]), "device": torch.device("cpu"), "dtype": torch.bfloat16, "none again": [None] * 2000,
    },
    "all dtypes": lambda: {
        str(dtype): torch.ones(3, 2).to(dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
            torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64,
        )
    },
    "parameters": lambda: [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)],
    "scalars and views": lambda: [torch.tensor(1.0), torch.arange(6.0)[3], torch.arange(24).view(2, 3, 4).mT],
    "the same twice": lambda: (lambda tensor: [tensor, tensor, {"x": tensor}])(torch.arange(5)),
    "generators": lambda: {
        "torch": torch.get_rng_state(),
        "python": random.Random(0).getstate(),
        "numpy": np.random.default_rng(0).bit_generator.state,
    },
    "no tensors": lambda: {"epoch": 1},
    "an untyped storage's dtype": lambda: torch.zeros(3).view(torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_load_checkpoint_equals_torch_load_for_plain_content(name: str, tmp_path: Path) -> None:
    content = LEGAL[name]()
    torch.save(content, tmp_path / "a.ckpt")
    expected = torch.load(tmp_path / "a.ckpt", weights_only=True)
    for loaded in (
        load_checkpoint(tmp_path / "a.ckpt"),
        load_checkpoint(str(tmp_path / "a.ckpt"), mapped=True),
        load_checkpoint(saved(content)),
    ):
        assert checksum(loaded) == checksum(expected)
        assert str(loaded) == str(expected)
        assert pickle.dumps(loaded).count(b"Parameter") == pickle.dumps(expected).count(b"Parameter")


def test_mapped_tensors_keep_shared_storage_and_leave_the_file_unchanged(tmp_path: Path) -> None:
    torch.save(Tied().state_dict(), tmp_path / "a.ckpt")
    before = (tmp_path / "a.ckpt").read_bytes()
    for mapped in (False, True):
        loaded = load_checkpoint(tmp_path / "a.ckpt", mapped=mapped)
        assert loaded["a.weight"].data_ptr() == loaded["b.weight"].data_ptr()
        loaded["rows"][0] = -1.0
        assert loaded["turned"][0, 0] == -1.0
        assert loaded._metadata == Tied().state_dict()._metadata
    assert (tmp_path / "a.ckpt").read_bytes() == before


# -- hostile files ---------------------------------------------------------------------------------------------------
class Assembled:
    """An object that is pickled as a tensor with arbitrary arguments."""

    def __init__(self, *arguments: Any, function: Any = torch._utils._rebuild_tensor_v2) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


class Stored:
    """A reference to a storage in a pickle: class, key and number of elements."""

    def __init__(self, kind: Any = torch.FloatStorage, key: Any = "0", count: Any = 8) -> None:
        self.described = ("storage", kind, key, "cpu", count)


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.described if isinstance(value, Stored) else None


def pickled(content: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file, 2).dump(content)
    return file.getvalue()


def tensor(size: Any, stride: Any, offset: Any = 0, storage: Any = None) -> Assembled:
    return Assembled(storage or Stored(), offset, size, stride, False, collections.OrderedDict())


def operations(*codes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(codes) + b"."


def pickled_call(name: str, *arguments: Any) -> bytes:
    """Return a pickle that calls the named function."""
    module, _, attribute = name.rpartition(".")
    inner = pickle.dumps(arguments, 2)[2:-1]
    return operations(f"c{module}\n{attribute}\n".encode(), inner, b"R")


PICKLES: dict[str, bytes] = {
    "a bytearray of 3 GB": pickled_call("builtins.bytearray", 3 << 30),
    "a bytearray by its old name": pickled_call("__builtin__.bytearray", 3 << 30),
    "bytes of 3 GB": pickled_call("builtins.bytes", 3 << 30),
    "a range": pickled_call("builtins.range", 3),
    "a call": pickled_call("os.system", "true"),
    "an array": pickled_call("numpy.zeros", 3 << 30),
    "a tensor by its class": pickled_call("torch.FloatTensor", 3 << 28),
    "a tensor by a function": pickled_call("torch.zeros", 3 << 28),
    "a storage by its class": pickled_call("torch.FloatStorage", 3 << 28),
    "an untyped storage": pickled_call("torch.storage.UntypedStorage", 3 << 28),
    "a class": operations(b"cbuiltins\ndict\n"),
    "a name for a value": operations(b"ctorch\nTensor\n"),
    "a name in a list": operations(b"](ctorch\nFloatStorage\ne"),
    "a name in a tuple in a list": operations(b"](ctorch\nFloatStorage\n\x85e"),
    "a set of a number": pickled_call("builtins.set", 1 << 40),
    "an encoding that grows": pickled_call("_codecs.encode", "x", "utf-32"),
    "a parameter of nothing": pickled_call("torch._utils._rebuild_parameter", None, True, None),
    "a shape of 3 GB": pickled_call("torch.Size", 3 << 30),
    "more than the storage": pickled({"x": tensor((9,), (1,))}),
    "behind the storage": pickled({"x": tensor((8,), (1,), 1)}),
    "before the storage": pickled({"x": tensor((8,), (1,), -1)}),
    "stride 0": pickled({"x": tensor((10**6, 10**6), (0, 0))}),
    "stride 0 in one dimension": pickled({"x": tensor((10**9, 8), (0, 1))}),
    "stride 0 without elements": pickled({"x": tensor((0, 10**9), (1, 0))}),
    "a negative stride": pickled({"x": tensor((8,), (-1,), 7)}),
    "a negative size": pickled({"x": tensor((-8,), (1,))}),
    "sizes that overflow": pickled({"x": tensor((1 << 61, 1 << 61), (1, 1))}),
    "sizes that overflow, without elements": pickled({"x": tensor((0, 1 << 61, 1 << 61), (1, 1, 1))}),
    "sizes that are no numbers": pickled({"x": tensor(("8",), (1,))}),
    "sizes that are flags": pickled({"x": tensor((True,), (1,))}),
    "a size that is a tensor": pickled({"x": tensor(tensor((1,), (1,)), (1,))}),
    "fewer strides than sizes": pickled({"x": tensor((2, 2), (1,))}),
    "a thousand dimensions": pickled({"x": tensor((1,) * 1000, (1,) * 1000)}),
    "windows that overlap": pickled([tensor((4, 5), (1, 1)) for _ in range(30_000)]),
    "the storage many times": pickled([tensor((8,), (1,)) for _ in range(60_000)]),
    "a storage of 4 TB": pickled({"x": tensor((8,), (1,), 0, Stored(count=1 << 40))}),
    "a storage of fewer elements": pickled({"x": tensor((4,), (1,), 0, Stored(count=4))}),
    "a storage of negative length": pickled({"x": tensor((4,), (1,), 0, Stored(count=-4))}),
    "a storage of another dtype": pickled({"x": tensor((4,), (1,), 0, Stored(torch.DoubleStorage))}),
    "a storage that is not there": pickled({"x": tensor((4,), (1,), 0, Stored(key="7"))}),
    "a storage elsewhere": pickled({"x": tensor((4,), (1,), 0, Stored(key="../data.pkl"))}),
    "a storage for a value": pickled({"x": Stored()}),
    "an ordered dict with attributes": operations(b"ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb"),
    "attributes of a dict": operations(b"}}X\x01\x00\x00\x00aNsb"),
    "a key that is a list": operations(b"}]Ns"),
    "a key of nested tuples": operations(b"})" + b"q\x01h\x01\x86" * 60 + b"Ns"),
    "another protocol": b"\x80\x04" + b"N.",
    "an integer of 255 bytes": operations(b"\x8a\xff" + b"\x01" * 255),
    "an integer of many digits": operations(b"L" + b"9" * 100_000 + b"L\n"),
    "a memo that is far": operations(b"Nr\xff\xff\xff\xff"),
    "a value that is not there": operations(b"h\x07"),
    "no value": operations(b""),
    "two values": operations(b"NN"),
    "no end": b"\x80\x02N",
    "nothing": b"",
    "a mark without values": operations(b"N("),
    "values without a mark": operations(b"]e"),
    "a list from nothing": operations(b"a"),
    "a long text": operations(b"X\xff\xff\xff\xffx"),
    "a long name": operations(b"c" + b"x" * 10_000),
    "many operations": operations(b"N0" * PICKLE_OPERATIONS),
    "many lists": operations(b"(" + b"]" * (2 * PICKLE_OPERATIONS) + b"t"),
    "many dicts": operations(b"(" + b"}" * (2 * PICKLE_OPERATIONS) + b"t"),
}


def measured(action: Callable[[], Any]) -> tuple[float, float]:
    """Return the growth of peak memory in MB and the processor time of an action that raises ValueError."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match=r".") as raised:
        action()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, time.process_time() - began


def check_cheap(file: io.BytesIO) -> None:
    size = len(file.getvalue()) / MB
    memory, seconds = measured(lambda: verify_checksums(load_checkpoint(file), "a.ckpt"))
    assert memory < 3 * size + 200
    assert seconds < 10


@pytest.mark.parametrize("name", [name for name in PICKLES if name != "a memo that is far"])
def test_hostile_pickle_raises_with_little_memory(name: str) -> None:
    check_cheap(rewritten(PICKLES[name]))


def test_memo_index_may_be_any_number() -> None:
    assert load_checkpoint(rewritten(PICKLES["a memo that is far"])) is None


def zeros(size: int) -> io.BytesIO:
    return rewritten(content={"x": torch.zeros(size // 4)}, compression=zipfile.ZIP_DEFLATED)


def duplicated_record() -> io.BytesIO:
    file = saved({"x": torch.zeros(8)})
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/data/0", bytes(32))
    return file


def patched(change: Callable[[bytearray], Any]) -> io.BytesIO:
    data = bytearray(saved({"x": torch.zeros(8)}).getvalue())
    change(data)
    return io.BytesIO(data)


def directory_of(size: int) -> Callable[[bytearray], Any]:
    return lambda data: data.__setitem__(slice(-10, -6), struct.pack("<L", size))


FILES: dict[str, Callable[[], io.BytesIO]] = {
    "deflated zeros": lambda: zeros(1 << 27),
    "a deflated pickle": lambda: rewritten(operations(b"N0" * 10**7), compression=zipfile.ZIP_DEFLATED),
    "bzip2": lambda: rewritten(compression=zipfile.ZIP_BZIP2),
    "lzma": lambda: rewritten(compression=zipfile.ZIP_LZMA),
    "a record twice": duplicated_record,
    "two roots": lambda: rewritten(more={"other/data.pkl": b"\x80\x02N."}),
    "another order of bytes": lambda: patched(lambda data: data.__setitem__(data.index(b"little"), 0)),
    "a long directory": lambda: patched(directory_of(1 << 30)),
    "a comment": lambda: patched(lambda data: data.extend(b"x")),
    "half": lambda: patched(lambda data: data.__delitem__(slice(200, None))),
    "without a record": lambda: patched(lambda data: data.__delitem__(slice(100, 300))),
    "an older form": lambda: saved({"x": torch.zeros(8)}, _use_new_zipfile_serialization=False),
    "a text": lambda: io.BytesIO(b"# a page\n" * 10),
    "nothing": io.BytesIO,
    "a pickle": lambda: io.BytesIO(pickle.dumps({})),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_file_raises_with_little_memory(name: str) -> None:
    check_cheap(FILES[name]())


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="regular"):
        load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="regular"):
        load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize(
    "content",
    [
        {"x": torch.zeros(1).expand(10**6, 10**6), "checksums": {"x": 1}},
        {"x": [torch.zeros(1 << 16)] * 100_000, "checksums": {"x": 1}},
        {"x": ["x" * 10**6] * 100_000, "checksums": {"x": 1}},
        {"x": {"x" * 10**6: {"y" * 10**6: [0] * 1000}, "z": [{"x" * 10**6: 0}] * 10_000}},
        {"x": torch.zeros(1 << 20).as_strided((1 << 10, 1 << 19), (1, 1)), "checksums": {"x": 1}},
    ],
    ids=["an expanded tensor", "a tensor often", "a text often", "keys often", "windows"],
)
def test_checksums_are_bounded_by_the_stored_memory(content: dict[str, Any]) -> None:
    memory, seconds = measured(lambda: verify_checksums(content, "a.ckpt"))
    assert memory < 200
    assert seconds < 10


def test_checksum_of_a_transposed_tensor_takes_little_memory() -> None:
    tensor = torch.arange(20_000_000, dtype=torch.float32).view(4000, 5000)
    expected = checksum(tensor.t().contiguous())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert checksum(tensor.t()) == expected
    assert checksum(tensor.t()[None]) == checksum(tensor.t().contiguous()[None])
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 100


def test_expanded_tensor_is_reported_and_copied_before_saving() -> None:
    content = {"a": {"b": [1, torch.ones(1, 3).expand(4, 3)]}, "c": torch.zeros(3)}
    assert list(invalid_tensors(content)) == ["a.b.1"]
    copied = copy_expanded_tensors(content)
    assert not list(invalid_tensors(copied))
    assert torch.equal(copied["a"]["b"][1], content["a"]["b"][1])
    assert copied["c"] is content["c"]
    assert content["a"]["b"][1].stride() == (0, 1)
    assert checksum(load_checkpoint(saved(copied))) == checksum(copied)
