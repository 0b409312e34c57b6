"""Measure the load of up to hundreds of simulated actors on one learner.

    python tests/benchmarks/ray_many_actors.py [--json many.json] [--counts 10 50 200] [--seconds 15]

The simulated actors are coroutines in four processes without torch. Each actor sends a recorded rollout of CartPole, 32
steps of 8 environments, at a fixed rate to the RayCollector of this process. The calls are the same as with real
actors: one call per rollout, with the published weights. The first runs only collect. In the other runs, a
complete Trainer learns V-trace.

The report contains the requested and the delivered rollouts per second, the busy share of the learner's process, its
processor time per rollout, and the age of the weights. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread(pin=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    warnings.simplefilter("ignore")

import lightning as L
import torch

import ray
from torchrl_lightning import GymnasiumCollector, OnPolicyDataModule, RayCollector, VTraceBuffer, VTraceModule
from torchrl_lightning.ray._serialization import as_arrays

PROCESSES, ENVS, FRAMES = 4, 8, 256


class Crowd:
    """Many actors in one process, each with its own clock."""

    def __init__(self, arrays: dict[Any, Any], period: float) -> None:
        self.arrays, self.period = arrays, period
        self.due: dict[int, float] = {}
        self.begun: dict[int, int] = {}

    async def rollout(self, worker: int, version: int, weights: Any, delta: Any) -> tuple[int, dict[Any, Any]]:
        now = time.monotonic()
        if worker not in self.due:  # spread the first rollouts over time
            self.due[worker] = now + self.period * (worker * 0.618 % 1)
        await asyncio.sleep(max(0.0, self.due[worker] - now))
        self.due[worker] = max(self.due[worker], now) + self.period
        number = self.begun[worker] = self.begun.get(worker, -1) + 1
        told = {"env_ids": worker * ENVS, "policy_version": version}
        arrays = {key: value + told.get(key[1], 0) if key[0] == "collector" else value for key, value in self.items()}
        return number, arrays

    def items(self) -> Any:
        return self.arrays.items()


class ManyActors(RayCollector):
    """A RayCollector with simulated actors."""

    crowds: Any = ()

    def _build_actor(self, worker: int) -> Any:
        crowd = self.crowds[worker % PROCESSES]
        rollout = SimpleNamespace(remote=partial(crowd.rollout.remote, worker))
        return SimpleNamespace(rollout=rollout)

    def _stop(self) -> None:
        self._actors, self._pending = [], {}


def recorded(module: Any) -> dict[Any, Any]:
    """Return a rollout in the format of an actor. Its environment ids start at 0, and its policy version is 0."""
    collector = GymnasiumCollector("CartPole-v1", module.policy, num_envs=ENVS, frames_per_batch=FRAMES, seed=0)
    rollout = collector.rollout()
    ids = rollout["collector", "traj_ids"]
    rollout["collector", "env_ids"] = torch.arange(ENVS)[:, None].expand_as(ids).clone()
    rollout["collector", "policy_version"] = torch.zeros_like(ids)
    collector.shutdown()
    return as_arrays(rollout)


def data_of(count: int, rollouts: int) -> OnPolicyDataModule:
    make = partial(ManyActors, num_collectors=count, remote_configs={"num_cpus": 0})
    return OnPolicyDataModule(
        "CartPole-v1",
        buffer=VTraceBuffer,
        collector=make,
        num_envs=count * ENVS,
        frames_per_batch=FRAMES,
        total_frames=rollouts * FRAMES,
        num_epochs=1,
        num_mini_batch=1,
        seed=0,
    )


class Timed(L.Callback):
    """Time a fit after all actors have delivered their first rollout."""

    def __init__(self, warm: int) -> None:
        self.warm, self.lag = warm, [0.0]

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == self.warm:
            self.began = time.perf_counter(), time.process_time()
        self.lag.append(trainer.datamodule.metrics()["collector/lag"])


def fit(count: int, rollouts: int, *callbacks: L.Callback) -> Any:
    module = VTraceModule(learning_rate=1e-3)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        callbacks=list(callbacks),
    )
    trainer.fit(module, datamodule=data_of(count, rollouts))
    return module


def measured(count: int, rate: float, seconds: float, arrays: Any, policy: Any, learns: bool) -> dict[str, float]:
    """Return the measurements of a learner with ``count`` actors that send ``rate`` rollouts per second in total."""
    build = ray.remote(Crowd).options(max_concurrency=-(-count // PROCESSES) + 1, num_cpus=0)
    crowds = [build.remote(arrays, count / rate) for _ in range(PROCESSES)]
    ManyActors.crowds = crowds
    number = max(int(rate * seconds), count)
    if learns:
        timed = Timed(warm=count)
        fit(count, count + number, timed)
        began, busy = timed.began
        lag = timed.lag[-number:]
    else:
        lag = []
        make = partial(ManyActors, num_collectors=count, remote_configs={"num_cpus": 0})
        collector = make("CartPole-v1", policy, num_envs=ENVS, frames_per_batch=FRAMES, seed=0)
        for _ in range(count):
            collector.rollout()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(number):
            collector.rollout()
            collector.update_policy_weights_()
            lag.append(collector.metrics()["collector/lag"])
    wall, busy = time.perf_counter() - began, time.process_time() - busy
    for crowd in crowds:
        ray.kill(crowd)
    names = ("actors", "asked", "delivered", "busy", "ms", "lag")
    return dict(
        zip(names, (count, rate, number / wall, busy / wall, busy / number * 1e3, sum(lag) / len(lag)), strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--rates", type=float, nargs="+", default=[40.0, 1000.0], help="rollouts a second, of all")
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
    L.seed_everything(0, verbose=False)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    module = VTraceModule()
    module.build(OnPolicyDataModule("CartPole-v1", num_envs=ENVS, frames_per_batch=FRAMES).specs)
    arrays = recorded(module)
    say(f"a rollout: {sum(value.nbytes for value in arrays.values()) / 1e3:.1f} kB")
    found = []
    for learns in (False, True):
        for count in options.counts:
            for rate in options.rates:
                # Limit the number of rollouts to 100 per second: waiting for undelivered ones would take too long.
                seconds = options.seconds * min(1.0, 100.0 / rate)
                result = measured(count, rate, seconds, arrays, module.policy, learns)
                found.append({"learns": learns, **result})
                say(
                    f"{'V-trace learns' if learns else 'nobody learns'}, {count:4d} actors: {rate:6.0f} rollouts/s "
                    f"asked, {result['delivered']:6.1f} delivered; busy {result['busy']:4.0%}, {result['ms']:5.2f} ms "
                    f"a rollout; lag {result['lag']:5.1f}"
                )
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main()
