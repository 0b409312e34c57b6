"""Runs that are stopped and resumed, and what differs then from an uninterrupted one.

Each is a process of its own, forked from this one, which has imported and compiled what they need: the whole command,
or, in a tenth of the time, what it does with the config that it has composed.
"""

from __future__ import annotations

import copy
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

from cli.commands import unchanged_process
from kit.forks import Forked
from kit.store import only_our_schemas
from torchrl_lightning._conf import CONF_DIR
from torchrl_lightning.callbacks import LastCheckpoint
from torchrl_lightning.files import read_state

WAYS = ("epoch", "end", "SIGINT", "SIGTERM", "SIGKILL")
"""How a run is stopped: inside an epoch (by ``max_steps``), at its regular end, or by a signal."""

_ALL = [
    "data.reset_at_each_batch=true",
    "data.eval_episodes=1",
    "data.eval_num_envs=1",
    "trainer.check_val_every_n_epoch=2",
    "eval_episodes=1",
    "eval_checkpoint=last",
    "logger=none",
    "callbacks=checkpoint",
    "trainer.enable_progress_bar=false",
    "model.schedule=constant",  # others depend on when the run ends
]
_ON_POLICY = [
    "data.num_envs=4",
    "data.frames_per_batch=64",
    "data.num_epochs=2",
    "data.num_mini_batch=2",
    "data.mini_batch_size=null",
]
_REPLAY = [
    "data.num_envs=2",
    "data.frames_per_batch=16",
    "data.frames_per_update=1",
    "data.warmup_frames=32",
    "data.updates_per_epoch=16",
    "data.updates_per_step=4",
    "data.batch_size=8",
    "data.checkpoint_buffer=inside",
]
_DYNAMICS = [
    "data.num_envs=1",
    "data.frames_per_batch=32",
    "data.frames_per_fit=32",
    "data.warmup_frames=64",
    "data.max_epochs_per_fit=3",
    "data.batch_size=16",
    "data.num_members=2",
    "model.hidden_sizes=[8,8]",
    "model.planner.horizon=3",
    "model.planner.candidates=10",
    "model.planner.elites=2",
    "model.planner.iterations=1",
]
_OWN = {
    "ddpg_her_fetchreach": ["data.buffer.storage.max_size=512"],
    "dqn_cartpole": ["data.buffer.storage.max_size=512"],
    "dqn_frames_pong": ["data.buffer.storage.max_size=512"],
    "dqn_pong": ["data.buffer.storage.max_size=512"],
    "dqn_prioritized_lunarlander": ["data.buffer.storage.max_size=512"],
    "sac_episodic_pendulum": ["data.buffer.storage.max_size=512", "data.buffer.sampler.recent_data_steps=4"],
    "sac_pendulum": ["data.buffer.storage.max_size=512"],
    "sac_recurrent_pendulum": [
        "data.buffer.storage.max_size=512",
        "data.buffer.sampler.batch_length=4",
        "data.buffer.sampler.burn_in=1",
    ],
    "sac_simple_pendulum": ["data.buffer.size=512"],
    "mbpo_pendulum": [
        "data.buffer.storage.max_size=512",
        "data.source.frames_per_fit=16",
        "data.source.branches_per_fit=32",
        "model.dynamics.hidden_sizes=[8,8]",
        "model.dynamics.num_members=2",
        "model.dynamics.num_elites=1",
        "model.dynamics.batch_size=8",
        "model.dynamics.max_epochs=3",
    ],
}


_STATUS = {"SIGINT": (1, 130), "SIGTERM": (143,), "SIGKILL": (-signal.SIGKILL,)}
Stop = tuple[int, int]
"""A step, behind which a process gets a signal, and the signal."""
Runner = Callable[[Path, Sequence[str], Path, Mapping[str, object], Any], int]


@dataclass(frozen=True)
class Sizes:
    """How far a run goes: its frames in all, those of the regular end before, and the step at which it is stopped."""

    total: int
    end: int
    step: int


def experiments() -> list[str]:
    """Return the names of all experiments."""
    return sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))


def settings(experiment: str) -> tuple[list[str], Sizes]:
    """Return the command's arguments that make a run of an experiment short, and how far it goes."""
    own = _OWN.get(experiment, [])
    if experiment.startswith("pets"):
        stream, sizes = _DYNAMICS, Sizes(160, 96, 14)
    elif own:
        stream, sizes = _REPLAY, Sizes(128, 64, 14)
    else:
        stream, sizes = _ON_POLICY, Sizes(384, 192, 14)
    return [f"experiment={experiment}", *_ALL, *stream, *own], sizes


def _forked(folder: Path, run: Callable[[], object], stop: Stop | None) -> int:
    """Run in a process of its own, which gets a signal behind a step; return its status, negative for a signal."""

    def stopped() -> None:
        if stop is not None:
            LastCheckpoint.on_train_batch_end = _stopping(*stop)
        try:
            run()
        except SIGTERMException:
            raise SystemExit(143) from None  # as the command does

    return Forked(stopped, folder).ends()


def command(
    folder: Path,
    arguments: Sequence[str],
    into: Path,
    changed: Mapping[str, object],
    stop: tuple[int, int] | None = None,
) -> int:
    """Run the command that trains, in a process of its own.

    Args:
        folder: Where it is run.
        arguments: What it is given,
        into: the folder of its run,
        changed: and further settings.
        stop: How it is stopped.
    """

    def train() -> None:
        from torchrl_lightning.cli.train import main

        given = [f"{name}={value}" for name, value in changed.items()]
        sys.argv = ["torchrl-lightning-train", *arguments, f"hydra.run.dir={into}", *given]
        main()

    return _forked(folder, train, stop)


def task(
    folder: Path,
    arguments: Sequence[str],
    into: Path,
    changed: Mapping[str, object],
    stop: tuple[int, int] | None = None,
) -> int:
    """Do what :func:`command` does with a config that is composed here, and once for all such settings."""
    cfg = _config(tuple(arguments), into, changed)
    return _forked(folder, lambda: _train(cfg), stop)


def task_here(
    folder: Path, arguments: Sequence[str], into: Path, changed: Mapping[str, object], stop: None = None
) -> int:
    """Do the same in this process, so that it has done once what others need not do again."""
    cfg = _config(tuple(arguments), into, changed)
    with unchanged_process(), redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        _train(cfg)
    return 0


def _train(cfg: Any) -> None:
    from torchrl_lightning.cli.train import train

    train(cfg)


def _config(arguments: tuple[str, ...], into: Path, changed: Mapping[str, object]) -> Any:
    cfg = copy.deepcopy(_composed(arguments))
    for name, value in {"paths.output_dir": str(into), **changed}.items():
        OmegaConf.update(cfg, name, value)
    return cfg


@cache
def _composed(arguments: tuple[str, ...]) -> Any:
    paths = ["paths.output_dir=here", f"paths.demonstrations={CONF_DIR / 'demonstrations'}"]
    with only_our_schemas(), initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose("train", [*arguments, *paths])


def _stopping(step: int, number: int) -> Any:
    def on_train_batch_end(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == step:
            os.kill(os.getpid(), number)

    return on_train_batch_end


def resumed(experiment: str, folder: Path, way: str, *more: str, run: Runner = command) -> Path:
    """Stop a run in one of the ways, resume it to its end, and return its last checkpoint."""
    arguments, sizes = settings(experiment)
    changed: dict[str, object] = {"data.total_frames": sizes.total, "trainer.max_steps": -1}
    half, stop = folder / f"{way}-half", None
    if way == "epoch":
        first = {**changed, "trainer.max_steps": sizes.step}
    elif way == "end":
        first = {**changed, "data.total_frames": sizes.end}
    else:
        first, stop = changed, (sizes.step, signal.Signals[way])
    status = run(folder, [*arguments, *more], half, first, stop)
    if status not in _STATUS.get(way, (0,)):
        raise RuntimeError(f"the run was to be stopped by {way}, but ended with status {status}:\n{_tail(folder)}")
    rest = {**changed, "ckpt_path": str(half / "checkpoints" / "last.ckpt")}
    return _to_its_end(folder, [*arguments, *more], folder / f"{way}-rest", rest, run)


def uninterrupted(experiment: str, folder: Path, *more: str, run: Runner = command) -> Path:
    """Run to the end, and return the last checkpoint."""
    arguments, sizes = settings(experiment)
    return _to_its_end(folder, [*arguments, *more], folder / "whole", {"data.total_frames": sizes.total}, run)


def _to_its_end(folder: Path, arguments: Sequence[str], into: Path, changed: Mapping[str, object], run: Runner) -> Path:
    if status := run(folder, arguments, into, changed, None):
        raise RuntimeError(f"the run did not come to its end: status {status}:\n{_tail(folder)}")
    return into / "checkpoints" / "last.ckpt"


def _tail(folder: Path) -> str:
    return "\n".join((folder / "said").read_text().splitlines()[-25:])


def differences(one: Path, other: Path) -> list[str]:
    """Name what two checkpoints differ in: weights, optimizers, counters, and the rows that were collected."""
    return list(_differing(_content(one), _content(other), ""))


def _content(path: Path) -> dict[str, Any]:
    stored = torch.load(path, weights_only=True, map_location="cpu")
    (data,) = (value for name, value in stored.items() if name.endswith("DataModule"))
    own = {name: value for name, value in data["ranks"][0].items() if name != "metrics"}
    if "snapshot" in own:
        snapshot = own.pop("snapshot")
        own["buffer"] = read_state(Path(snapshot["folder"]) / snapshot["name"])
    names = ("state_dict", "optimizer_states", "global_step")
    return {"data": own, "normalization": data["normalization"], **{name: stored[name] for name in names}}


def _differing(one: Any, other: Any, name: str) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        # Of a ring of frames, places of spare frames that are free hold anything.
        for key in (key for key in {**one, **other} if key != "spares"):
            if key in one and key in other:
                yield from _differing(one[key], other[key], f"{name}.{key}" if name else str(key))
            else:
                yield f"{name}.{key}"
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _differing(left, right, f"{name}[{number}]")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
            yield name
    elif one != other and not (one != one and other != other):
        yield name
