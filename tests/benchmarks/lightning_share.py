"""Measure Lightning's share of the training time with a tiny network: DQN and PPO on CartPole-v1.

    python tests/benchmarks/lightning_share.py [--json timings.json] [--repetitions 7] [--check]

`Trainer.fit` is compared with the same loop without a Trainer. Both use the same DataModule, buffer and module. The
manual loop passes batches, calls ``backward`` and steps the optimizers directly. Runs are interleaved and measured in
processor time, because other processes do not change it. ``--check`` exits with 1 if a budget is missed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Timing, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from torchrl_lightning import ExperienceBuffer, OnPolicyDataModule, ReplayDataModule, RingStorage
from torchrl_lightning.agents import DQNModule, MLPNetwork, PPOModule
from torchrl_lightning.agents.analytic import make_analytic_update

NUM_ENVS, EPOCHS = 8, 9


def replay(updates_per_step: int) -> ReplayDataModule:
    """Return replay data with 256 updates per epoch and eight frames per update."""
    return ReplayDataModule(
        "CartPole-v1",
        buffer=partial(ExperienceBuffer, storage=RingStorage(50_000)),
        batch_size=128,
        updates_per_epoch=256,
        updates_per_step=updates_per_step,
        frames_per_update=8,
        num_envs=NUM_ENVS,
        warmup_frames=200,
        seed=0,
    )


def rollouts(updates_per_step: int) -> OnPolicyDataModule:
    """Return rollout data with 16 updates per epoch from 128 steps of each environment."""
    return OnPolicyDataModule(
        "CartPole-v1",
        num_envs=NUM_ENVS,
        frames_per_batch=1024,
        num_epochs=4,
        mini_batch_size=256,
        updates_per_step=updates_per_step,
        seed=0,
    )


class ByHand:
    """A module without a Trainer. It calls ``backward`` and the optimizers of torch directly."""

    hand: Any = None
    raw: Any = ()

    @property
    def _data(self) -> Any:
        return self.hand

    @property
    def trainer(self) -> Any:
        """Return the stand-in for the Trainer."""
        return self.hand.trainer

    def manual_backward(self, loss: Tensor) -> None:
        """Call ``backward`` directly."""
        loss.backward()

    def step_optimizers(self: Any, *, inner: bool = False) -> dict[str, Tensor]:
        """Clip the gradients and step each optimizer directly; return the gradient norms."""
        norms = {}
        for optimizer, (name, group) in zip(self.raw, self._groups.items(), strict=True):
            norms[name] = group.clip(self.max_grad_norm)
            optimizer.step()
        return norms


class BareDQN(ByHand, DQNModule):
    """DQN without a Trainer."""


class BarePPO(ByHand, PPOModule):
    """PPO without a Trainer."""


def make_module(cls: type) -> Any:
    """Return a learner with a network of 64x64."""
    return cls(MLPNetwork([64, 64], "relu"), max_grad_norm=10.0)


def in_the_trainer(cls: type, data: Any) -> float:
    """Return the seconds of all epochs except the first."""
    began = 0.0

    class Clock(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            nonlocal began
            if trainer.current_epoch == 1:
                began = time.process_time()

    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[Clock()],
        logger=False,
        max_epochs=EPOCHS,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(make_module(cls), datamodule=data)
    return time.process_time() - began


def by_hand(cls: type, data: Any) -> float:
    """Return the seconds of the same epochs without Lightning."""
    module = make_module(cls)
    module.hand = data
    count = SimpleNamespace(ready=0, processed=0)
    progress = SimpleNamespace(current=count)
    epochs = SimpleNamespace(batch_progress=progress)
    data.trainer = trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=epochs, epoch_progress=progress, is_resuming=False, restarting=False),
        lightning_module=module,
        world_size=1,
        global_rank=0,
        precision="32-true",
        callbacks=[],
        precision_plugin=None,
        default_root_dir=".",
        should_stop=False,
        current_epoch=0,
        num_training_batches=float("inf"),
        strategy=SingleDeviceStrategy("cpu"),
        state=SimpleNamespace(fn=None),
    )
    data.setup("fit")
    module.build(data.specs)
    module.raw = module.configure_optimizers()
    module._analytic_update = make_analytic_update(module)
    began = 0.0
    for epoch in range(EPOCHS):
        trainer.current_epoch = epoch
        if epoch == 1:
            began = time.process_time()
        for index, batch in enumerate(data.train_dataloader()):
            module.training_step(data.on_after_batch_transfer(batch, 0), index)
            data.end_step()
        module.metric_sums.flush()
    seconds = time.process_time() - began
    data.close()
    return seconds


# Name, module with and without a Trainer, data, updates per epoch, upper bound of Lightning's share.
CASES: list[tuple[str, type, type, Callable[[], Any], int, float]] = [
    ("DQN, batch 128, 8 frames an update, 1 update a step", DQNModule, BareDQN, partial(replay, 1), 256, 0.3),
    ("DQN, the same, 16 updates a step, as auto has it", DQNModule, BareDQN, partial(replay, 16), 256, 0.05),
    ("PPO, batch 256, 64 frames an update, 1 update a step", PPOModule, BarePPO, partial(rollouts, 1), 16, 0.3),
    ("PPO, the same, 8 updates a step, as auto has it", PPOModule, BarePPO, partial(rollouts, 8), 16, 0.05),
]


def main() -> int:
    """Print the tables and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results, missed = {}, []
    for title, module, bare, make_data, updates, budget in CASES:
        runs: dict[str, list[float]] = {"Trainer": [], "by hand": []}
        for _ in range(arguments.repetitions):
            for name, seconds in (
                ("Trainer", in_the_trainer(module, make_data())),
                ("by hand", by_hand(bare, make_data())),
            ):
                runs[name].append(seconds * 1e6 / (updates * (EPOCHS - 1)))
        results[title] = timings = [_timing(name, found) for name, found in runs.items()]
        # Compare within pairs: both runs of a pair ran under the same load.
        share = statistics.median(1 - hand / fit for fit, hand in zip(*runs.values(), strict=True))
        say(table(title, timings, "by hand"))
        say(f"  Lightning's share: {share:.1%}, the budget is {budget:.0%}\n")
        if share > budget:
            missed.append(title)
    if arguments.json:
        write_json(arguments.json, results)
    if arguments.check and missed:
        say(f"missed: {'; '.join(missed)}")
        return 1
    return 0


def _timing(name: str, samples: list[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(name, median, low, high, min(samples))


if __name__ == "__main__":
    sys.exit(main())
