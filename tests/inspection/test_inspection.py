"""Inspections of buffers with known content."""

from __future__ import annotations

import copy
import tracemalloc

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_lightning import (
    Demonstration,
    DemonstrationStorage,
    ExperienceBuffer,
    PrioritizedSampler,
    RingStorage,
    inspect_buffer,
)
from torchrl_lightning._core.files import MappedTensor, read_state_folder
from torchrl_lightning.inspection import buffer_views
from torchrl_lightning.inspection.diagnostics import findings
from torchrl_lightning.inspection.episode_gallery import ENDS, episodes_in
from torchrl_lightning.inspection.report import inspect_state
from torchrl_lightning.inspection.summary import summarize


def steps(count, seed=0, **changed):
    draw = torch.Generator().manual_seed(seed)
    done = torch.rand(count, 1, generator=draw) < 0.1
    terminated = done & (torch.rand(count, 1, generator=draw) < 0.5)
    entries = {
        "observation": torch.randn(count, 3, generator=draw),
        "action": torch.rand(count, 2, generator=draw),
        ("next", "reward"): torch.randn(count, 1, generator=draw),
        ("next", "done"): done,
        ("next", "terminated"): terminated,
        ("next", "truncated"): done & ~terminated,
    }
    data = TensorDict({}, [count])
    for key, value in {**entries, **changed.pop("entries", {})}.items():
        data[key] = value
    return data


def filled(cells=120, envs=4, rounds=(120,), uneven=False, **options):
    """Fill a buffer; return it and the rows that were written for each environment."""
    buffer = ExperienceBuffer(storage=RingStorage(cells), num_envs=envs, **options)
    written = [[] for _ in range(envs)]
    for seed, count in enumerate(rounds):
        ids = [1, 3] if uneven and seed % 2 else list(range(envs))
        data = steps(count // envs * len(ids), seed)
        buffer.extend(data.reshape(-1, len(ids)), torch.tensor(ids), time_dim=0)
        for column, env in enumerate(ids):
            written[env].append(data[column :: len(ids)])
    return buffer, [torch.cat(parts) for parts in written]


@pytest.mark.parametrize("piece", [buffer_views.CHUNK_BYTES, 300])
@pytest.mark.parametrize(
    ("rounds", "uneven"), [((80,), False), ((120, 92), False), ((40, 40), True), ((120, 60, 40), True)]
)
def test_entries_and_episodes_match_a_plain_loop(monkeypatch, piece, rounds, uneven):
    monkeypatch.setattr(buffer_views, "CHUNK_BYTES", piece)
    buffer, written = filled(rounds=rounds, uneven=uneven)
    (summary,) = inspect_buffer(buffer).summaries
    stored = [rows[-int(count) :] for rows, count in zip(written, buffer.writer.filled, strict=True)]
    all_steps = torch.cat(stored)

    entry = summary.entry("action")
    assert (entry.low, entry.high) == pytest.approx(
        (all_steps["action"].min().item(), all_steps["action"].max().item())
    )
    assert entry.mean == pytest.approx(all_steps["action"].mean().item(), rel=1e-5)
    assert entry.std == pytest.approx(all_steps["action"].std(correction=0).item(), rel=1e-4)

    expected = []
    for env, (rows, written_rows) in enumerate(zip(stored, written, strict=True)):
        total, length, is_begun = 0.0, 0, len(rows) == len(written_rows)
        for reward, done, terminated in zip(
            *(rows["next", name][:, 0].tolist() for name in ("reward", "done", "terminated")), strict=True
        ):
            total, length = total + reward, length + 1
            if done:
                expected.append((env, length, round(total, 3), "terminated" if terminated else "truncated", is_begun))
                total, length, is_begun = 0.0, 0, True
        if length:
            expected.append((env, length, round(total, 3), "running", False))
    episodes = summary.episodes
    rows = sorted(
        zip(
            episodes.env,
            episodes.length,
            episodes.episode_return,
            (ENDS[end] for end in episodes.end_kind),
            episodes.is_complete,
            strict=True,
        )
    )
    expected = sorted(expected)
    assert [(row[:2], row[3:]) for row in rows] == [(row[:2], row[3:]) for row in expected]
    assert [row[2] for row in rows] == pytest.approx([row[2] for row in expected], abs=2e-3)


def test_saved_buffer_read_in_chunks_has_the_same_summary(tmp_path, monkeypatch):
    buffer, _ = filled(rounds=(120, 60))
    buffer.dumps(tmp_path / "saved")
    monkeypatch.setattr("torchrl_lightning._core.files._STREAMED_BYTES", 16)
    state = read_state_folder(tmp_path / "saved", streamed=True)
    assert isinstance(state["storage"]["data"]["observation"], MappedTensor)
    assert str(inspect_state(state, "it")) == str(inspect_buffer(buffer, name="it"))


def test_ages_and_priorities():
    sampler = PrioritizedSampler(400, alpha=1.0, beta=0.4)
    buffer = ExperienceBuffer(storage=RingStorage(400), sampler=sampler)
    cells = buffer.extend(steps(200))
    buffer.update_priority(cells, torch.cat([torch.full((199,), 1.0), torch.tensor([801.0])]))
    inspection = inspect_buffer(buffer)
    priorities, ages = inspection.summaries[0].priorities, inspection.summaries[0].ages
    assert (priorities.num_cells, priorities.half) == (200, 1)
    assert priorities.largest == pytest.approx(0.801)
    assert (ages.oldest, ages.mean) == (199, 99.5)
    assert ages.drawn == pytest.approx(sum(range(1, 200)) / 1000)
    assert "one step has 80% of the sampling probability: it fills the batches" in inspection.findings


@pytest.mark.parametrize("count", [7, 200])
def test_priority_shares_and_half_match_a_plain_sum(count):
    sampler = PrioritizedSampler(400, alpha=1.0, beta=0.4)
    buffer = ExperienceBuffer(storage=RingStorage(400), sampler=sampler)
    cells = buffer.extend(steps(count))
    values = torch.rand(count, generator=torch.Generator().manual_seed(1)) ** 3 + 0.01
    buffer.update_priority(cells, values)
    priorities = inspect_buffer(buffer).summaries[0].priorities
    shares = np.sort(values.double().numpy())[::-1].cumsum() / values.double().sum().item()
    assert priorities.half == int((shares < 0.5).sum()) + 1
    assert sum(priorities.shares) == pytest.approx(1)
    assert sum(priorities.shares[:16]) == pytest.approx(shares[count // 2 - 1], rel=1e-4)


def test_entry_sample_keeps_no_chunk_alive():
    buffer = ExperienceBuffer(storage=RingStorage(50_000))
    buffer.extend(steps(50_000))
    sample = inspect_buffer(buffer).summaries[0].entry("observation").sample
    owner = sample if sample.base is None else sample.base
    assert len(sample) > 4000
    assert owner.nbytes <= 1.1 * sample.nbytes


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({("next", "reward"): torch.zeros(200, 1)}, "next.reward is zero in every step"),
        ({"observation": torch.full((200, 3), torch.nan)}, "observation holds 600 numbers that are NaN"),
        ({"observation": torch.rand(200, 3) * torch.tensor([1, 0, 1])}, "observation has 1 of 3 numbers that are"),
        ({"action": torch.rand(200, 2).mul(9).clamp(0, 1)}, "action[0] is at its bounds"),
        ({"action": torch.arange(200) // 199}, "action is 0 in 100% of the steps"),
        ({("next", "terminated"): torch.zeros(200, 1, dtype=torch.bool)}, "next.terminated is never set"),
    ],
)
def test_likely_mistakes_are_reported(entries, message):
    buffer = ExperienceBuffer(storage=RingStorage(200))
    assert not inspect_buffer(_extended(buffer, {})).findings
    inspection = inspect_buffer(_extended(ExperienceBuffer(storage=RingStorage(200)), entries))
    assert any(finding.startswith(message) for finding in inspection.findings), inspection.findings
    assert f"! {message}" in str(inspection)


def _extended(buffer, entries):
    buffer.extend(steps(200, entries=entries))
    return buffer


def test_demonstrations_are_episodes_with_their_recorded_ends():
    storage, demonstrations = DemonstrationStorage(), []
    for number, terminated in enumerate((True, False, None)):
        data = steps(5 + number).select("observation", "action", ("next", "reward"))
        ends = {} if terminated is None else {"terminated": terminated, "truncated": not terminated}
        demonstrations.append(Demonstration(data, **ends))
    storage.replace(demonstrations, [])
    (summary,) = inspect_buffer(storage).summaries
    assert sorted(summary.episodes.length.tolist()) == [5, 6, 7]
    assert np.bincount(summary.episodes.end_kind).tolist() == [0, 2, 1]
    assert summary.episodes.is_complete.all()


def test_last_inspects_only_the_newest_cells():
    buffer, written = filled(rounds=(120, 60))
    (summary,) = inspect_buffer(buffer, last=40).summaries
    newest = torch.cat([rows[-10:] for rows in written])
    assert summary.view.num_inspected == 40
    assert summary.entry("observation").high == pytest.approx(newest["observation"].max().item())


def test_storage_of_uneven_rings_shows_all_its_rows():
    buffer = ExperienceBuffer(storage=RingStorage(20), num_envs=2)
    buffer.extend(TensorDict({"x": torch.arange(6.0)[:, None, None]}, [6, 1]), torch.tensor([1]), time_dim=0)
    for source in (buffer, buffer.storage, buffer.storage.state_dict()):
        entry = inspect_buffer(source).summaries[0].entry("x")
        assert (entry.low, entry.mean, entry.high) == (0.0, 2.5, 5.0)


@pytest.mark.parametrize(
    ("key", "change", "setting"),
    [
        ("positions", lambda positions: positions + 1000, "positions and oldest"),
        ("oldest", lambda oldest: oldest - 1000, "positions and oldest"),
        ("oldest", lambda oldest: oldest[:0], "positions"),
        ("positions", lambda positions: positions[:1], "positions"),
        ("cells", lambda cells: cells[:-1], "cells"),
        ("cells", lambda cells: cells * 0, "positions"),
    ],
)
def test_inconsistent_counters_are_reported_in_one_line(key, change, setting):
    state = copy.deepcopy(filled(rounds=(40, 40), uneven=True)[0].state_dict())
    part = state["storage" if key == "cells" else "writer"]
    part[key] = change(part[key])
    with pytest.raises(ValueError, match=f"^it cannot be shown: {setting} must ") as error:
        inspect_state(state, "it")
    assert "\n" not in str(error.value)


def test_buffer_of_a_billion_cells_raises_with_a_remedy():
    flags = {"observation": torch.zeros(1).expand(10**9)}
    storage = {"max_size": 10**9, "count": 10**9, "cells": None, "cursor": -1, "data": flags}
    with pytest.raises(ValueError, match=r"^it has 1,000,000,000 cells, .*--last 10000000.*last=10_000_000") as error:
        inspect_state(storage, "it")
    assert "\n" not in str(error.value)
    assert inspect_state(storage, "it", last=1000).summaries[0].view.num_inspected == 1000


def test_memory_of_an_inspection_does_not_grow_with_the_cells():
    def peak_of(count):
        numbers, flags = torch.zeros(1, 1).expand(count, 1), torch.zeros(1, 1, dtype=torch.bool).expand(count, 1)
        data = {"observation": numbers, "next": {"reward": numbers, "done": flags}}
        storage = {"max_size": count, "count": count, "cells": None, "cursor": 0, "data": data}
        writer = {"positions": torch.full((4,), count // 4), "oldest": torch.zeros(4).long(), "length": count // 4}
        tracemalloc.start()
        try:
            assert inspect_state({"storage": storage, "writer": writer}, "it").summaries[0].view.count == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_of(2_000_000) < 1.2 * peak_of(500_000)


def test_summary_repr_omits_samples():
    summaries = inspect_buffer(filled(sampler=PrioritizedSampler(120))[0]).summaries
    assert len(repr(summaries)) < 4000
    assert "Entry(key=('observation',), shape=(3,), dtype='float32'" in repr(summaries)


def test_empty_buffer_and_foreign_objects():
    assert inspect_buffer(ExperienceBuffer()).findings == ["nothing is stored yet"]
    with pytest.raises(ValueError, match=r"buffer must be .*, got a list"):
        inspect_buffer([])
    with pytest.raises(ValueError, match=r"buffer must be .*, got a str; torchrl-lightning-inspect PATH reads a file"):
        inspect_buffer("RUN")
    with pytest.raises(ValueError, match="it has no buffer"):
        inspect_state({"weights": {}}, "it")
    assert episodes_in(next(buffer_views.find_buffers(ExperienceBuffer().state_dict(), "it"))) is None
    assert summarize(next(buffer_views.find_buffers(ExperienceBuffer().state_dict(), "it"))).ages is None


@pytest.mark.parametrize("piece", [buffer_views.CHUNK_BYTES, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.uint8])
def test_statistics_of_small_differences_at_a_large_offset(monkeypatch, piece, dtype):
    monkeypatch.setattr(buffer_views, "CHUNK_BYTES", piece)
    offset = {torch.uint8: 250, torch.float32: 2**20}.get(dtype, 1_700_000_037)
    values = torch.arange(200).remainder(5).sub(2)[:, None]
    values[0] = -offset  # an outlier at the beginning
    constant = torch.full((200, 1), 1e9 + 0.1, dtype=torch.float64).to(dtype)
    clock = (values[1:] + offset).to(dtype)
    buffer = ExperienceBuffer(storage=RingStorage(200))
    entries = {"clock": clock, "late": torch.cat([clock[:1] * 0, clock])[:199], "constant": constant[:199]}
    buffer.extend(steps(199, entries=entries))
    (summary,) = inspect_buffer(buffer).summaries
    for name, values_of_entry in entries.items():
        entry, wide = summary.entry(name), values_of_entry.double()
        assert (entry.low, entry.high) == (wide.min().item(), wide.max().item())
        assert entry.mean == pytest.approx(wide.mean().item(), rel=1e-12)
        assert entry.std == pytest.approx(wide.std(correction=0).item(), rel=1e-6, abs=1e-6)
    lines = [line for line in findings(summary) if "the same in every step" in line]
    assert ["clock" in line for line in lines] == [False]
    assert summary.entry("constant").std == 0.0
