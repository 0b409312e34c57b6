"""The path-wise PPO buffer with golden, wrapped, exactly full, terminal and cut paths, and its config methods."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kit.documented import choice, path_step
from kit.golden import load
from kit.rollouts import brute_gae, brute_returns, make_critic, make_rollout
from torchrl_lightning.l2r.ppo import PPOBuffer


def build(size: int, batch_size: int = 1, **options: Any) -> PPOBuffer:
    return PPOBuffer(obs_dim=1, act_dim=1, size=size, batch_size=batch_size, **options)


def walked(buffer: PPOBuffer, *rewards: float) -> PPOBuffer:
    """Store a path with these rewards and end its episode."""
    for t, reward in enumerate(rewards):
        buffer.store(path_step(t, reward, done=t == len(rewards) - 1))
    buffer.finish_path()
    return buffer


def by_number(batch: dict[str, Tensor], name: str) -> dict[int, float]:
    return dict(zip(batch["obs"][:, 0].int().tolist(), batch[name].tolist(), strict=True))


def is_standardised(advantage: Tensor) -> bool:
    return abs(float(advantage.mean())) < 1e-6 and float(advantage.std(correction=0)) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("case", ["c0", "c1", "c2"])
@pytest.mark.parametrize("flags", [True, False])
@pytest.mark.parametrize("spare", [0, 3])
def test_golden_paths(case: str, flags: bool, spare: int) -> None:
    data = {name.removeprefix(f"{case}_"): value for name, value in load("l2r_ppo_finish_path").items()}
    steps, number = len(data["reward"]), 0
    buffer = build(steps + spare, steps, gamma=float(data["gamma"]), lam=float(data["lam"]))
    for length, last in zip(data["path_lengths"].tolist(), data["last_value"].tolist(), strict=True):
        for left in range(length, 0, -1):
            done = {"done": last == 0.0 and left == 1} if flags else {}
            buffer.store(path_step(number, float(data["reward"][number]), float(data["value"][number]), **done))
            number += 1
        buffer.finish_path(None if last == 0.0 else choice(last))
    batch = buffer.sample_batch()
    order = batch["obs"][:, 0].argsort()
    found = {"advantage": buffer.rollout["advantage"].flatten()}
    names = {"adv": "advantage_normalised", "ret": "return", "rew": "reward", "val": "value"}
    found |= {expected: batch[name][order] for name, expected in names.items()}
    for name, value in found.items():
        torch.testing.assert_close(value, data[name].float(), atol=1e-5, rtol=1e-5, msg=name)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    lam=st.sampled_from([0.0, 0.7, 1.0]),
    restore=st.booleans(),
)
def test_wrapped_full_terminal_and_cut_paths_match_a_list(
    size: int, lengths: list[int], seed: int, lam: float, restore: bool
) -> None:
    rng = np.random.default_rng(seed)
    buffer, twin, number = build(size, gamma=0.9, lam=lam), {}, 0
    for length in lengths:
        length = min(length, size)
        reward, value = torch.from_numpy(rng.normal(size=(2, length, 1)))
        terminal, last = bool(rng.integers(2)), float(rng.normal())
        done = (torch.arange(length) == length - 1)[:, None]
        for t in range(length):
            buffer.store(path_step(number + t, float(reward[t]), float(value[t]), done=terminal and bool(done[t])))
        if restore:
            copy = build(size, gamma=0.9, lam=lam)
            copy.load_state_dict(buffer.state_dict())
            buffer = copy
        buffer.finish_path(choice(last))
        following = torch.cat([value[1:], torch.tensor([[last]])])
        advantage = brute_gae(reward, value, following, done & terminal, done, 0.9, lam)
        target = brute_returns(reward, following, done & terminal, done, 0.9)
        twin.update({number + t: (float(advantage[t]), float(target[t])) for t in range(length)})
        number += length
    kept = dict(list(twin.items())[-size:])
    buffer.update_storage_parameter("standardize_advantages", False)
    buffer.before_gradients()
    columns = [buffer.rollout[key].flatten().tolist() for key in ("observation", "advantage", "value_target")]
    found = {int(n): pytest.approx(results, abs=1e-4) for n, *results in zip(*columns, strict=True)}
    assert found == {n: [*results] for n, results in kept.items()}


def test_batches_are_standardised_over_finished_steps_once() -> None:
    buffer = walked(build(10, 6), 0.0, 1.0, 2.0, 3.0, 0.0, 1.0)
    buffer.store(path_step(6, 1000.0))
    first, second = buffer.sample_batch(), buffer.sample_batch()
    assert by_number(first, "adv") == by_number(second, "adv")
    assert sorted(by_number(first, "adv")) == [*range(6)]
    assert is_standardised(first["adv"])
    assert buffer.weights is not None
    assert buffer.weights.tolist() == [1.0] * 6


def test_batch_has_documented_names_shapes_and_type() -> None:
    buffer = PPOBuffer(obs_dim=3, act_dim=2, size=4, batch_size=2)
    for t in range(4):
        agent = SimpleNamespace(action=np.ones(2), value=torch.zeros(1, requires_grad=True), logp=torch.tensor(-0.5))
        buffer.store({"obs": np.zeros(3), "act": agent, "rew": np.float64(1), "next_obs": np.ones(3), "done": t == 3})
    buffer.finish_path()
    batch = buffer.sample_batch()
    scalars = dict.fromkeys(("rew", "ret", "adv", "val", "logp"), (2,))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"obs": (2, 3), "act": (2, 2), **scalars}
    assert {value.dtype for value in batch.values()} == {torch.float32}
    assert not any(value.requires_grad for value in batch.values())


@pytest.mark.parametrize(
    ("given", "flags", "target"),
    [
        (choice(8.0), {"done": True}, 1.0),
        (choice(8.0), {"done": False}, 5.0),
        (8.0, {"done": False, "truncated": True}, 5.0),
        (choice(8.0), {"done": True, "truncated": True}, 1.0),
        (choice(8.0), {}, 5.0),
        (None, {}, 1.0),
    ],
)
def test_bootstrap_value_is_used_only_by_cut_paths(given: Any, flags: Any, target: float) -> None:
    buffer = build(1, gamma=0.5)
    buffer.store(path_step(0, **flags))
    buffer.finish_path(given)
    assert float(buffer.sample_batch()["ret"]) == target


def test_value_of_the_last_stored_step_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    buffer, last = build(2), path_step(0, done=False)
    buffer.store(last)
    with caplog.at_level(logging.WARNING):
        buffer.finish_path(last["act"])
    assert "action_obj" in caplog.text


def test_open_path_is_never_overwritten() -> None:
    buffer = build(2)
    buffer.store(path_step(0))
    buffer.store(path_step(1))
    with pytest.raises(RuntimeError, match="size=2"):
        buffer.store(path_step(2))
    buffer.finish_path(0.0)
    buffer.store(path_step(2))
    assert (buffer.ptr, buffer.path_start_idx, buffer.max_size) == (1, 0, 2)


def test_misuse_raises_an_error() -> None:
    buffer = build(4, 2)
    with pytest.raises(RuntimeError, match="No path is open"):
        buffer.finish_path()
    buffer.store(path_step(0, done=True))
    with pytest.raises(RuntimeError, match="finish_path"):
        buffer.store(path_step(1))
    buffer.finish_path()
    with pytest.raises(ValueError, match=r"batch_size must be at most 1.*got 2"):
        buffer.sample_batch()


def test_stored_paths_are_standardised_by_the_first_read() -> None:
    buffer = build(6)
    for t in range(8):
        buffer.store(path_step(t, float(t), done=t % 2 == 1))
        if t % 2:
            buffer.finish_path()
    read = buffer[:]["advantage"]
    buffer.before_gradients()
    assert torch.equal(read, buffer.rollout["advantage"])
    assert is_standardised(read)
    batch = torch.cat([*buffer.generate_batches(2, shuffle=False)])
    assert sorted(batch["observation"].flatten().int().tolist()) == [2, 3, 4, 5, 6, 7]
    assert torch.equal(batch["advantage"], read.flatten(0, 1))


def test_rollout_has_rewards_to_go_and_documented_batches() -> None:
    buffer = PPOBuffer(None, None, size=5, batch_size=4, gamma=0.9, lam=0.8, critic=make_critic())
    buffer.insert_data_slice(make_rollout(5, 3))
    assert buffer.sample_batch()["act"].shape == (4, 1)
    value = buffer.rollout["state_value"]
    entries = ("reward", "state_value", "terminated", "done")
    reward, following, *ends = (buffer.rollout["next", entry] for entry in entries)
    raw = brute_gae(reward, value, following, *ends, 0.9, 0.8)
    expected = (raw - raw.mean()) / (raw.std(correction=0) + buffer.eps)
    torch.testing.assert_close(buffer.rollout["advantage"], expected)
    torch.testing.assert_close(buffer.rollout["value_target"], brute_returns(reward, following, *ends, 0.9))
    assert sum(len(batch) for batch in buffer.generate_batches(3)) == 15


def test_rollouts_and_steps_replace_each_other() -> None:
    buffer = walked(build(4), 1.0)
    with pytest.raises(ValueError, match="differs from the stored steps"):
        buffer.insert_data_slice(make_rollout(4, 1))
    assert by_number(buffer.sample_batch(), "ret") == {0: 1.0}
    buffer.reset()
    assert (buffer.step, buffer.ptr, buffer.path_length) == (0, 0, 0)


def test_config_is_read_from_files_and_dicts(tmp_path: Path) -> None:
    file = tmp_path / "buffer.yaml"
    file.write_text("obs_dim: 3\nact_dim: 2\nsize: 2_000\nbatch_size: 64\ngamma: 1\n")
    buffer = PPOBuffer.instantiate_from_config(file)
    assert (buffer.size, buffer.batch_size, buffer.gamma, buffer.lam, buffer.eps) == (2000, 64, 1.0, 0.95, 1e-3)
    assert isinstance(buffer.gamma, float)
    config = {"obs_dim": 3, "act_dim": 2, "size": 5, "batch_size": 4, "eps": 0.5}
    assert PPOBuffer.instantiate_from_config_dict({"name": "PPOBuffer", "config": config}).eps == 0.5
    for name, wrong in {"lam": "high", "gamma": 2}.items():
        with pytest.raises(ValueError, match=name):
            PPOBuffer.instantiate_from_config_dict({**config, name: wrong})
