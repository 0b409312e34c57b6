"""The path-wise PPO buffer: golden paths, wrapped, exactly full, terminal and cut ones, and its config verbs."""

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

from kit.golden import load
from kit.rollouts import make_critic, make_rollout
from torchrl_lightning.l2r.ppo import PPOBuffer

CASES = ("c0", "c1", "c2")


def act(value: float = 0.0, logp: float = -1.0) -> SimpleNamespace:
    return SimpleNamespace(action=torch.zeros(1), value=torch.tensor([value]), logp=logp)


def step(number: int, reward: float = 1.0, value: float = 0.0, **flags: Any) -> dict[str, Any]:
    """A step whose observation tells its number."""
    return {"obs": torch.tensor([float(number)]), "act": act(value), "rew": reward, **flags}


def build(size: int, batch_size: int = 1, **options: Any) -> PPOBuffer:
    return PPOBuffer(obs_dim=1, act_dim=1, size=size, batch_size=batch_size, **options)


def by_number(batch: dict[str, torch.Tensor], name: str) -> dict[int, float]:
    return dict(zip(batch["obs"][:, 0].int().tolist(), batch[name].tolist(), strict=True))


def store_case(buffer: PPOBuffer, data: dict[str, Any], case: str, flags: bool = True) -> None:
    number = 0
    for length, last in zip(data[f"{case}_path_lengths"].tolist(), data[f"{case}_last_value"].tolist(), strict=True):
        for left in range(length, 0, -1):
            done = {"done": last == 0.0 and left == 1} if flags else {}
            buffer.store(
                step(number, float(data[f"{case}_reward"][number]), float(data[f"{case}_value"][number]), **done)
            )
            number += 1
        buffer.finish_path(None if last == 0.0 else act(last))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("flags", [True, False])
@pytest.mark.parametrize("spare", [0, 3])
def test_golden_paths(case: str, flags: bool, spare: int) -> None:
    data = load("l2r_ppo_finish_path")
    steps = len(data[f"{case}_reward"])
    buffer = build(steps + spare, steps, gamma=float(data[f"{case}_gamma"]), lam=float(data[f"{case}_lam"]))
    store_case(buffer, data, case, flags)
    batch = buffer.sample_batch()
    order = batch["obs"][:, 0].argsort()
    for name, expected in (("adv", "advantage_normalised"), ("ret", "return"), ("rew", "reward"), ("val", "value")):
        torch.testing.assert_close(
            batch[name][order], data[f"{case}_{expected}"].float(), atol=1e-5, rtol=1e-5, msg=name
        )
    torch.testing.assert_close(
        buffer.rollout["advantage"].flatten(), data[f"{case}_advantage"].float(), atol=1e-5, rtol=1e-5
    )


def brute(rewards: list[float], values: list[float], last: float, gamma: float, lam: float) -> tuple[Any, Any]:
    following = [*values[1:], last]
    advantage, target = np.zeros(len(rewards)), np.zeros(len(rewards))
    trace, togo = 0.0, last
    for t in reversed(range(len(rewards))):
        trace = rewards[t] + gamma * following[t] - values[t] + gamma * lam * trace
        togo = rewards[t] + gamma * togo
        advantage[t], target[t] = trace, togo
    return advantage, target


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
        rewards, values = rng.normal(size=length).tolist(), rng.normal(size=length).tolist()
        terminal, last = bool(rng.integers(2)), float(rng.normal())
        for t in range(length):
            buffer.store(step(number + t, rewards[t], values[t], done=terminal and t == length - 1))
        if restore:
            copy = build(size, gamma=0.9, lam=lam)
            copy.load_state_dict(buffer.state_dict())
            buffer = copy
        buffer.finish_path(act(last))
        advantage, target = brute(rewards, values, 0.0 if terminal else last, 0.9, lam)
        twin.update({number + t: (advantage[t], target[t]) for t in range(length)})
        number += length
    kept = dict(list(twin.items())[-size:])
    buffer.update_storage_parameter("standardize_advantages", False)
    buffer.before_gradients()
    found = buffer.rollout
    assert set(found["observation"].flatten().int().tolist()) == set(kept)
    for n, a, r in zip(
        found["observation"].flatten().int().tolist(),
        found["advantage"].flatten().tolist(),
        found["value_target"].flatten().tolist(),
        strict=True,
    ):
        assert a == pytest.approx(kept[n][0], abs=1e-4)
        assert r == pytest.approx(kept[n][1], abs=1e-4)


def test_batches_are_standardised_over_finished_steps_once() -> None:
    buffer = build(10, 6)
    for t in range(6):
        buffer.store(step(t, reward=float(t % 4), done=t == 5))
    buffer.finish_path()
    buffer.store(step(6, reward=1000.0))
    first, second = buffer.sample_batch(), buffer.sample_batch()
    assert by_number(first, "adv") == by_number(second, "adv")
    assert 6 not in by_number(first, "adv")
    assert float(first["adv"].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(first["adv"].std(correction=0)) == pytest.approx(1.0, abs=1e-2)
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


def test_draws_come_from_the_buffers_generator_and_differ_within_a_batch() -> None:
    def draws(seed: int) -> list[int]:
        buffer = build(8, 5, generator=torch.Generator().manual_seed(seed))
        for t in range(8):
            buffer.store(step(t, done=t == 7))
        buffer.finish_path()
        return buffer.sample_batch()["obs"].flatten().int().tolist()

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len(set(draws(1))) == 5


def test_terminal_step_ignores_the_given_value_and_a_cut_one_uses_it() -> None:
    def target(given: Any, **flags: bool) -> float:
        buffer = build(1, gamma=0.5)
        buffer.store(step(0, **flags))
        buffer.finish_path(given)
        return float(buffer.sample_batch()["ret"])

    assert target(act(8.0), done=True) == 1.0
    assert target(act(8.0), done=False) == 5.0
    assert target(8.0, done=False, truncated=True) == 5.0
    assert target(act(8.0), done=True, truncated=True) == 1.0
    assert target(act(8.0)) == 5.0
    assert target(None) == 1.0


def test_a_cut_path_without_a_value_is_refused() -> None:
    buffer = build(2)
    buffer.store(step(0, done=False))
    with pytest.raises(ValueError, match="path was cut"):
        buffer.finish_path()
    buffer.finish_path(0.0)
    assert buffer.path_length == 0


def test_the_value_of_the_last_stored_step_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    buffer, last = build(2), step(0, done=False)
    buffer.store(last)
    with caplog.at_level(logging.WARNING):
        buffer.finish_path(last["act"])
    assert "behind it" in caplog.text


def test_what_store_refuses_leaves_the_buffer_as_it_was() -> None:
    buffer = build(3)
    buffer.store(step(0))
    before = buffer.rollout.clone()
    for bad, error in (
        ([step(1)], TypeError),
        (step(1) | {"obs": "text"}, TypeError),
        ({"obs": torch.zeros(1)}, KeyError),
        (step(1) | {"obs": torch.zeros(2)}, ValueError),
        (step(1, reward=float("nan")), ValueError),
        (step(1) | {"act": torch.zeros(1)}, ValueError),
        (step(1, done=0.5), ValueError),
        (step(1) | {"next_obs": torch.zeros(1)}, ValueError),
    ):
        with pytest.raises(error):
            buffer.store(bad)
    assert (buffer.step, buffer.ptr, buffer.path_length) == (1, 1, 1)
    assert (buffer.rollout == before).all()


def test_an_open_path_is_never_overwritten() -> None:
    buffer = build(2)
    buffer.store(step(0))
    buffer.store(step(1))
    with pytest.raises(RuntimeError, match="size=2"):
        buffer.store(step(2))
    buffer.finish_path(0.0)
    buffer.store(step(2))
    assert (buffer.ptr, buffer.path_start_idx, buffer.max_size) == (1, 0, 2)


def test_misuse_is_told() -> None:
    buffer = build(4, 2)
    with pytest.raises(RuntimeError, match="No path is open"):
        buffer.finish_path()
    with pytest.raises(ValueError, match="2 different steps from 0"):
        buffer.sample_batch()
    buffer.store(step(0, done=True))
    with pytest.raises(RuntimeError, match="finish_path before"):
        buffer.store(step(1))
    with pytest.raises(RuntimeError, match="1 steps is open"):
        buffer.before_gradients()
    buffer.finish_path()
    with pytest.raises(ValueError, match="2 different steps from 1"):
        buffer.sample_batch()
    for wrong in ({"size": 0}, {"batch_size": 2.5}, {"gamma": 1.5}, {"lam": -1.0}, {"eps": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong)).replace("lam", "gae_lambda")):
            PPOBuffer(**({"obs_dim": 1, "act_dim": 1, "size": 2, "batch_size": 1} | wrong))


def test_stored_paths_come_out_as_mini_batches_too() -> None:
    buffer = build(6)
    for t in range(8):
        buffer.store(step(t, reward=float(t), done=t % 2 == 1))
        if t % 2:
            buffer.finish_path()
    buffer.before_gradients()
    batches = list(buffer.generate_batches(2, shuffle=False))
    assert sorted(n for b in batches for n in b["observation"].flatten().int().tolist()) == [2, 3, 4, 5, 6, 7]
    advantage = torch.cat([b["advantage"] for b in batches])
    assert float(advantage.mean()) == pytest.approx(0.0, abs=1e-6)


def test_stored_paths_are_standardised_by_the_first_read() -> None:
    buffer = build(6)
    for t in range(4):
        buffer.store(step(t, reward=float(t), done=t == 3))
        if t == 2:
            with pytest.raises(RuntimeError, match=r"3 steps is open; call finish_path"):
                buffer.sample(2)
    buffer.finish_path()
    read = buffer[:]["advantage"]
    buffer.before_gradients()
    assert torch.equal(read, buffer.rollout["advantage"])
    assert float(read.mean()) == pytest.approx(0.0, abs=1e-6)


def test_a_whole_rollout_gets_rewards_to_go_and_documented_batches() -> None:
    buffer = PPOBuffer(None, None, size=5, batch_size=4, gamma=0.9, lam=0.8, critic=make_critic())
    rollout = make_rollout(5, 3)
    buffer.insert_data_slice(rollout)
    assert buffer.sample_batch()["act"].shape == (4, 1)
    flat = buffer.rollout
    value, following = flat["state_value"], flat["next", "state_value"]
    trace, togo = torch.zeros(3, 1), following[-1]
    for t in reversed(range(5)):
        done, terminated = flat["next", "done"][t], flat["next", "terminated"][t]
        bootstrap = following[t] * ~terminated
        trace = flat["next", "reward"][t] + 0.9 * bootstrap - value[t] + 0.9 * 0.8 * ~done * trace
        togo = flat["next", "reward"][t] + 0.9 * torch.where(done, bootstrap, togo)
        torch.testing.assert_close(flat["value_target"][t], togo)
    assert float(flat["advantage"].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(flat["advantage"].std(correction=0)) == pytest.approx(1.0, abs=1e-2)
    assert sum(len(b) for b in buffer.generate_batches(3)) == 15


def test_rollouts_and_steps_replace_each_other_whole() -> None:
    buffer = build(4)
    buffer.store(step(0, done=True))
    buffer.finish_path()
    with pytest.raises(ValueError, match="differs from what is stored"):
        buffer.insert_data_slice(make_rollout(4, 1))
    assert by_number(buffer.sample_batch(), "ret") == {0: 1.0}
    buffer.reset()
    assert (buffer.step, buffer.ptr, buffer.path_length) == (0, 0, 0)


def test_config_verbs(tmp_path: Path) -> None:
    file = tmp_path / "buffer.yaml"
    file.write_text("obs_dim: 3\nact_dim: 2\nsize: 2_000\nbatch_size: 64\ngamma: 1\n")
    buffer = PPOBuffer.instantiate_from_config(file)
    assert (buffer.size, buffer.batch_size, buffer.gamma, buffer.lam, buffer.eps) == (2000, 64, 1.0, 0.95, 1e-3)
    assert isinstance(buffer.gamma, float)
    config = {"obs_dim": 3, "act_dim": 2, "size": 5, "batch_size": 4, "eps": 0.5}
    assert PPOBuffer.instantiate_from_config_dict({"name": "PPOBuffer", "config": config}).eps == 0.5
    with pytest.raises(ValueError, match="'size'"):
        PPOBuffer.instantiate_from_config_dict({"obs_dim": 3, "act_dim": 2, "batch_size": 4})
    with pytest.raises(ValueError, match="'lam'"):
        PPOBuffer.instantiate_from_config_dict({**config, "lam": "high"})
    with pytest.raises(ValueError, match="gamma"):
        PPOBuffer.instantiate_from_config_dict({**config, "gamma": 2})


def test_factory() -> None:
    buffer = PPOBuffer.create_factory(6, obs_dim=1, act_dim=1, batch_size=2, lam=0.5)("cpu", None, None, None)
    assert (type(buffer), buffer.size, buffer.lam) == (PPOBuffer, 6, 0.5)
