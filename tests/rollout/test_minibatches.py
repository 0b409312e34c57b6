from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.rollouts import holding, make_critic, make_rollout, torchrl_buffer
from kit.seeds import generator
from torchrl_lightning import GAEBuffer, MinibatchSampler, RolloutStorage


def filled(steps: int = 5, envs: int = 3, **kwargs) -> GAEBuffer:
    return holding(GAEBuffer(steps, critic=make_critic(), **kwargs), make_rollout(steps, envs))


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 9),
    envs=st.integers(1, 4),
    num_batches=st.integers(1, 8),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_epoch_visits_each_sample_once(steps: int, envs: int, num_batches: int, shuffle: bool, drop_last: bool) -> None:
    buffer, total = filled(steps, envs), steps * envs
    if num_batches > total:
        with pytest.raises(ValueError, match="num_mini_batch"):
            buffer.generate_batches(num_batches)
        return
    batches = [b["observation"].flatten() for b in buffer.generate_batches(num_batches, None, 1, shuffle, drop_last)]
    seen = torch.cat(batches).tolist()
    assert len(batches) == num_batches
    assert len(set(seen)) == len(seen)
    if drop_last:
        assert {len(b) for b in batches} == {total // num_batches}
    else:
        assert sorted(seen) == list(range(total))
        if not shuffle:
            assert seen == sorted(seen)


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 4, 3]), (True, [4, 4, 4])])
def test_mini_batch_size_leaves_a_smaller_last_batch(drop_last: bool, sizes: list[int]) -> None:
    assert [b.shape[0] for b in filled().generate_batches(None, 4, drop_last=drop_last)] == sizes


def test_number_and_size_of_mini_batches_are_exact() -> None:
    buffer = filled()
    assert [b.shape[0] for b in buffer.generate_batches(2, 4)] == [4, 4]
    with pytest.raises(ValueError, match="mini_batch_size=4 is 16, but only 15"):
        buffer.generate_batches(4, 4)
    with pytest.raises(ValueError, match="num_mini_batch"):
        buffer.generate_batches()
    for invalid in (0, -1, 2.5, True, "2"):
        for name in ("num_mini_batch", "mini_batch_size", "num_epochs"):
            with pytest.raises(ValueError, match=f"{name}"):
                buffer.generate_batches(**{"num_mini_batch": 1, name: invalid})
        with pytest.raises(ValueError, match="batch_size"):
            buffer.sample(invalid)
        with pytest.raises(ValueError, match="batch_size"):
            list(MinibatchSampler().epoch(5, invalid))
    with pytest.raises(ValueError, match=r"mini_batch_size .*15"):
        buffer.generate_batches(None, 16)


def test_algorithm_sets_number_and_size() -> None:
    algorithm = SimpleNamespace(gamma=0.5, num_mini_batch=3, mini_batch_size=5)
    assert [b.shape[0] for b in filled(algorithm=algorithm).generate_batches()] == [5, 5, 5]
    assert GAEBuffer(3, algorithm=algorithm, gamma=0.7).gamma == 0.7


def test_epochs_are_reshuffled_and_seeded() -> None:
    first, second = (filled(generator=generator(3)) for _ in range(2))
    order = [b["observation"].flatten().tolist() for b in first.generate_batches(1, num_epochs=2)]
    assert order[0] != order[1]
    assert order == [b["observation"].flatten().tolist() for b in second.generate_batches(1, num_epochs=2)]


def test_recurrent_mini_batches_are_whole_environments() -> None:
    buffer = filled(6, 4, recurrent=True)
    batches = list(buffer.generate_batches(2))
    assert [b.shape for b in batches] == [(2, 6), (2, 6)]
    assert batches[0].names == [None, "time"]
    seen = torch.cat([b["observation"][:, 0, 0] for b in batches])
    assert sorted(seen.tolist()) == [0, 1, 2, 3]
    assert torch.equal(batches[0]["observation"][0, :, 0].diff(), torch.full((5,), 4.0))
    with pytest.raises(ValueError, match=r"num_mini_batch .*4 environments, got 3"):
        buffer.generate_batches(3)


def test_batch_keys_select_entries() -> None:
    with pytest.raises(KeyError, match="absent"):
        filled(batch_keys=["absent"]).generate_batches(1)
    assert ("collector", "traj_ids") not in next(filled().generate_batches(1)).keys(True)


def test_replayed_steps_stay_marked_under_batch_keys() -> None:
    buffer = GAEBuffer(5, critic=make_critic(), batch_keys=["observation"])
    buffer.insert_data_slice(make_rollout(demo={"mask": torch.rand(5, 3, 1) < 0.5, "serial": torch.zeros(5, 3, 1)}))
    assert set(next(buffer.generate_batches(1)).keys(True, True)) == {"observation", ("demo", "mask")}


def test_torchrl_buffer_iterates_complete_epochs_and_restarts_after_a_write() -> None:
    buffer = torchrl_buffer(6)
    buffer.extend(make_rollout(6, 3))
    for _ in range(2):
        sizes, seen = [], []
        for batch in buffer:
            sizes.append(len(batch))
            seen += batch["observation"].flatten().tolist()
        assert sizes == [4, 4, 4, 4, 2]
        assert sorted(seen) == list(range(18))
    buffer.sample()
    buffer.empty()
    buffer.extend(make_rollout(6, 3))
    assert sorted(torch.cat([b["observation"].flatten() for b in buffer]).tolist()) == list(range(18))


def test_torchrl_buffer_samples_environments() -> None:
    buffer = torchrl_buffer(6, MinibatchSampler(by="environments", shuffle=False, drop_last=True), batch_size=2)
    buffer.extend(make_rollout(6, 3))
    batch = buffer.sample()
    assert batch.shape == (2, 6)
    assert batch["observation"][:, 0, 0].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"batch_size .*got 9"):
        buffer.sampler.sample(buffer.storage, 9)


def test_read_of_an_empty_buffer_is_rejected() -> None:
    for read in (lambda: MinibatchSampler().sample(RolloutStorage(3), 2), GAEBuffer(3).get_all_buffer_data):
        with pytest.raises(RuntimeError, match="empty"):
            read()
    with pytest.raises(RuntimeError, match="nothing to sample"):
        GAEBuffer(3).sample(2)
