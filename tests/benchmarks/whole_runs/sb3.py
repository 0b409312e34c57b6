"""Runs of Stable-Baselines3, and of SBX, which has the same algorithms and arguments in JAX."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from benchmarks.whole_runs.clock import CELLS, WARMUP, Stopwatch, Training
from torchrl_lightning.agents.analytic import FusedAdam

Environments = Callable[[int, int, bool], VecEnv]
"""Build environments from their number, a seed and ``lean``."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "its own": {},
    "fused": {"optimizer_kwargs": {"fused": True}},
    "ours": {"optimizer_class": FusedAdam},
}


def environments(env: str, num_envs: int, seed: int, lean: bool) -> Any:
    """Build vector environments, with or without Monitor."""
    return DummyVecEnv([lambda: gymnasium.make(env)] * num_envs) if lean else make_vec_env(env, num_envs, seed=seed)


class Updates(BaseCallback):
    """Start the stopwatch after the first half of ``updates``; stop the run after ``updates`` more."""

    def __init__(self, updates: int, device: str) -> None:
        super().__init__()
        self.watch, self.updates = Stopwatch(device), updates

    def _on_step(self) -> bool:
        done: int = self.model._n_updates
        if done >= self.updates // 2:
            self.watch.start(self.model.num_timesteps)
        return done < self.updates // 2 * 3


class Rollouts(BaseCallback):
    """Start the stopwatch with the second rollout."""

    def __init__(self, frames: int, device: str) -> None:
        super().__init__()
        self.watch, self.frames = Stopwatch(device), frames

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps >= self.frames:
            self.watch.start(self.model.num_timesteps)

    def _on_step(self) -> bool:
        return True


def off_policy(
    algorithm: str,
    env: str,
    num_envs: int,
    batch_size: int,
    updates: int,
    *,
    policy_kwargs: dict[str, Any],
    library: str = "stable_baselines3",
    lean: bool = False,
    optimizer: str = "its own",
    at_once: int = 1,
    policy: str = "MlpPolicy",
    cells: int = CELLS,
    build: Environments | None = None,
    device: str = "cpu",
    **kwargs: Any,
) -> Training:
    """Return a run with one update per step of all environments, or ``at_once`` updates after ``at_once`` steps."""
    kind = getattr(importlib.import_module(library), algorithm)

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        made = environments(env, num_envs, seed, lean) if build is None else build(num_envs, seed, lean)
        model = kind(
            policy,
            made,
            device=device,
            seed=seed,
            batch_size=batch_size,
            buffer_size=cells,
            learning_starts=WARMUP,
            train_freq=(at_once, "step"),
            gradient_steps=at_once,
            policy_kwargs={**policy_kwargs, **OPTIMIZERS[optimizer]},
            **kwargs,
        )
        measure = Updates(updates, device)
        model.learn(10**9, callback=measure)
        speed = measure.watch.speed(model.num_timesteps)
        made.close()
        return speed

    return run


def ppo(
    env: str,
    num_envs: int,
    steps: int,
    rollouts: int,
    *,
    library: str = "stable_baselines3",
    lean: bool = False,
    optimizer: str = "its own",
    normalized: bool = False,
    policy: str = "MlpPolicy",
    build: Environments | None = None,
    device: str = "cpu",
) -> Training:
    """Return a run with mini-batches of 256 and 4 epochs."""
    frames = num_envs * steps
    kind: type[PPO] = importlib.import_module(library).PPO

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        made = environments(env, num_envs, seed, lean) if build is None else build(num_envs, seed, lean)
        if normalized:
            made = VecNormalize(made)
        model = kind(
            policy,
            made,
            device=device,
            seed=seed,
            n_steps=steps,
            batch_size=256,
            n_epochs=4,
            learning_rate=3e-4,
            policy_kwargs=dict(OPTIMIZERS[optimizer]),
        )
        measure = Rollouts(frames, device)
        model.learn(frames * (rollouts + 1), callback=measure)
        speed = measure.watch.speed(model.num_timesteps)
        made.close()
        return speed

    return run
