"""Write-back of batch entries into the cells they came from."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import RandomSampler

from kit.rings import ring
from torchrl_lightning import MixedReplay
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingWriter, SequenceSampler, UniformSampler


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
def test_write_back_skips_overwritten_cells(sampler: type, prefetch: int) -> None:
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


def test_write_back_skips_cells_of_an_emptied_buffer() -> None:
    ours = buffer(data=steps(4))
    batch = ours.sample()
    ours.empty()
    assert not len(ours.write_back(batch, ["n"]))
    ours.extend(steps(4, 20))
    batch["n"] = batch["n"] * 0
    assert not len(ours.write_back(batch, ["n"]))
    assert ours[:]["n"].tolist() == [20, 21, 22, 23]


def test_windows_write_masked_steps_and_the_last_value_per_cell() -> None:
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


def test_written_back_entries_have_no_gradients() -> None:
    ours = buffer(data=steps(4))
    batch = ours.sample()
    batch["recurrent_state", "c"] = batch["recurrent_state", "c"] * torch.ones((), requires_grad=True).double()
    ours.write_back(batch, [("recurrent_state", "c")])
    assert not ours[:]["recurrent_state", "c"].requires_grad


def test_write_entry_replaces_one_entry() -> None:
    ours = ring(4, 2)
    ours.extend(steps(2))
    ours.extend(steps(1, 2), env_ids=torch.tensor([1]))
    before = ours.storage.get(torch.tensor([0, 1, 3]))
    ours.storage.write_entry(("recurrent_state", "c"), torch.tensor([3, 0]), torch.tensor([[7.0], [8.0]]).double())
    after = ours.storage.get(torch.tensor([0, 1, 3]))
    assert after["recurrent_state", "c"].squeeze(-1).tolist() == [8, 1, 7]
    assert (after.exclude(("recurrent_state", "c")) == before.exclude(("recurrent_state", "c"))).all()
    for key, cells, value, error, says in (
        ("m", [0], torch.zeros(1), KeyError, "no entry 'm'"),
        ("recurrent_state", [0], torch.zeros(1), KeyError, "got 'recurrent_state'"),
        ("n", [2], torch.zeros(1).long(), IndexError, "Cell 2 "),
        ("n", [0], torch.zeros(1), ValueError, r"must be \[1\] torch.int64, got \[1\] torch.float32"),
        ("n", [0], torch.zeros(1, 1).long(), ValueError, r"got \[1, 1\]"),
    ):
        with pytest.raises(error, match=says):
            ours.storage.write_entry(key, torch.tensor(cells), value)
    assert (ours.storage.get(torch.tensor([0, 1, 3])) == after).all()


def agents(count: int) -> TensorDict:
    """Return steps with equal flags of two agents, a reward and a successor."""
    flags, number = torch.zeros(count, 2, dtype=torch.bool), torch.arange(float(count)).view(-1, 1)
    after = {"done": flags, "terminated": flags.clone(), "reward": number.clone(), "n": number + 1}
    return TensorDict({"n": number, "is_init": flags.clone(), "next": after}, [count])


def tracked(sampler: Any) -> ExperienceBuffer:
    return ring(8, 1, sampler, data=agents(6), writer=RingWriter(track_episodes=True))


REFUSED = {
    "done": (("next", "done"), torch.tensor([True, False])),
    "is_init": ("is_init", torch.tensor([True, False])),
}


@pytest.mark.parametrize("flag", REFUSED)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_rejected_key_leaves_all_keys_unchanged(flag: str, place: int, mixed: bool) -> None:
    key, value = REFUSED[flag]
    first, ours = (tracked(SequenceSampler(2)) for _ in range(2))
    source: Any = MixedReplay(first, [ours], [0.5, 0.5]) if mixed else ours
    before = [each.state_dict() for each in (first, ours)]
    successors = [each.writer.rings.successors.state_dict() for each in (first, ours)]
    batch = source.draw(8)
    batch["n"], batch["next", "n"] = batch["n"] + 100, batch["next", "n"] + 100
    rows = slice(7, 8) if mixed else slice(None)  # the rows of the first buffer stay valid
    batch[key][rows] = value
    batch["next", "reward"] += 100
    keys = ["n", ("next", "n"), ("next", "reward")]
    keys.insert(place, key)
    with pytest.raises(ValueError, match="done_reduce"):
        source.write_back(batch, keys)
    for buffer, state, known in zip((first, ours), before, successors, strict=True):
        assert (buffer[:] == agents(6)).all()
        assert buffer.state_dict()["writer"].keys() == state["writer"].keys()
        assert buffer.writer.rings.successors.state_dict() == known
        assert torch.equal(buffer.writer.index.end(torch.zeros(6).long(), torch.arange(6)), torch.full((6,), 5))


def test_flags_of_several_keys_update_episodes_together() -> None:
    ours = tracked(UniformSampler())
    batch = ours.sample(64)
    ends = (batch["n"] == 2).expand(-1, 2)
    batch["next", "done"], batch["is_init"] = ends.clone(), (batch["n"] == 4).expand(-1, 2).clone()
    ours.write_back(batch, [("next", "done"), "is_init", "n"])
    begin, end = ours.writer.index.bounds(torch.zeros(6).long(), torch.arange(6))
    assert begin.tolist() == [0, 0, 0, 3, 4, 4]
    assert end.tolist() == [2, 2, 2, 3, 5, 5]


def test_rejected_write_keeps_the_comparison_of_successors() -> None:
    ours = tracked(UniformSampler())
    rows = agents(6)[5:]
    rows["next", "n"], rows["next", "done"] = rows["next", "n"] + 1, torch.tensor([[True, False]])
    matched = set(ours.writer.rings.successors.matched)
    assert ("n",) in matched
    with pytest.raises(ValueError, match="done_reduce"):
        ours.storage.set(torch.tensor([5]), rows)
    assert ours.writer.rings.successors.matched == matched
