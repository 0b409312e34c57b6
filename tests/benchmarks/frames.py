"""Compare samples of 256 pairs of stacked frames from single frames and from whole stacks.

    python tests/benchmarks/frames.py

A stack has four frames of 84 x 84. Ours and TorchRL store each frame once, or whole stacks in a ring. The data come
from 8 environments with episodes of U[100, 500) steps, and all code runs on one thread. TorchRL's fastest way stores
whole stacks in a LazyTensorStorage. Its way to build stacks from stored frames is CatFrames over slices.

A sample of FrameStorage takes 1.0 to 1.1 times the time of whole stacks in a RingStorage, and 1.3 times for 32 pairs.
It stores 1.01 frames per transition instead of 8. FrameStackTransform takes 2.1 to 2.4 times the time of FrameStorage,
and TorchRL's whole stacks take 7 to 9 times. CatFrames is timed separately and less precisely: it takes 50 to 110 times
the time, and seconds with ``make_rb_transform_and_sampler``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import compare, one_thread, say, table

one_thread()

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler  # noqa: E402
from torchrl.envs import CatFrames, Compose  # noqa: E402

from torchrl_lightning import ExperienceBuffer, FrameStackTransform, FrameStorage, RingStorage  # noqa: E402

ENVS, STACK, PAIRS, SIDE, CAPACITY = 8, 4, 256, 84, 4_000
AFTER = ("next", "observation")
CATFRAMES = "TorchRL, CatFrames"


def episodes(steps: int) -> tuple[list[TensorDict], list[TensorDict]]:
    """Return the steps ``[steps]`` of each environment, once with single frames and once with stacks."""
    single, stacked = [], []
    for env in range(ENVS):
        ends = torch.randint(100, 500, (steps // 100 + 1,)).cumsum(0) - 1
        done = torch.zeros(steps, 1, dtype=torch.bool)
        done[ends[ends < steps]] = True
        episode = done.squeeze(1).cumsum(0) - done.squeeze(1).long()
        begin = torch.searchsorted(episode, episode)
        # Each episode has one more frame than steps: its last observation.
        frames = torch.randint(0, 256, (steps + int(episode[-1]) + 1, SIDE, SIDE), dtype=torch.uint8)
        place = torch.arange(steps) + episode
        earlier = (place.unsqueeze(1) + torch.arange(1 - STACK, 1)).maximum((begin + episode).unsqueeze(1))
        later = (place.unsqueeze(1) + torch.arange(2 - STACK, 2)).maximum((begin + episode).unsqueeze(1))
        rest = {"action": torch.zeros(steps, dtype=torch.long), "traj": episode + 1000 * env}
        after = {"reward": torch.zeros(steps, 1), "done": done}
        for rows, now, then in (
            (single, frames[place].unsqueeze(1), frames[place + 1].unsqueeze(1)),
            (stacked, frames[earlier], frames[later]),
        ):
            rows.append(TensorDict({"observation": now, **rest, "next": {"observation": then, **after}}, [steps]))
    return single, stacked


def contenders() -> tuple[dict[str, Any], dict[str, float]]:
    """Return the sample functions and the stored frames per transition."""
    steps = CAPACITY // ENVS
    single, stacked = episodes(steps)
    frames, ring, bare = FrameStorage(CAPACITY, STACK), RingStorage(CAPACITY), RingStorage(CAPACITY)
    buffers = {
        "FrameStorage": ExperienceBuffer(storage=frames, num_envs=ENVS, batch_size=PAIRS),
        "RingStorage of whole stacks": ExperienceBuffer(storage=ring, num_envs=ENVS, batch_size=PAIRS),
        "FrameStackTransform": ExperienceBuffer(
            storage=bare, num_envs=ENVS, batch_size=PAIRS, transform=FrameStackTransform(STACK)
        ),
    }
    for start in range(0, steps, 100):
        for name, buffer in buffers.items():
            envs = single if name == "FrameStackTransform" else stacked
            buffer.extend(torch.stack([rows[start : start + 100] for rows in envs]), time_dim=1)
    samples: dict[str, Any] = {name: buffer.sample for name, buffer in buffers.items()}
    per = {"FrameStorage": frames.reserved_frames / CAPACITY, "RingStorage of whole stacks": 2.0 * STACK}
    whole = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=PAIRS)
    # Each slice ends at its step, so the last window is not padded. Each key has its own CatFrames: with one for both,
    # as in make_rb_transform_and_sampler, entries after the first step are padded, which takes seconds.
    cat = (CatFrames(N=STACK, dim=-3, in_keys=[key], reset_key="_reset") for key in ("observation", AFTER))
    transform = Compose(lambda td: td.reshape(-1, STACK).refine_names(None, "time"), *cat, lambda td: td[:, -1])
    sampler = SliceSampler(slice_len=STACK, traj_key="traj", cache_values=True)
    # TensorDictReplayBuffer does not accept a transform that changes the number of rows.
    slices = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=sampler, transform=transform, batch_size=PAIRS * STACK
    )
    for now, then in zip(single, stacked, strict=True):
        slices.extend(now)
        whole.extend(then)
    samples |= {"TorchRL, whole stacks": whole.sample, CATFRAMES: slices.sample}
    per |= {"TorchRL, whole stacks": 2.0 * STACK, CATFRAMES: 2.0}
    for sample in samples.values():
        batch = sample()
        assert batch["observation"].shape == batch[AFTER].shape == (PAIRS, STACK, SIDE, SIDE)
        assert torch.equal(batch["observation"][:, 1:], batch[AFTER][:, :-1])
    return samples, per


if __name__ == "__main__":
    samples, per = contenders()
    for name, frames in per.items():
        say(f"{name}: {frames:.3f} frames a transition")
    # CatFrames is timed separately: interleaved with it, the others would run too few calls for stable times.
    slow = {CATFRAMES: samples.pop(CATFRAMES)}
    say(table("256 pairs of stacks", compare(samples), "FrameStorage"))
    say(table("256 pairs of stacks", compare(slow, repetitions=5), CATFRAMES))
