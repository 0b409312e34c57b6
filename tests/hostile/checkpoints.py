"""Checkpoints with an attacker's changes: pickles, archives, sizes, configs, names and optimizer states."""

from __future__ import annotations

import collections
import copy
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hostile.running import Base, Case
from kit import hostile
from torchrl_lightning._core.checksums import CHECKSUMS_KEY
from torchrl_lightning.deploy.loading import CONFIG

GB = 1 << 30


def place(sent: Path) -> Path:
    """Return the path of a checkpoint in the run folder that an attacker sent."""
    path = sent / "run" / "checkpoints" / "best.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# -- bytes and pickles -------------------------------------------------------------------------------------------------
def _raw(data: bytes | Callable[[Path, Base], None]) -> Callable[[Path, Base, str], Path]:
    def write(sent: Path, base: Base, canary: str) -> Path:
        path = place(sent)
        path.write_bytes(data) if isinstance(data, bytes) else data(path, base)
        return path

    return write


def _archive(
    path: Path, pickled: bytes, records: dict[str, Any] | None = None, method: int = zipfile.ZIP_STORED
) -> None:
    """Write an archive as torch does, with another pickle and other records: bytes, or a number of zeros."""
    source = io.BytesIO()
    torch.save({"x": torch.zeros(8)}, source)
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(path, "w") as written:
        root = archive.namelist()[0].partition("/")[0]
        for name in archive.namelist():
            if "/data/" not in name:
                written.writestr(name, pickled if name.endswith("data.pkl") else archive.read(name))
        for name, data in (records or {"0": bytes(32)}).items():
            info = zipfile.ZipInfo(f"{root}/data/{name}")
            info.compress_type = method
            with written.open(info, "w", force_zip64=True) as file:
                for _ in range(0, data if isinstance(data, int) else 1, 1 << 24):
                    file.write(bytes(1 << 24) if isinstance(data, int) else data)


class _Storage:
    """A storage of ``size`` numbers, with its name in the archive."""

    def __init__(self, name: str, size: int, kind: Any = torch.FloatStorage) -> None:
        self.pid = ("storage", kind, name, "cpu", size)


class _Call:
    """A pickle of a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = function, arguments

    def __reduce__(self) -> Any:
        return self.parts


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Storage) else None


def _pickled(node: Any, protocol: int = 2) -> bytes:
    data = io.BytesIO()
    _Pickler(data, protocol).dump(node)
    return data.getvalue()


def _tensor(size: int, shape: Any, stride: Any, offset: Any = 0, name: str = "0") -> _Call:
    rebuild = torch._utils._rebuild_tensor_v2
    return _Call(rebuild, _Storage(name, size), offset, shape, stride, False, collections.OrderedDict())


def _called(module: str, name: str, argument: bytes = b"(") -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00xc" + f"{module}\n{name}\n".encode() + argument + b"tRs."


def _unfolding() -> Any:
    node: list[Any] = [1]
    for _ in range(25):
        node = [node] * 10
    return {"x": node}


def _pickles(canary: str) -> dict[str, bytes | Any]:
    text = f"X{chr(len(canary) + 6)}\x00\x00\x00touch {canary}".encode("latin1")
    run = b"(" + text
    return {
        "os.system": _called("os", "system", run),
        "posix.system": _called("posix", "system", run),
        "subprocess": _called("subprocess", "getoutput", run),
        "eval": _called("builtins", "eval", run),
        "old names of builtins": _called("__builtin__", "exec", run),
        "an import": _called(hostile.MODULE, "function"),
        "a name with escape codes": _called("\x1b[31mos", "system\x1b[2J"),
        "getattr": _called("builtins", "getattr", b"(cos\nsystem\nX\x01\x00\x00\x00x"),
        "a bytearray of 3 GB": _called("builtins", "bytearray", b"(\x8a\x05" + (3 * GB).to_bytes(5, "little")),
        "bytes of 3 GB": _called("builtins", "bytes", b"(\x8a\x05" + (3 * GB).to_bytes(5, "little")),
        "a range": _called("builtins", "range", b"(\x8a\x05" + (3 * GB).to_bytes(5, "little")),
        "codecs": _called("_codecs", "encode", b"(X\x01\x00\x00\x00xX\x06\x00\x00\x00latin1"),
        "a text that claims 4 GB": b"\x80\x04\x8d" + (4 * GB).to_bytes(8, "little") + b"x",
        "a long number that claims 2 GB": b"\x80\x02\x8b" + (2 * GB - 1).to_bytes(4, "little") + b"x",
        "a number of a million digits": b"\x80\x02}X\x01\x00\x00\x00x\x8b"
        + (500_000).to_bytes(4, "little")
        + b"\x7f" * 500_000
        + b"s.",
        "a memo of four billion": b"\x80\x02}r\xff\xff\xff\xff.",
        "deep lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "deep tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
        "lists that unfold": _pickled(_unfolding()),
        "a million empty dicts": b"\x80\x02](" + b"}" * 1_000_000 + b"e.",
        "no end": b"\x80\x02}",
        "no pickle": b"\x00" * 100,
        "an empty pickle": b"",
        "another protocol": b"\x80\xff}.",
        "a list": _pickled([1, 2]),
        "a number": _pickled(3),
        "a tensor alone": _pickled(_tensor(8, (8,), (1,))),
        "a stride of zero": _pickled({"x": _tensor(8, (10**6, 10**6), (0, 0))}),
        "a stride of zero in weights": _pickled(
            {"state_dict": {"x": _tensor(8, (10**5, 10**5), (0, 0))}, CHECKSUMS_KEY: {"state_dict": 1}}
        ),
        "overlapping rows": _pickled({"x": _tensor(8, (10**4, 4), (0, 1))}),
        "a negative stride": _pickled({"x": _tensor(8, (4,), (-1,))}),
        "a negative shape": _pickled({"x": _tensor(8, (-4,), (1,))}),
        "a shape beyond its storage": _pickled({"x": _tensor(8, (100,), (1,))}),
        "an offset beyond its storage": _pickled({"x": _tensor(8, (4,), (1,), 1 << 40)}),
        "a negative offset": _pickled({"x": _tensor(8, (4,), (1,), -4)}),
        "a shape that overflows": _pickled({"x": _tensor(8, (2**32, 2**32), (2**32, 1))}),
        "a shape of text": _pickled({"x": _tensor(8, ("a",), (1,))}),
        "a storage that claims 4 TB": _pickled({"x": _tensor(10**12, (10**12,), (1,))}),
        "a storage that is not there": _pickled({"x": _tensor(8, (8,), (1,), name="nowhere")}),
        "a storage in another folder": _pickled({"x": _tensor(8, (8,), (1,), name="../../../etc/hostname")}),
        "a hundred thousand tensors": _pickled({"x": [_tensor(8, (8,), (1,)) for _ in range(100_000)]}),
        "a sparse tensor": _pickled(
            {
                "x": _Call(
                    torch._utils._rebuild_sparse_tensor,
                    torch.sparse_coo,
                    (_tensor(8, (1, 1), (1, 1)), _tensor(8, (1,), (1,)), (10**12,)),
                )
            }
        ),
        "a tensor without memory": _pickled(
            {"x": _Call(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (10**15,), (1,), False)}
        ),
        "a size of many": _pickled({"x": _Call(torch.Size, tuple(range(100_000)))}),
        "a set": _pickled({"x": {1, 2}}),
        "an ordered dict of pairs": _pickled({"x": _Call(collections.OrderedDict, [[1, 2]])}),
        "a counter": _pickled({"x": _Call(collections.Counter, "aab")}),
        "names with escape codes": _pickled(
            {"\x1b[31m\nred\u202e": {"\x1b[2J": _tensor(8, (8,), (1,))}, "state_dict": {}}
        ),
        "a name that is a number": _pickled({1: 2, (1, 2): 3, None: 4, "state_dict": {}}),
        "a key that is long": _pickled({"x" * 1_000_000: 1}),
    }


def _bomb(path: Path, base: Base) -> None:
    _archive(path, _pickled({"x": _tensor(GB // 2, (GB // 2,), (1,))}), {"0": 2 * GB}, zipfile.ZIP_DEFLATED)


def _bombs(path: Path, base: Base) -> None:
    tensors = {str(number): _tensor(GB // 32, (GB // 32,), (1,), name=str(number)) for number in range(8)}
    _archive(path, _pickled(tensors), dict.fromkeys(tensors, GB // 8), zipfile.ZIP_DEFLATED)


def _deflated_pickle(path: Path, base: Base) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02](" + b"}" * 200_000_000 + b"e.")
        archive.writestr("a/version", "3\n")
        archive.writestr("a/byteorder", "little")


def _truncated(path: Path, base: Base) -> None:
    torch.save(base.stored, path)
    path.write_bytes(path.read_bytes()[:-1000])


def _changed_bit(path: Path, base: Base) -> None:
    torch.save(base.stored, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def _legacy(path: Path, base: Base) -> None:
    torch.save(base.stored, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-1000])


def _twice(path: Path, base: Base) -> None:
    _archive(path, _pickled({"x": 1}))
    with zipfile.ZipFile(path, "a") as archive:
        name = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{name}/../../../escaped", b"x")
        archive.writestr("/tmp/absolute", b"x")


def _script(path: Path, base: Base) -> None:
    module = torch.jit.script(torch.nn.Linear(2, 2))
    torch.jit.save(module, str(path))


def _fifo(path: Path, base: Base) -> None:
    os.mkfifo(path)


BYTES: dict[str, bytes | Callable[[Path, Base], None]] = {
    "no byte": b"",
    "a text": b"no checkpoint",
    "zeros": bytes(100_000),
    "the head of an archive": b"PK\x03\x04" + bytes(200),
    "an archive of nothing": b"PK\x05\x06" + bytes(18),
    "escape codes": b"\x1b[31m\x1b]0;title\x07" * 10,
    "cut off": _truncated,
    "a changed bit": _changed_bit,
    "an old format that is cut off": _legacy,
    "a bomb of one record": _bomb,
    "bombs of eight records": _bombs,
    "a deflated pickle": _deflated_pickle,
    "records outside of the archive": _twice,
    "a script": _script,
    "a FIFO": _fifo,
    "a link to a device": lambda path, base: path.symlink_to("/dev/zero"),
    "a folder": lambda path, base: path.mkdir(),
}


# -- values ------------------------------------------------------------------------------------------------------------
def _data_of(stored: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(value for key, value in stored.items() if key.endswith("DataModule"))
    return found


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        node = stored
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = to

    return change


def _model(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        stored[CONFIG]["model"] = hostile.changed(stored[CONFIG]["model"], key, value)

    return change


def _data(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        stored[CONFIG]["data"] = hostile.changed(stored[CONFIG]["data"], key, value)

    return change


def _weights(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def each(stored: dict[str, Any]) -> None:
        stored["state_dict"] = {key: change(value) for key, value in stored["state_dict"].items()}

    return each


def _moments(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def each(stored: dict[str, Any]) -> None:
        for state in stored["optimizer_states"][0]["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = change(state[name])

    return each


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda stored: stored.pop(key)


def _renamed(stored: dict[str, Any]) -> None:
    stored["state_dict"] = {f"\x1b[31m{key}\n": value for key, value in stored["state_dict"].items()}


def _foreign_data(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        _data_of(stored)[key] = value

    return change


LINEAR = {"_target_": "torch.nn.Linear", "in_features": 30_000, "out_features": 30_000}
VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no weights": _without("state_dict"),
    "weights that are a list": _set("state_dict", to=[1]),
    "weights without names": _set("state_dict", to={}),
    "names of weights with escape codes": _renamed,
    "weights that are texts": _weights(lambda value: "\x1b[31m"),
    "weights that are not finite": _weights(lambda value: value * float("nan") if value.is_floating_point() else value),
    "weights of other shapes": _weights(lambda value: value.reshape(-1)[:1]),
    "weights of complex numbers": _weights(lambda value: value.to(torch.complex64)),
    "weights that are expanded": _weights(lambda value: torch.zeros(()).expand(value.shape)),
    "weights of a billion numbers": _set("state_dict", to={"x": torch.zeros(1).expand(10**9)}),
    "checksums that are texts": _set(CHECKSUMS_KEY, to={"state_dict": "x"}),
    "checksums of what is not there": _set(CHECKSUMS_KEY, to={"\x1b[31m": 1}),
    "checksums that are a list": _set(CHECKSUMS_KEY, to=[1]),
    "a config that is a text": _set(CONFIG, to="\x1b[31m"),
    "a config that is empty": _set(CONFIG, to={}),
    "a command that is a text": _set("command", to="x"),
    "overrides with escape codes": _set("command", "overrides", to=["model.gamma=\x1b[31m0.5", "x\n=1"]),
    "overrides of Hydra's": _set("command", "overrides", to=["hydra.run.dir=/tmp/CANARY", "hydra/launcher=joblib"]),
    "overrides that interpolate": _set(
        "command", "overrides", to=["seed=${oc.env:HOME}", "model.gamma=${oc.decode:1}"]
    ),
    "deep overrides": _set("command", "overrides", to=["model.network.hidden_sizes=" + "[" * 60 + "]" * 60]),
    "a hundred thousand overrides": _set("command", "overrides", to=["seed=1"] * 100_000),
    "an override of a megabyte": _set("command", "overrides", to=["seed=" + "1" * 1_000_000]),
    "choices with paths": _set("command", "choices", to={"experiment": "../../../etc/x", "model": "ppo"}),
    "choices with escape codes": _set("command", "choices", to={"\x1b[31m": "ppo"}),
    "a network of 10^12 numbers": _model("network.hidden_sizes", [10**6, 10**6]),
    "a network of many layers": _model("network.hidden_sizes", [1] * 20_000),
    "a network of huge layers": _model("network.hidden_sizes", [2**62]),
    "a network of negative layers": _model("network.hidden_sizes", [-5]),
    "a network of text": _model("network.hidden_sizes", "\x1b[31m"),
    "a layer of 3.6 GB": _model("network", LINEAR),
    "an optimizer that is a layer": _model("optimizer", LINEAR),
    "a name of a class with escape codes": _model("_target_", "torchrl_lightning.\x1b[31mPPOModule\n"),
    "a setting with escape codes": _model("\x1b[31mgamma\n", 1),
    "a discount that is a text": _model("gamma", "\x1b[31m"),
    "a million environments": _data("num_envs", 10**6),
    "a negative number of environments": _data("num_envs", -1),
    "a rollout of 10^12 steps": _data("frames_per_batch", 10**12),
    "a buffer of 10^12 cells": _data("buffer", {"_target_": "torchrl_lightning.RingStorage", "max_size": 10**12}),
    "an environment with escape codes": _data("env", "CartPole\x1b[31m-v1\n"),
    "an environment that is a number": _data("env", 3),
    "a frame stack of a billion": _data("env", {"_target_": hostile.RECIPE, "id": "CartPole-v1", "frame_stack": 10**9}),
    "an action repeat of a billion": _data(
        "env", {"_target_": hostile.RECIPE, "id": "CartPole-v1", "action_repeat": 10**9}
    ),
    "specs that are a text": _foreign_data("specs", "\x1b[31m"),
    "specs that are empty": _foreign_data("specs", {}),
    "no moments": _foreign_data("normalization", {"observation": "\x1b[31m"}),
    "a fingerprint that is a text": _foreign_data("fingerprint", "\x1b[31m"),
    "ranks that are a text": _foreign_data("ranks", "\x1b[31m"),
    "ranks that are empty": _foreign_data("ranks", []),
    "a rank that is a number": _foreign_data("ranks", [3]),
    "a million ranks": _foreign_data("ranks", [{}] * 1000),
    "a buffer in another folder": _foreign_data(
        "ranks", [{"snapshot": {"run": "../../..", "name": "after_1_0000000a", "folder": "/etc"}}]
    ),
    "a buffer that is a text": _foreign_data("ranks", [{"buffer": {"storage": "\x1b[31m", "writer": 3}}]),
    "frames that are a text": _foreign_data("frames", "\x1b[31m"),
    "no optimizer": _set("optimizer_states", to=[]),
    "an optimizer that is a text": _set("optimizer_states", to=["\x1b[31m"]),
    "groups of parameters that are gone": _set("optimizer_states", 0, "param_groups", to=[]),
    "groups with foreign parameters": _set("optimizer_states", 0, "param_groups", 0, "params", to=[10**9]),
    "moments of other shapes": _moments(lambda value: value.reshape(-1)[:1].clone()),
    "moments of more numbers": _moments(lambda value: torch.zeros(value.numel() + 4096)),
    "moments of float64": _moments(lambda value: value.double()),
    "moments that are expanded": _moments(lambda value: torch.zeros(()).expand(value.shape)),
    "moments that are texts": _moments(lambda value: "\x1b[31m"),
    "loops that are a text": _set("loops", to="\x1b[31m"),
    "callbacks with escape codes": _set("callbacks", to={"\x1b[31mos.system": {"x": 1}}),
    "a step that is a text": _set("global_step", to="\x1b[31m"),
    "a version with escape codes": _set("pytorch-lightning_version", to="\x1b[31m9.9.9\n"),
    "a huge epoch": _set("epoch", to=10**30),
}


def _changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Base, str], Path]:
    def write(sent: Path, base: Base, canary: str) -> Path:
        stored = copy.deepcopy(base.stored)
        change(stored)
        path = place(sent)
        torch.save(stored, path)
        return path

    return write


def _pickle_case(name: str) -> Callable[[Path, Base, str], Path]:
    def write(sent: Path, base: Base, canary: str) -> Path:
        path = place(sent)
        _archive(path, _pickles(canary)[name])
        return path

    return write


def _config_case(group: str, name: str) -> Callable[[Path, Base, str], Path]:
    configs = {"model": hostile.models, "data": hostile.datas}[group]

    def write(sent: Path, base: Base, canary: str) -> Path:
        stored = {**base.stored, CONFIG: {**base.stored[CONFIG], group: configs(canary)[name]}}
        path = place(sent)
        torch.save(stored, path)
        return path

    return write


def cases() -> Iterator[Case]:
    """Yield all hostile checkpoints."""
    for name, data in BYTES.items():
        yield Case("checkpoint", name, _raw(data))
    for name in _pickles("/tmp/x"):
        yield Case("checkpoint", f"pickle, {name}", _pickle_case(name))
    for name, change in VALUES.items():
        yield Case("checkpoint", f"values, {name}", _changed(change))
    for name in hostile.models("x"):
        yield Case("checkpoint", f"model, {name}", _config_case("model", name))
    for name in hostile.datas("x"):
        yield Case("checkpoint", f"data, {name}", _config_case("data", name))
