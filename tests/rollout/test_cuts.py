"""Estimates of rollouts follow trajectories that a collector cuts without an end flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.rollouts import brute_gae, intrinsic, make_critic, make_rollout
from torchrl_lightning import DiscountedReturns, GAEBuffer, GeneralizedAdvantages, IntrinsicReturns, VTraceAdvantages
from torchrl_lightning.estimators import IntrinsicRewardNormalizer

STEPS, ENVS = 12, 3
CRITIC = make_critic()


def with_cuts(data: TensorDict, starts: str) -> tuple[TensorDict, torch.Tensor]:
    """Add ids that change at ends and at cuts. Return the data and the cuts, ``[T, N]``."""
    done = data["next", "done"].transpose(0, 1)[..., 0]
    cut = torch.zeros(done.shape, dtype=torch.bool)
    cut[4, 0] = cut[9, 0] = cut[1, 1] = cut[6, 2] = True
    cut[1:] &= ~done[:-1]
    change = cut.clone()
    change[1:] |= done[:-1]
    data["collector", "traj_ids"] = (change.long().cumsum(0) * ENVS + torch.arange(ENVS)).T.contiguous()
    if starts == "none":
        del data["is_init"]
    return data, cut


@pytest.mark.parametrize("starts", ["none", "flags"])
@pytest.mark.parametrize("form", [(), (1,)])
@pytest.mark.parametrize("name", ["gae", "returns", "vtrace"])
def test_estimates_equal_separate_trajectories(name: str, starts: str, form: tuple[int, ...]) -> None:
    estimators: dict[str, Callable[[], Any]] = {
        "gae": lambda: GeneralizedAdvantages(0.9, lmbda=0.8),
        "returns": lambda: DiscountedReturns(0.9),
        "vtrace": lambda: VTraceAdvantages(0.9),
    }
    data, cut = with_cuts(make_rollout(STEPS, ENVS), starts)
    data["collector", "traj_ids"] = data["collector", "traj_ids"].view(ENVS, STEPS, *form)
    generator = torch.Generator().manual_seed(1)
    data["state_value"] = torch.randn(ENVS, STEPS, 1, generator=generator)
    data["next", "state_value"] = torch.randn(ENVS, STEPS, 1, generator=generator)
    data["current_action_log_prob"] = data["action_log_prob"] + 0.3
    explicit = data.clone()
    done = explicit["next", "done"].clone()
    done[:, :-1] |= cut.T[:, 1:].unsqueeze(-1)
    explicit["next", "done"] = done
    del explicit["collector"]
    result, expected = (estimators[name]()(rollout) for rollout in (data, explicit))
    assert result["value_target"].equal(expected["value_target"])
    assert result["next", "done"].equal(data["next", "done"])
    if name == "gae":
        reward, value, next_value = (
            data[key].transpose(0, 1) for key in (("next", "reward"), "state_value", ("next", "state_value"))
        )
        ends = (data["next", "terminated"].transpose(0, 1), done.transpose(0, 1))
        torch.testing.assert_close(
            result["advantage"].transpose(0, 1), brute_gae(reward, value, next_value, *ends, 0.9, 0.8)
        )


def buffer_of(data: TensorDict, by: str) -> GAEBuffer:
    buffer = GAEBuffer(STEPS, gamma=0.9, gae_lambda=0.8, critic=CRITIC)
    if by == "slice":
        buffer.extend(data)
    elif by == "slices":
        for begin, end in ((0, 5), (5, 9), (9, STEPS)):
            buffer.extend(data[:, begin:end])
    else:
        for step in range(STEPS):
            buffer.add(data[:, step])
    return buffer


@pytest.mark.parametrize("by", ["slice", "slices", "steps"])
def test_buffer_bootstraps_at_cuts_and_marks_them(by: str) -> None:
    data, cut = with_cuts(make_rollout(STEPS, ENVS), "flags")
    buffer = buffer_of(data.clone(), by)
    buffer.before_gradients(None, None)
    rollout = buffer.rollout
    assert rollout["is_init"][..., 0].equal(data["is_init"].transpose(0, 1)[..., 0] | cut)
    done = rollout["next", "done"].clone()
    done[:-1] |= cut[1:].unsqueeze(-1)
    value, next_value = (
        CRITIC(rollout.get(key).clone() if key else rollout.clone())["state_value"] for key in ("", "next")
    )
    stored_next = torch.cat([value[1:], next_value[-1:]])  # the trajectory stores this observation as its next step
    next_value = torch.where(done, next_value, stored_next)
    expected = brute_gae(rollout["next", "reward"], value, next_value, rollout["next", "terminated"], done, 0.9, 0.8)
    torch.testing.assert_close(rollout["value_target"], expected + value)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("env_ids", [None, [2, 0, 1]])
def test_intrinsic_reward_filter_restarts_at_cuts(direction: Any, env_ids: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    normalizer = IntrinsicRewardNormalizer(0.9, direction)
    sums, carry = [], torch.zeros(ENVS, dtype=torch.float64)
    state, last = IntrinsicRewardNormalizer(0.9, direction), None
    for rollout_index in range(4):
        reward = torch.rand(4, ENVS, 1, generator=generator)
        ids, done = torch.full((4, ENVS), rollout_index // 2), torch.zeros(4, ENVS, 1, dtype=torch.bool)
        done[-1, 0] = rollout_index == 1  # the episode ends: the ids of the first environment change without a cut
        ids[2:, 2] += 10 * rollout_index
        ids[:2, 2] += 10 * max(rollout_index - 1, 0)
        cut = torch.zeros(4, ENVS, dtype=torch.bool)
        cut[2, 2] = rollout_index > 0
        if last is not None:
            cut[0] = (ids[0] != last[0]) & ~last[1]
        last = ids[-1], done[-1, :, 0]
        expected, reward64 = torch.zeros(4, ENVS, dtype=torch.float64), reward[..., 0].double()
        if direction == "forward":
            for step in range(4):
                carry = torch.where(cut[step], 0.0, carry) * 0.9 + reward64[step]
                expected[step] = carry
        else:
            carry_back = torch.zeros(ENVS, dtype=torch.float64)
            for step in reversed(range(4)):
                cut_after = cut[step + 1] if step < 3 else torch.zeros(ENVS, dtype=torch.bool)
                carry_back = torch.where(cut_after, 0.0, carry_back) * 0.9 + reward64[step]
                expected[step] = carry_back
        sums.append(expected)
        env = None if env_ids is None else torch.tensor(env_ids)
        normalizer.normalize(reward, env, traj_ids=ids, done=done)
        state._update(expected.mean().item(), expected.var(correction=int(direction == "backward")).item(), 4 * ENVS)
        assert normalizer.variance == pytest.approx(state.variance)


def test_ids_of_another_shape_change_nothing() -> None:
    normalizer = IntrinsicRewardNormalizer(0.9)
    normalizer.normalize(torch.rand(4, 2), traj_ids=torch.zeros(4, 2))
    state = normalizer.state_dict()
    with pytest.raises(ValueError, match=r"traj_ids.*\(4, 2\)"):
        normalizer.normalize(torch.rand(4, 2), traj_ids=torch.zeros(3, 2))
    assert normalizer.state_dict()["variance"] == state["variance"]
    assert normalizer.state_dict()["filter"].equal(state["filter"])


def test_intrinsic_returns_follow_the_ids_of_rollouts() -> None:
    returns, rewards = IntrinsicReturns(gamma=0.9, critic=make_critic("intrinsic_state_value")), []
    for traj_id in range(2):
        data = intrinsic(steps=6, envs=2, seed=traj_id)
        data["collector", "traj_ids"] = torch.full((2, 6), traj_id)
        data["next", "done"].zero_()
        rewards.append(data["next", "intrinsic_reward"].transpose(0, 1))
        returns(data)
    expected = IntrinsicRewardNormalizer(0.9)
    for reward in rewards:
        expected._filter = None  # a cut in all environments
        expected.normalize(reward)
    assert returns.normalizer.variance == pytest.approx(expected.variance)
