"""PyTorchRL's documented names, parameters, algorithm settings and environment settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from kit.rollouts import Recorder, estimated, linear_actor, make_critic, make_rollout, transition
from torchrl_lightning import GAEBuffer, PPOBuffer, VanillaOnPolicyBuffer, VTraceBuffer

STEP = transition()


def test_storage_tensors_come_in_the_documented_order() -> None:
    assert ", ".join(VanillaOnPolicyBuffer.storage_tensors) == (
        "Observation, RecurrentHiddenStates, Done, Action, Reward, IntrinsicReward, ExternalReturn, IntrinsicReturn, "
        "Value, IntrinsicValue, LogProbability, Advantage, IntrinsicAdvantage"
    )


# ---- transitions and inserted estimates


def test_new_episode_requires_an_observation() -> None:
    buffer = GAEBuffer(4)
    buffer.insert_transition({**STEP, "Done": torch.tensor([[1.0], [0.0]])})
    step_without_observation = {key: value for key, value in STEP.items() if key != "Observation"}
    with pytest.raises(KeyError, match=r"observation.*environments \[0\]"):
        buffer.insert_transition(step_without_observation)
    assert buffer.step == 1
    buffer.insert_transition(STEP)
    buffer.insert_transition(step_without_observation)
    assert buffer.rollout["observation"][:, 0, 0].tolist() == [0.0, 0.0, 1.0]
    assert buffer.rollout["is_init"][:, 0, 0].tolist() == [True, True, False]


def test_rejected_transition_keeps_a_consumed_rollout() -> None:
    buffer = estimated(GAEBuffer(5, critic=make_critic()))
    buffer.after_gradients(None, {})
    with pytest.raises(ValueError, match="environments"):
        buffer.insert_transition(STEP)
    assert buffer.step == 5


@pytest.mark.parametrize("documented", [False, True])
def test_computed_values_are_dropped_by_another_buffer(documented: bool) -> None:
    data = estimated(GAEBuffer(5, critic=make_critic())).get_all_buffer_data(documented_names=documented)
    buffer = estimated(GAEBuffer(5, critic=make_critic(scale=0.7)), data)
    assert torch.equal(buffer.rollout["state_value"], 0.7 * buffer.rollout["observation"])
    buffer.insert_data_slice(make_rollout(seed=1) if not documented else without_values(data))
    assert buffer.step == 5


def without_values(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if "Value" not in key}


@pytest.mark.parametrize("documented", [False, True])
def test_values_given_with_the_data_are_kept(documented: bool) -> None:
    rollout = make_rollout(state_value=torch.full((5, 3, 1), 2.0))
    first = estimated(GAEBuffer(5, critic=make_critic()), rollout)
    data = first.get_all_buffer_data(documented_names=documented)
    second = estimated(GAEBuffer(5, critic=make_critic()), data)
    assert (second.rollout["state_value"] == 2.0).all()
    assert torch.equal(second.rollout["advantage"], first.rollout["advantage"])


def test_estimates_in_a_transition_are_dropped() -> None:
    buffer = GAEBuffer(2, critic=make_critic())
    buffer.insert_transition({**STEP, "Advantage": torch.zeros(2, 1), "ExternalReturn": torch.zeros(2, 1)})
    buffer.insert_transition(STEP)
    buffer.before_gradients()
    assert buffer.rollout["advantage"].any()


# ---- names


def test_documented_names_round_trip() -> None:
    buffer = estimated(GAEBuffer(5, critic=make_critic()))
    data = buffer.get_all_buffer_data(documented_names=True)
    assert set(data) >= {"Observation", "Action", "Reward", "Value", "LogProbability", "Done", "Advantage"}
    assert set(data) <= {*GAEBuffer.storage_tensors, "NextObservation", "NextValue", "Truncated", "EpisodeStart"}
    assert data["Reward"].shape == (5, 3, 1)
    reloaded = estimated(GAEBuffer(5, critic=make_critic()), data)
    for key in ("observation", "advantage", "value_target", "is_init", ("next", "done"), ("next", "truncated")):
        assert torch.equal(reloaded.rollout[key], buffer.rollout[key])
    data["Observation"].fill_(-1.0)
    assert (buffer.rollout["observation"] >= 0).all()


def test_documented_names_cover_renamed_and_nested_entries() -> None:
    keys = [("v", "a"), ("v", "b")]
    critic = TensorDictModule(Recorder(1.0, 2.0), in_keys=["observation"], out_keys=keys)
    buffer = GAEBuffer(5, critic=critic, value_key="v", advantage_key="adv")
    data = make_rollout(pixels=torch.zeros(5, 3, 2))
    data["next", "pixels"] = torch.zeros(3, 5, 2)
    data["recurrent_state"] = TensorDict({"h": torch.zeros(3, 5, 1, 4), "c": torch.zeros(3, 5, 1, 4)}, [3, 5])
    data["next", "recurrent_state"] = data["recurrent_state"].clone()
    estimated(buffer, data)
    out = buffer.get_all_buffer_data(documented_names=True)
    assert set(out["Observation"]) == set(out["NextObservation"]) == {"observation", "pixels"}
    assert set(out["Value"]) == set(out["Advantage"]) == {"a", "b"}
    assert set(out["RecurrentHiddenStates"]) == {"h", "c"}
    assert torch.equal(out["Value"]["b"], 2 * out["Value"]["a"])
    again = estimated(GAEBuffer(5, critic=critic, value_key="v", advantage_key="adv"), out)
    assert torch.equal(again.rollout["adv", "b"], buffer.rollout["adv", "b"])


def test_mini_batches_have_documented_names() -> None:
    buffer = estimated(GAEBuffer(5, critic=make_critic()))
    batches = list(buffer.generate_batches(3, shuffle=False, documented_names=True))
    assert len(batches) == 3
    assert all(isinstance(batch, dict) for batch in batches)
    assert torch.equal(torch.cat([b["Advantage"] for b in batches]), buffer.rollout["advantage"].flatten(0, 1))
    assert "NextValue" not in batches[0]


# ---- parameters


def test_thresholds_of_one_call_are_not_stored() -> None:
    buffer = estimated(
        VTraceBuffer(5, actor=linear_actor(), critic=make_critic(), clip_rho_thres=0.5, clip_c_thres=0.4)
    )
    configured = buffer.rollout["value_target"].clone()
    buffer.compute_vtrace(2.0, 2.0)
    assert not torch.equal(buffer.rollout["value_target"], configured)
    buffer.compute_vtrace()
    assert torch.equal(buffer.rollout["value_target"], configured)
    assert (buffer.clip_rho_thres, buffer.clip_c_thres) == (0.5, 0.4)
    with pytest.raises(ValueError, match="clip_rho_thres"):
        buffer.compute_vtrace(-1.0)


INVALID_VALUES: dict[str, Any] = {
    "gamma": 7.0,
    "gamma_intrinsic": -0.1,
    "gae_lambda": 7.0,
    "lmbda": 7.0,
    "clip_rho_thres": 0.0,
    "clip_c_thres": float("nan"),
    "clip_pg_rho_thres": -1.0,
    "standardize_advantages": "no",
    "recompute_values": 2,
    "normalize_intrinsic": None,
    "recurrent": "no",
    "frame_stack": 0,
    "batch_keys": [3],
    "size": 0,
    "num_envs": 0,
}


@pytest.mark.parametrize("name", INVALID_VALUES)
def test_parameter_is_validated_on_construction_and_update(name: str) -> None:
    cls: type[VanillaOnPolicyBuffer] = VTraceBuffer if name in VTraceBuffer.mutable_settings else GAEBuffer
    buffer = cls(5)
    value = getattr(buffer, name)
    for call in (
        lambda: buffer.update_storage_parameter(name, INVALID_VALUES[name]),
        lambda: cls(**{"size": 5, name: INVALID_VALUES[name]}),
    ):
        with pytest.raises((ValueError, TypeError), match="key" if name == "batch_keys" else name):
            call()
    assert getattr(buffer, name) == value


def test_arguments_set_attributes() -> None:
    buffer = PPOBuffer(2, 1, 8, 4, lam=0.5, num_envs=3, value_key="v", batch_keys=["action"], recompute_values=True)
    assert (buffer.gae_lambda, buffer.size, buffer.num_envs, buffer.value_key) == (0.5, 8, 3, "v")
    assert (buffer.batch_keys, buffer.recompute_values) == (("action",), True)


def test_updated_keys_are_converted_as_in_the_constructor() -> None:
    buffer = estimated(GAEBuffer(5, critic=make_critic()))
    buffer.update_storage_parameter("batch_keys", ["observation", ["next", "reward"]])
    assert set(next(buffer.generate_batches(1)).keys(True, True)) == {"observation", ("next", "reward")}


def test_intrinsic_discount_reaches_the_filter() -> None:
    rewards = torch.rand(3, 5, 1)

    def normalized(buffer: GAEBuffer) -> torch.Tensor:
        data = make_rollout(intrinsic_state_value=torch.zeros(5, 3, 1))
        data["next", "intrinsic_reward"], data["next", "intrinsic_state_value"] = rewards, torch.zeros(3, 5, 1)
        estimated(buffer, data)
        result: torch.Tensor = buffer.rollout["next", "normalized_intrinsic_reward"]
        return result

    changed, built = GAEBuffer(5, critic=make_critic()), GAEBuffer(5, critic=make_critic(), gamma_intrinsic=0.5)
    changed.update_storage_parameter("gamma_intrinsic", 0.5)
    assert torch.equal(normalized(changed), normalized(built))
    built.load_state_dict(changed.state_dict())


def test_discounts_follow_the_algorithm() -> None:
    algorithm = SimpleNamespace(gamma=0.5, gamma_intrinsic=0.6)
    buffer = GAEBuffer(5, algorithm=algorithm, critic=make_critic())
    assert (buffer.gamma, buffer.gamma_intrinsic) == (0.5, 0.6)
    algorithm.gamma, algorithm.gamma_intrinsic = 0.7, 0.8
    assert (buffer.gamma, buffer.gamma_intrinsic, buffer.normalizer.gamma) == (0.7, 0.8, 0.8)
    buffer.update_storage_parameter("algorithm", SimpleNamespace(gamma=0.1))
    assert (buffer.gamma, buffer.gamma_intrinsic) == (0.1, 0.99)
    buffer.update_storage_parameter("gamma", 0.2)
    assert buffer.gamma == 0.2
    with pytest.raises(ValueError, match="gamma"):
        GAEBuffer(5, algorithm=SimpleNamespace(gamma=2.0))


def test_frame_stack_defaults_to_the_environments() -> None:
    envs = SimpleNamespace(num_envs=3, env_kwargs={"frame_stack": 4})
    assert GAEBuffer(5, envs=envs).frame_stack == 4
    assert GAEBuffer(5, envs=envs, frame_stack=2).frame_stack == 2
    assert GAEBuffer(5, envs=SimpleNamespace(num_envs=3, env_kwargs=None)).frame_stack == 1
