"""256 pairs of four stacked frames of 84 x 84: kept once by ours and by TorchRL, beside whole stacks in a ring.

    python tests/benchmarks/frames.py

8 environments, episodes of U[100, 500) steps, one thread. TorchRL's fastest way is to keep whole stacks in a
LazyTensorStorage; the one to put them together when they are read is CatFrames over slices.

A sample of FrameStorage takes 1.0 to 1.1 times as long as one of whole stacks in a RingStorage, 1.3 times for 32 pairs,
and keeps 1.01 frames a transition instead of 8. FrameStackTransform takes 2.1 to 2.4 times as long as FrameStorage,
TorchRL's whole stacks 7 to 9 times. Its CatFrames, timed apart and so less exactly, take 50 to 110 times as long, and
with ``make_rb_transform_and_sampler`` seconds.
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
    """Return the steps of each environment, ``[steps]``: with single frames, and with stacks."""
    single, stacked = [], []
    for env in range(ENVS):
        ends = torch.randint(100, 500, (steps // 100 + 1,)).cumsum(0) - 1
        done = torch.zeros(steps, 1, dtype=torch.bool)
        done[ends[ends < steps]] = True
        episode = done.squeeze(1).cumsum(0) - done.squeeze(1).long()
        begin = torch.searchsorted(episode, episode)
        # One more frame for each episode, the last.
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
    """Return samples of each, and frames that each keeps for a transition."""
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
    # The slice up to a step is its stack, so that the last window needs no padding. One CatFrames for each key: one for
    # both, as make_rb_transform_and_sampler has it, also pads what is after the first step, in seconds.
    cat = (CatFrames(N=STACK, dim=-3, in_keys=[key], reset_key="_reset") for key in ("observation", AFTER))
    transform = Compose(lambda td: td.reshape(-1, STACK).refine_names(None, "time"), *cat, lambda td: td[:, -1])
    sampler = SliceSampler(slice_len=STACK, traj_key="traj", cache_values=True)
    # TensorDictReplayBuffer would refuse the transform, which changes the number of rows.
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
    # The slow one runs apart: few calls fit between its own, and so few differ from run to run by more than tenfold.
    slow = {CATFRAMES: samples.pop(CATFRAMES)}
    say(table("256 pairs of stacks", compare(samples), "FrameStorage"))
    say(table("256 pairs of stacks", compare(slow, repetitions=5), CATFRAMES))
