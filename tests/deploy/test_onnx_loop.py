"""The example's loop imports only gymnasium and onnxruntime, and its returns equal the returns of an evaluation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation

from kit.extras import need_extra
from kit.processes import PROJECT
from torchrl_lightning import (
    DQNModule,
    LoadedPolicy,
    OnPolicyDataModule,
    PPOModule,
    RecurrentNetwork,
    RolloutBuffer,
    SACModule,
    export_policy,
)
from torchrl_lightning._core.moments import Moments
from torchrl_lightning.environments.normalization import NormalizedPolicy, ObservationNormalizer

EXAMPLE = PROJECT / "examples" / "play_onnx.py"
EPISODES = 12


class Turned(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole with an unsorted nested Dict space, a scalar entry, a float64 entry, and actions that start at 3."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        box = spaces.Box
        self.observation_space = spaces.Dict(
            velocity=box(-np.inf, np.inf, (2,)),
            angle=box(-np.inf, np.inf, (1,), np.float64),
            cart=spaces.Dict(place=box(-np.inf, np.inf, ())),
        )
        self.action_space = spaces.Discrete(2, start=3)

    @staticmethod
    def turned(row: Any) -> dict[str, Any]:
        angle, place = row[2:3].astype(np.float64), np.asarray(row[0])
        return {"velocity": row[[1, 3]], "angle": angle, "cart": {"place": place}}

    def reset(self, **options: Any) -> Any:
        row, info = self.env.reset(**options)
        return self.turned(row), info

    def step(self, action: Any) -> Any:
        row, _, *ends = self.env.step(action - 3)
        return self.turned(row), 1.0 + float(row[0]), *ends


def cart_pole() -> Any:
    return gym.make("CartPole-v1")


def hidden_velocity() -> Any:
    space = spaces.Box(-5, 5, (2,))
    return TransformObservation(cart_pole(), lambda row: row[[0, 2]], space)


def pendulum() -> Any:
    return gym.make("Pendulum-v1")


CASES: dict[str, tuple[Callable[[], Any], Any, bool]] = {
    "ppo": (cart_pole, PPOModule(), False),
    "sac": (pendulum, SACModule(), False),
    "gru": (hidden_velocity, PPOModule(RecurrentNetwork("gru", 8)), False),
    "lstm": (hidden_velocity, PPOModule(RecurrentNetwork("lstm", 8)), True),
    "normalised": (pendulum, PPOModule(), True),
    "dict and start": (Turned, DQNModule(), False),
}


@pytest.mark.parametrize("name", CASES)
def test_plain_loop_has_the_returns_of_an_evaluation(name: str, tmp_path: Path) -> None:
    need_extra("onnx")
    make_env, module, normalize = CASES[name]
    data = OnPolicyDataModule(make_env, buffer=RolloutBuffer, num_envs=1, frames_per_batch=8, total_frames=8, seed=1000)
    torch.manual_seed(0)
    normalizer = ObservationNormalizer(data.specs, True, 5.0) if normalize else None
    policy = module.build(data.specs if normalizer is None else normalizer.specs).policy
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter).mul_(0.3))
    if normalizer is not None:
        size = data.specs.observation["observation"].shape[0]
        normalizer.advance({"observation": Moments.from_samples(torch.randn(20, size))})
        policy = NormalizedPolicy(policy, normalizer)
    loaded = LoadedPolicy(policy, data.specs)
    expected = data.evaluate(loaded, EPISODES)["episode_return"].numpy()
    data.close()
    export_policy(loaded, tmp_path / "policy.onnx", format="onnx")
    spec = importlib.util.spec_from_file_location("play_onnx", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    returns = example.evaluate(str(tmp_path / "policy.onnx"), make_env, EPISODES)
    assert len(set(expected.tolist())) > 1
    np.testing.assert_allclose(returns, expected, rtol=1e-6)


def test_plain_loop_does_not_import_this_package() -> None:
    assert "torch" not in EXAMPLE.read_text().replace("torchrl-lightning-evaluate", "")
