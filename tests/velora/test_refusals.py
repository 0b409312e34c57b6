"""Nothing sampled, nothing added, and transitions that hold no numbers."""

from __future__ import annotations

import pytest
import torch

from torchrl_lightning import RecurrentReplayBuffer


def velora(count: int = 3) -> RecurrentReplayBuffer:
    ours = RecurrentReplayBuffer(8, state_dim=2, action_dim=1, hidden_dim=4)
    for number in range(count):
        ours.add([number, number], [0.0], 1.0, [number, number], False, torch.zeros(4))
    return ours


def test_velora_samples_nothing() -> None:
    batch = velora().sample(0)
    assert (batch.states.shape, batch.rewards.shape, batch.hiddens.shape) == ((0, 2), (0, 1), (0, 4))
    for size in (-1, 2.5, True, "3"):
        with pytest.raises(ValueError, match="batch_size must be an integer of at least 0"):
            velora().sample(size)


def test_velora_adds_nothing() -> None:
    ours = velora()
    ours.add_multi(*(torch.zeros(0, width) for width in (2, 1, 1, 2, 1, 4)))
    assert (len(ours), ours.position) == (3, 3)


def test_a_state_that_holds_no_numbers_is_refused_by_name() -> None:
    ours = velora()
    with pytest.raises(TypeError, match="states must be numbers, got a str"):
        ours.add("text", [0.0], 1.0, [0.0, 0.0], False, torch.zeros(4))
    assert len(ours) == 3
