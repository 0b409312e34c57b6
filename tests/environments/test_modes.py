"""A policy acts in evaluation mode and is given back in its own."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from kit.counting import vector_env
from torchrl_lightning.collectors import GymnasiumCollector, play_episodes


class Watching(nn.Module):
    """Acts 0 and remembers in which modes it was asked; raises after some steps if told so."""

    def __init__(self, steps: int | None = None) -> None:
        super().__init__()
        self.dropout, self.frozen, self.steps = nn.Dropout(), nn.Dropout().eval(), steps
        self.modes: list[tuple[bool, ...]] = []

    def forward(self, observation: Tensor) -> Tensor:
        self.modes.append((self.training, self.dropout.training, self.frozen.training))
        if len(self.modes) == self.steps:
            raise RuntimeError("broken")
        return torch.zeros(len(observation), dtype=torch.long)


def policy_of(network: Watching) -> TensorDictModule:
    return TensorDictModule(network, in_keys=["observation"], out_keys=["action"])


def own_modes(network: Watching) -> tuple[bool, ...]:
    return network.training, network.dropout.training, network.frozen.training


def test_collector_acts_in_evaluation_mode() -> None:
    network = Watching()
    collector = GymnasiumCollector(vector_env(), policy_of(network), frames_per_batch=8, total_frames=16)
    for _ in collector:
        assert own_modes(network) == (True, True, False)
    assert len(network.modes) == 4
    assert not any(any(modes) for modes in network.modes)


def test_modes_are_restored_after_an_error() -> None:
    for play in (
        lambda policy: GymnasiumCollector(vector_env(), policy, frames_per_batch=8).rollout(),
        lambda policy: play_episodes(vector_env(), policy, 4),
    ):
        network = Watching(steps=2)
        with pytest.raises(RuntimeError, match="broken"):
            play(policy_of(network))
        assert network.modes[-1] == (False, False, False)
        assert own_modes(network) == (True, True, False)
