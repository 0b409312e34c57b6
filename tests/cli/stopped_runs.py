"""Stop and resume runs, and compare their checkpoints with the checkpoint of an uninterrupted run.

Each run is a forked process, so that it does not import and compile everything again.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

from cli.commands import unchanged_process
from kit import states
from kit.forks import Forked
from kit.store import composed_run
from torchrl_lightning._core.files import read_state_folder
from torchrl_lightning.callbacks import LastCheckpoint
from torchrl_lightning.cli.train import train

WAYS = ("epoch", "end", "SIGINT", "SIGTERM", "SIGKILL")
"""The ways to stop a run: inside an epoch (by ``max_steps``), at its regular end, or by a signal."""

_ALL = [
    *("data.reset_at_each_batch=true", "data.eval_episodes=1", "data.eval_num_envs=1", "eval_episodes=1"),
    *("trainer.check_val_every_n_epoch=2", "trainer.enable_progress_bar=false", "eval_checkpoint=last"),
    *("logger=none", "callbacks=checkpoint", "model.schedule=constant"),  # others depend on the run's end
]
_ON_POLICY = [
    *("data.num_envs=4", "data.frames_per_batch=64", "data.num_epochs=2", "data.num_mini_batch=2"),
    *("data.mini_batch_size=null", "data.updates_per_step=1"),
]
_REPLAY = [
    *("data.num_envs=2", "data.frames_per_batch=16", "data.frames_per_update=1", "data.warmup_frames=32"),
    *("data.updates_per_epoch=16", "data.updates_per_step=4", "data.batch_size=8", "data.checkpoint_buffer=inside"),
]
_DYNAMICS = [
    *("data.num_envs=1", "data.frames_per_batch=32", "data.frames_per_fit=32", "data.warmup_frames=64"),
    *("data.max_epochs_per_fit=3", "data.batch_size=16", "data.num_members=2", "model.hidden_sizes=[8,8]"),
    *("model.planner.horizon=3", "model.planner.candidates=10", "model.planner.elites=2", "model.planner.iterations=1"),
]
_RING = ["data.buffer.storage.max_size=512"]
_BRANCHES = [
    *(*_RING, "data.source.frames_per_fit=16", "data.source.branches_per_fit=32"),
    *("model.dynamics.hidden_sizes=[8,8]", "model.dynamics.num_members=2", "model.dynamics.num_elites=1"),
    *("model.dynamics.batch_size=8", "model.dynamics.max_epochs=3"),
]
_OWN = {
    **dict.fromkeys(("ddpg_her_fetchreach", "dqn_cartpole", "dqn_frames_pong", "dqn_pong", "sac_pendulum"), _RING),
    **dict.fromkeys(("dqn_pong_envpool", "dqn_prioritized_lunarlander", "sac_hopper", "sac_invertedpendulum"), _RING),
    **dict.fromkeys(("dqfd_mountaincar", "dqn_lunarlander", "dqn_mountaincar", "sac_her_fetchpush"), _RING),
    "sac_halfcheetah": _RING,
    "rlpd_pendulum": ["data.buffer.storage.max_size=2048"],  # must hold the 2000 steps of its data
    "sac_her_fetchpickandplace": ["data.buffer.storage.max_size=1024"],  # must hold the 1000 steps of its data
    "sac_episodic_pendulum": [*_RING, "data.buffer.sampler.recent_data_steps=4"],
    "sac_recurrent_pendulum": [*_RING, "data.buffer.sampler.batch_length=4", "data.buffer.sampler.burn_in=1"],
    "sac_simple_pendulum": ["data.buffer.size=512"],
    **dict.fromkeys(("mbpo_hopper", "mbpo_invertedpendulum", "mbpo_pendulum"), _BRANCHES),
}


_STATUS = {"SIGINT": (1, 130), "SIGTERM": (143,), "SIGKILL": (-signal.SIGKILL,)}
Stop = tuple[int, int]
"""A step, and the signal that the process gets after it."""
Runner = Callable[[Path, Sequence[str], Path, Mapping[str, object], Stop | None], int]


STEP = 14
"""The step after which a run is stopped inside an epoch or by a signal."""


def settings(experiment: str) -> tuple[list[str], int, int]:
    """Return the arguments of a short run, its total frames, and the frames of its first half."""
    own = _OWN.get(experiment, [])
    if experiment.startswith("pets"):
        stream, total, end = _DYNAMICS, 160, 96
    elif own:
        stream, total, end = _REPLAY, 128, 64
    else:
        stream, total, end = _ON_POLICY, 384, 192
    return [f"experiment={experiment}", *_ALL, *stream, *own], total, end


def task(folder: Path, arguments: Sequence[str], into: Path, changed: Mapping[str, object], stop: Stop | None) -> int:
    """Compose a run in this process, and train it in a forked one.

    Args:
        folder: The working directory.
        arguments: The arguments of the command.
        into: The folder of the run.
        changed: Settings that replace values of the composed config.
        stop: The signal that stops the run, and its step. None does not stop it.
    """
    return forked(folder, partial(train, config_of(arguments, into, changed)), stop)


def task_here(
    folder: Path, arguments: Sequence[str], into: Path, changed: Mapping[str, object], stop: Stop | None
) -> int:
    """Train in this process, so that forked processes inherit its imports and compiled functions."""
    assert stop is None
    with unchanged_process(), redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        train(config_of(arguments, into, changed))
    return 0


def config_of(arguments: Sequence[str], into: Path, changed: Mapping[str, object]) -> Any:
    cfg = composed_run(*arguments, into=into)
    for name, value in changed.items():
        OmegaConf.update(cfg, name, value)
    return cfg


def forked(folder: Path, run: Callable[[], object], stop: Stop | None) -> int:
    """Run in a forked process that may get a signal after a step; return its status, negative for a signal."""

    def stopped() -> None:
        if stop is not None:
            LastCheckpoint.on_train_batch_end = _stopping(*stop)
        with status_of_sigterm():
            run()

    return Forked(stopped, folder).ends()


@contextmanager
def status_of_sigterm() -> Iterator[None]:
    """Exit with the command's status after SIGTERM."""
    try:
        yield
    except SIGTERMException:
        raise SystemExit(143) from None


def _stopping(step: int, number: int) -> Any:
    def on_train_batch_end(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == step:
            os.kill(os.getpid(), number)

    return on_train_batch_end


def resumed(experiment: str, folder: Path, way: str, *more: str, run: Runner = task) -> Path:
    """Stop a run, resume it until its end, and return its last checkpoint."""
    arguments, total, end = settings(experiment)
    changed: dict[str, object] = {"data.total_frames": total, "trainer.max_steps": -1}
    half, stop = folder / f"{way}-half", None
    if way == "epoch":
        first = {**changed, "trainer.max_steps": STEP}
    elif way == "end":
        first = {**changed, "data.total_frames": end}
    else:
        first, stop = changed, (STEP, signal.Signals[way])
    status = run(folder, [*arguments, *more], half, first, stop)
    if status not in _STATUS.get(way, (0,)):
        raise RuntimeError(f"the run was to be stopped by {way}, but ended with status {status}:\n{_tail(folder)}")
    rest = {**changed, "ckpt_path": str(half / "checkpoints" / "last.ckpt"), "trusted": True}
    return to_its_end(folder, [*arguments, *more], folder / f"{way}-rest", rest, run)


def uninterrupted(experiment: str, folder: Path, *more: str, run: Runner = task) -> Path:
    """Train without a stop, and return the last checkpoint."""
    arguments, total, _ = settings(experiment)
    return to_its_end(folder, [*arguments, *more], folder / "whole", {"data.total_frames": total}, run)


def to_its_end(folder: Path, arguments: Sequence[str], into: Path, changed: Mapping[str, object], run: Runner) -> Path:
    if status := run(folder, arguments, into, changed, None):
        raise RuntimeError(f"the run did not come to its end: status {status}:\n{_tail(folder)}")
    return into / "checkpoints" / "last.ckpt"


def _tail(folder: Path) -> str:
    return "\n".join((folder / "said").read_text().splitlines()[-25:])


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of differing entries of two checkpoints: weights, optimizers, counters and stored rows."""
    return [each.partition(":")[0] for each in states.differences(_content(one), _content(other))]


def _content(path: Path) -> Any:
    stored = torch.load(path, weights_only=True, map_location="cpu")
    (data,) = (value for name, value in stored.items() if name.endswith("DataModule"))
    own = {name: value for name, value in data["ranks"][0].items() if name != "metrics"}
    if "snapshot" in own:
        snapshot = own.pop("snapshot")
        own["buffer"] = read_state_folder(Path(snapshot["folder"]) / snapshot["name"])
    names = ("state_dict", "optimizer_states", "global_step")
    content = {"data": own, "normalization": data["normalization"], **{name: stored[name] for name in names}}
    return _comparable(content)


def _comparable(value: Any) -> Any:
    """Return the value without NaN, which differs from itself, and without the unused frames of a ring."""
    if isinstance(value, Mapping):
        return {key: _comparable(each) for key, each in value.items() if key != "spares"}
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    if isinstance(value, torch.Tensor):
        return torch.nan_to_num(value)
    return None if value != value else value
