from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from kit.golden import assert_near, cases
from kit.rollouts import (
    Recorder,
    brute_gae,
    brute_returns,
    estimated,
    holding,
    intrinsic,
    linear_actor,
    make_critic,
    make_rollout,
    torchrl_buffer,
)
from torchrl_lightning import (
    DiscountedReturns,
    GAEBuffer,
    GeneralizedAdvantages,
    RolloutBuffer,
    VanillaOnPolicyBuffer,
    VTraceAdvantages,
    VTraceBuffer,
)
from torchrl_lightning.rollout.estimates import Estimator

FIELDS = ("reward", "value", "next_value", "terminated", "truncated")


def golden_rollout(case: dict[str, torch.Tensor]) -> TensorDict:
    data = {key: case[key].unsqueeze(-1) for key in FIELDS}
    terminated, truncated = (data.pop(key).bool() for key in ("terminated", "truncated"))
    flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    next_data = {"reward": data["reward"], "state_value": data["next_value"], **flags}
    entries = {"action": torch.zeros_like(case["reward"]), "state_value": data["value"], "next": next_data}
    return TensorDict(entries, case["reward"].shape)


def test_buffers_equal_the_golden_vectors() -> None:
    for case in cases("gae_terminated_truncated"):
        options = {"gamma": float(case["gamma"]), "standardize_advantages": False}
        gae = GAEBuffer(99, gae_lambda=float(case["lmbda"]), **options)
        vanilla = VanillaOnPolicyBuffer(99, **options)
        for buffer in (gae, vanilla):
            buffer.insert_data_slice(golden_rollout(case), time_dim=0)
            buffer.before_gradients()
        assert_near(gae.rollout["advantage"][..., 0], case["advantage"])
        assert_near(gae.rollout["value_target"][..., 0], case["value_target"])
        assert_near(vanilla.rollout["value_target"][..., 0], case["return"])


def test_documented_standardisation_equals_the_golden_vectors() -> None:
    for case in cases("returns_gae_done_only"):
        if case["reward"].numel() == 1:
            continue
        value, done = case["value"].unsqueeze(-1), case["done"].bool().unsqueeze(-1)
        buffer = GAEBuffer(99, gamma=float(case["gamma"]), gae_lambda=float(case["lmbda"]))
        returns = buffer.compute_returns(case["reward"].unsqueeze(-1), None, value, done, buffer.gamma)
        assert_near(returns[..., 0], case["gae_value_target"])
        advantage = buffer.compute_advantages(returns, value)
        assert_near(advantage[..., 0], case["gae_advantage_normalised_ref"])
        vanilla = VanillaOnPolicyBuffer(99)
        out = torch.zeros_like(value)
        vanilla.compute_returns(case["reward"].unsqueeze(-1), out, value, done, float(case["gamma"]))
        assert_near(out[:-1, :, 0], case["return"])
        assert torch.equal(out[-1], value[-1])


def test_vtrace_transform_equals_the_golden_vectors() -> None:
    for case in cases("vtrace"):
        gamma, rho, c, pg_rho, lmbda = case["hyper_gamma_rho_c_pgrho_lambda"].tolist()
        data = golden_rollout(case)
        data["current_action_log_prob"], data["action_log_prob"] = case["log_pi"], case["log_mu"]
        transform = VTraceAdvantages(gamma, lmbda, rho_clip=rho, c_clip=c, pg_rho_clip=pg_rho, time_dim=0)
        out = transform(data)
        assert_near(out["value_target"][..., 0], case["vs"])
        assert_near(out["advantage"][..., 0], case["pg_advantage"])


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 12), envs=st.integers(1, 4), seed=st.integers(0, 10**6), gamma=st.sampled_from([0.0, 0.9, 1.0])
)
def test_gae_and_returns_equal_brute_force_with_truncation(steps: int, envs: int, seed: int, gamma: float) -> None:
    data = make_rollout(steps, envs, seed)
    major = data.transpose(0, 1)
    value, next_value = 0.1 * major["observation"], 0.1 * major["next", "observation"]
    # Within an episode, the value of the successor is the next stored value.
    done, terminated = major["next", "done"], major["next", "terminated"]
    next_value[:-1] = torch.where(done[:-1], next_value[:-1], value[1:])
    reward = major["next", "reward"]
    for cls in (GAEBuffer, VanillaOnPolicyBuffer):
        critic = make_critic()
        buffer = estimated(cls(20, gamma=gamma, critic=critic, standardize_advantages=False), data)
        if cls is GAEBuffer:
            expected = brute_gae(reward, value, next_value, terminated, done, gamma, 0.95)
        else:
            expected = brute_returns(reward, next_value, terminated, done, gamma) - value
        torch.testing.assert_close(buffer.rollout["advantage"], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(buffer.rollout["value_target"], expected + value, atol=1e-4, rtol=1e-4)


def test_critic_reads_truncated_and_last_successors_in_one_batch() -> None:
    data = make_rollout(6, 3, seed=4)
    major = data.transpose(0, 1)
    needs_successor = major["next", "truncated"].clone()
    needs_successor[-1] = ~major["next", "terminated"][-1]
    critic = make_critic()
    buffer = estimated(GAEBuffer(6, critic=critic), data)
    all_rows, successors = critic.module.seen
    assert all_rows.shape == (18, 1)
    assert torch.equal(successors, major["next", "observation"][needs_successor].unsqueeze(-1))
    assert (buffer.rollout["next", "state_value"][major["next", "terminated"]] == 0).all()


def test_policy_values_are_used_unless_recompute_values() -> None:
    data = make_rollout(5, 3, seed=4)
    data["state_value"] = torch.full((3, 5, 1), 2.0)
    for recompute in (False, True):
        buffer = estimated(GAEBuffer(5, critic=make_critic(), recompute_values=recompute), data)
        assert bool((buffer.rollout["state_value"] == 2.0).all()) is not recompute


def test_estimates_are_the_same_twice() -> None:
    buffer = estimated(GAEBuffer(5, critic=make_critic()))
    first = buffer.get_all_buffer_data()
    buffer.before_gradients()
    assert (first == buffer.get_all_buffer_data()).all()
    assert first["advantage"].mean().abs() < 1e-6
    torch.testing.assert_close(first["advantage"].std(), torch.tensor(1.0), atol=1e-4, rtol=0)


def test_policy_values_need_no_critic_without_truncation() -> None:
    ended = torch.zeros(3, 5, 1, dtype=torch.bool)
    ended[:, -1] = True
    data = make_rollout(state_value=torch.ones(5, 3, 1), is_init=torch.zeros(5, 3, 1, dtype=torch.bool))
    data["next"].update({"done": ended, "terminated": ended, "truncated": ~ended & ended})
    assert estimated(GAEBuffer(5), data).rollout["advantage"].isfinite().all()


POLICY = {"actor": linear_actor(), "critic": make_critic()}
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: estimated(GAEBuffer(5, critic=make_critic("other"))), KeyError, "other"),
    (lambda: estimated(GAEBuffer(5, critic=make_critic(scale=math.nan))), ValueError, "NaN"),
    (lambda: estimated(GAEBuffer(5), make_rollout(state_value=torch.ones(5, 3, 1))), RuntimeError, "successors"),
    (lambda: holding(GAEBuffer(5, critic=make_critic())).normalize_int_rewards(), KeyError, "intrinsic_reward"),
    (lambda: estimated(GAEBuffer(5, critic=make_critic()), intrinsic()), KeyError, "intrinsic_state_value"),
    (lambda: estimated(VTraceBuffer(5)), RuntimeError, "actor is None"),
    (lambda: estimated(VTraceBuffer(5, actor=linear_actor())), RuntimeError, "critic is None"),
    (lambda: estimated(VTraceBuffer(5, actor=nn.Identity())), TypeError, "get_dist"),
    (lambda: estimated(VTraceBuffer(5, **POLICY), without("action_log_prob")), KeyError, "return_log_prob"),
    (lambda: estimated(RolloutBuffer(5, Estimator(), **POLICY)), NotImplementedError, "Estimator .*advantages"),
    (lambda: DiscountedReturns(bootstrap=False)(make_rollout().reshape(-1)), ValueError, "time_dim"),
    (lambda: DiscountedReturns(bootstrap=False)(without(("next", "terminated"))), KeyError, "terminated"),
    (lambda: VTraceAdvantages(critic=make_critic())(make_rollout()), RuntimeError, "actor"),
]


def without(*keys: Any) -> TensorDict:
    return make_rollout().exclude(*keys)


@pytest.mark.parametrize(("estimate", "error", "message"), REFUSED)
def test_estimate_with_missing_parts_is_rejected(
    estimate: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        estimate()


def test_appended_rollouts_do_not_leak_across_a_reset() -> None:
    first, second = make_rollout(2, 1, 7), make_rollout(2, 1, 8)
    for data in (first, second):
        for key in ("done", "terminated", "truncated"):
            data["next", key] = torch.zeros(1, 2, 1, dtype=torch.bool)
        data["is_init"][:, 1:] = False
    combined, single = (GAEBuffer(4, critic=make_critic(), standardize_advantages=False) for _ in range(2))
    combined.extend(first)
    combined.extend(second)
    combined.before_gradients()
    estimated(single, first)
    torch.testing.assert_close(combined.rollout["advantage"][:2], single.rollout["advantage"])


def test_several_critics_have_separate_targets() -> None:
    keys = [("state_value", "critic_a"), ("state_value", "critic_b")]
    critic = TensorDictModule(Recorder(0.1, -0.2), in_keys=["observation"], out_keys=keys)
    buffer = estimated(GAEBuffer(5, critic=critic))
    for name, scale in (("critic_a", 0.1), ("critic_b", -0.2)):
        single = estimated(GAEBuffer(5, critic=make_critic(scale=scale)))
        for key in ("state_value", "advantage", "value_target"):
            assert torch.equal(buffer.rollout[key, name], single.rollout[key])
    batch = next(buffer.generate_batches(3))
    assert batch["advantage", "critic_b"].shape == (5, 1)
    both = buffer.compute_returns(
        torch.ones(2, 1, 1), None, {"a": torch.zeros(3, 1, 1), "b": torch.ones(3, 1, 1)}, torch.zeros(2, 1, 1), 0.5
    )
    assert set(both) == {"a", "b"}
    assert set(buffer.compute_advantages(both, {"a": torch.zeros(3, 1, 1), "b": torch.ones(3, 1, 1)})) == {"a", "b"}


ACTING = {"actor": linear_actor()}
TRANSFORMS = pytest.mark.parametrize(
    ("transform", "twin"),
    [
        (GeneralizedAdvantages, GAEBuffer),
        (partial(VTraceAdvantages, **ACTING), partial(VTraceBuffer, **ACTING)),
    ],
)


@TRANSFORMS
@pytest.mark.parametrize("mode", ["call", "invert", "on_write"])
def test_transforms_equal_the_buffer_alone_and_in_a_torchrl_buffer(transform: Any, twin: Any, mode: str) -> None:
    data, critic = make_rollout(), make_critic()
    expected = estimated(twin(5, critic=critic, standardize_advantages=False), data)
    if mode == "call":
        out = transform(critic=critic)(data).transpose(0, 1)
    else:
        buffer = torchrl_buffer()
        buffer.append_transform(transform(critic=critic, on_write=mode == "on_write"), invert=mode == "invert")
        buffer.extend(data)
        assert "advantage" not in data.keys()  # noqa: SIM118
        out = buffer[:]
        assert buffer.sample()["advantage"].shape == (4, 1)
        assert not any("critic" in key for key in buffer.state_dict()["_transforms"])
    for key in ("advantage", "value_target", "state_value", ("next", "state_value")):
        torch.testing.assert_close(out[key], expected.rollout[key])


@TRANSFORMS
def test_renamed_keys(transform: Any, twin: Any) -> None:
    data = make_rollout()
    data["next", "bonus"] = data["next", "reward"].clone()
    data["next", "reward"].zero_()
    keys: dict[str, Any] = {"value_key": ("a", "value"), "advantage_key": ("a", "adv"), "value_target_key": "goal"}
    out = transform(critic=make_critic(("a", "value")), reward_key=("next", "bonus"), **keys)(data)
    plain = transform(critic=make_critic())(make_rollout())
    assert torch.equal(out["a", "adv"], plain["advantage"])
    assert torch.equal(out["goal"], plain["value_target"])


def test_single_step_is_not_nan() -> None:
    buffer = estimated(GAEBuffer(1, critic=make_critic()), make_rollout(1, 1))
    assert buffer.rollout["advantage"].isfinite().all()
