"""Frame stacks on read against ALF's recorded ones, and against the stacks of a recipe."""

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


def test_golden_and_right_where_an_episode_begins_inside_a_window() -> None:
    data = arrays("alf_frame_stack_and_her", "fs_")
    num_envs, length, _, count, steps = data["config_E_L_n_stack_len"].tolist()
    kinds = torch.from_numpy(data["step_type"])
    storage = RingStorage(num_envs * length)
    stack = FrameStackTransform(count)
    buffer = ExperienceBuffer(storage=storage, writer=RingWriter(num_envs, done_key="last"), transform=stack)
    for t, kind in enumerate(kinds):
        frame = (t + 1000.0 * torch.arange(num_envs)).view(num_envs, 1, 1)
        flags = {"last": (kind == LAST).unsqueeze(-1), "is_init": (kind == FIRST).unsqueeze(-1)}
        buffer.extend(TensorDict({"observation": frame, **flags}, [num_envs]))
    env, position = torch.from_numpy(data["env_ids"]), torch.from_numpy(data["positions"])
    windows = position.unsqueeze(1) + torch.arange(steps)
    cells = buffer.writer.cell(env.unsqueeze(1), windows)
    batch = stack(storage.get(cells).set("index", cells))
    found = batch["observation"].flatten(2).numpy()
    inside = (kinds[windows[:, 1:], env.unsqueeze(1)] == FIRST).any(1).numpy()
    assert inside.any()
    np.testing.assert_array_equal(found[~inside], data["stacked"][~inside])
    assert (found[inside] != data["stacked"][inside]).any()  # ALF's stacks cross into the episode before
    for e, row, stacks in zip(env.tolist(), windows.tolist(), found, strict=True):
        for p, stack in zip(row, stacks, strict=True):
            begin = max(q for q in range(p + 1) if kinds[q, e] == FIRST)
            assert stack.tolist() == [1000 * e + max(p - k, begin) for k in range(count - 1, -1, -1)]


def filled(shape, sampler=None, **options):
    """Buffers of two environments: one that stacks on read, and one that stored the stacks."""
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
def test_stacks_are_those_of_the_recipe(shape, windows):
    ours, plain = filled(shape, SequenceSampler(4, episode_ends="across") if windows else None)
    batch = ours.sample()
    expected = plain.storage.get(batch["index"])
    assert torch.equal(batch["observation"], expected["observation"])
    assert torch.equal(batch["next", "observation"], expected["next", "observation"])


def test_folded_steps_have_the_stack_after_the_last_of_them():
    ours, plain = filled((5, 7), n_steps=3)
    batch = ours.sample()
    expected = plain.storage.get(batch["index"], NStepReturns(plain.n_steps, plain.gamma))
    assert (batch["steps_to_next_obs"] == 3).any()
    assert torch.equal(batch["next", "observation"], expected["next", "observation"])


def test_what_cannot_be_stacked_is_refused():
    buffer = ring(4, transform=FrameStackTransform(2), batch_size=2)
    buffer.extend(TensorDict({"observation": torch.zeros(3, 5), "next": {"done": torch.zeros(3, 1).bool()}}, [3]))
    with pytest.raises(ValueError, match=r"'observation'.*\[5\]"):
        buffer.sample()
    buffer.transform[0].keys = ("pixels",)
    with pytest.raises(KeyError, match="pixels"):
        buffer.sample()
