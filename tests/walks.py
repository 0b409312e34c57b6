"""Count our files and calls in one step: ``python tests/walks.py dqn | ppo | sample | extend | command``.

``dqn`` counts from the end of one update to the end of the next, ``ppo`` from the start of an epoch to its first
update. ``command`` counts the functions with the run's config as an argument while the training command resumes a
short run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import lightning as L
import torch
from omegaconf import DictConfig
from tensordict import TensorDict

import torchrl_lightning as package

ROOT = Path(package.__file__).parent


class Walk:
    """Counts the calls of the package's functions between `start` and `stop`."""

    def __init__(self, takes: type | None = None) -> None:
        self.takes = takes
        self.calls = Counter[str]()

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{ROOT}/"):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if self.takes is None or any(isinstance(frame.f_locals.get(name), self.takes) for name in names):
            self.calls[str(Path(code.co_filename).relative_to(ROOT))] += 1

    def start(self) -> None:
        sys.setprofile(self._called)

    def stop(self) -> None:
        sys.setprofile(None)

    def report(self, name: str) -> str:
        files = ", ".join(f"{file} {count}" for file, count in self.calls.most_common())
        return f"walk {name}: {len(self.calls)} files, {sum(self.calls.values())} calls: {files}"


class From(L.Callback):
    """Starts the walk at the end of a batch or the start of an epoch, and stops it at the end of the next batch."""

    def __init__(self, walk: Walk, batch: int, epoch: bool) -> None:
        self.walk, self.batch, self.epoch, self.ended = walk, batch, epoch, 0

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.epoch and trainer.current_epoch == self.batch:
            self.walk.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.walk.stop()
        self.ended += 1
        if not self.epoch and self.ended == self.batch:
            self.walk.start()
        elif self.walk.calls:
            trainer.should_stop = True


def fit(callback: From, model: L.LightningModule, data: L.LightningDataModule) -> None:
    """Train until the callback stops it."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_epochs=-1, max_steps=200, accelerator="cpu", callbacks=[callback], enable_model_summary=False, **quiet
    )
    trainer.fit(model, datamodule=data)


def replay() -> Any:
    buffer = partial(package.ExperienceBuffer, storage=package.RingStorage(10000))
    sizes: dict[str, Any] = {"frames_per_update": 8, "warmup_frames": 400, "batch_size": 128, "updates_per_epoch": 200}
    return package.ReplayDataModule("CartPole-v1", buffer=buffer, num_envs=8, **sizes)


def resume(walk: Walk) -> None:
    """Train for a few steps, and count the calls of the command that resumes this run."""
    from torchrl_lightning.cli.train import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        sizes = ["data.frames_per_batch=32", "data.num_envs=2", "data.mini_batch_size=16", "eval_episodes=1"]
        sys.argv = ["train", "experiment=ppo_cartpole", "data.total_frames=64", *sizes, f"hydra.run.dir={folder}/first"]
        main()
        checkpoint = next(Path(folder).rglob("last.ckpt"))
        sys.argv = ["train", f"ckpt_path={checkpoint}", "data.total_frames=128", f"hydra.run.dir={folder}/second"]
        walk.start()
        main()
        walk.stop()


def rows() -> TensorDict:
    """Return steps of an episode without an end."""
    flags = torch.zeros(8, 1, dtype=torch.bool)
    after = {"observation": torch.rand(8, 3), "reward": torch.rand(8, 1)}
    after |= {"done": flags, "terminated": flags, "truncated": flags}
    return TensorDict({"observation": torch.rand(8, 3), "action": torch.rand(8, 2), "next": after}, batch_size=[8])


def main() -> None:
    torch.set_num_threads(1)
    name = sys.argv[1]
    walk = Walk(DictConfig if name == "command" else None)
    if name == "dqn":
        fit(From(walk, 60, epoch=False), package.DQNModule(), replay())
    elif name == "ppo":
        sizes: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 4, "mini_batch_size": 2, "num_epochs": 2}
        fit(From(walk, 2, epoch=True), package.PPOModule(), package.OnPolicyDataModule("CartPole-v1", **sizes))
    elif name == "command":
        resume(walk)
    else:
        buffer = package.ExperienceBuffer(storage=package.RingStorage(100), batch_size=4)
        data = rows()
        buffer.extend(data)
        buffer.sample()
        walk.start()
        buffer.sample() if name == "sample" else buffer.extend(data)
        walk.stop()
    print(walk.report(name))


if __name__ == "__main__":
    main()
