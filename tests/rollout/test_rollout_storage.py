from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import SamplerWithoutReplacement, TensorDictReplayBuffer

from kit.rollouts import holding, make_rollout, torchrl_buffer
from torchrl_lightning import GAEBuffer, RolloutStorage


@pytest.mark.parametrize("layout", ["named", "time first", "environments first"])
def test_rollout_of_any_layout_becomes_time_major(layout: str) -> None:
    data, time_dim = make_rollout(), None
    expected = data.transpose(0, 1)["observation"]
    if layout != "named":
        data.names = [None, None]
        data, time_dim = (data.transpose(0, 1), 0) if layout == "time first" else (data, 1)
    buffer = torchrl_buffer(time_dim=time_dim)
    index = buffer.extend(data)
    assert torch.equal(buffer[:]["observation"], expected)
    if index.ndim == 2:  # the index holds cells, otherwise only rows
        assert torch.equal(expected[index[:, 0], index[:, 1]], data.reshape(-1)["observation"])


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


def test_infinite_values_are_rejected() -> None:
    buffer = GAEBuffer(5)
    with pytest.raises(ValueError, match="state_value"):
        buffer.insert_data_slice(make_rollout(state_value=torch.full((5, 3, 1), torch.inf)))
    assert len(buffer) == 0


def test_bootstrap_step_is_kept() -> None:
    data = make_rollout(recurrent_state=torch.ones(5, 3, 1, 2))
    data["next", "recurrent_state"] = torch.full((3, 5, 1, 2), 7.0)
    data["next", "done"][:, -1] = torch.tensor([[True], [False], [False]])
    data["next", "terminated"][:, -1] = torch.tensor([[True], [False], [False]])
    buffer = holding(GAEBuffer(5), data)
    bootstrap_step = buffer.storage.bootstrap_step
    assert torch.equal(bootstrap_step["observation"], data["next", "observation"][:, -1])
    assert bootstrap_step["is_init"].flatten().tolist() == [True, False, False]
    assert bootstrap_step["recurrent_state"][:, 0, 0].tolist() == [0.0, 7.0, 7.0]
    buffer.empty()
    assert buffer.storage.bootstrap_step is bootstrap_step


def test_torchrl_sampler_visits_every_cell_once() -> None:
    buffer = torchrl_buffer(sampler=SamplerWithoutReplacement())
    buffer.extend(make_rollout(4, 2))
    seen = torch.cat([batch["observation"].flatten() for batch in buffer])
    assert sorted(seen.tolist()) == list(range(8))


def test_torchrl_writer_is_rejected() -> None:
    buffer = TensorDictReplayBuffer(storage=RolloutStorage(5), dim_extend=0)
    with pytest.raises(TypeError, match="RolloutWriter"):
        buffer.extend(make_rollout().transpose(0, 1))


def test_state_contains_the_filled_part() -> None:
    state = holding(GAEBuffer(100)).storage.state_dict()
    assert state["data"]["observation"].shape == (5, 3, 1)


def test_padded_rollouts_are_rejected() -> None:
    data, buffer = make_rollout(), GAEBuffer(5)
    data["collector", "mask"] = torch.ones(3, 5, 1, dtype=torch.bool)
    buffer.insert_data_slice(data)
    data["collector", "mask"][1, 3:] = False
    with pytest.raises(ValueError, match=r"padded steps.*2"):
        buffer.insert_data_slice(data)
    assert buffer.step == 5


@pytest.mark.parametrize("change", [copy.deepcopy, lambda storage: pickle.loads(pickle.dumps(storage))])
def test_copy_has_separate_cells_and_keeps_added_entries(change) -> None:
    buffer = holding(GAEBuffer(5), make_rollout(seed=0))
    buffer.rollout["advantage"] = torch.ones(5, 3, 1)
    storage = change(buffer.storage)
    assert set(storage.added()) == {"advantage"}
    storage.rollout["next", "reward"].fill_(7.0)
    assert (storage.data["next", "reward"][:5] == 7.0).all()
    assert (buffer.rollout["next", "reward"] != 7.0).all()


def test_rows_are_written_singly_and_overwritten() -> None:
    storage = RolloutStorage(3, num_envs=2)
    for row, filled in ((0, 1), (1, 2), (0, 2), (2, 3)):
        value = torch.full((2, 1), float(row))
        next_data = {"observation": value, "reward": value, "done": torch.zeros(2, 1, dtype=torch.bool)}
        storage.set(row, TensorDict({"observation": value, "next": next_data}, [2]))
        assert storage.num_steps == filled
        assert len(storage) == 2 * filled
