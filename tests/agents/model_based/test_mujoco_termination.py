"""The rules of Gymnasium's MuJoCo bodies, against the environments themselves."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from torchrl_lightning.agents import MujocoTermination

pytest.importorskip("mujoco")
IDS = ["Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "InvertedPendulum-v5", "Hopper-v4", "Ant-v4"]


# Version 4 is told to be older than version 5.
@pytest.mark.filterwarnings("ignore:.*out of date.*")
@pytest.mark.parametrize("name", IDS)
def test_body_ends_where_its_environment_does(name: str) -> None:
    body = {"InvertedPendulum": "inverted_pendulum"}.get(name[:-3], name[:-3].lower())
    generator = np.random.default_rng(0)
    with gymnasium.make(name, disable_env_checker=True) as env:
        env.action_space.seed(0)
        env.reset(seed=0)
        data = env.unwrapped
        begin = data.init_qpos, data.init_qvel
        rows, ends = [], []
        for _ in range(200):
            places = begin[0] + generator.uniform(-0.9, 0.9, len(begin[0])) * (generator.random(len(begin[0])) < 0.3)
            data.set_state(places, begin[1])
            shown, _, terminated, _, _ = env.step(env.action_space.sample())
            env.reset()
            rows.append(shown)
            ends.append(terminated)
    told = MujocoTermination(body)(*[torch.tensor(np.array(rows), dtype=torch.float32)] * 3)
    assert told.tolist() == ends
    assert 10 < sum(ends) < 190


def test_what_is_not_finite_has_fallen_and_bounds_belong_where_the_rule_says() -> None:
    nan = torch.full((1, 4), torch.nan)
    assert MujocoTermination("inverted_pendulum")(nan, nan, nan).tolist() == [True]
    at_bound = torch.tensor([[0.0, 0.2, 0.0, 0.0]])
    assert MujocoTermination("inverted_pendulum")(at_bound, at_bound, at_bound).tolist() == [False]
    at_bound = torch.tensor([[1.25, 0.2, 0.0, 0.0]])
    assert MujocoTermination("hopper")(at_bound, at_bound, at_bound).tolist() == [True]
