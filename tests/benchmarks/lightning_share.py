"""Lightning's own share of a DQN update with a tiny network.

    python tests/benchmarks/lightning_share.py [--json timings.json] [--updates 512] [--repetitions 5] [--check]

`Trainer.fit` with a ReplayDataModule, against the same loop written by hand: the same collector steps eight
environments for each update, the same buffer is sampled, the same loss is computed, torch's Adam steps. By hand there
is neither Trainer nor DataModule nor any hook, so that our DataModule counts as Lightning's share. Runs are
interleaved; what counts is processor time, which neighbours do not lengthen. ``--check`` exits with 1 where a
budget is missed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Timing, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import lightning as L

from torchrl_lightning import GymnasiumCollector, ReplayDataModule, environment_specs, make_vector_env
from torchrl_lightning.learn import DQNModule, MLPNetwork
from torchrl_lightning.learn.transitions import read_transitions
from torchrl_lightning.replay import ExperienceBuffer, RingStorage, UniformSampler

BATCH, WARMUP, CELLS = 128, 200, 50_000
NUM_ENVS = FRAMES = 8
# Updates a step, and Lightning's share of them at most.
BUDGETS = {1: 0.15, 4: 0.08, 8: 0.08}


def make_module() -> DQNModule:
    """Return the learner."""
    return DQNModule(MLPNetwork([64, 64], "relu"))


def make_buffer(num_envs: int) -> ExperienceBuffer:
    """Return a uniform buffer."""
    return ExperienceBuffer(storage=RingStorage(CELLS), sampler=UniformSampler(), num_envs=num_envs)


def in_the_trainer(count: int, parts: int) -> float:
    """Return the seconds of `count` updates, those of the warm-up and of building everything left out."""
    began = 0.0

    class Clock(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            nonlocal began
            if trainer.current_epoch == 1:
                began = time.process_time()

    data = ReplayDataModule(
        "CartPole-v1",
        buffer=make_buffer,
        batch_size=BATCH,
        updates_per_epoch=count,
        updates_per_step=parts,
        frames_per_update=FRAMES,
        num_envs=NUM_ENVS,
        warmup_frames=WARMUP,
        seed=0,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[Clock()],
        logger=False,
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(make_module(), datamodule=data)
    return time.process_time() - began


def by_hand(count: int) -> float:
    """Return the same, without Lightning."""
    env = make_vector_env("CartPole-v1", NUM_ENVS)
    module = make_module().build(environment_specs(env))
    (optimizer,), (optimized,) = module.configure_optimizers(), module._groups.values()
    buffer = make_buffer(NUM_ENVS)
    collector = GymnasiumCollector(
        env, module.policy, frames_per_batch=NUM_ENVS, num_envs=NUM_ENVS, seed=0, init_random_frames=WARMUP
    )
    stream = iter(collector)
    while len(buffer) < WARMUP:
        buffer.extend(next(stream).exclude("collector", "done", "terminated", "truncated"))
    began, frames = 0.0, WARMUP
    for update in range(2 * count):
        if update == count:
            began = time.process_time()
        while frames < WARMUP + update * FRAMES:
            buffer.extend(next(stream).exclude("collector", "done", "terminated", "truncated"))
            frames += NUM_ENVS
        batch = buffer.sample(BATCH)
        optimized.clear()
        terms, batch["td_error"] = module.compute(read_transitions(batch, ["observation"], module.gamma))
        sum(value for name, value in terms.items() if name.startswith("loss_")).backward()
        optimized.gather()
        optimized.clip(10.0)
        optimizer.step()
        module.targets.follow(module.tau)
        buffer.update_tensordict_priority(batch)
        module.policy.amount.fill_(module.exploration(frames))
    seconds = time.process_time() - began
    env.close()
    return seconds


def share(timings: list[Timing]) -> float:
    """Return which part of the Trainer's time the loop by hand does not need."""
    times = {timing.name: timing.median for timing in timings}
    return 1.0 - times["by hand"] / times["Trainer"]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--updates", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results, missed = {}, []
    for parts, budget in BUDGETS.items():
        samples: dict[str, list[float]] = {"Trainer": [], "by hand": []}
        for _ in range(arguments.repetitions):
            samples["Trainer"].append(in_the_trainer(arguments.updates, parts) * 1e6 / arguments.updates)
            samples["by hand"].append(by_hand(arguments.updates) * 1e6 / arguments.updates)
        timings = []
        for name, found in samples.items():
            low, median, high = statistics.quantiles(found, n=4, method="inclusive")
            timings.append(Timing(name, median, low, high, min(found)))
        title = f"DQN update of {BATCH} with its {FRAMES} frames, {parts} update(s) a step"
        results[title] = timings
        say(table(title, timings, "by hand"))
        say(f"  Lightning's share: {share(timings):.1%}, the budget is {budget:.0%}\n")
        if share(timings) > budget:
            missed.append(parts)
    if arguments.json:
        write_json(arguments.json, results)
    if arguments.check and missed:
        say(f"missed at {', '.join(map(str, missed))} update(s) a step")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
