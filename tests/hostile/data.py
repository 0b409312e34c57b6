"""Demonstrations and data sets with an attacker's changes: npz, safetensors and, if h5py is installed, HDF5."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hostile.running import Base, Case
from kit.demonstrations import episode
from torchrl_lightning import write_demonstration

GB = 1 << 30


def _npz(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Base, str], Path]:
    """Return a function that writes the four arrays of a demonstration with a change, compressed."""

    def write(sent: Path, base: Base, canary: str) -> Path:
        arrays: dict[str, Any] = {
            "Observation": np.zeros((3, 4), np.float32),
            "Action": np.zeros((3, 1), np.int64),
            "Reward": np.ones((3, 1), np.float32),
            "FrameSkip": np.array(1),
        }
        change(arrays)
        with zipfile.ZipFile(sent / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    if isinstance(array, np.ndarray):
                        np.save(file, array, allow_pickle=True)
                    else:
                        for part in array if isinstance(array, list) else [array]:
                            file.write(part)
        return sent / "a.npz"

    return write


def _head(shape: Any, dtype: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": (1,)})
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    text += b" " * (-(10 + len(text) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


class _Touch:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def _objects(sent: Path, base: Base, canary: str) -> Path:
    return _npz(lambda arrays: arrays.update(Observation=np.array([_Touch(canary)] * 3)))(sent, base, canary)


def _members(change: Callable[[zipfile.ZipFile], Any]) -> Callable[[Path, Base, str], Path]:
    def write(sent: Path, base: Base, canary: str) -> Path:
        path = _npz(lambda arrays: None)(sent, base, canary)
        with zipfile.ZipFile(path, "a") as archive:
            change(archive)
        return path

    return write


def _lying_size(sent: Path, base: Base, canary: str) -> Path:
    """Declare a size of a few bytes for a member that unpacks to a gigabyte."""
    path = _npz(lambda arrays: arrays.update(Observation=[_head((GB // 16, 4)), *[bytes(1 << 24)] * 64]))(
        sent, base, canary
    )
    data = bytearray(path.read_bytes())
    size = len(_head((GB // 16, 4))) + GB
    place = data.rfind(size.to_bytes(4, "little"))
    data[place : place + 4] = (128 + 48).to_bytes(4, "little")
    path.write_bytes(data)
    return path


def _bytes(name: str, data: bytes | None) -> Callable[[Path, Base, str], Path]:
    def write(sent: Path, base: Base, canary: str) -> Path:
        path = sent / name
        os.mkfifo(path) if data is None else path.write_bytes(data)
        return path

    return write


def _linked(name: str, target: str) -> Callable[[Path, Base, str], Path]:
    def write(sent: Path, base: Base, canary: str) -> Path:
        (sent / name).symlink_to(target)
        return sent / name

    return write


def _own(change: Callable[[dict[str, Any], bytes], tuple[Any, bytes]]) -> Callable[[Path, Base, str], Path]:
    """Return a function that writes a safetensors demonstration with a changed header or changed numbers."""

    def write(sent: Path, base: Base, canary: str) -> Path:
        path = sent / "a.safetensors"
        write_demonstration(path, episode(terminated=True, truncated=False))
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header, rest = change(json.loads(data[8 : 8 + size]), data[8 + size :])
        written = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(len(written).to_bytes(8, "little") + written + rest)
        return path

    return write


def _content(**changes: Any) -> Callable[[dict[str, Any], bytes], tuple[Any, bytes]]:
    def change(header: dict[str, Any], rest: bytes) -> tuple[Any, bytes]:
        content = json.loads(header["__metadata__"]["demonstration"])
        content.pop("checksum")
        content.update(changes)
        header["__metadata__"]["demonstration"] = json.dumps(content)
        return header, rest

    return change


def _tensor(**changes: Any) -> Callable[[dict[str, Any], bytes], tuple[Any, bytes]]:
    def change(header: dict[str, Any], rest: bytes) -> tuple[Any, bytes]:
        name = next(name for name in header if name != "__metadata__")
        header[name].update(changes)
        return header, rest

    return change


def _renamed(name: str) -> Callable[[dict[str, Any], bytes], tuple[Any, bytes]]:
    def change(header: dict[str, Any], rest: bytes) -> tuple[Any, bytes]:
        header, rest = _content()(header, rest)
        old = next(each for each in header if each != "__metadata__")
        header[name] = header.pop(old)
        return header, rest

    return change


DEMONSTRATIONS = {
    "npz of objects": _objects,
    "npz that unpacks to 2 GB": _npz(lambda a: a.update(Observation=[_head((GB // 8, 4)), *[bytes(1 << 24)] * 128])),
    "npz that declares 4 TB": _npz(lambda a: a.update(Observation=_head((10**12, 1)))),
    "npz whose shape overflows": _npz(lambda a: a.update(Observation=_head((2**62, 2**62)))),
    "npz of a negative shape": _npz(lambda a: a.update(Observation=_head((-1, 4)))),
    "npz of a shape of text": _npz(lambda a: a.update(Observation=_head(("\x1b[31m",)))),
    "npz without numbers": _npz(lambda a: a.update(Observation=_head((2**61, 0)))),
    "npz that calls": _npz(lambda a: a.update(Observation=_head("__import__('os').system('touch CANARY')"))),
    "npz of a deep head": _npz(lambda a: a.update(Observation=_head((1,), "(" * 9000))),
    "npz of texts": _npz(lambda a: a.update(Action=np.array([["\x1b[31m"]] * 3))),
    "npz of complex numbers": _npz(lambda a: a.update(Observation=np.zeros((3, 4), np.complex64))),
    "npz of records": _npz(lambda a: a.update(Reward=np.zeros(3, [("a", "f4"), ("b", "f4")]))),
    "npz of no step": _npz(lambda a: a.update({k: v[:0] for k, v in a.items() if v.ndim})),
    "npz of other lengths": _npz(lambda a: a.update(Reward=np.ones((2, 1), np.float32))),
    "npz of infinite rewards": _npz(lambda a: a.update(Reward=np.full((3, 1), np.inf, np.float32))),
    "npz of a huge frame skip": _npz(lambda a: a.update(FrameSkip=np.array(2**62))),
    "npz of a negative frame skip": _npz(lambda a: a.update(FrameSkip=np.array(-1))),
    "npz of an array that is missing": _npz(lambda a: a.pop("Reward")),
    "npz whose size is a lie": _lying_size,
    "npz with another member": _members(lambda archive: archive.writestr("\x1b[31mx\n", b"x")),
    "npz with a path": _members(lambda archive: archive.writestr("../../../tmp/CANARY", b"x")),
    "npz with ten thousand members": _members(lambda archive: [archive.writestr(f"m{n}", b"") for n in range(10_000)]),
    "npz of no byte": _bytes("a.npz", b""),
    "npz of a text": _bytes("a.npz", b"PK\x03\x04\x1b[31m"),
    "a FIFO as the list of saved files": _bytes(".saved.json", None),
    "npz that is a FIFO": _bytes("a.npz", None),
    "npz that is a device": _linked("a.npz", "/dev/zero"),
    "npz elsewhere": _linked("a.npz", "/etc/passwd"),
    "safetensors of no byte": _bytes("a.safetensors", b""),
    "safetensors that is a FIFO": _bytes("a.safetensors", None),
    "safetensors that is a device": _linked("a.safetensors", "/dev/zero"),
    "safetensors of a head of 10 TB": _bytes("a.safetensors", (10**13).to_bytes(8, "little") + b"{}"),
    "safetensors of a deep head": _own(lambda header, rest: (b'{"__metadata__":' + b"[" * 90_000, rest)),
    "safetensors of another head": _own(lambda header, rest: ({"__metadata__": {"\x1b[31m": "x"}}, b"")),
    "safetensors of 4 TB": _own(_tensor(shape=[10**12], data_offsets=[0, 4 * 10**12])),
    "safetensors of another dtype": _own(_tensor(dtype="\x1b[31m")),
    "safetensors of float8": _own(_tensor(dtype="F8_E4M3")),
    "safetensors that is cut off": _own(lambda header, rest: (header, rest[:-4])),
    "safetensors with a changed bit": _own(lambda header, rest: (header, b"\xff" + rest[1:])),
    "a deep name": _own(_renamed("steps/" + "/".join("x" * 2000))),
    "a name with escape codes": _own(_renamed("steps/\x1b[31m\n<script>")),
    "a foreign name": _own(_renamed("\x1b[31m")),
    "metadata with escape codes": _own(_content(metadata={"environment": "\x1b[31m\u202e", "\x1b[2J": "x"})),
    "a recipe with escape codes": _own(_content(metadata={"recipe": '{"id": "\x1b[31m", "\x1b[32m": 1}'})),
    "a recipe that imports": _own(
        _content(metadata={"recipe": '{"id": "hostile_module:X-v0"}', "environment": "hostile_module:X-v0"})
    ),
    "metadata that are a list": _own(_content(metadata=[1])),
    "metadata of a megabyte": _own(_content(metadata={"x": "y" * 1_000_000})),
    "a frame skip of text": _own(_content(frame_skip="\x1b[31m")),
    "a value that is not a number": _own(_content(value="\x1b[31m")),
    "an infinite value": _own(_content(value=float("inf"))),
    "another version": _own(_content(schema_version=99)),
    "an end of text": _own(_content(terminated="\x1b[31m")),
}


# -- HDF5 --------------------------------------------------------------------------------------------------------------
def _hdf5(change: Callable[[Any], Any]) -> Callable[[Path, Base, str], Path]:
    def write(sent: Path, base: Base, canary: str) -> Path:
        import h5py

        path = sent / "a.hdf5"
        with h5py.File(path, "w") as file:
            file["observations"], file["actions"] = np.zeros((3, 4), np.float32), np.zeros(3, np.int64)
            file["rewards"], file["terminals"] = np.ones(3, np.float32), np.array([0, 0, 1], bool)
            change(file)
        return path

    return write


def _replaced(name: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[name]
        make(file)

    return change


def _external(file: Any) -> None:
    import h5py

    file["observations"] = h5py.ExternalLink("/etc/passwd", "/x")


HDF5 = {
    "HDF5 that claims 4 TB": _hdf5(
        _replaced("observations", lambda f: f.create_dataset("observations", (10**12, 1), "f4", chunks=(10**6, 1)))
    ),
    "HDF5 that unpacks to 2 GB": _hdf5(
        _replaced(
            "observations",
            lambda f: f.create_dataset(
                "observations", (GB // 2, 1), "f4", chunks=(1 << 22, 1), compression="gzip", fillvalue=0
            ),
        )
    ),
    "HDF5 with a link to a file": _hdf5(_replaced("observations", _external)),
    "HDF5 of an external file": _hdf5(
        _replaced(
            "observations",
            lambda f: f.create_dataset("observations", (3, 4), "f4", external=[("/etc/passwd", 0, 48)]),
        )
    ),
    "HDF5 with a circle": _hdf5(lambda f: f.__setitem__("x", f["/"])),
    "HDF5 of a group": _hdf5(_replaced("observations", lambda f: f.create_group("observations"))),
    "HDF5 of texts": _hdf5(_replaced("actions", lambda f: f.__setitem__("actions", ["\x1b[31m"] * 3))),
    "HDF5 of a name with escape codes": _hdf5(lambda f: f.__setitem__("\x1b[31m", 3)),
    "HDF5 of no end": _hdf5(_replaced("terminals", lambda f: None)),
    "HDF5 of other lengths": _hdf5(_replaced("actions", lambda f: f.__setitem__("actions", np.zeros(2)))),
}
PLAIN_HDF5 = {
    "HDF5 of no byte": _bytes("a.hdf5", b""),
    "HDF5 of a text": _bytes("a.hdf5", b"\x89HDF\r\n\x1a\n\x1b[31m"),
    "HDF5 that is a FIFO": _bytes("a.hdf5", None),
    "HDF5 that is a device": _linked("a.hdf5", "/dev/zero"),
}


# -- Minari ------------------------------------------------------------------------------------------------------------
def _minari(name: str, content: bytes | None) -> Callable[[Path, Base, str], Path]:
    """Return a function that writes a Minari data set with one hostile file, and returns the root folder."""

    def write(sent: Path, base: Base, canary: str) -> Path:
        data = sent / "evil" / "set-v0" / "data"
        data.mkdir(parents=True)
        (data / "metadata.json").write_text(
            json.dumps({"dataset_id": "evil/set-v0", "total_episodes": 1, "total_steps": 3})
        )
        (data / "main_data.hdf5").write_bytes(b"")
        (data / name).unlink(missing_ok=True)
        os.mkfifo(data / name) if content is None else (data / name).write_bytes(content)
        return sent

    return write


def _metadata(**changes: Any) -> Callable[[Path, Base, str], Path]:
    """Return a function that writes metadata for CartPole with a change; None removes an entry."""
    box = {"type": "Box", "dtype": "float32", "shape": [4], "low": [-1] * 4, "high": [1] * 4}
    metadata: dict[str, Any] = {
        "dataset_id": "evil/set-v0",
        "total_episodes": 0,
        "total_steps": 0,
        "data_format": "hdf5",
        "observation_space": json.dumps(box),
        "action_space": '{"type": "Discrete", "dtype": "int64", "start": 0, "n": 2}',
    }

    def write(sent: Path, base: Base, canary: str) -> Path:
        import h5py
        import minari

        whole = {**metadata, "minari_version": minari.__version__, **changes}
        content = json.dumps({name: value for name, value in whole.items() if value is not None}).encode()
        path = _minari("metadata.json", content.replace(b"CANARY", canary.encode()))(sent, base, canary)
        with h5py.File(sent / "evil" / "set-v0" / "data" / "main_data.hdf5", "w"):
            pass
        return path

    return write


def _spec(entry_point: str, **kwargs: Any) -> str:
    return json.dumps({"id": "Evil-v0", "entry_point": entry_point, "kwargs": kwargs, "additional_wrappers": []})


MINARI = {
    "metadata of no JSON": _minari("metadata.json", b"\x1b[31m"),
    "metadata that are deep": _minari("metadata.json", b"[" * 100_000),
    "metadata of a FIFO": _minari("metadata.json", None),
    "an environment that imports": _minari(
        "metadata.json", json.dumps({"dataset_id": "evil/set-v0", "env_spec": '{"id": "hostile_module:X-v0"}'}).encode()
    ),
    "an environment that is built": _metadata(
        observation_space=None, env_spec=_spec("subprocess:Popen", args=["touch", "CANARY"])
    ),
    "a module of an environment": _metadata(action_space=None, env_spec=_spec("hostile_module:function")),
    "an environment beside the spaces": _metadata(env_spec=_spec("hostile_module:function")),
    "10^10 episodes": _metadata(total_episodes=10**10),
    "episodes of text": _metadata(total_episodes="\x1b[31m"),
    "a deep space": _metadata(observation_space='{"type": "Tuple", "subspaces": [' * 50_000),
    "a space of another type": _metadata(observation_space='{"type": "\x1b[31m"}'),
    "a space of 10^12 bits": _metadata(observation_space='{"type": "MultiBinary", "n": 1000000000000}'),
    "a space of a huge shape": _metadata(
        observation_space='{"type": "Box", "dtype": "float32", "shape": [1000000000000], "low": [0], "high": [1]}'
    ),
    "another format": _metadata(data_format="arrow"),
    "metadata of many values": _minari("metadata.json", b"[" + b"1," * 5_000_000 + b"1]"),
    "metadata of 100 MB": _minari("metadata.json", b" " * 100_000_000),
    "metadata that are a list": _minari("metadata.json", b"[]"),
    "metadata that lack all": _minari("metadata.json", b"{}"),
    "data of no byte": _minari("main_data.hdf5", b""),
    "data of a FIFO": _minari("main_data.hdf5", None),
}


def cases() -> Iterator[Case]:
    """Yield all hostile demonstrations and data sets."""
    yield from (Case("demonstration", name, write) for name, write in DEMONSTRATIONS.items())
    yield from (Case("data set", name, write) for name, write in PLAIN_HDF5.items())
    if find_spec("h5py"):
        yield from (Case("data set", name, write) for name, write in HDF5.items())
    if find_spec("minari"):
        yield from (Case("Minari", name, write) for name, write in MINARI.items())
