"""Discrete actions that do not start at 0 are counted from 0 in all that is learned from, and shifted where stepped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import GymWrapper

from kit.counting import ShiftedEnv, still_policy
from kit.forks import forked_workers
from torchrl_lightning import LoadedPolicy, environment_specs, make_vector_env
from torchrl_lightning.cli.record import scripted_policy
from torchrl_lightning.collectors import AsynchronousCollector, GymnasiumCollector, play_episodes
from torchrl_lightning.demonstrations import (
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    record_demonstrations,
)
from torchrl_lightning.environments import make_environment
from torchrl_lightning.environments.specs import specs_from_state, specs_state

SPACES = {
    "Discrete": (spaces.Discrete(3, start=-2), torch.tensor(-2)),
    "MultiDiscrete": (spaces.MultiDiscrete([3, 2], start=[1, 5]), torch.tensor([1, 5])),
}
SIZES: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 40, "seed": 0}


def rollout(build: Callable[..., Any], make: Any, **options: Any) -> Any:
    with forked_workers():
        collector = build(make, **SIZES, **options)
        rows = collector.rollout()
        collector.shutdown()
    return rows


WAYS: dict[str, Callable[[Any], Any]] = {
    "sync": partial(rollout, GymnasiumCollector),
    "async": partial(rollout, GymnasiumCollector, vectorization="async"),
    "workers": partial(rollout, AsynchronousCollector, num_workers=1),
}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("way", WAYS)
def test_environment_gets_its_own_numbers(way: str, name: str) -> None:
    space, start = SPACES[name]
    make = partial(ShiftedEnv, space)
    rows = WAYS[way](make)
    specs = environment_specs(make_vector_env(make, 1))
    action = rows["action"]
    assert specs.action.is_in(action[0, 0])
    assert action.min() == 0
    assert action.unique().numel() == 3
    stepped = (action + start).flatten(2).sum(-1) if action.ndim > 2 else action + start
    assert torch.equal(rows["next", "reward"].squeeze(-1), rows["next", "observation"][..., 2] + stepped)


@pytest.mark.parametrize("name", SPACES)
def test_policy_is_evaluated_and_recorded_and_acts(name: str) -> None:
    space, start = SPACES[name]
    make = partial(ShiftedEnv, space, length=3)
    zeros = TensorDictModule(
        lambda x: torch.zeros(*x.shape[:-1], *start.shape, dtype=torch.int64),
        in_keys=["observation"],
        out_keys=["action"],
    )
    first = float(start.sum())
    assert play_episodes(make, zeros, 2, seed=0)["episode_return"].flatten().tolist() == [6.0 + 3 * first] * 2
    (demonstration,) = record_demonstrations(make, zeros, 1, seed=0)
    assert not demonstration.steps["action"].any()
    assert demonstration.rewards.tolist() == [1 + first, 2 + first, 3 + first]
    specs = environment_specs(make_vector_env(make, 1))
    assert specs_from_state(specs_state(specs)) == specs
    policy = LoadedPolicy(zeros, specs_from_state(specs_state(specs)))
    env = make()
    taken = policy.act(env.reset()[0])
    assert space.contains(taken)
    assert np.asarray(taken).tolist() == start.tolist()
    assert policy.act(np.zeros((2, 3), np.float32), starts=True).tolist() == [start.tolist()] * 2


@pytest.mark.parametrize("name", SPACES)
def test_scripted_policy_returns_the_environments_actions(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    space, start = SPACES[name]
    (tmp_path / f"planner_{name}.py").write_text(f"def act(observation):\n    return {start.tolist()}\n")
    monkeypatch.syspath_prepend(tmp_path)
    policy = scripted_policy(f"planner_{name}:act", partial(ShiftedEnv, space))
    assert not policy(TensorDict({"observation": torch.zeros(1, 3)}, [1]))["action"].any()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_other_environments_continue_during_a_replay(vectorization: str) -> None:
    make = partial(ShiftedEnv, SPACES["Discrete"][0], length=3)
    storage = DemonstrationStorage()
    storage.replace(list(record_demonstrations(make, still_policy(), 1, seed=0)), [])
    replay = DemonstrationReplay(storage, DemonstrationSampler(0.5, 0.0, generator=torch.Generator().manual_seed(0)), 2)
    rows = rollout(GymnasiumCollector, make, replay=replay, vectorization=vectorization)
    assert rows["demo", "mask"].float().mean() not in (0.0, 1.0)
    expected = rows["next", "observation"][..., 2] + rows["action"] - 2
    assert torch.equal(rows["next", "reward"].squeeze(-1), expected)


def test_torchrls_wrapper_which_forgets_the_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"GymEnv must .*Discrete\(3, start=-2\)"):
        make_environment(lambda: GymWrapper(ShiftedEnv(SPACES["Discrete"][0])), 1)
