"""Pong from four grey images of 84 x 84 with clipped rewards; one action per four frames of the game."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import ale_py
import gymnasium
import torch
from gymnasium.wrappers import AtariPreprocessing
from stable_baselines3.common.atari_wrappers import AtariWrapper, ClipRewardEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack

from benchmarks.whole_runs.clock import Training
from torchrl_lightning import EnvironmentRecipe

gymnasium.register_envs(ale_py)

GAME: dict[str, Any] = {"frameskip": 1, "repeat_action_probability": 0.25}


def ours() -> EnvironmentRecipe:
    """Return the recipe of ``env=atari``."""
    wrappers = [partial(AtariPreprocessing, noop_max=30)]
    return EnvironmentRecipe(
        "ALE/Pong-v5", module="ale_py", env_kwargs=GAME, wrappers=wrappers, frame_stack=4, clip_reward=1.0
    )


def theirs(num_envs: int, seed: int, lean: bool) -> VecEnv:
    """Return Stable-Baselines3's environments with its own wrapper, or with Gymnasium's faster wrapper if ``lean``."""

    def make() -> Any:
        env = gymnasium.make("ALE/Pong-v5", **GAME)
        if not lean:
            return AtariWrapper(env, terminal_on_life_loss=False)
        return ClipRewardEnv(AtariPreprocessing(env, noop_max=30, grayscale_newaxis=True))

    made = DummyVecEnv([make] * num_envs)
    made.seed(seed)
    return VecFrameStack(made, 4)


def share_of_convolutions(train: Training) -> float:
    """Return the share of the convolutions in the processor time of a training run."""
    began = time.process_time()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(0)
    spent = time.process_time() - began
    events = profile.key_averages()
    return float(sum(each.self_cpu_time_total for each in events if "conv" in each.key)) / 1e6 / spent
