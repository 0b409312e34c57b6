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
    steps=st.integers(1, 9), envs=st.integers(1, 4), number=st.integers(1, 8), shuffle=st.booleans(), drop=st.booleans()
)
def test_every_sample_exactly_once_an_epoch(steps: int, envs: int, number: int, shuffle: bool, drop: bool) -> None:
    buffer, total = filled(steps, envs), steps * envs
    if number > total:
        with pytest.raises(ValueError, match="num_mini_batch"):
            buffer.generate_batches(number)
        return
    batches = [b["observation"].flatten() for b in buffer.generate_batches(number, None, 1, shuffle, drop)]
    seen = torch.cat(batches).tolist()
    assert len(batches) == number
    assert len(set(seen)) == len(seen)
    if drop:
        assert {len(b) for b in batches} == {total // number}
    else:
        assert sorted(seen) == list(range(total))
        if not shuffle:
            assert seen == sorted(seen)


@pytest.mark.parametrize(("drop", "sizes"), [(False, [4, 4, 4, 3]), (True, [4, 4, 4])])
def test_size_alone_leaves_a_ragged_last_batch(drop: bool, sizes: list[int]) -> None:
    assert [b.shape[0] for b in filled().generate_batches(None, 4, drop_last=drop)] == sizes


def test_number_and_size_give_exactly_that() -> None:
    buffer = filled()
    assert [b.shape[0] for b in buffer.generate_batches(2, 4)] == [4, 4]
    with pytest.raises(ValueError, match="16, but only 15 steps"):
        buffer.generate_batches(4, 4)
    with pytest.raises(ValueError, match="num_mini_batch"):
        buffer.generate_batches()
    for wrong in (0, -1, 2.5, True, "2"):
        for name in ("num_mini_batch", "mini_batch_size", "num_epochs"):
            with pytest.raises(ValueError, match=f"{name}"):
                buffer.generate_batches(**{"num_mini_batch": 1, name: wrong})
        with pytest.raises(ValueError, match="batch_size"):
            buffer.sample(wrong)
        with pytest.raises(ValueError, match="batch_size"):
            list(MinibatchSampler().epoch(5, wrong))
    with pytest.raises(ValueError, match="more than the 15"):
        buffer.generate_batches(None, 16)


def test_algorithm_fills_in_numbers() -> None:
    algorithm = SimpleNamespace(gamma=0.5, num_mini_batch=3, mini_batch_size=5)
    assert [b.shape[0] for b in filled(algorithm=algorithm).generate_batches()] == [5, 5, 5]
    assert GAEBuffer(3, algorithm=algorithm, gamma=0.7).gamma == 0.7


def test_epochs_are_reshuffled_and_seeded() -> None:
    first, second = (filled(generator=generator(3)) for _ in range(2))
    one = [b["observation"].flatten().tolist() for b in first.generate_batches(1, num_epochs=2)]
    assert one[0] != one[1]
    assert one == [b["observation"].flatten().tolist() for b in second.generate_batches(1, num_epochs=2)]


def test_whole_environments() -> None:
    buffer = filled(6, 4, recurrent=True)
    batches = list(buffer.generate_batches(2))
    assert [b.shape for b in batches] == [(2, 6), (2, 6)]
    assert batches[0].names == [None, "time"]
    seen = torch.cat([b["observation"][:, 0, 0] for b in batches])
    assert sorted(seen.tolist()) == [0, 1, 2, 3]
    assert torch.equal(batches[0]["observation"][0, :, 0].diff(), torch.full((5,), 4.0))
    with pytest.raises(ValueError, match="3 does not divide the 4 environments"):
        buffer.generate_batches(3)


def test_batch_keys_restrict_what_is_gathered() -> None:
    with pytest.raises(KeyError, match="absent"):
        filled(batch_keys=["absent"]).generate_batches(1)
    assert ("collector", "traj_ids") not in next(filled().generate_batches(1)).keys(True)


def test_replayed_steps_stay_marked_under_batch_keys() -> None:
    buffer = GAEBuffer(5, critic=make_critic(), batch_keys=["observation"])
    buffer.insert_data_slice(make_rollout(demo={"mask": torch.rand(5, 3, 1) < 0.5, "serial": torch.zeros(5, 3, 1)}))
    assert set(next(buffer.generate_batches(1)).keys(True, True)) == {"observation", ("demo", "mask")}


def test_inside_torchrl_each_epoch_is_complete_and_a_write_starts_anew() -> None:
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


def test_inside_torchrl_by_environments() -> None:
    buffer = torchrl_buffer(6, MinibatchSampler(by="environments", shuffle=False, drop_last=True), batch_size=2)
    buffer.extend(make_rollout(6, 3))
    batch = buffer.sample()
    assert batch.shape == (2, 6)
    assert batch["observation"][:, 0, 0].tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="does not fit"):
        buffer.sampler.sample(buffer.storage, 9)


def test_empty_one_says_so() -> None:
    for read in (lambda: MinibatchSampler().sample(RolloutStorage(3), 2), GAEBuffer(3).get_all_buffer_data):
        with pytest.raises(RuntimeError, match="empty"):
            read()
    with pytest.raises(RuntimeError, match="nothing to sample"):
        GAEBuffer(3).sample(2)
