"""The termination rules equal the rules of Gymnasium's MuJoCo bodies."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from torchrl_lightning.agents import MujocoTermination

pytest.importorskip("mujoco")
IDS = ["Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "InvertedPendulum-v5", "Hopper-v4", "Ant-v4"]


# Gymnasium warns that version 4 is older than version 5.
@pytest.mark.filterwarnings("ignore:.*out of date.*")
@pytest.mark.parametrize("name", IDS)
def test_mujoco_termination_equals_the_environment(name: str) -> None:
    body = {"InvertedPendulum": "inverted_pendulum"}.get(name[:-3], name[:-3].lower())
    generator = np.random.default_rng(0)
    with gymnasium.make(name, disable_env_checker=True) as env:
        env.action_space.seed(0)
        env.reset(seed=0)
        data = env.unwrapped
        qpos, qvel = data.init_qpos, data.init_qvel
        rows, expected = [], []
        for _ in range(200):
            noise = generator.uniform(-0.9, 0.9, len(qpos))
            data.set_state(qpos + noise * (generator.random(len(qpos)) < 0.3), qvel)
            observation, _, terminated, _, _ = env.step(env.action_space.sample())
            env.reset()
            rows.append(observation)
            expected.append(terminated)
    predicted = MujocoTermination(body)(*[torch.tensor(np.array(rows), dtype=torch.float32)] * 3)
    assert predicted.tolist() == expected
    assert 10 < sum(expected) < 190


def test_mujoco_termination_of_nan_and_of_values_on_bounds() -> None:
    nan = torch.full((1, 4), torch.nan)
    assert MujocoTermination("inverted_pendulum")(nan, nan, nan).tolist() == [True]
    at_bound = torch.tensor([[0.0, 0.2, 0.0, 0.0]])
    assert MujocoTermination("inverted_pendulum")(at_bound, at_bound, at_bound).tolist() == [False]
    at_bound = torch.tensor([[1.25, 0.2, 0.0, 0.0]])
    assert MujocoTermination("hopper")(at_bound, at_bound, at_bound).tolist() == [True]
