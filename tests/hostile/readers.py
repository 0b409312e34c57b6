"""All functions that read other people's files, by the kind of the file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli.commands import call
from hostile.running import Base
from torchrl_lightning import (
    ExperienceBuffer,
    GAEBuffer,
    RingStorage,
    from_pretrained,
    load_policy,
    read_demonstration,
    save_pretrained,
)
from torchrl_lightning._core.files import read_state_folder
from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.cli.evaluate import evaluate
from torchrl_lightning.cli.record import record
from torchrl_lightning.cli.train import train
from torchrl_lightning.demonstrations import DemonstrationDirectory
from torchrl_lightning.demonstrations.io.demo_dataset import read_dataset
from torchrl_lightning.demonstrations.io.recording import demonstration_specs

Reader = Callable[[Path, Base], Any]


def _called(name: str, *arguments: str) -> None:
    """Run a command as a console script does; raise SystemExit with its message if it fails."""
    done = call(name, *arguments, cwd=Path.cwd())
    sys.stdout.write(done.stdout)
    if done.returncode:
        raise SystemExit(done.stderr.strip() or "no message")


def _composed(name: str, task: Callable[[Any], Any], setting: str) -> Reader:
    """Return a reader that runs the task of a command with its config from the base."""

    def read(path: Path, base: Base) -> None:
        cfg = base.settings[name]
        cfg[setting] = str(path)
        with exit_with_one_line():
            task(cfg)

    return read


def _inspect(path: Path, base: Base) -> None:
    _called("inspect", str(path), "--html", "page.html")


def _export(path: Path, base: Base) -> None:
    _called("export", str(path), "--output", "policy.pt2")


def _resume(path: Path, base: Base) -> None:
    _called("train", f"ckpt_path='{path}'", "hydra.run.dir=resumed", "data.total_frames=512", "eval_episodes=1")


def _plot(path: Path, base: Base) -> None:
    _called("plot", str(path), "--output", "curve.png")


def _table(path: Path, base: Base) -> None:
    _called("plot", str(path), str(base.run), "--table", "--metric", "eval/return", "--output", "sweep.png")


def _own_config(path: Path, base: Base) -> None:
    for checkpoint in path.rglob("*.ckpt"):
        _composed("evaluate", evaluate, "ckpt_path")(checkpoint, base)


def _directory(path: Path, base: Base) -> None:
    specs, frame_skip = demonstration_specs("CartPole-v1")
    DemonstrationDirectory(path if path.is_dir() else path.parent, specs, frame_skip)


def _demonstrations(path: Path, base: Base) -> None:
    for file in [path] if path.is_file() or not path.is_dir() else sorted(path.iterdir()):
        read_demonstration(file)


def _read_dataset(path: Path, base: Base) -> None:
    read_dataset(path, "CartPole-v1")


def _minari(path: Path, base: Base) -> None:
    os.environ["MINARI_DATASETS_PATH"] = str(path)
    read_dataset("minari:evil/set-v0", "CartPole-v1")


def _record_table(path: Path, base: Base) -> None:
    cfg = base.settings["table"]
    cfg.table = str(path if path.is_dir() else path.parent)
    with exit_with_one_line():
        record(cfg)


def _buffer(path: Path, base: Base) -> None:
    ExperienceBuffer(storage=RingStorage(200)).loads(path)


def _rollout(path: Path, base: Base) -> None:
    GAEBuffer(8).loads(path)


READERS: dict[str, dict[str, Reader]] = {
    "checkpoint": {
        "load_policy": lambda path, base: load_policy(path),
        "recipe": lambda path, base: load_policy(path).recipe(),
        "save_pretrained": lambda path, base: save_pretrained(path, "published"),
        "evaluate": _composed("evaluate", evaluate, "ckpt_path"),
        "record": _composed("record", record, "ckpt_path"),
        "inspect": _inspect,
        "export": _export,
        "init_from": _composed("train", train, "init_from"),
        "resume": _resume,
    },
    "state": {
        "validate_state": lambda path, base: read_state_folder(path),
        "inspect": _inspect,
        "ExperienceBuffer.loads": _buffer,
        "GAEBuffer.loads": _rollout,
    },
    "run": {"plot": _plot, "plot --table": _table, "inspect": _inspect, "evaluate": _own_config},
    "demonstration": {
        "read_demonstration": _demonstrations,
        "dataset=": _read_dataset,
        "DemonstrationDirectory": _directory,
        "inspect": _inspect,
        "record table=": _record_table,
    },
    "data set": {"dataset=": _read_dataset},
    "Minari": {"dataset=": _minari},
    "policy": {
        "from_pretrained": lambda path, base: from_pretrained(path),
        "recipe": lambda path, base: from_pretrained(path).recipe(),
        "export": _export,
        "init_from": _composed("train", train, "init_from"),
    },
}
