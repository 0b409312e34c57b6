"""Frames that are stored once equal the full stacks of a plain ring bit for bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from kit.images import StackedSteps
from kit.rings import ring
from torchrl_lightning import ExperienceBuffer, FrameStorage, PrioritizedSampler, RingStorage, SequenceSampler


def twins(length: int, num_envs: int, count: int = 3, **options) -> tuple[ExperienceBuffer, ExperienceBuffer]:
    """Return a buffer that stores frames once, and a plain buffer."""
    ours, plain = (
        ring(length, num_envs, batch_size=16, **{"storage": storage, **options})
        for storage in (FrameStorage(length * num_envs, count), RingStorage(length * num_envs))
    )
    return ours, plain


def assert_same(ours: ExperienceBuffer, plain: ExperienceBuffer) -> None:
    cells = plain.writer.rings.filled_cells()
    assert torch.equal(ours.writer.rings.filled_cells(), cells)
    if len(cells):
        batch, expected = ours.storage.get(cells), plain.storage.get(cells)
        assert set(batch.keys(True, True)) == set(expected.keys(True, True))
        assert (batch == expected).all()
    for path, frames in ours.storage.frames.items():  # no spare frame is lost or assigned twice
        numbers, next_numbers = ours.storage.leaf(path), ours.storage.leaf(("next", *path))
        used_numbers = torch.cat([leaf[numbers[:, 0] >= 0] for leaf in (numbers, next_numbers)]).unique()
        used_spares = used_numbers[used_numbers >= len(frames.ring)].numpy() - len(frames.ring)
        free = frames.free[: frames.num_free[0]]
        assert len(np.unique(free)) == len(free)
        assert not np.isin(used_spares, free).any()
        assert len(used_spares) + len(free) == len(frames.spares)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("all"), st.integers(1, 9)),
        st.tuples(st.just("some"), st.sets(st.integers(0, 2), min_size=1), st.integers(1, 3)),
        st.tuples(st.just("miss"), st.integers(0, 2)),
        st.tuples(st.just("reset"), st.integers(0, 2)),
        st.tuples(st.sampled_from(["empty", "cut", "restore", "copy"])),
    ),
    max_size=14,
)


@settings(max_examples=20, deadline=None)
@given(operations, st.integers(1, 5), st.integers(1, 4), st.sampled_from([2, 256]), st.integers(0, 1000))
def test_frame_storage_reads_equal_a_plain_ring(operations, length, count, colors, seed):
    envs = [StackedSteps(seed + env, count, colors=colors) for env in range(3)]
    ours, plain = twins(length, 3, count)
    for name, *arguments in operations:
        if name in ("all", "some"):
            ids = [0, 1, 2] if name == "all" else sorted(arguments[0])
            data = torch.stack([torch.stack([envs[e].step() for e in ids]) for _ in range(arguments[-1])])
            for buffer in (ours, plain):
                buffer.extend(data.clone(), env_ids=torch.tensor(ids), time_dim=0)
        elif name == "miss":
            envs[arguments[0]].step()
        elif name == "reset":
            envs[arguments[0]].reset()
        elif name == "empty":
            ours.empty(), plain.empty()
        elif name == "cut":
            ours.writer.cut(), plain.writer.cut()
        elif name == "restore":
            state, ours = ours.state_dict(), twins(length, 3, count)[0]
            ours.load_state_dict(state)
        else:
            ours = copy.deepcopy(ours)
        assert_same(ours, plain)


@pytest.mark.parametrize("shape", [(5, 7), (2, 16, 12), (16, 12, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_steps": 3},
        {"prefetch": 2},
        {"sampler": lambda: PrioritizedSampler(48, 0.6, 0.4)},
        {"sampler": lambda: SequenceSampler(3)},
    ],
)
def test_samplers_read_complete_stacks(shape, options):
    buffer_options = [
        {name: value() if callable(value) else value for name, value in options.items()} for _ in range(2)
    ]
    ours, plain = twins(24, 2, **buffer_options[0])[0], twins(24, 2, **buffer_options[1])[1]
    envs = [StackedSteps(env, shape=shape) for env in range(2)]
    for _ in range(40):
        data = torch.stack([env.step() for env in envs])
        for buffer in (ours, plain):
            buffer.extend(data.clone())
    for _ in range(3):
        batch, expected = ours.sample(), plain.sample()
        assert batch["observation"].is_contiguous()
        assert (batch == expected).all()
        batch["observation"].zero_()  # does not change the storage
    assert (ours[:] == plain[:]).all()
    assert (ours[-1] == plain[-1]).all()
    assert (ours[3:9:2] == plain[3:9:2]).all()


def test_transition_needs_little_more_memory_than_a_frame():
    storage = FrameStorage(4000, 4)
    buffer = ExperienceBuffer(storage=storage, num_envs=4)
    frames = torch.randint(0, 256, (1600, 4, 3, 5), dtype=torch.uint8)
    for episode in range(16):  # each has 100 steps, and the next episode follows directly
        stacks = frames[episode * 100 + (torch.arange(101).unsqueeze(1) + torch.arange(-3, 1)).clamp(0, 99)]
        stacks = stacks.permute(0, 2, 1, 3, 4)
        for start in range(0, 100, 10):
            observation, next_observation = stacks[start : start + 10], stacks[start + 1 : start + 11]
            buffer.extend(
                TensorDict({"observation": observation, "next": {"observation": next_observation}}, [10, 4]), time_dim=0
            )
    assert len(buffer) == 4000
    assert storage.reserved_frames <= 1.05 * 4000
    spares = len(storage.frames["observation",].spares)
    assert 10 * 4 <= spares <= 1.25 * (11 * 4 + 4) + 4  # frames of ended episodes, and the reserve for one step
    assert storage.reserved_frames - spares == 4000 + 4 * 4


def test_data_without_stacked_frames_is_rejected():
    with pytest.raises(ValueError, match="cannot be shared"):
        FrameStorage(8, 3).share()
    good = StackedSteps(0).step().unsqueeze(0)
    with pytest.raises(ValueError, match="RingWriter"):
        FrameStorage(8, 3).allocate(good)
    with pytest.raises(TypeError, match="RingWriter"):
        FrameStorage(8, 3).set(0, good)
    ours, _ = twins(8, 1, 2)
    with pytest.raises(ValueError, match=r"2.*\[3, 5, 7\].*frame_stack"):
        ours.extend(good)
    with pytest.raises(KeyError, match=r"next.*observation"):
        twins(8, 1)[0].extend(good.exclude(("next", "observation")))
    ours, _ = twins(8, 1)
    ours.extend(good)
    with pytest.raises(KeyError, match=r"observation.*as frames"):
        ours.write_back(ours.sample(), ["observation"])
