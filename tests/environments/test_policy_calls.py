"""The outputs of a policy are the entries that it wrote, flat or nested, without private ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_lightning.environments.policy_calls import policy_outputs

ONE = torch.ones(3)


def step() -> TensorDict:
    return TensorDict({"observation": torch.zeros(3), "agent": {"state": torch.zeros(3)}}, [3])


def names(policy: Any) -> set[Any]:
    return set(policy_outputs(policy, step()))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"action": ONE}, {"action"}),
        ({"action": ONE, "_private": ONE}, {"action"}),
        ({("agent", "action"): ONE, ("agent", "_private"): ONE}, {("agent", "action")}),
        ({("_agent", "action"): ONE, ("next", "state"): ONE}, {("next", "state")}),
        ({("a", "b", "c"): ONE}, {("a", "b", "c")}),
        ({"observation": ONE, ("agent", "state"): ONE}, {"observation", ("agent", "state")}),
        ({}, set()),
    ],
)
def test_outputs_are_the_written_entries(written: dict[Any, Tensor], expected: set[Any]) -> None:
    def in_place(data: TensorDict) -> TensorDict:
        for key, value in written.items():
            data.set(key, value)
        return data

    def in_a_new_tensordict(data: TensorDict) -> TensorDict:
        return in_place(data.copy())

    assert names(in_place) == names(in_a_new_tensordict) == expected


def test_outputs_are_tensors_of_a_tensordict() -> None:
    with pytest.raises(TypeError, match="must return a TensorDict, got Tensor"):
        policy_outputs(lambda _: ONE, step())
    with pytest.raises(TypeError, match="must write 'label' as a tensor, got NonTensorData"):
        policy_outputs(lambda data: data.set_non_tensor("label", "a"), step())
