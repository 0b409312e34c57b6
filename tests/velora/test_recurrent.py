"""Velora's buffer: golden wraparound, documented methods, both hidden states, and TorchRL's methods."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from kit.documented import columns, stored
from kit.golden import tensors
from kit.seeds import generator
from kit.statistics import chi_square
from torchrl_lightning.replay.sequences import SequenceSampler
from torchrl_lightning.velora.buffer_files import NAMES
from torchrl_lightning.velora.experience import HIDDEN, BatchExperience
from torchrl_lightning.velora.recurrent import RecurrentReplayBuffer

golden = partial(tensors, "velora_wraparound")


def build(capacity: int = 7, filled: int = 0, **options: Any) -> RecurrentReplayBuffer:
    buffer = RecurrentReplayBuffer(capacity, state_dim=3, action_dim=2, hidden_dim=4, **options)
    buffer.add_multi(**columns(0, filled))
    return buffer


def test_golden_wraparound() -> None:
    data, start = golden(), 0
    buffer = build(int(data["capacity"]))
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
        assert stored(buffer)["states"][:, 0].equal(data["states0_after_each"][number][: len(buffer)])
    for name in NAMES:
        assert stored(buffer)[name].equal(data[f"final_{name}"]), name


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
        buffer.add_multi(**columns(total, count))
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


@pytest.mark.parametrize("count", [0, 3])
def test_batch_has_documented_names_shapes_and_type(count: int) -> None:
    batch = build(filled=5).sample(count)
    assert isinstance(batch, BatchExperience)
    shapes = {name: tuple(getattr(batch, name).shape) for name in NAMES}
    widths = {"states": 3, "actions": 2, "rewards": 1, "next_states": 3, "dones": 1, "hiddens": 4}
    assert shapes == {name: (count, width) for name, width in widths.items()}
    assert {getattr(batch, name).dtype for name in NAMES} == {torch.float32}
    assert batch.previous_hiddens is None
    assert batch.dones.equal((batch.states[:, :1] % 3 == 2).float())


def test_previous_hidden_states_are_stored_on_request() -> None:
    buffer, hidden = build(), torch.arange(4.0)
    for t in range(3):
        state = torch.full((3,), float(t))
        buffer.add(state, [0.0] * 2, 1.0, [0.0] * 3, False, hidden + t + 1, previous_hidden=hidden + t)
    batch = buffer.sample(3)
    assert batch.previous_hiddens is not None
    assert batch.previous_hiddens.equal(batch.hiddens - 1)
    assert batch.previous_hiddens[:, 0].equal(batch.states[:, 0])
    with pytest.raises(ValueError, match="recurrent_state"):
        buffer.add_multi(**columns(0, 2))


def test_done_means_terminated_and_truncated_is_separate() -> None:
    buffer, zero = build(), torch.zeros(3)
    buffer.add(zero, zero[:2], 0.0, zero, True, torch.zeros(4))
    buffer.add(zero, zero[:2], 0.0, zero, False, torch.zeros(4), truncated=True)
    assert stored(buffer)["dones"].flatten().tolist() == [1.0, 0.0]
    following = buffer[:]["next"]
    assert following["terminated"].flatten().tolist() == [True, False]
    assert following["done"].flatten().tolist() == [True, True]


def test_leading_dimensions_of_one_do_not_matter() -> None:
    buffer, zeros = build(), partial(torch.zeros, 1)
    buffer.add(zeros(3), zeros(2), torch.tensor([0.5]), np.zeros(3), np.bool_(True), zeros(4))
    assert len(buffer) == 1


def test_first_transition_is_checked_against_the_declared_sizes() -> None:
    buffer = build()
    wrong = {"states": 5, "next_states": 5, "actions": 1, "hiddens": 1, "rewards": 2}
    says = ("state_dim=3", "state_dim=3", "action_dim=2", "hidden_dim=4", "reward")
    for (name, width), match in zip(wrong.items(), says, strict=True):
        with pytest.raises(ValueError, match=match):
            buffer.add_multi(**{**columns(0, 2), name: torch.zeros(2, width)})
    assert len(buffer) == 0
    buffer.add_multi(**columns(0, 2))
    open_sizes = RecurrentReplayBuffer(7, None, None, None)
    open_sizes.load_state_dict(buffer.state_dict())
    assert open_sizes.hidden_dim == 4


def test_config_and_metadata() -> None:
    buffer = build(filled=3, device="cpu")
    sizes = {"capacity": 7, "state_dim": 3, "action_dim": 2, "hidden_dim": 4}
    assert vars(buffer.config()) == {"type": "ReplayBuffer", **sizes}
    assert list(buffer.metadata().items()) == [*sizes.items(), ("position", 3), ("size", 3), ("device", "cpu")]
    assert build().metadata()["device"] is None


def test_transitions_are_equally_likely() -> None:
    buffer = build(10, 13, generator=generator())
    drawn = torch.cat([buffer.sample(10).states[:, 0] for _ in range(200)])
    assert chi_square(drawn, dict.fromkeys(range(3, 13), 1.0)) < 27.9  # 0.1 % of 9 degrees of freedom
    assert build().sampler.with_replacement


def test_windows_come_from_draw_only() -> None:
    buffer = build(10, 10, sampler=SequenceSampler(4, episode_ends="across"), generator=generator())
    state = buffer.generator.get_state()
    with pytest.raises(ValueError, match="sampler must draw single steps"):
        buffer.sample(2)
    assert torch.equal(buffer.generator.get_state(), state)
    assert buffer.draw(2)["observation"].shape == (2, 4, 3)


def rollout(envs: int, steps: int, **changes: Any) -> TensorDict:
    number = torch.arange(envs * steps, dtype=torch.float32).view(envs, steps, 1)
    state, flag = number.unsqueeze(-1).expand(-1, -1, 1, 4), torch.zeros(envs, steps, 1, dtype=torch.bool)
    ends = dict.fromkeys(("done", "terminated", "truncated"), flag)
    following = {"observation": number.expand(-1, -1, 3) + 1, "reward": number, "recurrent_state": state, **ends}
    seen = {"observation": number.expand(-1, -1, 3), "action": number.expand(-1, -1, 2), "is_init": flag}
    entries = {**seen, "recurrent_state": state - 1, "next": following, **changes}
    return TensorDict(entries, [envs, steps], names=[None, "time"])


def test_rollouts_with_layered_states_are_sampled_both_ways() -> None:
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


def test_two_part_states_are_concatenated() -> None:
    number = torch.zeros(2, 3, 1, 4)
    state = TensorDict({"h": number, "c": number + 1}, [2, 3])
    data = rollout(2, 3, recurrent_state=state)
    data[HIDDEN] = state.clone()
    buffer = RecurrentReplayBuffer(12, 3, 2, 8, num_envs=2)
    buffer.extend(data)
    assert sorted(buffer.sample(1).hiddens.flatten().tolist()) == [0.0] * 4 + [1.0] * 4
    assert set(buffer.draw(1)["recurrent_state"].keys()) == {"h", "c"}


def test_tensordict_can_be_added() -> None:
    buffer = build(filled=2)
    buffer.add(buffer[1])
    assert stored(buffer)["states"][:, 0].tolist() == [0.0, 1.0, 1.0]


def test_transitions_without_recurrent_states_raise_an_error() -> None:
    buffer = RecurrentReplayBuffer(12, 3, 2, 4, num_envs=2)
    buffer.extend(rollout(2, 3).exclude(HIDDEN, "recurrent_state"))
    assert len(buffer.draw(2)) == 2
    with pytest.raises(KeyError, match="draw"):
        buffer.sample(2)


@pytest.mark.parametrize("count", [0, 3, 7, 12])
def test_files_contain_all_velora_entries(count: int, tmp_path: Path) -> None:
    folder, buffer = tmp_path / "a" / "b", build(filled=count)
    buffer.save(folder, prefix="run.1_")
    metadata = json.loads((folder / "run.1_metadata.json").read_text())
    loaded = RecurrentReplayBuffer.load(folder / "run.1_state", metadata)
    assert loaded.metadata() == {**buffer.metadata(), "device": "cpu"}
    assert {path.name for path in folder.iterdir()} == {"run.1_metadata.json", "run.1_state.safetensors"}
    for start in (count, count + 2):
        assert all(stored(loaded)[name].equal(stored(buffer)[name]) for name in NAMES)
        for each in (loaded, buffer):
            each.add_multi(**columns(start, 2))


def test_sizes_must_be_known_to_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_dim"):
        RecurrentReplayBuffer(5, 3, 2, None).save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_transitions_of_a_feedforward_network_are_saved() -> None:
    seen = build(filled=5).storage.get(slice(None)).exclude(HIDDEN)
    one, other = (RecurrentReplayBuffer(7, 3, 2, 4, generator=generator(seed)) for seed in (0, 1))
    one.extend(seen)
    other.load_state_dict(one.state_dict())
    assert not {*NAMES} & {*one.state_dict()}
    assert (one.draw(4) == other.draw(4)).all()
