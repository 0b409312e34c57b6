"""PyTorchRL's model-based buffer: methods, golden batches, and a test for each bug of the original."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical

from kit.dynamics import golden, golden_slice, numbered, rows
from torchrl_lightning import MBReplayBuffer, make_vector_env


def steps(data) -> list[list[float]]:
    """Return the observations of rows ``[T, N]``."""
    return data["observation"].squeeze(-1).tolist()


def filled(count: int, size: int = 10, envs: int = 1, **options) -> MBReplayBuffer:
    buffer = MBReplayBuffer(size, **options)
    buffer.insert_data_slice(numbered(0, count, envs))
    return buffer


# ---- golden batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["learned", "given", "discrete"])
def test_batches_equal_golden_values(kind):
    arrays, reward = golden(), (lambda s, a, n: s[..., :1]) if kind == "given" else None
    actor = SimpleNamespace(dynamics_model=SimpleNamespace(reward_function=reward))
    discrete = kind == "discrete"
    buffer = MBReplayBuffer(10, "cpu", actor, action_spec=Categorical(3) if discrete else None)
    buffer.insert_data_slice(golden_slice("discrete_action" if discrete else "action"))
    for size, _, _, correct in arrays["batch_sizes"].tolist():
        batches = list(buffer.generate_batches(5, size, 1, shuffle=False, documented_names=True))
        assert [batch["batch_number"] for batch in batches] == list(range(correct))
        assert {len(batch["train_input"]) for batch in batches[:-1]} <= {size}
        for name, expected in (("train_input", f"{kind}_inputs"), ("train_label", f"{kind}_targets")):
            if expected in arrays:
                column = torch.cat([batch[name] for batch in batches])
                torch.testing.assert_close(column, arrays[expected], rtol=1e-5, atol=1e-6)


# ---- the bugs of the original ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "size", "sizes"), [(9, 3, [3, 3, 3]), (10, 4, [4, 4, 2]), (4, 4, [4])])
def test_last_batch_is_smaller_but_not_empty(count, size, sizes):
    batches = list(filled(count).generate_batches(mini_batch_size=size))
    assert [len(batch) for batch in batches] == sizes
    assert all(batch["targets"].isfinite().all() for batch in batches)


@pytest.mark.parametrize("source", ["spec", "envs", "actor"])
def test_one_hot_columns_follow_the_spec(source):
    env = make_vector_env("CartPole-v1", 1)
    options = {
        "spec": {"action_spec": Categorical(2)},
        "envs": {"envs": env},
        "actor": {"actor": SimpleNamespace(action_space=gymnasium.spaces.Discrete(2))},
    }[source]
    buffer = MBReplayBuffer(4, **options)
    buffer.insert_data_slice(numbered(0, 3, Action=torch.zeros(3, 1, 1, dtype=torch.int64)))
    (batch,) = buffer.generate_batches(mini_batch_size=3)
    assert batch["inputs"].shape == (3, 1 + 2)
    assert buffer[:]["action"].dtype == torch.int64
    env.close()


def test_integer_actions_without_a_spec_are_rejected():
    buffer = MBReplayBuffer(4)
    buffer.insert_data_slice(numbered(0, 3, Action=torch.zeros(3, 1, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"torch.int64.*action_spec="):
        buffer.generate_batches(mini_batch_size=1)


def test_environments_are_flattened_into_the_batch():
    buffer = filled(4, envs=3)
    (batch,) = buffer.generate_batches(mini_batch_size=12, shuffle=False)
    assert batch["inputs"].shape == (12, 2)
    wide = torch.arange(4.0)[:, None] + 100 * torch.arange(3)
    expected = (wide.flatten() - wide.mean()) / wide.std()
    torch.testing.assert_close(batch["inputs"][:, 0], expected)
    discrete = MBReplayBuffer(4, action_spec=Categorical(3))
    discrete.insert_data_slice(numbered(0, 4, 3, Action=torch.randint(3, (4, 3))))
    assert next(discrete.generate_batches(mini_batch_size=12))["inputs"].shape == (12, 4)


def test_single_row_gives_finite_numbers():
    (batch,) = filled(1).generate_batches(mini_batch_size=1)
    assert batch["inputs"].tolist() == [[0.0, 0.0]]
    assert batch["targets"].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("names", ["NextDone", "Done"])
def test_steps_before_a_reset_are_left_out_of_batches(names):
    done = torch.zeros(6, 1, 1)
    done[2] = 1
    data = numbered(0, 6, **{names: done})
    data["NextObservation"][2] = -1000.0
    buffer = MBReplayBuffer(6, autoreset=True)
    buffer.insert_data_slice(data)
    assert buffer.size == 6
    (batch,) = buffer.generate_batches(mini_batch_size=5, shuffle=False)
    assert len(batch) == 5
    assert batch["targets"][:, 0].tolist() == [0.0] * 5  # each step changes the observation by the same amount
    without_autoreset = MBReplayBuffer(6)
    without_autoreset.insert_data_slice(data)
    assert sum(map(len, without_autoreset.generate_batches(mini_batch_size=6))) == 6


def test_data_without_next_observations_is_rejected():
    data = numbered(0, 3)
    del data["NextObservation"]
    buffer = MBReplayBuffer(4)
    with pytest.raises(KeyError, match="NextObservation"):
        buffer.insert_data_slice(data)
    with pytest.raises(KeyError, match="autoreset=True"):
        MBReplayBuffer(4, autoreset=True).extend(rows(3).exclude(("next", "done")))
    assert len(buffer) == 0


def test_write_beyond_the_capacity_keeps_the_newest_rows():
    buffer = filled(3, size=4, envs=2)
    buffer.insert_data_slice(numbered(3, 14, 2))
    assert steps(buffer.get_all_buffer_data()) == [[float(t), 100.0 + t] for t in range(10, 14)]
    buffer.insert_data_slice(numbered(14, 16, 2))
    assert steps(buffer.get_all_buffer_data()) == [[float(t), 100.0 + t] for t in range(12, 16)]


def test_single_tensor_uses_the_rows_of_a_slice():
    for first, second in ((3, 2), (3, 4), (2, 11), (9, 1)):
        buffer = filled(first, size=4)
        columns = {"Observation": buffer.storage.data["observation"].clone()}
        data = numbered(first, first + second)
        assert buffer.insert_single_tensor_slice(columns, "Observation", data["Observation"][:, 0]) == second
        step = buffer.step
        assert step == first % 4
        buffer.insert_data_slice(data)
        assert torch.equal(columns["Observation"], buffer.storage.data["observation"])
    with pytest.raises(ValueError, match=r"'Observation'.*torch.float32 \[4, 1\].*\[2\]"):
        buffer.insert_single_tensor_slice(columns, "Observation", torch.zeros(1, 2))


def test_data_slice_is_a_copy_in_order_of_age():
    buffer = filled(7, size=4)
    part = buffer.get_data_slice(1, 4)
    assert steps(part) == [[4.0], [5.0], [6.0]]
    assert part.names == ["time", None]
    part["observation"].zero_()
    assert steps(buffer.get_data_slice(0, 4)) == [[3.0], [4.0], [5.0], [6.0]]
    named = buffer.get_data_slice(3, 4, documented_names=True)
    assert named["NextObservation"].item() == 7.0
    assert set(MBReplayBuffer.storage_tensors) >= set(named) - {"Truncated"}


def test_reset_discards_rows_and_read_data_can_be_inserted():
    buffer = filled(6, size=4, envs=2)
    data = buffer.get_all_buffer_data(data_to_cpu=True, documented_names=True)
    buffer.reset()
    assert (buffer.size, buffer.step, len(buffer)) == (0, 0, 0)
    for read in (buffer.generate_batches, buffer.get_all_buffer_data):
        with pytest.raises(RuntimeError, match="Nothing is stored"):
            read()
    buffer.insert_data_slice(data)
    data["Observation"].zero_()  # the buffer stores a copy
    assert steps(buffer.get_all_buffer_data()) == [[float(t), 100.0 + t] for t in range(2, 6)]


def test_max_size_and_size_differ():
    buffer = filled(3, size=4, envs=2)
    assert (buffer.size, buffer.max_size, buffer.step, buffer.num_envs, len(buffer)) == (3, 4, 3, 2, 6)


@pytest.mark.parametrize(("envs", "size"), [(1, 3), (2, 3), (2, 9), (1, 4)])
def test_max_size_resizes_and_keeps_the_newest_rows(envs, size):
    buffer = filled(6, size=4, envs=envs)
    buffer.update_storage_parameter("max_size", size)
    stored_rows = range(max(2, 6 - size), 6)
    assert buffer.max_size == size
    assert [row[0] for row in steps(buffer.get_all_buffer_data())] == list(map(float, stored_rows))
    buffer.insert_data_slice(numbered(6, 7, envs))
    assert steps(buffer.get_all_buffer_data())[-1][-1] == 6.0 + 100 * (envs - 1)
    assert buffer.size == min(len(stored_rows) + 1, size)
    assert len(list(buffer.generate_batches(mini_batch_size=1))) == envs * buffer.size


def test_update_storage_parameter_sets_any_parameter():
    buffer = MBReplayBuffer(4)
    buffer.update_storage_parameter("algorithm", "mb")
    assert buffer.algorithm == "mb"


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_pytorchrl_methods_work():
    buffer = MBReplayBuffer.create_factory(5)("cpu", None, "algorithm", SimpleNamespace(num_envs=3))
    assert (buffer.max_size, buffer.num_envs, buffer.algorithm) == (5, 3, "algorithm")
    assert buffer.before_gradients() is None
    assert buffer.after_gradients(None, {"loss": 1}) == {"loss": 1}


def test_single_transitions_equal_a_slice():
    one, other = MBReplayBuffer(4), filled(6, size=4, envs=2)
    data = numbered(0, 6, 2)
    for t in range(6):
        one.insert_transition({name: value[t] for name, value in data.items()})
    assert (one.get_all_buffer_data() == other.get_all_buffer_data()).all()


def test_init_tensors_reserves_without_storing_rows():
    buffer = MBReplayBuffer(4)
    sample = {name: value[0] for name, value in numbered(0, 1, 2).items()}
    buffer.init_tensors(sample)
    assert (len(buffer), buffer.num_envs) == (0, 2)
    assert buffer.storage.data.shape == (8,)


def test_tensordict_of_any_layout_is_stored():
    data = rows(12)
    for layout, time_dim in ((data, None), (data.reshape(12, 1), 0), (data.reshape(1, 12), 1)):
        buffer = MBReplayBuffer(12)
        buffer.insert_data_slice(layout, time_dim)
        assert torch.equal(buffer.get_all_buffer_data()["action"][:, 0], data["action"])
    named = data.reshape(3, 4)
    named.names = [None, "time"]
    buffer = MBReplayBuffer(4)
    buffer.insert_data_slice(named)
    assert buffer.num_envs == 3
    assert torch.equal(buffer.get_all_buffer_data()["action"], named["action"].transpose(0, 1))


def test_dict_observations_are_columns_without_recurrent_states():
    observation = {"far": torch.rand(2, 1, 3), "near": torch.rand(2, 1, 1)}
    state = torch.zeros(2, 1, 4)
    data = numbered(0, 2, Observation=observation, NextObservation=observation)
    buffer = MBReplayBuffer(4)
    buffer.insert_data_slice({**data, "RecurrentHiddenStates": state, "NextRecurrentHiddenStates": state})
    assert set(buffer.targets.observation_columns) == {"far[0]", "far[1]", "far[2]", "near[0]"}


def test_first_rows_of_extend_are_one_environment():
    buffer = MBReplayBuffer(20)
    buffer.extend(rows(12))
    assert (buffer.num_envs, buffer.size) == (1, 12)


@pytest.mark.parametrize("verb", ["extend", "insert_transition", "insert_data_slice"])
def test_failed_first_write_leaves_num_envs_unset(verb):
    buffer = MBReplayBuffer(4)
    invalid = rows(3).set("name", "text")
    with pytest.raises(TypeError, match="'name'"):
        getattr(buffer, verb)(invalid)
    assert (buffer.num_envs, len(buffer), buffer.storage.max_size) == (None, 0, 4)
    buffer.insert_transition({name: value[0] for name, value in numbered(0, 1, 2).items()})
    assert buffer.num_envs == 2


def test_shuffled_epochs_contain_each_row_once_in_another_order():
    buffer = filled(10, generator=torch.Generator().manual_seed(3))
    batches = [batch["inputs"][:, 0] for batch in buffer.generate_batches(mini_batch_size=10, num_epochs=2)]
    assert len(batches) == 2
    assert torch.equal(batches[0].sort().values, batches[1].sort().values)
    assert not torch.equal(*batches)


def test_state_sets_num_envs():
    other = MBReplayBuffer(4)
    other.load_state_dict(filled(6, size=4, envs=2).state_dict())
    assert other.num_envs == 2
    assert steps(other.get_all_buffer_data())[-1] == [5.0, 105.0]


def test_empty_state_fits_any_num_envs():
    other = filled(6, size=4, envs=2)
    other.load_state_dict(MBReplayBuffer(4).state_dict())
    assert (len(other), other.writer.positions.tolist()) == (0, [0, 0])
    other.insert_transition({name: value[0] for name, value in numbered(0, 1, 2).items()})
    assert len(other) == 2
    with pytest.raises(ValueError, match="max_size"):
        other.load_state_dict(MBReplayBuffer(6).state_dict())


def test_torchrl_sample_returns_plain_transitions():
    buffer = filled(6, size=8, batch_size=4)
    assert isinstance(buffer.sample(), TensorDict)
    assert buffer.sample()["next", "observation"].shape == (4, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_batches_do_not_depend_on_the_offset_of_observations(dtype):
    batches = []
    for offset, kind in ((0, torch.float32), (1_700_000_037, dtype)):
        buffer = MBReplayBuffer(10)
        steps = numbered(0, 10)
        for name in ("Observation", "NextObservation"):
            steps[name] = (steps[name].to(torch.int64) + offset).to(kind)
        buffer.insert_data_slice(steps)
        batches += [next(buffer.generate_batches(mini_batch_size=10, shuffle=False))]
    for name in ("inputs", "targets"):
        assert batches[1][name].dtype is torch.float32
        torch.testing.assert_close(batches[1][name], batches[0][name], atol=1e-5, rtol=0.0)
