"""No sampler, split or transform returns removed steps, and no cached set of cells keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer

from torchrl_lightning import (
    EpisodicReplayBuffer,
    ExperienceBuffer,
    FrameStackTransform,
    FrameStorage,
    HindsightRelabel,
    HoldoutSplit,
    MixedReplay,
    PrioritizedSampler,
    RecentSampler,
    RingStorage,
    RingWriter,
    SequenceSampler,
    UniformSampler,
    inspect_buffer,
)
from torchrl_lightning.replay import sequences

LENGTH = 40


def rows(count: int, start: int = 0, every: int = 5) -> TensorDict:
    """Return steps with their position as ``t``. An episode ends every ``every`` steps."""
    t = torch.arange(start, start + count)
    now = t.float().view(-1, 1)
    done = (t % every == every - 1).view(-1, 1)
    picture = now.view(-1, 1, 1).expand(count, 2, 2).clone()
    after = {
        "observation": now + 1, "picture": picture + 1, "achieved_goal": now + 1, "desired_goal": now * 0,
        "reward": -torch.ones(count, 1), "done": done, "terminated": done.clone(),
    }  # fmt: skip
    goals = {"achieved_goal": now.clone(), "desired_goal": now * 0}
    return TensorDict({"t": t, "observation": now, "picture": picture, **goals, "next": after}, [count])


SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": UniformSampler,
    "distinct": lambda: UniformSampler(with_replacement=False),
    "stratified": lambda: UniformSampler(stratified=True),
    "stratified, distinct": lambda: UniformSampler(with_replacement=False, stratified=True),
    "inside": lambda: SequenceSampler(2),
    "pad": lambda: SequenceSampler(2, episode_ends="pad"),
    "across": lambda: SequenceSampler(2, episode_ends="across"),
    "prioritized": PrioritizedSampler,
    "prioritized, lowest": lambda: PrioritizedSampler(weight_norm="buffer"),
    "prioritized windows": lambda: PrioritizedSampler(batch_length=2),
    "prioritized, ignoring": lambda: PrioritizedSampler(num_earliest_frames_ignored=1),
    "recent": lambda: RecentSampler(2, recent_data_steps=2, recent_data_ratio=0.3),
    "recent prioritized": lambda: RecentSampler(
        2, recent_data_steps=2, recent_data_ratio=0.3, prioritized=PrioritizedSampler(batch_length=2)
    ),
}


def by_drop(buffer: Any, count: int) -> None:
    buffer.writer.drop(count)


def by_overwriting(buffer: Any, count: int) -> None:
    envs = buffer.writer.num_envs
    start = int(buffer.writer.positions[0])
    buffer.extend(torch.stack([rows(count, start)] * envs, 1), time_dim=0)


def by_loading(buffer: Any, count: int) -> None:
    state = buffer.state_dict()
    buffer.writer.drop(count)
    removed = buffer.state_dict()
    buffer.load_state_dict(state)
    buffer.sample(8)
    buffer.load_state_dict(removed)


@pytest.mark.parametrize(("num_envs", "draws"), [(1, 1), (2, 1 << 16)])  # 1 draw: the sampler lists all starts
@pytest.mark.parametrize("remove", [by_drop, by_overwriting, by_loading])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_never_draw_removed_steps(
    sampler: str, remove: Any, num_envs: int, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "MAX_DRAWS", draws)
    storage = RingStorage(LENGTH * num_envs)
    buffer = ExperienceBuffer(storage=storage, num_envs=num_envs, sampler=SAMPLERS[sampler]())
    buffer.extend(torch.stack([rows(LENGTH)] * num_envs, 1), time_dim=0)
    buffer.sample(24)
    remove(buffer, 31)
    oldest, newest = 31, int(buffer.writer.positions[0]) - 1
    expected = set(range(oldest, newest + 1))
    size = min(24, len(buffer))
    drawn = [buffer.sample(size)["t"] for _ in range(30)]
    found = {t for batch in drawn for t in batch.flatten().tolist()}
    assert found <= expected
    missing = expected - found
    alone = {newest} if sampler == "inside" and newest % 5 == 0 else set()  # an episode too short for a window
    assert missing == ({oldest} if "ignoring" in sampler else alone)


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_hindsight_uses_no_removed_goals(strategy: str) -> None:
    buffer = ExperienceBuffer(storage=RingStorage(LENGTH), transform=HindsightRelabel(1.0, strategy=strategy))
    buffer.extend(rows(LENGTH, every=LENGTH).set(("next", "reward"), -torch.ones(LENGTH, 1)))
    buffer.writer.drop(30)
    batch = buffer.sample(200)
    assert batch["t"].min() >= 30
    assert batch["desired_goal"].min() >= 31


def test_stacks_use_no_removed_frames() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(LENGTH), transform=FrameStackTransform(4, keys=["picture"]))
    buffer.extend(rows(LENGTH, every=LENGTH))
    buffer.writer.drop(30)
    batch = buffer.sample(100)
    assert batch["picture"].min() == 30


def test_frame_storage_keeps_complete_stacks_of_remaining_steps() -> None:
    buffer = ExperienceBuffer(storage=FrameStorage(LENGTH, 3))
    frames = torch.arange(LENGTH + 3).to(torch.uint8).view(-1, 1, 1).expand(-1, 4, 4).unfold(0, 3, 1)
    stacks = frames.movedim(-1, 1).contiguous()
    data = rows(LENGTH).select("t", ("next", "reward"), ("next", "done")).set("observation", stacks[:LENGTH])
    buffer.extend(data.set(("next", "observation"), stacks[1:]))
    buffer.writer.drop(30)
    batch = buffer.sample(60)
    assert batch["t"].min() >= 30
    assert batch["observation"][:, :, 0, 0].equal((batch["t"].view(-1, 1) + torch.arange(3)).to(torch.uint8))


@pytest.mark.parametrize("n_steps", [1, 3])
def test_n_step_returns_of_the_remaining_steps(n_steps: int) -> None:
    buffer = ExperienceBuffer(storage=RingStorage(LENGTH), n_steps=n_steps, gamma=1.0)
    buffer.extend(rows(LENGTH))
    buffer.writer.drop(32)
    batch = buffer.sample(100)
    assert set(batch["t"].tolist()) == set(range(32, LENGTH))
    assert (-batch["next", "reward"].flatten()).equal((5 - batch["t"] % 5).clamp(max=n_steps).float())


def test_split_counts_no_removed_rows() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(400), num_envs=2)
    split = HoldoutSplit(0.5, max_validation=20)
    buffer.extend(torch.stack([rows(200)] * 2, 1), time_dim=0)
    split.extend(buffer.writer)
    assert len(split.state_dict()["held"]) == 20
    buffer.writer.drop(150)
    buffer.extend(torch.stack([rows(100, 200)] * 2, 1), time_dim=0)
    split.extend(buffer.writer)
    training, validation = split.parts(buffer.writer.rings.filled_cells())
    assert len(validation) == 20
    assert len(training) + len(validation) == len(buffer) == 300
    assert buffer.storage.get(validation)["t"].min() >= 150


def test_mixture_draws_only_stored_steps() -> None:
    buffers = [ExperienceBuffer(storage=RingStorage(LENGTH), sampler=UniformSampler(stratified=True)) for _ in "ab"]
    for buffer in buffers:
        buffer.extend(rows(LENGTH))
        buffer.writer.drop(35)
    assert MixedReplay(buffers[0], buffers[1:], [0.5, 0.5]).draw(64)["t"].min() >= 35


@pytest.mark.parametrize("remove", ["dequeue", "clear"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_episodic_buffer_excludes_removed_steps(remove: str, prioritized: bool) -> None:
    buffer = EpisodicReplayBuffer(None, 2, LENGTH, prioritized_sampling=prioritized, keep_episodic_info=True)
    buffer.extend(torch.stack([rows(LENGTH)] * 2, 1), time_dim=0)
    buffer.get_batch(8, 3)
    if remove == "dequeue":
        buffer.dequeue(torch.tensor([1]), n=36)
    else:
        buffer.clear(torch.tensor([1]))
    batch, info = buffer.get_batch(64, 3)
    assert batch["t"][info.env_ids == 1].numel() == 0 or batch["t"][info.env_ids == 1].min() >= 36
    assert (remove == "clear") is not bool((info.env_ids == 1).any())
    assert buffer.total_size == LENGTH + (4 if remove == "dequeue" else 0)


def test_reports_count_the_remaining_steps() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(LENGTH), sampler=PrioritizedSampler())
    buffer.extend(rows(LENGTH))
    buffer.writer.drop(30)
    text = str(inspect_buffer(buffer))
    assert "10" in text
    assert buffer.sampler.table.count == 10
    assert int((buffer.sampler.table.priorities >= 0).sum()) == 10


def test_torchrl_samplers_raise_an_error_after_removal() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(LENGTH), sampler=RandomSampler(), batch_size=4)
    buffer.extend(rows(LENGTH))
    buffer.writer.drop(3)
    with pytest.raises(RuntimeError, match="UniformSampler"):
        buffer.sample()


def test_steps_of_a_torchrl_storage_cannot_be_removed() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(LENGTH), writer=RingWriter())
    buffer.extend(rows(LENGTH))
    with pytest.raises(ValueError, match="RingStorage"):
        buffer.writer.drop(3)
    assert len(buffer) == LENGTH


def change(name: str, buffer: ExperienceBuffer) -> None:
    cell = torch.tensor([1])
    {
        "write": lambda: buffer.extend(rows(1, LENGTH)),
        "drop": lambda: buffer.writer.drop(1),
        "cut": lambda: buffer.writer.cut(),
        "empty": buffer.empty,
        "load": lambda: buffer.load_state_dict(buffer.state_dict()),
        "claim": lambda: buffer.writer.claim(buffer.writer.rings.ids, 1),
        "done": lambda: buffer.storage.write_entry(("next", "done"), cell, torch.ones(1, 1, dtype=torch.bool)),
    }[name]()


CHANGES = ["write", "drop", "cut", "empty", "claim", "done"]


@pytest.mark.parametrize(("name", "shared"), [("load", False), *((name, one) for name in CHANGES for one in (0, 1))])
def test_version_increases_with_changes_of_borders_and_cells(name: str, shared: bool) -> None:
    buffer = ExperienceBuffer(storage=RingStorage(LENGTH))
    buffer.extend(rows(LENGTH))
    if shared:
        buffer.share()
    version = buffer.writer.rings.version
    change(name, buffer)
    assert buffer.writer.rings.version > version


def test_version_ignores_priorities_and_recurrent_states() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(LENGTH), sampler=PrioritizedSampler(), batch_size=4)
    buffer.extend(rows(LENGTH))
    version = buffer.writer.rings.version
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", torch.ones(4)))
    buffer.write_back(batch.set("picture", batch["picture"] + 1), ["picture"])
    assert buffer.writer.rings.version == version


def test_version_is_unique_among_rings() -> None:
    buffers = [ExperienceBuffer(storage=RingStorage(LENGTH)) for _ in range(3)]
    assert len({buffer.writer.rings.version for buffer in buffers}) == 3
