from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack
from torchrl.data import SamplerWithoutReplacement, TensorDictReplayBuffer

from kit.rollouts import holding, make_critic, make_rollout, torchrl_buffer
from torchrl_lightning import GAEBuffer, RolloutStorage


@pytest.mark.parametrize("layout", ["named", "time first", "environments first"])
def test_every_layout_becomes_time_major(layout: str) -> None:
    data, time_dim = make_rollout(), None
    expected = data.transpose(0, 1)["observation"]
    if layout != "named":
        data.names = [None, None]
        data, time_dim = (data.transpose(0, 1), 0) if layout == "time first" else (data, 1)
    buffer = torchrl_buffer(time_dim=time_dim)
    index = buffer.extend(data)
    assert torch.equal(buffer[:]["observation"], expected)
    cells = index if index.ndim == 2 else torch.stack((index, torch.zeros_like(index)), -1)
    flat = data.reshape(-1)["observation"] if index.ndim == 2 else None
    if flat is not None:
        assert torch.equal(buffer[:]["observation"][cells[:, 0], cells[:, 1]], flat)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("envs", [1, 2, 3])
@pytest.mark.parametrize("first", [True, False])
def test_torchrl_buffer_takes_any_shape(steps: int, envs: int, first: bool) -> None:
    data = make_rollout(steps, envs)
    buffer = torchrl_buffer()
    buffer.extend(data.transpose(0, 1) if first else data)
    assert buffer[:].shape == (steps, envs)
    buffer.empty()
    buffer.extend(data)
    assert len(buffer) == steps * envs


def test_unnamed_batch_is_never_guessed() -> None:
    data = make_rollout()
    data.names = [None, None]
    buffer = torchrl_buffer()
    with pytest.raises(ValueError, match="time_dim"):
        buffer.extend(data)
    assert len(buffer) == 0


def test_overflow_names_both_numbers_and_changes_nothing() -> None:
    buffer = holding(GAEBuffer(5, critic=make_critic()), make_rollout(4))
    before = buffer.get_all_buffer_data()
    with pytest.raises(ValueError, match="6 steps does not fit into size=5"):
        buffer.insert_data_slice(make_rollout(6))
    with pytest.raises(ValueError, match="3 steps does not fit into size=5 after 4 stored"):
        buffer.extend(make_rollout(3))
    assert (buffer.get_all_buffer_data() == before).all()


TEXT = NonTensorStack(*[NonTensorStack(*"abcde") for _ in range(3)])
NAN = torch.zeros(3, 5, 1).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(torch.nan))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda data: data.set(("next", "reward"), NAN), ValueError, "1 values that are NaN"),
        (lambda data: data.set("state_value", torch.full((3, 5, 1), torch.inf)), ValueError, "state_value"),
        (lambda data: data.set(("next", "terminated"), torch.zeros(3, 5, 1)), TypeError, "bool"),
        (lambda data: data.exclude(("next", "terminated")), KeyError, "Add it: boolean"),
        (lambda data: data.exclude("next"), KeyError, "next"),
        (lambda data: data.set("action", torch.zeros(3, 5)), ValueError, "'action' is .*float32, stored is .*int64"),
        (lambda data: data.set("observation", torch.zeros(3, 5, 7)), ValueError, r"'observation' is \[7\]"),
        (lambda data: data.exclude("action"), ValueError, "'action' is missing"),
        (lambda data: data.set("surprise", torch.zeros(3, 5)), ValueError, "'surprise' is new"),
        (lambda data: data.set("surprise", TEXT), TypeError, "'surprise' is a NonTensorStack; a buffer stores dense"),
        (lambda data: data[:0], ValueError, "5 steps of 0 environments"),
        (lambda data: data[:, :0], ValueError, "0 steps of 3 environments"),
        (lambda data: data["observation"], TypeError, "Expected a TensorDict, or a dict .* got a Tensor"),
    ],
)
def test_bad_rollouts_are_refused_before_anything_changes(spoil: Any, error: type[Exception], message: str) -> None:
    good = make_rollout(**({"state_value": torch.zeros(5, 3, 1)} if message == "state_value" else {}))
    buffer = holding(GAEBuffer(5), good)
    before = buffer.state_dict()
    with pytest.raises(error, match=message):
        buffer.insert_data_slice(spoil(make_rollout(seed=1)))
    after = buffer.state_dict()
    assert torch.equal(before["storage"]["data"]["observation"], after["storage"]["data"]["observation"])
    assert torch.equal(before["storage"]["data"]["next"]["reward"], after["storage"]["data"]["next"]["reward"])


def test_other_number_of_environments_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected 4 environments, got 3"):
        GAEBuffer(5, num_envs=4).insert_data_slice(make_rollout())


def test_the_step_after_the_last_is_kept() -> None:
    data = make_rollout(recurrent_state=torch.ones(5, 3, 1, 2))
    data["next", "recurrent_state"] = torch.full((3, 5, 1, 2), 7.0)
    data["next", "done"][:, -1] = torch.tensor([[True], [False], [False]])
    data["next", "terminated"][:, -1] = torch.tensor([[True], [False], [False]])
    buffer = holding(GAEBuffer(5), data)
    tail = buffer.storage.tail
    assert torch.equal(tail["observation"], data["next", "observation"][:, -1])
    assert tail["is_init"].flatten().tolist() == [True, False, False]
    assert tail["recurrent_state"][:, 0, 0].tolist() == [0.0, 7.0, 7.0]
    buffer.empty()
    assert buffer.storage.tail is tail


def test_torchrl_sampler_in_ours_visits_every_cell_once() -> None:
    buffer = torchrl_buffer(sampler=SamplerWithoutReplacement())
    buffer.extend(make_rollout(4, 2))
    seen = torch.cat([batch["observation"].flatten() for batch in buffer])
    assert sorted(seen.tolist()) == list(range(8))


def test_a_torchrl_writer_is_refused_with_the_fix() -> None:
    buffer = TensorDictReplayBuffer(storage=RolloutStorage(5), dim_extend=0)
    with pytest.raises(TypeError, match="RolloutWriter"):
        buffer.extend(make_rollout().transpose(0, 1))


def test_state_holds_the_filled_part_and_is_a_copy() -> None:
    buffer = holding(GAEBuffer(100))
    state = buffer.storage.state_dict()
    assert state["data"]["observation"].shape == (5, 3, 1)
    buffer.rollout["observation"].zero_()
    assert state["data"]["observation"].sum() > 0


def test_padded_rollouts_are_refused() -> None:
    data, buffer = make_rollout(), GAEBuffer(5)
    data["collector", "mask"] = torch.ones(3, 5, 1, dtype=torch.bool)
    buffer.insert_data_slice(data)
    data["collector", "mask"][1, 3:] = False
    with pytest.raises(ValueError, match="2 padded steps"):
        buffer.insert_data_slice(data)
    assert buffer.step == 5
