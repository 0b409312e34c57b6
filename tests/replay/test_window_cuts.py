"""Recurrent states and ``is_init`` of windows follow trajectories that were cut without a flag."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import GRUModule, set_recurrent_mode

from torchrl_lightning import (
    ExperienceBuffer,
    PrioritizedSampler,
    RecentSampler,
    RingStorage,
    RingWriter,
    SequenceSampler,
)

BEGINS = {0, 4, 9, 15}
"""Steps that begin a trajectory: the first one by its flag, one after an end, two after a cut."""


def rows(how: str, starts: bool = True, dtype: torch.dtype = torch.bool) -> list[TensorDict]:
    """Return 20 steps in writes that end at each beginning."""
    step = torch.arange(20)
    count = step.float().view(-1, 1)
    jump = 100.0 * ((step >= 9).float() + (step >= 15).float()).view(-1, 1) * (how == "successors")
    done = (step == 3).view(-1, 1)
    state = {"h": count.view(-1, 1, 1) + 1}
    following = {"observation": count + jump + 1, "done": done, "recurrent_state": {"h": count.view(-1, 1, 1) + 2}}
    data = TensorDict({"step": step, "observation": count + jump, "recurrent_state": state, "next": following}, [20])
    if starts:
        data["is_init"] = ((step == 0) | (step == 4)).view(-1, 1).to(dtype)
    if how == "ids":
        data["collector", "traj_ids"] = torch.bucketize(step, torch.tensor([4, 9, 15]), right=True)
    return [data[a:b] for a, b in ((0, 2), (2, 9), (9, 15), (15, 20))]


def fill(buffer: Any, how: str, **options: Any) -> None:
    for part in rows(how, **options):
        if how == "cut()" and int(part["step"][0]) in (9, 15):
            (buffer.writer if isinstance(buffer, ExperienceBuffer) else buffer._writer).cut()
        buffer.extend(part)


def check(batch: TensorDict, starts: bool = True, stored: bool = True) -> None:
    step = batch["step"]
    for row in range(len(step)):
        expected = [] if stored else None
        for place, number in enumerate(step[row].tolist()):
            if expected is not None:
                first = 0.0 if step[row, 0].item() in BEGINS and starts else step[row, 0].item() + 1.0
                begin = 0.0 if starts else number + 1.0
                expected.append(begin if number in BEGINS else first)
            if starts:
                assert bool(batch["is_init"][row, place]) == (number in BEGINS)
        if expected is not None:
            assert batch["recurrent_state", "h"][row].flatten().tolist() == expected


HOW = pytest.mark.parametrize("how", ["ids", "successors", "cut()"])


@HOW
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("torchrls", [False, True])
def test_windows_across_cuts(how: str, starts: bool, torchrls: bool) -> None:
    sampler = SequenceSampler(6, episode_ends="across", recurrent_keys=["recurrent_state"])
    writer: Any = RingWriter(1)
    buffer: Any
    if torchrls:
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, writer=writer, batch_size=60)
    else:
        buffer = ExperienceBuffer(storage=RingStorage(20), sampler=sampler, writer=writer, batch_size=60)
    fill(buffer, how, starts=starts)
    batch = buffer.sample()
    assert len(batch["step"][:, 0].unique()) > 5
    check(batch, starts)


@HOW
@pytest.mark.parametrize("episode_ends", ["inside", "pad"])
@pytest.mark.parametrize("starts", [True, False])
def test_windows_inside_an_episode_begin_with_zeros_at_a_cut(how: str, episode_ends: str, starts: bool) -> None:
    torch.manual_seed(0)
    sampler = SequenceSampler(3, episode_ends=episode_ends)
    buffer = ExperienceBuffer(
        storage=RingStorage(20), sampler=sampler, batch_size=400
    )  # enough draws for each of about 18 starts
    fill(buffer, how, starts=starts)
    batch = buffer.sample()
    first = batch["step"][:, 0]
    assert {9, 15} <= set(first.tolist())
    expected = torch.where(torch.isin(first, torch.tensor([*BEGINS])) & starts, 0.0, first + 1.0)
    assert batch["recurrent_state", "h"][:, 0].flatten().equal(expected)


@HOW
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "kind", ["zero", "no states", "prioritized", "recent", "recent prioritized", "shared", "pickled"]
)
def test_flags_of_windows_mark_cuts(how: str, kind: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"start_states": "zero"} if kind == "zero" else {}
    options |= {"recurrent_keys": []} if kind == "no states" else {}
    sampler: Any = SequenceSampler(6, episode_ends="across", **options)
    if kind == "prioritized":
        sampler = PrioritizedSampler(20, batch_length=6)
    if kind.startswith("recent"):
        prioritized = PrioritizedSampler(20, batch_length=6) if kind == "recent prioritized" else None
        sampler = RecentSampler(6, recent_data_steps=2, recent_data_ratio=0.5, prioritized=prioritized)
    buffer = ExperienceBuffer(storage=RingStorage(20), sampler=sampler, batch_size=60)
    if kind == "shared":
        buffer.extend(rows(how, dtype=dtype)[0])
        buffer.empty()
        buffer.share()
    fill(buffer, how, dtype=dtype)
    if kind == "pickled":
        buffer = pickle.loads(pickle.dumps(buffer))
    batch = buffer.sample()
    assert batch["is_init"].dtype == dtype
    check(batch, stored=False)
    stored = buffer.storage.get(torch.arange(20))["is_init"].flatten().bool()
    assert stored.nonzero().flatten().tolist() == [0, 4]  # as written


@HOW
def test_restored_buffer_keeps_the_cuts(how: str) -> None:
    one, other = (
        ExperienceBuffer(
            storage=RingStorage(20), sampler=SequenceSampler(6, episode_ends="across"), batch_size=60,
            generator=torch.Generator().manual_seed(3),
        )
        for _ in range(2)
    )  # fmt: skip
    fill(one, how)
    other.load_state_dict(one.state_dict())
    batch, again = one.sample(), other.sample()
    check(again)
    assert batch["is_init"].equal(again["is_init"])


def test_restored_buffer_keeps_flags_that_were_never_set() -> None:
    def build() -> ExperienceBuffer:
        return ExperienceBuffer(storage=RingStorage(8), sampler=RecentSampler(batch_length=2), batch_size=4)

    buffer, restored = build(), build()
    for part in rows("no cut")[:2]:
        buffer.extend(part.clone().set("is_init", torch.zeros(len(part), 1, dtype=torch.bool)))
    restored.load_state_dict(buffer.state_dict())
    expected = buffer.sample()
    assert not expected["is_init"].any()
    assert (restored.sample() == expected).all()


def test_recurrent_module_processes_trajectories_separately() -> None:
    module = GRUModule(
        input_size=1, hidden_size=1, in_keys=["observation", "h", "is_init"], out_keys=["out", ("next", "h")]
    )
    sampler = SequenceSampler(6, episode_ends="across", recurrent_keys=["h"])
    buffer = ExperienceBuffer(storage=RingStorage(20), sampler=sampler, batch_size=60)
    for number, part in enumerate(rows("cut()")):
        part["h"], part["next", "h"] = torch.zeros(len(part), 1, 1), torch.zeros(len(part), 1, 1)
        if number >= 2:
            buffer.writer.cut()
        buffer.extend(part)
    batch = buffer.sample()
    with set_recurrent_mode(True):
        out = module(batch.clone())["out"]
    places = [(row, place) for row in range(60) for place in range(1, 6) if batch["step"][row, place].item() in (9, 15)]
    assert places
    for row, place in places:
        with set_recurrent_mode(True):
            alone = module(batch[row : row + 1, place:].clone())["out"]
        torch.testing.assert_close(out[row, place:], alone[0])
