"""Entries of a batch that go back into the cells they came from."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import RandomSampler

from kit.rings import ring
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, SequenceSampler, UniformSampler


def steps(count: int, start: int = 0, done: tuple[int, ...] = ()) -> TensorDict:
    number = torch.arange(start, start + count)
    ends = torch.tensor([int(step) in done for step in number]).unsqueeze(-1)
    state = {"h": number.float().view(-1, 1, 1).expand(-1, 1, 2), "c": number.double().view(-1, 1)}
    return TensorDict({"n": number, "recurrent_state": state, "next": {"done": ends}}, [count])


buffer = partial(ring, 8, batch_size=16)


def state_of(ours: ExperienceBuffer) -> list[float]:
    return ours[:]["recurrent_state", "h"][:, 0, 0].tolist()


@pytest.mark.parametrize("sampler", [RandomSampler, UniformSampler, lambda: PrioritizedSampler(8, 1.0, 1.0)])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_only_what_was_not_overwritten_changes(sampler: type, prefetch: int) -> None:
    ours = buffer(sampler=sampler(), prefetch=prefetch, batch_size=64)
    ours.extend(steps(8))
    batch = ours.sample()
    assert set(batch["index"].tolist()) == set(range(8))
    ours.extend(steps(3, 8))
    batch["recurrent_state"] = batch["recurrent_state"].apply(lambda leaf: leaf + 100)
    assert ours.write_back(batch, ["recurrent_state"]).tolist() == [3, 4, 5, 6, 7]
    assert state_of(ours) == [8, 9, 10, 103, 104, 105, 106, 107]
    assert ours[:]["recurrent_state", "c"].squeeze(-1).tolist() == state_of(ours)
    assert ours[:]["n"].tolist() == [8, 9, 10, 3, 4, 5, 6, 7]


def test_uneven_rings() -> None:
    ours = ring(4, 2, UniformSampler(), batch_size=64)
    ours.extend(steps(2), env_ids=torch.tensor([1, 0]))
    for number in range(2, 5):
        ours.extend(steps(1, number), env_ids=torch.tensor([1]))
    batch = ours.sample()
    ours.extend(steps(1, 5), env_ids=torch.tensor([1]))  # overwrites the first step of this environment
    batch["recurrent_state", "h"] = batch["recurrent_state", "h"] + 100
    assert ours.write_back(batch, [("recurrent_state", "h")]).tolist() == [0, 3, 5, 7]
    stored = ours.storage.get(torch.tensor([0, 1, 3, 5, 7]))["recurrent_state", "h"][:, 0, 0]
    assert stored.tolist() == [101, 5, 102, 103, 104]


def test_emptied_and_filled_again() -> None:
    ours = buffer(data=steps(4))
    batch = ours.sample()
    ours.empty()
    assert not len(ours.write_back(batch, ["n"]))
    ours.extend(steps(4, 20))
    batch["n"] = batch["n"] * 0
    assert not len(ours.write_back(batch, ["n"]))
    assert ours[:]["n"].tolist() == [20, 21, 22, 23]


def test_windows_write_what_the_mask_counts_and_the_last_of_each_cell() -> None:
    ours = buffer(sampler=SequenceSampler(3, episode_ends="pad", burn_in=1), batch_size=64)
    ours.extend(steps(6, done=(5,)))
    batch = ours.sample()
    batch["n"] = torch.arange(batch["n"].numel()).view(64, 3) + 100
    expected = torch.arange(6)
    for cell, keep, value in zip(batch["index"].flatten(), batch["mask"].flatten(), batch["n"].flatten(), strict=True):
        if keep:
            expected[cell] = value
    written = ours.write_back(batch, ["n"])
    assert 0 not in written
    assert ours[:]["n"].tolist() == expected.tolist()


def test_gradients_stay_outside() -> None:
    ours = buffer(data=steps(4))
    batch = ours.sample()
    batch["recurrent_state", "c"] = batch["recurrent_state", "c"] * torch.ones((), requires_grad=True).double()
    ours.write_back(batch, [("recurrent_state", "c")])
    assert not ours[:]["recurrent_state", "c"].requires_grad


def test_one_entry_of_stored_steps_is_replaced() -> None:
    ours = ring(4, 2)
    ours.extend(steps(2))
    ours.extend(steps(1, 2), env_ids=torch.tensor([1]))
    before = ours.storage.get(torch.tensor([0, 1, 3]))
    ours.storage.write_entry(("recurrent_state", "c"), torch.tensor([3, 0]), torch.tensor([[7.0], [8.0]]).double())
    after = ours.storage.get(torch.tensor([0, 1, 3]))
    assert after["recurrent_state", "c"].squeeze(-1).tolist() == [8, 1, 7]
    assert (after.exclude(("recurrent_state", "c")) == before.exclude(("recurrent_state", "c"))).all()
    for key, cells, value, error, says in (
        ("m", [0], torch.zeros(1), KeyError, "no stored entry 'm'"),
        ("recurrent_state", [0], torch.zeros(1), KeyError, "no entry 'recurrent_state' alone"),
        ("n", [2], torch.zeros(1).long(), IndexError, "Cell 2 holds nothing"),
        ("n", [0], torch.zeros(1), ValueError, r"is \[1\] torch.float32, to be written it must be \[1\] torch.int64"),
        ("n", [0], torch.zeros(1, 1).long(), ValueError, r"is \[1, 1\]"),
    ):
        with pytest.raises(error, match=says):
            ours.storage.write_entry(key, torch.tensor(cells), value)
    assert (ours.storage.get(torch.tensor([0, 1, 3])) == after).all()
