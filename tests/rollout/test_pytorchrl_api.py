"""The documented methods, and a regression test for each bug of PyTorchRL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kit.rollouts import estimated, linear_actor, make_critic, make_rollout, transition
from torchrl_lightning import (
    GAE,
    GAEBuffer,
    PPOBuffer,
    PPODBuffer,
    RolloutBuffer,
    VanillaOnPolicyBuffer,
    VTraceBuffer,
)

EACH_CLASS = pytest.mark.parametrize("cls", [VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer])
STEP_WITHOUT_OBSERVATION = {key: value for key, value in transition(2).items() if key != "Observation"}


def with_steps(buffer: Any, steps: int) -> Any:
    for t in range(steps):
        buffer.insert_transition(transition(t))
    return buffer


FACTORIES = {
    VanillaOnPolicyBuffer: ((), {}, {}),
    GAEBuffer: ((0.5,), {}, {"gae_lambda": 0.5}),
    VTraceBuffer: ((), {"lmbda": 0.5}, {"lmbda": 0.5}),
    RolloutBuffer: ((GAE(lmbda=0.5),), {}, {"estimator": GAE(lmbda=0.5)}),
    PPODBuffer: ((0.2, 0.4, 0.5), {}, {"rho": 0.2, "phi": 0.4, "gae_lambda": 0.5}),
    PPOBuffer: ((), {"obs_dim": 1, "act_dim": 1, "batch_size": 2, "lam": 0.5}, {"lam": 0.5}),
}


@pytest.mark.parametrize("cls", FACTORIES)
def test_factory_takes_options_first_and_runtime_arguments_later(cls: Any) -> None:
    positional, options, expected = FACTORIES[cls]
    factory = cls.create_factory(9, *positional, recompute_values=True, **options)
    buffer = factory("cpu", None, SimpleNamespace(gamma=0.5), SimpleNamespace(num_envs=7))
    assert type(buffer) is cls
    assert (buffer.size, buffer.num_envs, buffer.gamma, buffer.recompute_values) == (9, 7, 0.5, True)
    assert {name: getattr(buffer, name) for name in expected} == expected
    with pytest.raises(TypeError, match="positional"):
        cls.create_factory(9, *[1] * 40)


def test_gae_lambda_is_the_sixth_positional_argument() -> None:
    assert GAEBuffer(3, "cpu", None, None, None, 0.5).gae_lambda == 0.5


def test_transitions_fill_the_rollout() -> None:
    buffer = GAEBuffer(4)
    with pytest.raises(KeyError, match="observation"):
        buffer.insert_transition(STEP_WITHOUT_OBSERVATION)
    with_steps(buffer, 3)
    assert buffer.step == buffer.used_capacity == 3
    assert buffer.rollout["observation"][:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    assert buffer.rollout["is_init"][:, 0, 0].tolist() == [True, False, False]
    assert buffer.rollout["action_log_prob"].shape == (3, 2)
    assert buffer.storage.bootstrap_step["observation"][0].item() == 3.0
    buffer.reset()
    assert (buffer.used_capacity, len(buffer), buffer.step) == (0, 0, 0)


def test_first_observation_of_the_next_rollout_is_carried_over() -> None:
    buffer = with_steps(GAEBuffer(2, critic=make_critic()), 2)
    buffer.before_gradients()
    for batch in buffer.generate_batches(2):
        buffer.after_gradients(batch, {})
    buffer.insert_transition(STEP_WITHOUT_OBSERVATION)
    assert buffer.step == 1
    assert buffer.rollout["observation"].flatten().tolist() == [2.0, 2.0]
    assert not buffer.rollout["is_init"].any()


def test_transitions_accept_torchrl_keys() -> None:
    major = make_rollout().transpose(0, 1)
    buffer = GAEBuffer(5)
    for t in range(5):
        buffer.insert_transition(major[t])
    assert (buffer.rollout == major).all()


def test_documented_names_accept_arrays_dicts_and_pytorchrl_flags() -> None:
    buffer = GAEBuffer(3)
    sample = {
        "Observation": {"camera": np.zeros((2, 3), np.float32), "joints": torch.ones(2, 1)},
        "NextObservation": {"camera": np.ones((2, 3), np.float32), "joints": torch.ones(2, 1)},
        "Action": np.zeros(2),
        "Reward": np.ones(2, np.float32),
        "Done": np.array([1.0, 0.0]),
        "NextDone": np.array([0.0, 1.0]),
        "Truncated": np.array([1.0, 0.0]),
        "Value": {"a": torch.ones(2), "b": torch.zeros(2)},
        "RecurrentHiddenStates": torch.zeros(2, 1, 4),
        "NextRecurrentHiddenStates": torch.ones(2, 1, 4),
    }
    buffer.insert_transition(sample)
    rollout = buffer.rollout
    assert rollout["camera"].shape == (1, 2, 3)
    assert rollout["state_value", "a"].shape == (1, 2, 1)
    assert rollout["is_init"].flatten().tolist() == [True, False]
    assert rollout["next", "terminated"].flatten().tolist() == [False, True]
    assert rollout["next", "done"].flatten().tolist() == [True, True]
    with pytest.raises(KeyError, match="Typo"):
        buffer.insert_transition({**sample, "Typo": 1})
    with pytest.raises(KeyError, match="Done"):
        buffer.insert_transition({"Reward": torch.ones(2)})


def test_insert_data_slice_takes_documented_names_time_major() -> None:
    stacked = {key: torch.stack([torch.as_tensor(transition(t)[key]) for t in range(3)]) for key in transition()}
    buffer = estimated(GAEBuffer(3, critic=make_critic()), stacked)
    assert buffer.rollout.shape == (3, 2)


@EACH_CLASS
def test_partial_rollouts_use_the_filled_steps_only(cls: type[VanillaOnPolicyBuffer]) -> None:
    large, exact = (with_steps(cls(size, critic=make_critic(), actor=linear_actor()), 3) for size in (50, 3))
    for buffer in (large, exact):
        buffer.before_gradients()
    assert large.rollout.shape == (3, 2)
    assert torch.equal(large.rollout["advantage"], exact.rollout["advantage"])
    assert sum(b.shape[0] for b in large.generate_batches(2)) == 6


def test_after_gradients_between_batches_changes_nothing() -> None:
    buffer = estimated(GAEBuffer(5, critic=make_critic()))
    data, info = buffer.get_all_buffer_data(), {"loss": 1.0}
    for batch in buffer.generate_batches(3, None, 2, shuffle=False):
        assert buffer.after_gradients(batch, info) is info
        assert (data == buffer.get_all_buffer_data()).all()
    buffer.extend(make_rollout(4))
    assert buffer.step == 4


def test_get_all_buffer_data_is_a_copy() -> None:
    buffer = estimated(GAEBuffer(9, critic=make_critic()))
    data = buffer.get_all_buffer_data(data_to_cpu=True)
    assert data.shape == (5, 3)
    data["observation"].zero_()
    assert buffer.rollout["observation"].sum() > 0


def test_init_tensors_reserves_without_storing() -> None:
    buffer = GAEBuffer(5)
    buffer.init_tensors(transition())
    assert buffer.step == 0
    assert buffer.num_envs == 2
    buffer.insert_transition(transition())
    with pytest.raises(ValueError, match="reset"):
        buffer.init_tensors(transition())


def test_update_storage_parameter() -> None:
    buffer = estimated(GAEBuffer(5, critic=make_critic()))
    data = buffer.get_all_buffer_data()
    buffer.update_storage_parameter("gae_lambda", 0.5)
    assert buffer.gae_lambda == 0.5
    buffer.update_storage_parameter("size", 8)
    assert (buffer.get_all_buffer_data() == data).all()
    buffer.extend(make_rollout(3))
    assert buffer.step == 8
    with pytest.raises(ValueError, match=r"size .*8"):
        buffer.update_storage_parameter("size", 7)
    with pytest.raises(ValueError, match="gae_lambdaa"):
        buffer.update_storage_parameter("gae_lambdaa", 1.0)


def test_get_num_channels_obs() -> None:
    buffer = GAEBuffer(5, frame_stack=4)
    assert buffer.get_num_channels_obs({"Observation": torch.zeros(2, 12, 8, 8)}) == 3
    assert buffer.num_channels_obs == 3
    with pytest.raises(ValueError, match="frame_stack=4"):
        buffer.get_num_channels_obs({"Observation": torch.zeros(2, 6, 8, 8)})
    with pytest.raises(ValueError, match="dict"):
        buffer.get_num_channels_obs({"Observation": {"a": torch.zeros(2, 4)}})


def test_compute_returns_with_truncation() -> None:
    buffer = VanillaOnPolicyBuffer(3, standardize_advantages=False)
    rewards, values = torch.ones(3, 1, 1), torch.full((4, 1, 1), 10.0)
    flag = torch.tensor([0, 1, 0]).view(3, 1, 1)
    terminated_returns = buffer.compute_returns(rewards, None, values, flag, 0.5)
    truncated_returns = buffer.compute_returns(rewards, None, values, torch.zeros_like(flag), 0.5, truncated=flag)
    assert terminated_returns.flatten().tolist() == [1.5, 1.0, 6.0]
    assert truncated_returns.flatten().tolist() == [4.0, 6.0, 6.0]
    returns_with_first_flag = buffer.compute_returns(
        rewards, None, values, torch.tensor([0, 0, 1, 0]).view(4, 1, 1), 0.5
    )
    assert torch.equal(returns_with_first_flag, terminated_returns)
    assert buffer.compute_advantages(terminated_returns, values).flatten().tolist() == [-8.5, -9.0, -4.0]
    with pytest.raises(ValueError, match="rows"):
        buffer.compute_returns(torch.ones(5, 1, 1), None, values, flag, 0.5)


def test_dict_observations_and_frame_stacks() -> None:
    frames = torch.rand(5, 3, 4, 8, 8)
    data = make_rollout(pixels=frames)
    data["next", "pixels"] = frames.transpose(0, 1)
    buffer = estimated(GAEBuffer(5, critic=make_critic(), batch_keys=["pixels", "observation", "advantage"]), data)
    batch = next(buffer.generate_batches(3, shuffle=False))
    assert torch.equal(batch["pixels"], frames.flatten(0, 1)[:5])
    assert torch.equal(buffer.storage.bootstrap_step["pixels"], frames[-1])


def test_default_hooks_change_nothing() -> None:
    buffer, env, policy = GAEBuffer(2), object(), torch.nn.Identity()
    assert buffer.wrap_env(env) is env
    assert buffer.wrap_policy(policy) is policy
    assert buffer.metrics() == {}
    assert buffer.before_epoch() is None
    assert buffer.required_keys == ["action"]
