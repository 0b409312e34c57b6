"""The demonstrations that experiments begin with are what their environments do."""

from __future__ import annotations

import warnings

import pytest
import torch

from kit.extras import need_extra
from kit.processes import PROJECT
from torchrl_lightning import EnvironmentRecipe, GoalReward, read_demonstration

FILES = sorted((PROJECT / "conf" / "demonstrations").glob("*/*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_actions_earn_the_recorded_return(path):
    demonstration = read_demonstration(path)
    environment, seed = (demonstration.metadata[key] for key in ("environment", "seed"))
    module, _, name = environment.rpartition(":")
    need_extra(module.removeprefix("gymnasium_"))
    is_sparse = name not in ("Pendulum-v1", "FetchPickAndPlace-v4")
    wrappers = [GoalReward] if is_sparse and demonstration.rewards[-1] == 1 else []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is out of date.*")  # MultiRoom-N4-S5-v0 is the one with published scores
        env = EnvironmentRecipe(environment, wrappers=wrappers)()
    env.reset(seed=seed)
    played = [env.step(action)[1] for action in demonstration.steps["action"].numpy()]
    assert torch.tensor(played).float().equal(demonstration.rewards)
    if module == "gymnasium_robotics":
        assert demonstration.rewards[-1] == 0  # -1 elsewhere than at the goal
    if is_sparse:
        assert demonstration.rewards[-1] > 0
        assert demonstration.rewards[:-1].eq(0).all()


def test_shipped_demonstrations_exist():
    assert {path.suffix for path in FILES} == {".safetensors"}
