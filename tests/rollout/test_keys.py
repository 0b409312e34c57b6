"""Keys can be strings, tuples or lists, and all of them can be renamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

from kit.rollouts import Recorder, estimated, holding, linear_actor, make_critic, make_rollout
from torchrl_lightning import (
    DiscountedReturns,
    GAEBuffer,
    GeneralizedAdvantages,
    RolloutWriter,
    VanillaOnPolicyBuffer,
    VTraceAdvantages,
    VTraceBuffer,
)

BUFFERS = (VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer)
RENAMED: dict[str, Any] = {"value_key": ["a", "v"], "advantage_key": ["a", "adv"], "value_target_key": ["target"]}


def renamed(cls: type[VanillaOnPolicyBuffer], **kwargs: Any) -> VanillaOnPolicyBuffer:
    critic = make_critic(("a", "v"))
    return cls(5, critic=critic, actor=linear_actor(), generator=torch.Generator().manual_seed(0), **RENAMED, **kwargs)


@pytest.mark.parametrize("cls", BUFFERS)
def test_keys_from_yaml_work(cls: type[VanillaOnPolicyBuffer]) -> None:
    buffer = renamed(
        cls, recurrent_keys=["h", ["s", "c"]], batch_keys=["observation", ["a", "adv"], ["next", "reward"]]
    )
    assert buffer.writer.recurrent_keys == buffer.recurrent_keys == ("h", ("s", "c"))
    estimated(buffer)
    plain = estimated(cls(5, critic=make_critic(), actor=linear_actor()))
    for mine, theirs in {("a", "v"): "state_value", ("a", "adv"): "advantage", "target": "value_target"}.items():
        assert torch.equal(buffer.rollout[mine], plain.rollout[theirs])
    batch = next(buffer.generate_batches(3))
    assert set(batch.keys(True, True)) == {"observation", ("a", "adv"), ("next", "reward")}


def test_keys_of_components_may_be_lists() -> None:
    assert VTraceBuffer(5, action_key=["agent", "action"]).required_keys[0] == ("agent", "action")
    assert RolloutWriter(recurrent_keys=[["s", "h"]]).recurrent_keys == (("s", "h"),)  # type: ignore[arg-type]
    assert RolloutWriter(recurrent_keys="state").recurrent_keys == ("state",)  # type: ignore[arg-type]
    assert GeneralizedAdvantages(value_key=["a", "v"]).value_key == ("a", "v")
    assert VTraceAdvantages(log_prob_key=["a", "p"]).log_prob_key == ("a", "p")


@pytest.mark.parametrize("cls", BUFFERS)
@pytest.mark.parametrize("target_kind", ["same", "filled", "new"])
def test_renamed_entries_round_trip(cls: type[VanillaOnPolicyBuffer], target_kind: str) -> None:
    buffer = holding(renamed(cls))
    buffer.before_gradients()
    data = buffer.get_all_buffer_data()
    schema = dict(buffer.storage.schema)
    target = buffer if target_kind == "same" else renamed(cls)
    if target_kind == "filled":
        target.insert_data_slice(make_rollout(seed=1))
    target.insert_data_slice(data)
    assert target.storage.schema == schema
    assert set(target.rollout.keys(True, True)) == set(make_rollout().keys(True, True))
    target.before_gradients()
    assert torch.equal(target.rollout["a", "adv"], data["a", "adv"])
    assert torch.equal(target.rollout["target"], data["target"])


@pytest.mark.parametrize("values", [["v"], [("v", "a"), ("v", "b")]], ids=["one critic", "two critics"])
def test_estimates_given_to_extend_are_kept(values: list[Any]) -> None:
    settings: dict[str, Any] = {"value_key": "v", "advantage_key": "adv", "value_target_key": "target"}
    critic = TensorDictModule(Recorder(*(0.1, 0.5)[: len(values)]), in_keys=["observation"], out_keys=values)
    source, buffer = (GAEBuffer(5, critic=critic, **settings) for _ in range(2))
    data = estimated(source).get_all_buffer_data()
    buffer.extend(data)
    copied = buffer.get_all_buffer_data()
    assert set(copied.keys(True, True)) == set(data.keys(True, True))
    buffer.insert_data_slice(copied)
    stored = buffer[:]
    assert set(stored.keys(True, True)) == set(data.keys(True, True))
    assert all(torch.equal(stored[key], data[key]) for key in data.keys(True, True))


def test_successor_values_are_excluded_from_mini_batches() -> None:
    buffer = estimated(renamed(GAEBuffer))
    batch = next(buffer.generate_batches(3))
    assert ("next", "a", "v") not in batch.keys(True, True)
    assert ("a", "v") in batch.keys(True, True)


@pytest.mark.parametrize("cls", [DiscountedReturns, GeneralizedAdvantages, VTraceAdvantages])
def test_torchrl_trainer_configs_can_assign_the_critic(cls: type[GeneralizedAdvantages]) -> None:
    transform = cls()
    assert transform.module.value_network is None
    critic = make_critic()
    transform.module.value_network = critic
    assert transform.critic is critic
    assert transform.value_network is critic
    assert not list(transform.children())
    transform.critic = None
    assert transform.value_network is None
