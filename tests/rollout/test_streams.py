"""Intrinsic rewards, V-trace and recurrent policies through the buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule, ProbabilisticActor, set_recurrent_mode

from kit.golden import load
from kit.rollouts import (
    both_values,
    brute_gae,
    categorical_actor,
    estimated,
    holding,
    intrinsic,
    linear_actor,
    make_critic,
    make_rollout,
)
from torchrl_lightning import GAEBuffer, VanillaOnPolicyBuffer, VTraceBuffer
from torchrl_lightning.estimators import IntrinsicRewardNormalizer


@pytest.mark.parametrize("separate", [True, False])
def test_intrinsic_returns_continue_across_episode_ends(separate: bool) -> None:
    data = intrinsic(seed=2)
    critics = (
        {"critic": make_critic(), "intrinsic_critic": make_critic("intrinsic_state_value", 0.3)}
        if separate
        else {"critic": both_values()}
    )
    buffer = estimated(
        GAEBuffer(5, gamma_intrinsic=0.8, normalize_intrinsic=False, standardize_advantages=False, **critics), data
    )
    major = data.transpose(0, 1)
    value = 0.3 * major["observation"]
    next_value = torch.cat((value[1:], 0.3 * major["next", "observation"][-1:]))
    never = torch.zeros_like(major["next", "done"])
    expected = brute_gae(major["next", "intrinsic_reward"], value, next_value, never, never, 0.8, 0.95)
    torch.testing.assert_close(buffer.rollout["intrinsic_advantage"], expected)
    torch.testing.assert_close(buffer.rollout["intrinsic_value_target"], expected + value)
    plain = estimated(GAEBuffer(5, standardize_advantages=False, critic=make_critic()), make_rollout(seed=2))
    torch.testing.assert_close(buffer.rollout["advantage"], plain.rollout["advantage"])


def test_intrinsic_reward_filter_is_separate_for_each_worker() -> None:
    buffer = VanillaOnPolicyBuffer(5, gamma_intrinsic=0.8, critic=both_values())
    separate = IntrinsicRewardNormalizer(0.8)
    for turn, worker in enumerate((0, 1, 1, 0)):
        data = intrinsic(seed=turn)
        ids = worker * data.shape[0] + torch.arange(data.shape[0])
        data["collector", "env_ids"] = ids[:, None].expand(data.shape)
        estimated(buffer, data)
        separate.normalize(data["next", "intrinsic_reward"].transpose(0, 1), ids)
        buffer.after_gradients(None, {})
    normalizer = buffer.normalizer
    assert normalizer.variance == pytest.approx(separate.variance)
    assert torch.equal(normalizer.state_dict()["filter"], separate.state_dict()["filter"])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_normalised_intrinsic_rewards_equal_the_golden_vectors(direction: str) -> None:
    case = load("intrinsic_reward_normalisation")
    expected = case["normalised_forward" if direction == "forward" else "normalised_backward_ref"]
    gamma = float(case["gamma_int"])
    buffer = VanillaOnPolicyBuffer(16, gamma_intrinsic=gamma, intrinsic_direction=direction, critic=both_values())
    for raw, normalised in zip(case["irew"], expected, strict=True):
        data = make_rollout(16, 3)
        data["next", "intrinsic_reward"] = raw.unsqueeze(-1).transpose(0, 1)
        buffer.insert_data_slice(data)
        buffer.normalize_int_rewards()
        buffer.normalize_int_rewards()
        buffer.before_gradients()
        out = buffer.rollout["next", "normalized_intrinsic_reward"][..., 0]
        torch.testing.assert_close(out.double(), normalised, atol=1e-6, rtol=1e-6)
        assert torch.equal(buffer.rollout["next", "intrinsic_reward"][..., 0], raw)


def test_intrinsic_rewards_added_after_the_write_are_used() -> None:
    buffer = holding(GAEBuffer(5, critic=both_values()))
    buffer.rollout["next", "intrinsic_reward"] = torch.rand(5, 3, 1)
    buffer.before_gradients()
    assert next(buffer.generate_batches(1))["intrinsic_advantage"].shape == (15, 1)


def test_vtrace_compares_the_current_policy_with_the_stored_log_probs() -> None:
    data = make_rollout()
    actor = linear_actor()
    buffer = estimated(VTraceBuffer(5, actor=actor, critic=make_critic(), standardize_advantages=False), data)
    logits = actor.module[0].module(data.transpose(0, 1)["observation"])
    expected = torch.distributions.Categorical(logits=logits).log_prob(data.transpose(0, 1)["action"])
    torch.testing.assert_close(buffer.rollout["current_action_log_prob"], expected)
    behaviour, first = data.transpose(0, 1)["action_log_prob"], buffer.rollout["value_target"].clone()
    assert buffer.metrics()["mean_abs_rho_minus_1"] > 0
    actor.module[0].module.weight.data[1] = -0.2
    buffer.compute_vtrace(2.0, 1.5)
    assert torch.equal(buffer.rollout["action_log_prob"], behaviour)
    assert not torch.equal(buffer.rollout["value_target"], first)
    assert torch.equal(buffer.get_updated_action_log_probs(), buffer.rollout["current_action_log_prob"])
    actor.module[0].module.weight.data[1] = 0.3
    buffer.clip_rho_thres = buffer.clip_c_thres = 1.0
    buffer.before_epoch()
    assert torch.equal(buffer.rollout["value_target"], first)


def test_vtrace_reports_the_policy_lag() -> None:
    data = make_rollout()
    data["collector", "policy_version"] = torch.full((3, 5), 4)
    buffer = VTraceBuffer(5, actor=linear_actor(), critic=make_critic())
    assert buffer.metrics() == {}
    estimated(buffer, data)
    assert "policy_lag" not in buffer.metrics()
    assert buffer.metrics(6)["policy_lag"] == 2.0


# ---- recurrent


def recurrent_parts(cell: str) -> tuple[TensorDictSequential, ProbabilisticActor]:
    torch.manual_seed(0)
    keys = ["recurrent_state"] if cell == "gru" else [("recurrent_state", "h"), ("recurrent_state", "c")]
    cell_class = GRUModule if cell == "gru" else LSTMModule
    core = cell_class(
        input_size=1,
        hidden_size=4,
        in_keys=["observation", *keys],
        out_keys=["features", *[("next", *([key] if isinstance(key, str) else key)) for key in keys]],
    )
    value = TensorDictModule(nn.Linear(4, 1), in_keys=["features"], out_keys=["state_value"])
    logits = TensorDictModule(nn.Linear(4, 2), in_keys=["features"], out_keys=["logits"])
    return TensorDictSequential(core, value), categorical_actor(TensorDictSequential(core, logits))


def recurrent_rollout(cell: str, actor: ProbabilisticActor, steps: int = 9, envs: int = 4) -> TensorDict:
    """Act step by step as a collector does, starting from a nonzero state."""
    data = make_rollout(steps, envs, seed=3)
    data["observation"] *= 0.1
    data["next", "observation"] = data["observation"] + 0.05
    data["is_init"][:, 0] = False
    state: object = torch.full((envs, 1, 4), 0.5)
    if cell == "lstm":
        state = TensorDict({"h": state, "c": state}, [envs])
    rows = []
    for t in range(steps):
        row = data[:, t].copy()
        row["recurrent_state"] = state
        out = row.select("observation", "recurrent_state", "is_init").clone()
        with torch.no_grad():
            out = actor.module[0](out)
        row["next", "recurrent_state"] = out["next", "recurrent_state"]
        with torch.no_grad():
            row["action_log_prob"] = actor.get_dist(row.clone()).log_prob(row["action"])
        rows.append(row)
        state = out["next", "recurrent_state"].clone()
    stacked = torch.stack(rows, 1)
    stacked.names = [None, "time"]
    return stacked


@pytest.fixture(params=["gru", "lstm"])
def recurrent(request: pytest.FixtureRequest) -> tuple[TensorDictSequential, ProbabilisticActor, TensorDict]:
    """Return a critic, an actor, and nine steps of this actor in four environments."""
    critic, actor = recurrent_parts(request.param)
    return critic, actor, recurrent_rollout(request.param, actor)


def test_recurrent_mini_batches_reproduce_log_probs_and_values(recurrent: Any) -> None:
    critic, actor, data = recurrent
    buffer = estimated(GAEBuffer(9, critic=critic), data)
    assert buffer.is_recurrent
    batches = list(buffer.generate_batches(2))
    assert [batch.shape for batch in batches] == [(2, 9)] * 2
    for batch in batches:
        assert ("next", "recurrent_state") not in batch.keys(True)
        with set_recurrent_mode(True), torch.no_grad():
            log_prob = actor.get_dist(batch.copy()).log_prob(batch["action"])
            values = critic(batch.copy())["state_value"]
        torch.testing.assert_close(log_prob, batch["action_log_prob"])
        torch.testing.assert_close(values, batch["state_value"])
    bootstrap_state, last_state = (
        buffer.storage.bootstrap_step["recurrent_state"],
        data["next", "recurrent_state"][:, -1],
    )
    done = data["next", "done"][:, -1, 0]
    for leaf, end in (
        [(bootstrap_state, last_state)]
        if isinstance(bootstrap_state, Tensor)
        else [(bootstrap_state[name], last_state[name]) for name in "hc"]
    ):
        assert torch.equal(leaf[~done], end[~done])
        assert (leaf[done] == 0).all()


def test_recurrent_vtrace_of_an_unchanged_policy_has_ratio_one(recurrent: Any) -> None:
    critic, actor, data = recurrent
    buffer = estimated(VTraceBuffer(9, critic=critic, actor=actor), data)
    assert buffer.metrics()["mean_abs_rho_minus_1"] < 1e-5


# GAE uses the stored recurrent states. V-trace computes new states with the current critic, which has changed.
@pytest.mark.parametrize(("cls", "learned"), [(GAEBuffer, 1.0), (VTraceBuffer, 1.5)])
def test_recurrent_values_equal_one_unroll(cls: type[VanillaOnPolicyBuffer], learned: float, recurrent: Any) -> None:
    critic, actor, data = recurrent
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.mul_(learned)
    buffer = estimated(cls(9, critic=critic, actor=actor), data)
    assert data["next", "truncated"][:, :-1].any()
    state, values, next_values = data["recurrent_state"][:, 0], [], []
    for t in range(9):
        steps = []
        for source, start in ((data[:, t], data["is_init"][:, t]), (data["next"][:, t], torch.zeros(4, 1) > 0)):
            row = TensorDict({"observation": source["observation"], "is_init": start, "recurrent_state": state}, [4])
            with torch.no_grad():
                steps.append(critic(row))
            state = steps[0]["next", "recurrent_state"]
        values.append(steps[0]["state_value"])
        next_values.append(steps[1]["state_value"])
    expected, expected_next = torch.stack(values), torch.stack(next_values)
    flags = data["next"].transpose(0, 1)
    inside = ~flags["done"]
    inside[-1] = False
    expected_next = torch.where(inside, torch.cat((expected[1:], expected_next[-1:])), expected_next).masked_fill(
        flags["terminated"], 0
    )
    torch.testing.assert_close(buffer.rollout["state_value"], expected)
    torch.testing.assert_close(buffer.rollout["next", "state_value"], expected_next)
