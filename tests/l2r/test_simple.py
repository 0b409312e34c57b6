"""The simple buffer: documented verbs, TorchRL's verbs beside them, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_lightning.l2r.simple import SimpleReplayBuffer
from torchrl_lightning.replay.uniform import UniformSampler


def step(number: float, **changes: Any) -> dict[str, Any]:
    act = SimpleNamespace(action=np.array([number, -number]))
    base = {"obs": [number], "next_obs": [number + 0.5], "act": act, "rew": 2 * number, "done": number % 2 == 1}
    return {**base, **changes}


def build(size: int = 5, batch_size: int = 2, **options: Any) -> SimpleReplayBuffer:
    return SimpleReplayBuffer(obs_dim=1, act_dim=2, size=size, batch_size=batch_size, **options)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 6), count=st.integers(1, 20), batch_size=st.integers(1, 6))
def test_the_newest_steps_are_kept_and_drawn_whole_and_once(size: int, count: int, batch_size: int) -> None:
    buffer = build(size, batch_size)
    for number in range(count):
        buffer.store(step(float(number)))
    kept = min(size, count)
    assert (len(buffer), buffer.size, buffer.ptr) == (kept, kept, count % size)
    if batch_size > kept:
        with pytest.raises(ValueError, match=f"{batch_size} .* {kept}"):
            buffer.sample_batch()
        return
    batch = buffer.sample_batch()
    obs = batch["obs"][:, 0]
    assert len(set(obs.tolist())) == batch_size
    assert set(obs.tolist()) <= set(range(count - kept, count))
    assert batch["obs2"][:, 0].equal(obs + 0.5)
    assert batch["act"].equal(torch.stack((obs, -obs), 1))
    assert batch["rew"].equal(2 * obs)
    assert batch["done"].equal(obs % 2)
    assert {value.dtype for value in batch.values()} == {torch.float32}
    assert buffer.weights is not None
    assert buffer.weights.tolist() == [1.0] * batch_size


def test_flags_go_into_torchrl_layout() -> None:
    buffer = build()
    buffer.store(step(0.0, done=True))
    buffer.store(step(1.0, done=False, truncated=True))
    following = buffer[:]["next"]
    assert following["terminated"].flatten().tolist() == [True, False]
    assert following["truncated"].flatten().tolist() == [False, True]
    assert following["done"].flatten().tolist() == [True, True]


def test_tensors_are_detached_and_plain_actions_do() -> None:
    buffer = build()
    buffer.store(step(1.0, obs=torch.ones(1, requires_grad=True), act=torch.ones(2, requires_grad=True)))
    assert not buffer[:]["observation"].requires_grad


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"obs": "text"}, TypeError),
        ({"obs": [1.0, 2.0]}, ValueError),
        ({"next_obs": []}, ValueError),
        ({"act": [1.0]}, ValueError),
        ({"rew": float("nan")}, ValueError),
        ({"rew": [1.0, 2.0]}, ValueError),
        ({"done": 0.3}, ValueError),
        ({"done": [True, False]}, ValueError),
    ],
)
def test_a_wrong_step_is_refused_and_changes_nothing(change: dict[str, Any], error: type[Exception]) -> None:
    buffer = build()
    buffer.store(step(1.0))
    with pytest.raises(error):
        buffer.store(step(2.0, **change))
    assert buffer[:]["observation"].tolist() == [[1.0]]


def test_a_missing_entry_is_named() -> None:
    incomplete = step(1.0)
    del incomplete["next_obs"]
    with pytest.raises(KeyError, match="next_obs"):
        build().store(incomplete)


@pytest.mark.parametrize("wrong", [None, [], "step"])
def test_a_step_is_a_dict(wrong: Any) -> None:
    with pytest.raises(TypeError, match="A step is a dict of documented entries, got a"):
        build().store(wrong)


def test_an_empty_buffer_gives_both_numbers_and_nothing_to_store() -> None:
    buffer = build()
    buffer.store(build())
    with pytest.raises(ValueError, match="2 different steps from 0"):
        buffer.sample_batch()


def transitions(count: int) -> TensorDict:
    flag = torch.zeros(count, 1, dtype=torch.bool)
    number = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    following = {"observation": number + 0.5, "reward": number, "done": flag, "terminated": flag, "truncated": flag}
    return TensorDict({"observation": number, "action": number.expand(count, 2), "next": following}, [count])


def test_torchrl_verbs_serve_the_same_steps() -> None:
    buffer = SimpleReplayBuffer(None, None, size=8, batch_size=4)
    buffer.extend(transitions(6))
    assert (buffer.obs_dim, buffer.act_dim) == (1, 2)
    batch = buffer.sample()
    assert isinstance(batch, TensorDict)
    assert batch["observation"].flatten().equal(batch["index"].float())
    with pytest.warns(UserWarning, match="conflicting batch_sizes"):
        assert buffer.sample(3).shape == (3,)
    assert buffer.sample_batch()["obs"].shape == (4, 1)
    with pytest.raises(ValueError, match="act_dim=2"):
        buffer.extend(transitions(2).set("action", torch.zeros(2, 3)))
    assert len(buffer) == 6


def test_rollouts_of_several_environments() -> None:
    buffer = build(size=12, batch_size=6, num_envs=3)
    rollout = transitions(6).view(3, 2)
    rollout.names = [None, "time"]
    buffer.extend(rollout)
    assert buffer.writer.positions.tolist() == [2, 2, 2]
    assert sorted(buffer.sample()["observation"].flatten().tolist()) == [0, 1, 2, 3, 4, 5]


def test_discrete_actions_come_out_as_numbers() -> None:
    buffer = SimpleReplayBuffer(None, None, size=4, batch_size=2)
    buffer.extend(transitions(4).set("action", torch.arange(4)))
    assert buffer.act_dim == 1
    assert buffer.sample_batch()["act"].shape == (2, 1)


def test_another_buffer_is_stored_oldest_first() -> None:
    source, target = build(size=3), build(size=9)
    for number in range(5):
        source.store(step(float(number)))
    target.store(source)
    assert target[:]["observation"].flatten().tolist() == [2.0, 3.0, 4.0]


def test_finish_path_does_nothing() -> None:
    buffer = build()
    buffer.store(step(1.0))
    before = buffer[:].clone()
    buffer.finish_path()
    buffer.finish_path(SimpleNamespace(value=1.0))
    assert (buffer[:] == before).all()


def test_every_kept_step_is_equally_likely() -> None:
    buffer = build(size=10, batch_size=2, generator=torch.Generator().manual_seed(0))
    for number in range(13):
        buffer.store(step(float(number)))
    counts = torch.zeros(13)
    for _ in range(1000):
        counts[buffer.sample_batch()["obs"][:, 0].long()] += 1
    assert counts[:3].sum() == 0
    chi_square = float(((counts[3:] - 200) ** 2 / 200).sum())
    assert chi_square < 27.9  # 0.1 % of 9 degrees of freedom


@pytest.mark.parametrize("given", [{}, {"sampler": None}])
def test_no_sampler_means_uniform_without_replacement(given: dict[str, Any]) -> None:
    sampler = build(**given).sampler
    assert isinstance(sampler, UniformSampler)
    assert not sampler.with_replacement


def test_another_sampler_may_be_given() -> None:
    buffer = build(batch_size=4, sampler=UniformSampler(with_replacement=True))
    buffer.store(step(1.0))
    assert len(buffer.sample()) == 4
