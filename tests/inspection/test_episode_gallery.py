"""An inspection displays all indexed episodes of a buffer, including episodes that were cut without a flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from torchrl_lightning import ExperienceBuffer, RingStorage, RingWriter, UniformSampler, inspect_buffer
from torchrl_lightning.inspection import buffer_views
from torchrl_lightning.inspection.episode_gallery import CUT, ENDS
from torchrl_lightning.inspection.page import fragment


def steps(count: int, draw: torch.Generator, ids: list[int]) -> TensorDict:
    done = torch.rand(count, len(ids), 1, generator=draw) < 0.15
    after = {"reward": torch.rand(count, len(ids), 1, generator=draw), "done": done}
    after |= {"terminated": done & (after["reward"] < 0.5), "truncated": done & (after["reward"] >= 0.5)}
    entries = {"observation": torch.rand(count, len(ids), 2, generator=draw), "next": after}
    return TensorDict(entries, [count, len(ids)], names=["time", None])


def expected(buffer: ExperienceBuffer) -> list[tuple[Any, ...]]:
    """Compute environment, begin, length, kind of end and return of each episode in a plain loop."""
    index, episodes = buffer.writer.index, []
    for env in range(buffer.writer.num_envs):
        position = torch.arange(int(buffer.writer.oldest[env]), int(buffer.writer.positions[env]))
        if not len(position):
            continue
        ids = torch.full_like(position, env)
        begin, end = index.bounds(ids, position)
        rows = buffer.storage.get(buffer.writer.cell(ids, position))["next"]
        for first in begin.unique().tolist():
            in_episode = begin == first
            last = rows[in_episode][-1]
            newest = int(end[in_episode][0]) == int(position[-1])
            kind = "cut"
            if last["done"]:
                kind = "terminated" if last["terminated"] else "truncated"
            elif newest and bool(index.arrays[3][env]):
                kind = "running"
            episode_return = pytest.approx(float(rows["reward"][in_episode].sum()), abs=1e-4)
            episodes.append((env, first, int(in_episode.sum()), kind, episode_return))
    return episodes


def inspected_episodes(buffer: Any, **options: Any) -> list[tuple[Any, ...]]:
    (summary,) = inspect_buffer(buffer, **options).summaries
    episodes = summary.episodes
    ends = [ENDS[end] for end in episodes.end_kind]
    rows = zip(episodes.env, episodes.begin, episodes.length, ends, episodes.episode_return, strict=True)
    return sorted((int(env), int(begin), int(length), end, float(total)) for env, begin, length, end, total in rows)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("saved", [False, True])
def test_episodes_match_the_episode_index_after_any_operation(
    seed: int, saved: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(buffer_views, "CHUNK_BYTES", 300)
    draw, envs = torch.Generator().manual_seed(seed), 3
    buffer = ExperienceBuffer(storage=RingStorage(20 * envs), sampler=UniformSampler(), num_envs=envs)
    for number in range(20):
        ids = [0, 1, 2] if seed % 2 and number < 10 else torch.randperm(envs, generator=draw)[:2].tolist()
        buffer.extend(steps(int(torch.randint(1, 6, (1,), generator=draw)), draw, ids), torch.tensor(ids))
        action = int(torch.randint(5, (1,), generator=draw))
        if action == 0:
            buffer.writer.cut(torch.tensor(ids[:1]))
        elif action == 1:
            buffer.writer.cut()
        elif action == 2 and int(buffer.writer.filled[ids[0]]) > 2:
            buffer.writer.drop(2, torch.tensor(ids[:1]))
        elif action == 3:
            cell = buffer.writer.cell(torch.tensor([ids[0]]), buffer.writer.positions[ids[0]].view(1) - 1)
            buffer.storage.write_entry(("next", "done"), cell, torch.tensor([[True]]))
            buffer.storage.write_entry(("next", "terminated"), cell, torch.tensor([[True]]))
        episodes = inspected_episodes(buffer.state_dict() if saved else buffer)
        assert episodes == expected(buffer)
    assert any(row[3] == "cut" for row in episodes)


def test_trajectory_cut_by_ids_is_shown_as_two_episodes(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    data = steps(6, draw, [0]).reshape(-1)
    data["next"].update({name: torch.zeros(6, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")})
    data["collector", "traj_ids"] = torch.tensor([0, 0, 1, 1, 1, 2])
    buffer = ExperienceBuffer(storage=RingStorage(9), writer=RingWriter(track_episodes=True))
    buffer.extend(data)
    inspection = inspect_buffer(buffer)
    (summary,) = inspection.summaries
    assert summary.episodes.length.tolist() == [2, 3, 1]
    assert summary.episodes.end_kind.tolist() == [CUT, CUT, 0]
    assert summary.episodes.is_complete.tolist() == [True, True, False]
    page = fragment(inspection.summaries)
    assert "cut after 2 steps" in page
    assert "2 cut" in str(inspection)
    buffer.dumps(tmp_path / "buffer")
    restored = ExperienceBuffer(storage=RingStorage(9), writer=RingWriter(track_episodes=True))
    restored.loads(tmp_path / "buffer")
    assert inspected_episodes(restored) == inspected_episodes(buffer)


@pytest.mark.parametrize("last", [1, 4, 100])
def test_newest_cells_show_the_ends_of_their_episodes(last: int) -> None:
    draw = torch.Generator().manual_seed(1)
    buffer = ExperienceBuffer(storage=RingStorage(30), writer=RingWriter(track_episodes=True))
    data = steps(8, draw, [0]).reshape(-1)
    data["next", "done"] = torch.zeros(8, 1, dtype=torch.bool)
    buffer.extend(data)
    buffer.writer.cut()
    assert [row[:4] for row in inspected_episodes(buffer, last=last)] == [(0, max(0, 8 - last), min(8, last), "cut")]


def test_ends_follow_the_reduced_flags_of_agents() -> None:
    done = torch.tensor([[0, 0], [0, 1], [1, 1], [1, 0], [0, 0]]).bool()
    after = {"reward": torch.ones(5, 1), "done": done}
    writer = RingWriter(track_episodes=True, done_reduce="all")
    buffer = ExperienceBuffer(storage=RingStorage(9), writer=writer)
    buffer.extend(TensorDict({"next": after}, [5]))
    assert [row[1:4] for row in inspected_episodes(buffer)] == [(0, 3, "done"), (3, 2, "running")]
