"""The simple buffer: its documented methods and TorchRL's methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from kit.documented import simple_step
from kit.seeds import generator
from kit.statistics import chi_square
from torchrl_lightning.l2r.simple import SimpleReplayBuffer
from torchrl_lightning.replay.sequences import SequenceSampler
from torchrl_lightning.replay.uniform import UniformSampler


def build(size: int = 5, batch_size: int = 2, filled: int = 0, **options: Any) -> SimpleReplayBuffer:
    buffer = SimpleReplayBuffer(obs_dim=1, act_dim=2, size=size, batch_size=batch_size, **options)
    for number in range(filled):
        buffer.store(simple_step(float(number)))
    return buffer


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 6), count=st.integers(1, 20), batch_size=st.integers(1, 6))
def test_newest_steps_are_kept_and_drawn_once(size: int, count: int, batch_size: int) -> None:
    buffer, kept = build(size, batch_size, count), min(size, count)
    assert (len(buffer), buffer.size, buffer.ptr) == (kept, kept, count % size)
    if batch_size > kept:
        with pytest.raises(ValueError, match=rf"{kept}.*{batch_size}"):
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


def test_flags_are_stored_in_torchrls_layout() -> None:
    buffer = build()
    buffer.store(simple_step(0.0, done=True))
    buffer.store(simple_step(1.0, done=False, truncated=True))
    following = buffer[:]["next"]
    assert following["terminated"].flatten().tolist() == [True, False]
    assert following["truncated"].flatten().tolist() == [False, True]
    assert following["done"].flatten().tolist() == [True, True]


def test_tensors_are_detached_and_plain_actions_accepted() -> None:
    buffer = build()
    buffer.store(simple_step(1.0, obs=torch.ones(1, requires_grad=True), act=torch.ones(2, requires_grad=True)))
    assert not buffer[:]["observation"].requires_grad


def transitions(count: int) -> TensorDict:
    flag = torch.zeros(count, 1, dtype=torch.bool)
    number = torch.arange(count, dtype=torch.float32).unsqueeze(1)
    following = {"observation": number + 0.5, "reward": number, "done": flag, "terminated": flag, "truncated": flag}
    return TensorDict({"observation": number, "action": number.expand(count, 2), "next": following}, [count])


def test_torchrl_methods_return_the_same_steps() -> None:
    buffer = SimpleReplayBuffer(None, None, size=8, batch_size=4)
    buffer.extend(transitions(6))
    assert (buffer.obs_dim, buffer.act_dim) == (1, 2)
    batch = buffer.sample()
    assert isinstance(batch, TensorDict)
    assert batch["observation"].flatten().equal(batch["index"].float())
    with pytest.warns(UserWarning, match="batch_sizes"):
        assert buffer.sample(3).shape == (3,)
    assert buffer.sample_batch()["obs"].shape == (4, 1)
    with pytest.raises(ValueError, match="act_dim=2"):
        buffer.extend(transitions(2).set("action", torch.zeros(2, 3)))
    assert len(buffer) == 6


def test_rollouts_of_several_environments_are_stored() -> None:
    buffer = build(size=12, batch_size=6, num_envs=3)
    rollout = transitions(6).view(3, 2)
    rollout.names = [None, "time"]
    buffer.extend(rollout)
    assert buffer.writer.positions.tolist() == [2, 2, 2]
    assert sorted(buffer.sample()["observation"].flatten().tolist()) == [0, 1, 2, 3, 4, 5]


def test_discrete_actions_are_returned_as_numbers() -> None:
    buffer = SimpleReplayBuffer(None, None, size=4, batch_size=2)
    buffer.extend(transitions(4).set("action", torch.arange(4)))
    assert buffer.act_dim == 1
    assert buffer.sample_batch()["act"].shape == (2, 1)


def test_another_buffer_is_stored_oldest_first() -> None:
    target = build(size=9)
    for source in (build(size=3, filled=5), build()):
        target.store(source)
        assert target[:]["observation"].flatten().tolist() == [2.0, 3.0, 4.0]


def test_finish_path_does_nothing() -> None:
    buffer = build(filled=1)
    before = buffer[:].clone()
    buffer.finish_path()
    buffer.finish_path(SimpleNamespace(value=1.0))
    assert (buffer[:] == before).all()


def test_stored_steps_are_equally_likely() -> None:
    buffer = build(10, 2, 13, generator=generator())
    drawn = torch.cat([buffer.sample_batch()["obs"][:, 0] for _ in range(1000)])
    assert chi_square(drawn, dict.fromkeys(range(3, 13), 1.0)) < 27.9  # 0.1 % of 9 degrees of freedom


def test_windows_come_from_sample_only() -> None:
    buffer = build(8, 2, filled=8, sampler=SequenceSampler(4, episode_ends="across"))
    with pytest.raises(ValueError, match="sampler must draw single steps"):
        buffer.sample_batch()
    assert buffer.sample()["observation"].shape[:2] == (2, 4)


def test_sampler_can_be_replaced() -> None:
    assert len(build(batch_size=4, filled=1, sampler=UniformSampler(with_replacement=True)).sample()) == 4
