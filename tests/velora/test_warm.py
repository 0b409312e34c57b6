"""An agent fills Velora's buffer up to a number of actual transitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch

from kit.counting import ContinuousEnv
from kit.documented import stored
from kit.seeds import generator
from torchrl_lightning.velora.experience import HIDDEN
from torchrl_lightning.velora.recurrent import RecurrentReplayBuffer

ENV = "torchrl_lightning_test/Continuous-v0"
gymnasium.register(ENV, ContinuousEnv)


class Agent:
    """Agent with a hidden state that counts the steps since the state was last zero."""

    device = torch.device("cpu")

    def __init__(self, hidden: int = 4, **kwargs: Any) -> None:
        self.env = gymnasium.make(ENV, **kwargs)
        self.hidden, self.calls = hidden, 0

    def predict(self, states: torch.Tensor, hidden: torch.Tensor | None, train_mode: bool = False) -> Any:
        assert train_mode
        self.calls += 1
        hidden = torch.zeros(len(states), self.hidden) if hidden is None else hidden
        return torch.zeros(len(states), 2), hidden + 1


def build(capacity: int = 100, **options: Any) -> RecurrentReplayBuffer:
    return RecurrentReplayBuffer(capacity, **{"state_dim": 3, "action_dim": 2, "hidden_dim": 4, **options})


@pytest.mark.parametrize("count", [1, 7, 10, 16])
def test_warm_stores_the_requested_number(count: int) -> None:
    buffer = build(16)
    buffer.warm(Agent(), count, num_envs=4)
    assert len(buffer) == count


def test_warm_adds_only_missing_transitions() -> None:
    buffer, agent = build(), Agent()
    calls = []
    for count in (5, 9, 9):
        buffer.warm(agent, count, num_envs=2)
        assert len(buffer) == count
        calls.append(agent.calls)
    assert calls[0] < calls[1] == calls[2]


@pytest.mark.parametrize(("end", "settings"), [("terminated", {}), ("truncated", {"length": 1000, "limit": 5})])
def test_warm_stores_true_transitions_and_resets_the_hidden_state(end: str, settings: dict[str, int]) -> None:
    buffer = build(200)
    buffer.warm(Agent(**settings), 200, num_envs=3, previous_hidden=True)
    data = buffer[:]
    time = data["observation"][:, 2]
    assert data["next", "observation"][:, 2].equal(time + 1)
    assert time.max() == 4
    for name in ("terminated", "truncated"):
        assert data["next", name].flatten().equal((time == 4) & (name == end))
    assert data["next", "done"].flatten().equal(time == 4)
    assert data["next", "reward"].flatten().equal(time + 1)
    assert data["recurrent_state"][:, 0].equal(time)
    assert data[HIDDEN][:, 0].equal(time + 1)


def test_warm_stores_no_previous_hidden_states_by_default() -> None:
    buffer, zero = build(), torch.zeros(4)
    buffer.warm(Agent(), 4)
    assert buffer.sample(2).previous_hiddens is None
    buffer.add(zero[:3], zero[:2], 0.0, zero[:3], False, zero)
    assert len(buffer) == 5


def test_warm_fills_rings_of_several_environments() -> None:
    buffer = build(num_envs=2)
    buffer.warm(Agent(), 8, num_envs=2)
    assert buffer.writer.positions.tolist() == [4, 4]
    with pytest.raises(ValueError, match=r"num_envs must be 2.*got 4"):
        buffer.warm(Agent(), 16, num_envs=4)
    with pytest.raises(ValueError, match=r"3 .*num_envs=2"):
        buffer.warm(Agent(), 11, num_envs=2)
    assert len(buffer) == 8


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_envs": 1}, "num_envs=1"),
        ({"n_samples": 101}, "capacity=100"),
        ({"n_samples": -1}, "n_samples"),
        ({"n_samples": 2.5}, "n_samples"),
        ({"agent": Agent(hidden=3)}, r"\(8, 4\)"),
        ({"agent": SimpleNamespace(env=SimpleNamespace())}, "agent.env.spec"),
    ],
)
def test_warm_rejects_invalid_arguments_and_stores_nothing(arguments: dict[str, Any], match: str) -> None:
    buffer = build()
    with pytest.raises(ValueError, match=match):
        buffer.warm(**{"agent": Agent(), "n_samples": 10, **arguments})
    assert len(buffer) == 0


def test_warm_checks_the_observation_first() -> None:
    agent = Agent()
    with pytest.raises(ValueError, match="state_dim=5"):
        build(state_dim=5).warm(agent, 4)
    assert agent.calls == 0


def test_warm_is_reproducible_with_a_generator() -> None:
    first, second = (build(generator=generator(3)) for _ in range(2))
    for each in (first, second):
        each.warm(Agent(), 12)
    assert stored(first)["states"].equal(stored(second)["states"])
    assert first.sample(5).states.equal(second.sample(5).states)
