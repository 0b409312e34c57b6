"""Frame stacks built on read equal ALF's recorded stacks and the stacks of a reference recipe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from kit.golden import arrays
from kit.images import StackedSteps
from kit.rings import ring
from torchrl_lightning import (
    ExperienceBuffer,
    FrameStackTransform,
    RingStorage,
    RingWriter,
    SequenceSampler,
)
from torchrl_lightning.replay.n_step import NStepReturns

FIRST, LAST = 0, 2


def test_stacks_equal_golden_values_across_episode_starts() -> None:
    data = arrays("alf_frame_stack_and_her", "fs_")
    num_envs, length, _, count, steps = data["config_E_L_n_stack_len"].tolist()
    step_types = torch.from_numpy(data["step_type"])
    storage = RingStorage(num_envs * length)
    stack = FrameStackTransform(count)
    buffer = ExperienceBuffer(storage=storage, writer=RingWriter(num_envs, done_key="last"), transform=stack)
    for t, step_type in enumerate(step_types):
        frame = (t + 1000.0 * torch.arange(num_envs)).view(num_envs, 1, 1)
        flags = {"last": (step_type == LAST).unsqueeze(-1), "is_init": (step_type == FIRST).unsqueeze(-1)}
        buffer.extend(TensorDict({"observation": frame, **flags}, [num_envs]))
    env, position = torch.from_numpy(data["env_ids"]), torch.from_numpy(data["positions"])
    windows = position.unsqueeze(1) + torch.arange(steps)
    cells = buffer.writer.cell(env.unsqueeze(1), windows)
    batch = stack(storage.get(cells).set("index", cells))
    stacked = batch["observation"].flatten(2).numpy()
    is_crossing = (step_types[windows[:, 1:], env.unsqueeze(1)] == FIRST).any(1).numpy()
    assert is_crossing.any()
    np.testing.assert_array_equal(stacked[~is_crossing], data["stacked"][~is_crossing])
    assert (stacked[is_crossing] != data["stacked"][is_crossing]).any()  # ALF stacks frames across episodes
    for e, row, stacks in zip(env.tolist(), windows.tolist(), stacked, strict=True):
        for p, stack in zip(row, stacks, strict=True):
            begin = max(q for q in range(p + 1) if step_types[q, e] == FIRST)
            assert stack.tolist() == [1000 * e + max(p - k, begin) for k in range(count - 1, -1, -1)]


def filled(shape, sampler=None, **options):
    """Return two buffers of two environments: one stacks on read, the other stores the stacks."""
    ours = ring(32, 2, sampler, transform=FrameStackTransform(3), batch_size=64, **options)
    plain = ring(32, 2, **options)
    envs = [StackedSteps(seed, 3, shape) for seed in range(2)]
    for _ in range(30):
        steps = torch.stack([env.step() for env in envs])
        plain.extend(steps.clone())
        steps["observation"], steps["next", "observation"] = map(
            torch.stack, zip(*(env.frames for env in envs), strict=True)
        )
        ours.extend(steps)
    return ours, plain


@pytest.mark.parametrize("shape", [(5, 7), (3, 16, 12), (16, 12, 3)])
@pytest.mark.parametrize("windows", [False, True])
def test_stacks_equal_the_recipe(shape, windows):
    ours, plain = filled(shape, SequenceSampler(4, episode_ends="across") if windows else None)
    batch = ours.sample()
    expected = plain.storage.get(batch["index"])
    assert torch.equal(batch["observation"], expected["observation"])
    assert torch.equal(batch["next", "observation"], expected["next", "observation"])


def test_n_step_returns_have_the_stack_after_their_last_step():
    ours, plain = filled((5, 7), n_steps=3)
    batch = ours.sample()
    expected = plain.storage.get(batch["index"], NStepReturns(plain.n_steps, plain.gamma))
    assert (batch["steps_to_next_obs"] == 3).any()
    assert torch.equal(batch["next", "observation"], expected["next", "observation"])


def test_entry_without_images_is_rejected():
    buffer = ring(4, transform=FrameStackTransform(2), batch_size=2)
    buffer.extend(TensorDict({"observation": torch.zeros(3, 5), "next": {"done": torch.zeros(3, 1).bool()}}, [3]))
    with pytest.raises(ValueError, match=r"'observation'.*\[5\]"):
        buffer.sample()
    buffer.transform[0].keys = ("pixels",)
    with pytest.raises(KeyError, match="pixels"):
        buffer.sample()
