"""Compare 1, 2 and 4 Ray actors with worker processes and TorchRL on environments that wait.

    python tests/benchmarks/ray_collectors.py [--json ray.json] [--rounds 5] [--batches 12]

Each CartPole step waits for 1 ms, so two cores are enough for four actors. An actor has four environments and rollouts
of 256 frames. No learner runs, but the weights of a perceptron are published after each batch. Contenders take turns in
one process. The first batches of each turn do not count, because they were collected during the turns of other
contenders.

The report contains frames per second of wall-clock time and the processor time of the learner's process per batch.
Ray's threads use a part of this processor time even if no rollout arrives. The last line contains both for rollouts of
8 x 128. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread(pin=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    warnings.simplefilter("ignore")

import gymnasium
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors.distributed import RayCollector as TorchRLCollector
from torchrl.envs import EnvBase, GymWrapper, SerialEnv
from torchrl.modules import MLP

from torchrl_lightning import AsynchronousCollector, RayCollector

ENVS, FRAMES = 4, 256


class Waiting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wait for 1 ms before each step."""

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return self.env.step(action)


def waiting() -> EnvBase:
    return GymWrapper(Waiting(gymnasium.make("CartPole-v1")), categorical_action_encoding=True)


def policy() -> TensorDictSequential:
    """Return a policy that takes the better of two actions."""
    torch.manual_seed(0)
    network = MLP(in_features=4, out_features=2, num_cells=[64, 64])
    scores = TensorDictModule(network, ["observation"], ["scores"])
    return TensorDictSequential(scores, TensorDictModule(lambda found: found.argmax(-1), ["scores"], ["action"]))


def ours(
    workers: int, wrappers: Sequence[Any] = (Waiting,), num_envs: int = ENVS, frames_per_batch: int = FRAMES
) -> RayCollector:
    sizes = {"num_collectors": workers, "num_envs": num_envs, "frames_per_batch": frames_per_batch}
    return RayCollector("CartPole-v1", policy(), wrappers=wrappers, seed=0, **sizes)


def contenders() -> dict[str, Any]:
    """Return the collectors of the same environments and policy by name."""
    sizes = {"wrappers": [Waiting], "num_envs": ENVS, "frames_per_batch": FRAMES, "seed": 0}
    theirs = {"frames_per_batch": FRAMES, "total_frames": 10**9, "num_collectors": 2, "sync": False}
    room = {"num_cpus": 1, "num_gpus": 0, "memory": 2**27}
    return {
        **{f"Ray, {n}": ours(n) for n in (1, 2, 4)},
        "processes, 2": AsynchronousCollector("CartPole-v1", policy(), num_workers=2, **sizes),
        "TorchRL, 2": TorchRLCollector([lambda: SerialEnv(ENVS, waiting)] * 2, policy(), remote_configs=room, **theirs),
    }


def taken(
    collector: Any, rollouts: Iterator[Any], batches: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Return frames per second and milliseconds of processor time per batch."""
    for _ in range(8):
        next(rollouts)
    began, busy, frames = clock(), time.process_time(), 0
    for _ in range(batches):
        frames += next(rollouts).numel()
        collector.update_policy_weights_()
    return frames / (clock() - began), (time.process_time() - busy) / batches * 1e3


def idle() -> float:
    """Return the milliseconds of processor time per second of Ray's idle threads."""
    busy = time.process_time()
    time.sleep(5)
    return (time.process_time() - busy) * 1e3 / 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12)
    options = parser.parse_args()
    import ray

    ray.init(address="local", num_cpus=16, include_dashboard=False, logging_level="error", log_to_driver=False)
    polls = idle()
    found: dict[str, list[tuple[float, float]]] = {}
    collectors = contenders()
    rollouts = {name: iter(collector) for name, collector in collectors.items()}
    for _ in range(options.rounds):
        for name, collector in collectors.items():
            found.setdefault(name, []).append(taken(collector, rollouts[name], options.batches))
    for collector in collectors.values():
        collector.shutdown()
    wide = ours(2, (), 8, 1024)
    rollouts["wide"] = iter(wide)
    found["Ray, 2, 8 x 128"] = [taken(wide, rollouts["wide"], 4 * options.batches) for _ in range(options.rounds)]
    wide.shutdown()
    medians = {name: [statistics.median(each) for each in zip(*turns, strict=True)] for name, turns in found.items()}
    for name, (frames, busy) in medians.items():
        say(f"{name:15} {frames:6.0f} frames/s, {busy:5.2f} ms of the learner's processor time a batch")
    rates = {name: frames for name, (frames, _) in medians.items()}
    say(f"2 and 4 actors over 1: {rates['Ray, 2'] / rates['Ray, 1']:.2f}, {rates['Ray, 4'] / rates['Ray, 1']:.2f}")
    for name in ("processes, 2", "TorchRL, 2"):
        say(f"2 actors over {name}: {rates['Ray, 2'] / rates[name]:.2f}")
    say(f"Ray's threads take {polls:.1f} ms of the learner's processor time a second while nothing comes")
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main()
