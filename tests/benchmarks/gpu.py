"""Compare replay, estimators and updates on a CUDA device with TorchRL and a compiled loop, interleaved.

    python tests/benchmarks/gpu.py [--device cuda] [--size 1000000] [--repetitions 11] [--json timings.json]

``prioritized`` draws 256 of a million cells on the device and updates their priorities. Its trees are on the CPU, the
default, or on the device. ``uniform`` only draws. TorchRL needs its compiled extension for prioritized sampling;
without the extension it is skipped. ``gae`` estimates rollouts on the device. ``update`` is one update of PPO and SAC
in the Trainer, eager and compiled. Each call ends with a synchronisation, so the time includes the work of the device.
``--device cpu`` only checks that the script runs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, say, table, write_json

if __name__ == "__main__":
    warnings.simplefilter("ignore")

import lightning as L
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

from torchrl_lightning import OnPolicyDataModule, ReplayDataModule
from torchrl_lightning.agents import MLPNetwork, PPOModule, SACModule
from torchrl_lightning.estimators import gae
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingStorage, UniformSampler

OURS, THERE, TORCHRL, LOOP = "ours", "ours, trees there", "TorchRL", "compiled loop"
BATCH, UPDATES, SKIPPED = 256, 200, 50


def finished(call: Callable[[], object], device: str) -> Contender:
    """Return a call that ends when the device has finished its work."""
    if device == "cpu":
        return call

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def transitions(count: int, device: str) -> TensorDict:
    """Return rows of 165 bytes."""
    flag = torch.zeros(count, 1, dtype=torch.bool, device=device)
    following = {
        "observation": torch.randn(count, 17, device=device),
        "reward": torch.randn(count, 1, device=device),
        "done": flag,
    }
    entries = {
        "observation": torch.randn(count, 17, device=device),
        "action": torch.randn(count, 6, device=device),
        "next": following,
    }
    return TensorDict(entries, [count], device=device)


def filled(buffer: Any, size: int, device: str) -> Any:
    """Fill a buffer in chunks."""
    for start in range(0, size, 100_000):
        buffer.extend(transitions(min(100_000, size - start), device))
    return buffer


def drawing(buffer: Any, device: str, prioritized: bool) -> Contender:
    """Return a function that draws a batch and, if ``prioritized``, updates its priorities."""

    def draw() -> None:
        batch = buffer.sample()
        if prioritized:
            batch["td_error"] = torch.rand(BATCH, device=device)
            buffer.update_tensordict_priority(batch)

    return finished(draw, device)


def replay(size: int, device: str, prioritized: bool) -> dict[str, Contender]:
    """Return the draws of all replay buffers."""

    def own(sampler: Any) -> Contender:
        buffer = ExperienceBuffer(storage=RingStorage(size, device=device), sampler=sampler, batch_size=BATCH)
        return drawing(filled(buffer, size, device), device, prioritized)

    if prioritized:
        contenders = {OURS: own(PrioritizedSampler()), THERE: own(PrioritizedSampler(device=device))}
    else:
        contenders = {OURS: own(UniformSampler())}
    storage = LazyTensorStorage(size, device=device)
    try:
        if prioritized:
            theirs: Any = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)
        else:
            theirs = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
        contenders[TORCHRL] = drawing(filled(theirs, size, device), device, prioritized)
    except (ImportError, NameError, RuntimeError) as error:
        say(f"TorchRL is left out: {error}")
    return contenders


def by_loop(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    """Estimate step by step with a plain loop."""
    delta = reward + 0.99 * next_value * ~terminated - value
    trace = 0.99 * 0.95 * (~done).to(value.dtype)
    advantage, last = torch.empty_like(value), torch.zeros_like(value[0])
    for t in range(len(value) - 1, -1, -1):
        last = delta[t] + trace[t] * last
        advantage[t] = last
    return advantage, advantage + value


def estimators(steps: int, num_envs: int, device: str) -> dict[str, Contender]:
    """Return the estimators of a rollout ``[T, N, 1]``. TorchRL expects ``[N, T, 1]``."""
    torch.manual_seed(0)
    reward, value, next_value = torch.randn(3, steps, num_envs, 1, device=device)
    terminated = torch.rand(steps, num_envs, 1, device=device) < 0.01
    done = terminated | (torch.rand(steps, num_envs, 1, device=device) < 0.01)
    turned = [x.transpose(0, 1).contiguous() for x in (value, next_value, reward, done, terminated)]
    own = (reward, value, next_value, terminated, done)
    contenders = {
        OURS: finished(lambda: gae(*own, gamma=0.99, lmbda=0.95), device),
        TORCHRL: finished(lambda: vec_generalized_advantage_estimate(0.99, 0.95, *turned), device),
    }
    if steps <= 128:  # the loop is unrolled: a longer one takes minutes to compile
        loop = torch.compile(by_loop)
        contenders[LOOP] = finished(lambda: loop(*own), device)
    return contenders


def update(algorithm: str, compiled: bool, device: str) -> Timing:
    """Time training steps in the Trainer without the first steps, which compile and warm up."""
    samples: list[float] = []

    def timed(step: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            began = time.perf_counter()
            result = step(self, batch, batch_idx)
            if device != "cpu":
                torch.cuda.synchronize()
            samples.append((time.perf_counter() - began) * 1e6)
            return result

        return training_step

    kind = PPOModule if algorithm == "PPO" else SACModule
    module = type(f"Timed{algorithm}", (kind,), {"training_step": timed(kind.training_step)})(
        MLPNetwork([256, 256]), compile=compiled
    )
    data: L.LightningDataModule
    if algorithm == "PPO":
        data = OnPolicyDataModule(
            "Pendulum-v1",
            num_envs=8,
            frames_per_batch=2048,
            num_epochs=10,
            mini_batch_size=BATCH,
            updates_per_step=1,
            seed=0,
        )
        epochs = -(-UPDATES // 80)
    else:
        data = ReplayDataModule(
            "Pendulum-v1",
            buffer=lambda num_envs: ExperienceBuffer(
                storage=RingStorage(10_000), sampler=UniformSampler(), num_envs=num_envs
            ),
            batch_size=BATCH,
            updates_per_epoch=UPDATES,
            updates_per_step=1,
            warmup_frames=500,
            seed=0,
        )
        epochs = 1
    L.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        max_epochs=epochs,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, datamodule=data)
    kept = samples[SKIPPED:]
    low, middle, high = statistics.quantiles(kept, n=4, method="inclusive")
    return Timing("compiled" if compiled else "eager", middle, low, high, min(kept))


def main() -> int:
    """Run the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device, results = arguments.device, {}
    if device != "cpu":
        say(torch.cuda.get_device_name(device))
    for name, prioritized in (("prioritized", True), ("uniform", False)):
        title = f"{name}, {BATCH} of {arguments.size}"
        results[title] = compare(replay(arguments.size, device, prioritized), repetitions=arguments.repetitions)
        say(table(title, results[title], OURS))
    for steps, num_envs in ((128, 4096), (1024, 1024)):
        title = f"gae, {steps} x {num_envs}"
        results[title] = compare(estimators(steps, num_envs, device), repetitions=arguments.repetitions)
        say(table(title, results[title], OURS))
    for algorithm in ("PPO", "SAC"):
        title = f"update of {algorithm}"
        results[title] = [update(algorithm, compiled, device) for compiled in (False, True)]
        say(table(title, results[title], "eager"))
    if arguments.json:
        write_json(arguments.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
