"""Velora's buffer: golden wraparound, documented verbs, both hidden states, files, and warming up."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from kit.golden import tensors
from torchrl_lightning.replay.uniform import UniformSampler
from torchrl_lightning.velora.base import BufferBase
from torchrl_lightning.velora.experience import BatchExperience
from torchrl_lightning.velora.files import NAMES
from torchrl_lightning.velora.recurrent import RecurrentReplayBuffer

DATA = Path(__file__).parents[1] / "data"
HIDDEN = ("next", "recurrent_state")


golden = partial(tensors, "velora_wraparound")


def build(capacity: int = 7, **options: Any) -> RecurrentReplayBuffer:
    return RecurrentReplayBuffer(capacity, state_dim=3, action_dim=2, hidden_dim=4, **options)


def rows(start: int, count: int) -> dict[str, torch.Tensor]:
    """Transitions whose every number tells which they are."""
    number = torch.arange(start, start + count, dtype=torch.float32).unsqueeze(1)
    return {
        "states": number.expand(count, 3),
        "actions": number.expand(count, 2) + 0.1,
        "rewards": number.squeeze(1) + 0.2,
        "next_states": number.expand(count, 3) + 1,
        "dones": (number.squeeze(1) % 3 == 2),
        "hiddens": number.expand(count, 4) + 0.3,
    }


def stored(buffer: RecurrentReplayBuffer) -> dict[str, torch.Tensor]:
    state = buffer.state_dict()
    return {name: state[name] for name in NAMES}


def filled_like_golden(**options: Any) -> RecurrentReplayBuffer:
    data, start = golden(), 0
    buffer = build(int(data["capacity"]), **options)
    for number, count in enumerate(data["ops"].tolist()):
        given = [data[f"in_{name}"][start : start + count] for name in NAMES]
        if count == 1:
            s, a, r, n, d, h = (column[0] for column in given)
            buffer.add(s, a, float(r), n, bool(d), h)
        else:
            buffer.add_multi(*given)
        start += count
        assert buffer.position == int(data["position"][number])
        assert len(buffer) == buffer.size == int(data["size"][number])
        size = len(buffer)
        assert stored(buffer)["states"][:, 0].equal(data["states0_after_each"][number][:size])
    return buffer


def test_golden_wraparound() -> None:
    data, found = golden(), stored(filled_like_golden())
    for name in NAMES:
        assert found[name].equal(data[f"final_{name}"]), name


def test_golden_oversize_keeps_the_last_rows() -> None:
    data = golden()
    capacity, count = int(data["oversize_capacity"]), int(data["oversize_n"])
    buffer = RecurrentReplayBuffer(capacity, 1, 1, 1)
    column = torch.arange(count, dtype=torch.float32)
    buffer.add_multi(column, column, column, column, torch.zeros(count), column)
    assert (buffer.position, len(buffer)) == (int(data["oversize_position"]), int(data["oversize_size"]))
    assert stored(buffer)["states"].flatten().equal(data["oversize_states"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 6), st.booleans())
def test_any_sequence_of_writes_matches_a_list(counts: list[int], capacity: int, restore: bool) -> None:
    buffer, total = build(capacity), 0
    for count in counts:
        buffer.add_multi(**rows(total, count))
        total += count
        if restore:
            copy = build(capacity)
            copy.load_state_dict(buffer.state_dict())
            buffer = copy
    kept = range(max(0, total - capacity), total)
    assert sorted(stored(buffer)["states"][:, 0].int().tolist()) == list(kept)
    assert buffer.position == total % capacity
    batch = buffer.sample(len(kept))
    assert batch.rewards.equal(batch.states[:, :1] + 0.2)
    assert batch.hiddens.equal(batch.states[:, :1].expand(-1, 4) + 0.3)


def test_a_batch_has_documented_names_shapes_and_type() -> None:
    buffer = build()
    buffer.add_multi(**rows(0, 5))
    batch = buffer.sample(3)
    assert isinstance(batch, BatchExperience)
    shapes = {name: tuple(getattr(batch, name).shape) for name in NAMES}
    widths = {"states": 3, "actions": 2, "rewards": 1, "next_states": 3, "dones": 1, "hiddens": 4}
    assert shapes == {name: (3, width) for name, width in widths.items()}
    assert {getattr(batch, name).dtype for name in NAMES} == {torch.float32}
    assert batch.previous_hiddens is None
    assert batch.dones.equal((batch.states[:, :1] % 3 == 2).float())


def test_both_hidden_states_are_kept_on_request() -> None:
    buffer, hidden = build(), torch.arange(4.0)
    for t in range(3):
        buffer.add(
            torch.full((3,), float(t)), [0.0, 0.0], 1.0, [0.0] * 3, False, hidden + t + 1, previous_hidden=hidden + t
        )
    batch = buffer.sample(3)
    assert batch.previous_hiddens is not None
    assert batch.previous_hiddens.equal(batch.hiddens - 1)
    assert batch.previous_hiddens[:, 0].equal(batch.states[:, 0])
    with pytest.raises(ValueError, match="recurrent_state"):
        buffer.add_multi(**rows(0, 2))


def test_done_means_terminated_and_truncated_refines_it() -> None:
    buffer = build()
    zero = torch.zeros(3)
    buffer.add(zero, zero[:2], 0.0, zero, True, torch.zeros(4))
    buffer.add(zero, zero[:2], 0.0, zero, False, torch.zeros(4), truncated=True)
    assert stored(buffer)["dones"].flatten().tolist() == [1.0, 0.0]
    following = buffer[:]["next"]
    assert following["terminated"].flatten().tolist() == [True, False]
    assert following["done"].flatten().tolist() == [True, True]


def test_leading_dimensions_of_one_do_not_matter() -> None:
    buffer = build()
    buffer.add(
        torch.zeros(1, 3), torch.zeros(1, 2), torch.tensor([0.5]), np.zeros(3), np.bool_(True), torch.zeros(1, 4)
    )
    assert len(buffer) == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hiddens": None}, "hiddens is None"),
        ({"states": torch.zeros(2, 5)}, "observation"),
        ({"next_states": torch.zeros(2, 5)}, "observation"),
        ({"actions": torch.zeros(2)}, "action"),
        ({"hiddens": torch.zeros(2, 1)}, "recurrent_state"),
        ({"rewards": torch.zeros(3)}, "one row for each"),
        ({"rewards": torch.zeros(2, 2)}, "reward"),
        ({"dones": torch.tensor([0.5, 0.0])}, "0 and 1"),
    ],
)
def test_wrong_transitions_are_refused_and_change_nothing(change: dict[str, Any], match: str) -> None:
    buffer = build()
    buffer.add_multi(**rows(0, 3))
    before = stored(buffer)
    with pytest.raises(ValueError, match=match):
        buffer.add_multi(**{**rows(3, 2), **change})
    assert all(stored(buffer)[name].equal(before[name]) for name in NAMES)
    assert buffer.position == 3


def test_a_state_that_holds_no_numbers_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="states must be numbers, got a str"):
        build().add("text", [0.0, 0.0], 1.0, [0.0] * 3, False, torch.zeros(4))


def test_the_first_transition_is_checked_against_the_declared_sizes() -> None:
    buffer = build()
    for name, width, match in (
        ("states", 5, "state_dim=3"),
        ("next_states", 5, "state_dim=3"),
        ("actions", 1, "action_dim=2"),
        ("hiddens", 1, "hidden_dim=4"),
        ("rewards", 2, "reward"),
    ):
        with pytest.raises(ValueError, match=match):
            buffer.add_multi(**{**rows(0, 2), name: torch.zeros(2, width)})
    assert len(buffer) == 0
    buffer.add_multi(**rows(0, 2))
    open_sizes = RecurrentReplayBuffer(7, None, None, None)
    open_sizes.load_state_dict(buffer.state_dict())
    assert open_sizes.hidden_dim == 4


def test_too_few_transitions_give_both_numbers() -> None:
    buffer = build()
    with pytest.raises(ValueError, match="Available: 0, Requested: 1"):
        buffer.sample(1)
    buffer.add_multi(**rows(0, 2))
    with pytest.raises(ValueError, match="Available: 2, Requested: 3"):
        buffer.sample(3)


def test_the_base_cannot_be_used_without_sample() -> None:
    with pytest.raises(TypeError, match="RecurrentReplayBuffer"):
        BufferBase(1, 1, 1, 1)


def test_config_and_metadata() -> None:
    buffer = build(device="cpu")
    buffer.add_multi(**rows(0, 3))
    sizes = {"capacity": 7, "state_dim": 3, "action_dim": 2, "hidden_dim": 4}
    assert vars(buffer.config()) == {"type": "ReplayBuffer", **sizes}
    assert list(buffer.metadata().items()) == [*sizes.items(), ("position", 3), ("size", 3), ("device", "cpu")]
    assert build().metadata()["device"] is None


def test_nothing_is_sampled_and_nothing_is_added() -> None:
    buffer = build()
    buffer.add_multi(**rows(0, 3))
    batch = buffer.sample(0)
    assert (batch.states.shape, batch.rewards.shape, batch.hiddens.shape) == ((0, 3), (0, 1), (0, 4))
    for size in (-1, 2.5, True, "3"):
        with pytest.raises(ValueError, match="batch_size must be an integer of at least 0"):
            buffer.sample(size)
    buffer.add_multi(**rows(3, 0))
    assert (len(buffer), buffer.position) == (3, 3)


def test_every_transition_is_equally_likely() -> None:
    buffer = build(10, generator=torch.Generator().manual_seed(0))
    buffer.add_multi(**rows(0, 13))
    counts = torch.bincount(torch.cat([buffer.sample(10).states[:, 0] for _ in range(200)]).long(), minlength=13)
    assert counts[:3].sum() == 0
    assert float(((counts[3:] - 200.0) ** 2 / 200.0).sum()) < 27.9  # 0.1 % of 9 degrees of freedom


# ---- TorchRL's verbs ------------------------------------------------------------------------------------------------


def rollout(envs: int, steps: int, **changes: Any) -> TensorDict:
    number = torch.arange(envs * steps, dtype=torch.float32).view(envs, steps, 1)
    flag = torch.zeros(envs, steps, 1, dtype=torch.bool)
    following = {
        "observation": number.expand(-1, -1, 3) + 1,
        "reward": number,
        "done": flag,
        "terminated": flag,
        "truncated": flag,
        "recurrent_state": number.unsqueeze(-1).expand(-1, -1, 1, 4),
    }
    root = {
        "observation": number.expand(-1, -1, 3),
        "action": number.expand(-1, -1, 2),
        "is_init": flag,
        "recurrent_state": number.unsqueeze(-1).expand(-1, -1, 1, 4) - 1,
    }
    data = TensorDict({**root, "next": TensorDict(following, [envs, steps])}, [envs, steps], names=[None, "time"])
    return data.update(changes)


def test_rollouts_with_layered_states_serve_both_paths() -> None:
    buffer = RecurrentReplayBuffer(12, None, None, None, num_envs=2)
    buffer.extend(rollout(2, 3))
    assert (buffer.state_dim, buffer.action_dim, buffer.hidden_dim) == (3, 2, 4)
    batch = buffer.draw(5)
    assert isinstance(batch, TensorDict)
    assert batch[HIDDEN].shape == (5, 1, 4)
    assert batch["index"].shape == (5,)
    experience = buffer.sample(4)
    assert experience.hiddens.shape == (4, 4)
    assert experience.previous_hiddens is not None
    assert experience.previous_hiddens.equal(experience.hiddens - 1)
    with pytest.raises(ValueError, match="observation"):
        buffer.extend(rollout(2, 3, observation=torch.zeros(2, 3, 5)))


def test_two_part_states_lie_side_by_side() -> None:
    number = torch.zeros(2, 3, 1, 4)
    state = TensorDict({"h": number, "c": number + 1}, [2, 3])
    data = rollout(2, 3, recurrent_state=state)
    data[HIDDEN] = state.clone()
    buffer = RecurrentReplayBuffer(12, 3, 2, 8, num_envs=2)
    buffer.extend(data)
    assert sorted(buffer.sample(1).hiddens.flatten().tolist()) == [0.0] * 4 + [1.0] * 4
    assert set(buffer.draw(1)["recurrent_state"].keys()) == {"h", "c"}


def test_a_tensordict_may_be_added() -> None:
    buffer = build()
    buffer.add_multi(**rows(0, 2))
    buffer.add(buffer[1])
    assert stored(buffer)["states"][:, 0].tolist() == [0.0, 1.0, 1.0]


def test_transitions_without_recurrent_states_are_told_apart() -> None:
    buffer = RecurrentReplayBuffer(12, 3, 2, 4, num_envs=2)
    buffer.extend(rollout(2, 3).exclude(HIDDEN, "recurrent_state"))
    assert len(buffer.draw(2)) == 2
    with pytest.raises(KeyError, match="use draw"):
        buffer.sample(2)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_files_hold_everything_that_velora_keeps(tmp_path: Path) -> None:
    for count in (0, 3, 7, 12):
        buffer = build()
        if count:
            buffer.add_multi(**rows(0, count))
        buffer.save(tmp_path / "a" / "b", prefix="run.1_")
        metadata = json.loads((tmp_path / "a" / "b" / "run.1_metadata.json").read_text())
        loaded = RecurrentReplayBuffer.load(tmp_path / "a" / "b" / "run.1_state", metadata)
        assert loaded.metadata() == {**buffer.metadata(), "device": "cpu"}
        assert all(stored(loaded)[name].equal(stored(buffer)[name]) for name in NAMES)
        assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == [
            "run.1_metadata.json",
            "run.1_state.safetensors",
        ]
        loaded.add_multi(**rows(count, 2))
        buffer.add_multi(**rows(count, 2))
        assert all(stored(loaded)[name].equal(stored(buffer)[name]) for name in NAMES)


def test_sizes_must_be_known_to_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_dim"):
        RecurrentReplayBuffer(5, 3, 2, None).save(tmp_path)
    assert not list(tmp_path.iterdir())


# ---- warming up -----------------------------------------------------------------------------------------------------


class Countdown(gymnasium.Env[Any, Any]):
    """Observes how many steps the episode has run; ends after ``length`` steps, every second time by truncation."""

    observation_space = gymnasium.spaces.Box(0.0, 100.0, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, length: int = 3) -> None:
        self.length, self.episode = length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.episode = 0, self.episode + 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        ended, even = self.time == self.length, self.episode % 2 == 0
        return np.full(1, self.time, np.float32), 1.0, ended and not even, ended and even, {}


gymnasium.register("torchrl_lightning_test/Countdown-v0", Countdown)


class Agent:
    """Its hidden state counts the steps since the state was last zero."""

    device = torch.device("cpu")

    def __init__(self, hidden: int = 4, **kwargs: Any) -> None:
        self.env = gymnasium.make("torchrl_lightning_test/Countdown-v0", **kwargs)
        self.hidden, self.calls = hidden, 0

    def predict(self, states: torch.Tensor, hidden: torch.Tensor | None, train_mode: bool = False) -> Any:
        assert train_mode
        self.calls += 1
        hidden = torch.zeros(len(states), self.hidden) if hidden is None else hidden
        return torch.zeros(len(states), 1), hidden + 1


def warmed(capacity: int = 100, **options: Any) -> RecurrentReplayBuffer:
    return RecurrentReplayBuffer(capacity, 1, 1, 4, **options)


@pytest.mark.parametrize("count", [1, 7, 10, 16])
def test_warm_stores_exactly_so_many(count: int) -> None:
    buffer = warmed(16)
    buffer.warm(Agent(), count, num_envs=4)
    assert len(buffer) == count


def test_warm_fills_up_to_the_number_and_stops_there() -> None:
    buffer, agent = warmed(), Agent()
    buffer.warm(agent, 5, num_envs=2)
    buffer.warm(agent, 9, num_envs=2)
    assert len(buffer) == 9
    calls = agent.calls
    buffer.warm(agent, 9, num_envs=2)
    assert (len(buffer), agent.calls) == (9, calls)


def test_warm_stores_true_transitions_and_resets_the_hidden_state() -> None:
    buffer = warmed(200)
    buffer.warm(Agent(length=5), 200, num_envs=3, previous_hidden=True)
    data = buffer[:]
    time = data["observation"].flatten()
    assert data["next", "observation"].flatten().equal(time + 1)
    assert time.max() == 4
    ended = time == 4
    assert data["next", "done"].flatten().equal(ended)
    assert 0 < int(data["next", "terminated"].sum()) < int(ended.sum())
    assert (data["next", "terminated"] ^ data["next", "truncated"]).flatten().equal(ended)
    assert data["next", "reward"].eq(1).all()
    assert data["recurrent_state"][:, 0].equal(time)
    assert data[HIDDEN][:, 0].equal(time + 1)


def test_warm_keeps_to_what_is_stored() -> None:
    buffer = warmed()
    buffer.warm(Agent(), 4)
    assert buffer.sample(2).previous_hiddens is None
    zero = torch.zeros(1)
    buffer.add(zero, zero, 0.0, zero, False, torch.zeros(4))
    assert len(buffer) == 5


def test_warm_fills_rings_of_the_same_environments() -> None:
    buffer = warmed(num_envs=2)
    buffer.warm(Agent(), 8, num_envs=2)
    assert buffer.writer.positions.tolist() == [4, 4]
    with pytest.raises(ValueError, match="rings for 2"):
        buffer.warm(Agent(), 16, num_envs=4)
    with pytest.raises(ValueError, match="3 transitions do not divide"):
        buffer.warm(Agent(), 11, num_envs=2)
    assert len(buffer) == 8


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"n_samples": 10, "num_envs": 1}, "num_envs=1"),
        ({"n_samples": 101}, "capacity=100"),
        ({"n_samples": -1}, "n_samples"),
        ({"n_samples": 2.5}, "n_samples"),
        ({"n_samples": 10, "agent": Agent(hidden=3)}, r"expected \(8, 4\)"),
        ({"n_samples": 10, "agent": SimpleNamespace(env=SimpleNamespace())}, "agent.env.spec"),
    ],
)
def test_warm_refuses_and_stores_nothing(arguments: dict[str, Any], match: str) -> None:
    buffer = warmed()
    with pytest.raises(ValueError, match=match):
        buffer.warm(**{"agent": Agent(), **arguments})
    assert len(buffer) == 0


def test_warm_checks_the_observation_first() -> None:
    agent = Agent()
    with pytest.raises(ValueError, match="state_dim=3"):
        build().warm(agent, 4)
    assert agent.calls == 0


def test_warm_repeats_with_the_same_generator() -> None:
    first, second = (warmed(generator=torch.Generator().manual_seed(3)) for _ in range(2))
    first.warm(Agent(), 12)
    second.warm(Agent(), 12)
    assert stored(first)["states"].equal(stored(second)["states"])
    assert first.sample(5).states.equal(second.sample(5).states)


@pytest.mark.parametrize("given", [{}, {"sampler": None}])
def test_no_sampler_means_uniform_with_replacement(given: dict[str, Any]) -> None:
    sampler = build(**given).sampler
    assert isinstance(sampler, UniformSampler)
    assert sampler.with_replacement
