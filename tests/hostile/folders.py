"""States on disk, run folders and published policies with an attacker's changes."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tensordict import TensorDict

from cli.written_runs import keep, write_run
from hostile.running import Base, Case
from kit import hostile
from torchrl_lightning import ExperienceBuffer, RingStorage
from torchrl_lightning._core.files import MANIFEST, write_state_folder


# -- states ------------------------------------------------------------------------------------------------------------
def _state() -> dict[str, Any]:
    buffer = ExperienceBuffer(storage=RingStorage(200))
    done = torch.zeros(150, 1, dtype=torch.bool)
    done[::10] = True
    steps = TensorDict({"x": torch.rand(150, 1), "next": {"reward": torch.ones(150, 1), "done": done}}, [150])
    buffer.extend(steps)
    return buffer.state_dict()


def _written(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Base, str], Path]:
    """Return a function that writes a changed state with checksums that match it."""

    def write(sent: Path, base: Base, canary: str) -> Path:
        state = _state()
        write_state_folder(sent / "state", change(state) or state)
        return sent / "state"

    return write


def _manifest(change: Callable[[Path, dict[str, Any]], Any]) -> Callable[[Path, Base, str], Path]:
    """Return a function that changes the manifest of a state: its content with a new checksum, or the whole file."""

    def write(sent: Path, base: Base, canary: str) -> Path:
        folder = sent / "state"
        write_state_folder(folder, _state())
        path = folder / MANIFEST
        written = json.loads(path.read_text())
        changed = change(folder, written["content"])
        if isinstance(changed, str | bytes):
            path.write_bytes(changed.encode() if isinstance(changed, str) else changed)
        elif not path.is_symlink() and path.is_file():
            content = written["content"] if changed is None else changed
            crc32 = zlib.crc32(json.dumps(content).encode())
            path.write_text(json.dumps({**written, "content": content, "crc32": crc32}))
        return folder

    return write


def _reward(**changes: Any) -> Callable[[Path, dict[str, Any]], None]:
    def change(folder: Path, content: dict[str, Any]) -> None:
        content["state"]["storage"]["data"]["next"]["reward"]["__tensor__"].update(changes)

    return change


def _put(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        node = state
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = to

    return change


def _replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path, dict[str, Any]], None]:
    def change(folder: Path, content: dict[str, Any]) -> None:
        path = folder / (MANIFEST if name == MANIFEST else content["file"])
        path.unlink()
        make(path)

    return change


def _deep(folder: Path, content: dict[str, Any]) -> str:
    return "[" * 200_000 + "]" * 200_000


STATES = {
    "rewards of 1e30": _written(_put("storage", "data", "next", "reward", to=torch.full((150, 1), 1e30))),
    "rewards that are not finite": _written(
        _put("storage", "data", "next", "reward", to=torch.full((150, 1), float("nan")))
    ),
    "complex rewards": _written(_put("storage", "data", "next", "reward", to=torch.ones(150, 1) * 1j)),
    "a length of zero": _written(_put("writer", "length", to=0)),
    "a length of 10^15": _written(_put("writer", "length", to=10**15)),
    "a capacity of 10^15": _written(_put("storage", "max_size", to=10**15)),
    "a count of 10^15": _written(_put("storage", "count", to=10**15)),
    "a negative count": _written(_put("storage", "count", to=-1)),
    "a count that is a text": _written(_put("storage", "count", to="\x1b[31m")),
    "positions that are a text": _written(_put("writer", "positions", to="\x1b[31m")),
    "positions of 2^62": _written(_put("writer", "positions", to=torch.tensor([1 << 62]))),
    "no environment": _written(_put("writer", "positions", to=torch.empty(0, dtype=torch.int64))),
    "cells of a billion rows without numbers": _written(_put("storage", "data", to={"x": torch.empty(10**9, 0)})),
    "names with escape codes": _written(_put("storage", "data", "\x1b[31m\n<script>\u202e", to=torch.rand(150, 1))),
    "a storage that is a text": _written(_put("storage", to="\x1b[31m")),
    "a thousand buffers": _written(lambda state: {"x": [_state()["storage"]] * 1000}),
    "ten thousand entries": _written(_put("storage", "data", to={f"x{n}": torch.zeros(150) for n in range(10_000)})),
    "a manifest of 60 MB": _manifest(lambda folder, content: "[" + "[]," * 20_000_000 + "[]]"),
    "a manifest of one text": _manifest(lambda folder, content: '"' + "x" * 60_000_000 + '"'),
    "a manifest of other characters": _manifest(lambda folder, content: '"' + "\U0001f600" * 15_000_000 + '"'),
    "a manifest that is too large": _manifest(lambda folder, content: b" " * (65 << 20)),
    "a deep manifest": _manifest(_deep),
    "no manifest of JSON": _manifest(lambda folder, content: "\x1b[31m"),
    "a manifest of a number": _manifest(lambda folder, content: "3"),
    "a number of many digits": _manifest(lambda folder, content: '{"version": ' + "1" * 1_000_000 + "}"),
    "bytes that are no text": _manifest(lambda folder, content: b"\xff\xfe"),
    "a changed manifest": _manifest(lambda folder, content: '{"version": 2, "crc32": 1, "content": {}}'),
    "a FIFO as a manifest": _manifest(_replaced(MANIFEST, os.mkfifo)),
    "a link as a manifest": _manifest(_replaced(MANIFEST, lambda path: path.symlink_to("/dev/zero"))),
    "a FIFO as data": _manifest(_replaced("data", os.mkfifo)),
    "a link as data": _manifest(_replaced("data", lambda path: path.symlink_to("/etc/passwd"))),
    "no data": _manifest(_replaced("data", lambda path: None)),
    "data in another folder": _manifest(lambda folder, content: content.update(file="../../etc/passwd")),
    "a shape of 4 TB": _manifest(_reward(shape=[10**12])),
    "a shape that overflows": _manifest(_reward(shape=[2**40, 2**40])),
    "a negative shape": _manifest(_reward(shape=[-1])),
    "a shape without numbers": _manifest(_reward(shape=[0, 2**61])),
    "an offset beyond the data": _manifest(_reward(offset=2**60)),
    "a negative offset": _manifest(_reward(offset=-4)),
    "an offset between numbers": _manifest(_reward(offset=1)),
    "another dtype": _manifest(_reward(dtype="\x1b[31m")),
    "another checksum": _manifest(_reward(crc32=1)),
}


# -- runs --------------------------------------------------------------------------------------------------------------
def _run(change: Callable[[Path], Any]) -> Callable[[Path, Base, str], Path]:
    def write(sent: Path, base: Base, canary: str) -> Path:
        run = keep(write_run(sent / "run", points=3))
        (run / "checkpoints").mkdir()
        torch.save({**base.stored}, run / "checkpoints" / "last.ckpt")
        change(run)
        return run

    return write


def _file(name: str, content: str | bytes | None) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / name
        path.unlink(missing_ok=True)
        if content is None:
            os.mkfifo(path)
        else:
            path.write_bytes(content.encode(errors="surrogatepass") if isinstance(content, str) else content)

    return change


CSV, CONFIG, HYDRA = "csv/metrics.csv", ".hydra/config.yaml", ".hydra/hydra.yaml"
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
DOUBLED = "seed: ${a40}\na0: xx\n" + "".join(f"a{n}: ${{a{n - 1}}}${{a{n - 1}}}\n" for n in range(1, 41))
RUNS = {
    "a FIFO as a log": _file(CSV, None),
    "a log without a line": _file(CSV, b"1" * (1 << 24)),
    "a log of many columns": _file(CSV, ",".join(f"\x1b[3{n}m" for n in range(50_000)) + "\n"),
    "a log of a million rows": _file(CSV, "step,eval/return\n" + "".join(f"{n},1\n" for n in range(900_000))),
    "a log of empty rows": _file(CSV, "step,eval/return\n" + "\n" * 900_000),
    "an open quote": _file(CSV, 'step,eval/return\n"' + "1,1\n" * 1_000_000),
    "a log with escape codes": _file(CSV, "step,eval/return\n1,\x1b[31m\n"),
    "a log of zero bytes": _file(CSV, bytes(1_000_000)),
    "no text as a log": _file(CSV, b"step,eval/return\n\xff,1\n"),
    "huge numbers in a log": _file(CSV, "step,eval/return\n1,1e308\n2,-1e308\n1e308,inf\n"),
    "a FIFO as a config": _file(CONFIG, None),
    "a FIFO as a record": _file(HYDRA, None),
    "aliases of a config": _file(CONFIG, BOMB),
    "aliases of a record": _file(HYDRA, BOMB),
    "an alias in itself": _file(CONFIG, "a: &a [*a]"),
    "deep lists": _file(CONFIG, "a: " + "[" * 100_000),
    "deep blocks": _file(HYDRA, "a:\n" + "- " * 100_000),
    "a config of 100 MB": _file(CONFIG, b"a: " + b"x" * 100_000_000),
    "a tag that calls": _file(CONFIG, "a: !!python/object/apply:os.system [touch CANARY]"),
    "a tag that imports": _file(HYDRA, f"a: !!python/name:{hostile.MODULE}.function"),
    "a tag that builds": _file(HYDRA, "a: !!python/object/new:pathlib.Path [x]"),
    "a directive": _file(CONFIG, "%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system x"),
    "interpolations that double": _file(CONFIG, DOUBLED),
    "interpolations of the shell": _file(CONFIG, "seed: ${oc.env:HOME}\nckpt_path: ${oc.env:HOME}"),
    "a long interpolation": _file(CONFIG, "seed: " + "${a" * 50_000),
    "a checkpoint of a device": _file(CONFIG, "ckpt_path: /dev/zero"),
    "a checkpoint of itself": _file(CONFIG, "ckpt_path: run/checkpoints/last.ckpt"),
    "overrides with escape codes": _file(
        HYDRA, 'hydra: {runtime: {choices: {a: "\\e[31m"}, cwd: x}, overrides: {task: ["x=$\\\\frac$\\e[2J"]}}'
    ),
    "ten thousand overrides": _file(
        HYDRA,
        "hydra:\n  runtime: {choices: {}, cwd: x}\n  overrides:\n    task:\n"
        + "".join(f"    - x{n}=1\n" for n in range(9999)),
    ),
    "a record of other types": _file(HYDRA, "hydra: {runtime: {choices: 3, cwd: [x]}, overrides: 5}"),
    "a record that is a list": _file(HYDRA, "[1]"),
    "a FIFO as a checkpoint": _file("checkpoints/last.ckpt", None),
}


# -- policies ----------------------------------------------------------------------------------------------------------
def _policy(change: Callable[[Path, dict[str, Any]], Any]) -> Callable[[Path, Base, str], Path]:
    """Return a function that changes a published policy: the content of ``config.json``, or any file."""

    def write(sent: Path, base: Base, canary: str) -> Path:
        folder = sent / "policy"
        shutil.copytree(base.pretrained, folder)
        path = folder / "config.json"
        content = json.loads(path.read_text())
        changed = change(folder, content)
        if isinstance(changed, str | bytes):
            path.write_bytes(changed.encode() if isinstance(changed, str) else changed)
        elif path.is_file():
            path.write_text(json.dumps(content))
        return folder

    return write


def _other_file(name: str, make: Callable[[Path], Any]) -> Callable[[Path, dict[str, Any]], None]:
    def change(folder: Path, content: dict[str, Any]) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def _header(header: Any, data: bytes = b"") -> Callable[[Path], None]:
    """Return a function that writes a safetensors file with any header."""

    def make(path: Path) -> None:
        written = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(len(written).to_bytes(8, "little") + written + data)

    return make


def _model(name: str) -> Callable[[Path, dict[str, Any]], None]:
    return lambda folder, content: content["config"].update(model=hostile.models("/tmp/CANARY")[name])


WEIGHTS = "model.safetensors"
POLICIES = {
    "a FIFO as weights": _other_file(WEIGHTS, os.mkfifo),
    "a FIFO as a config": _other_file("config.json", os.mkfifo),
    "zeros without an end": _other_file(WEIGHTS, lambda path: path.symlink_to("/dev/zero")),
    "no weights": _other_file(WEIGHTS, lambda path: None),
    "no byte of weights": _other_file(WEIGHTS, lambda path: path.write_bytes(b"")),
    "weights of 10 TB": _other_file(
        WEIGHTS, _header({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}})
    ),
    "a header of 10 TB": _other_file(WEIGHTS, lambda path: path.write_bytes((10**13).to_bytes(8, "little") + b"{}")),
    "a header of 90 MB": _other_file(WEIGHTS, _header(b"{" + b" " * 90_000_000 + b"}")),
    "a deep header": _other_file(WEIGHTS, _header(b'{"__metadata__":' + b"[" * 100_000)),
    "overlapping weights": _other_file(
        WEIGHTS, _header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, bytes(4))
    ),
    "a sparse file of weights": _other_file(
        WEIGHTS, lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 3 << 30)
    ),
    "other weights": _other_file(WEIGHTS, lambda path: safetensors.torch.save_file({"\x1b[31m": torch.zeros(3)}, path)),
    "a config of one text": lambda folder, content: '"\x1b[31m"',
    "a config of 4 MB": lambda folder, content: "[" + "[]," * 1_300_000 + "[]]",
    "a config of 100 MB": lambda folder, content: b" " * 100_000_000,
    "a deep config": lambda folder, content: "[" * 100_000 + "]" * 100_000,
    "a config of a number": lambda folder, content: "3",
    "another version": lambda folder, content: content.update(schema_version="\x1b[31m"),
    "no content": lambda folder, content: content.update(content={}),
    "a tensor that is not there": lambda folder, content: content["content"].update(x={"__tensor__": "\x1b[31m"}),
    "a tensor by a list": lambda folder, content: content["content"].update(x={"__tensor__": [1]}),
    "a class of os": _model("optimizer: a function of os"),
    "a module": _model("optimizer: a module"),
    "a script": _model("optimizer: a script"),
    "an interpolation": _model("an interpolation"),
    "a layer of 40 GB": lambda folder, content: content["config"]["model"].update(
        network={"_target_": "torch.nn.Linear", "in_features": 100_000, "out_features": 100_000}
    ),
}


def cases() -> Iterator[Case]:
    """Yield all hostile states, runs and policies."""
    yield from (Case("state", name, write) for name, write in STATES.items())
    yield from (Case("run", name, _run(change)) for name, change in RUNS.items())
    yield from (Case("policy", name, _policy(change)) for name, change in POLICIES.items())
