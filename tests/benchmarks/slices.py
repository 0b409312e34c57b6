"""Measure samples of windows of four steps at growing buffer sizes, on one thread.

    python tests/benchmarks/slices.py [--json timings.json] [--repetitions 7] [--sizes 1e5 1e6 1e7 6e7]
                                      [--folder FOLDER] [--check]

A sample has 256 windows of 4 steps within episodes of 500 steps, the reads of the world model TD-MPC2. TorchRL's
``SliceSampler`` gets slower with the number of stored steps: 5 ms for 6 million steps, 1.7 s for 600 million
(https://github.com/pytorch/rl/issues/2669).

Rows come from 8 environments. They have 9 bytes: 4 bytes each for observation and reward, and the episode end. Our
index adds 9 bytes. TorchRL's rows also contain the episode number and have 17 bytes. All sizes are compared with the
smallest one, in memory and memory-mapped. The mapped pages were just written, so most of them are also in memory; other
pages would add the time of the disk. ``--check`` exits with 1 if one of our samplers takes more than 2.5 times as long
at the largest size as at the smallest, which fits in the processor's caches.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler

from torchrl_lightning.episodic.episodic_buffer import EpisodicReplayBuffer
from torchrl_lightning.replay.replay_buffer import ExperienceBuffer
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.sequences import SequenceSampler

ENVS, BATCH, LENGTH, EPISODE, CHUNK = 8, 256, 4, 500, 4000
GROWTH = 2.5  # upper bound of the ratio of largest to smallest size; cache misses explain it, more reads would not


def steps_of(time: int, steps: int) -> TensorDict:
    """Return steps of all environments from ``time`` on, ``[steps, ENVS]``. Their episodes end together."""
    done = (torch.arange(time, time + steps) % EPISODE == EPISODE - 1).view(-1, 1, 1).expand(-1, ENVS, 1)
    after = {"reward": torch.randn(steps, ENVS, 1), "done": done}
    return TensorDict({"observation": torch.randn(steps, ENVS, 1), "next": after}, [steps, ENVS])


def filled(buffer: ExperienceBuffer, steps: int) -> ExperienceBuffer:
    for time in range(0, steps, CHUNK):
        buffer.extend(steps_of(time, min(CHUNK, steps - time)), time_dim=0)
    return buffer


def sequences(size: int, folder: Path | None) -> Contender:
    storage = RingStorage(size // ENVS * ENVS, scratch_dir=folder)
    buffer = ExperienceBuffer(storage=storage, sampler=SequenceSampler(LENGTH), num_envs=ENVS, batch_size=BATCH)
    return filled(buffer, size // ENVS).sample


def batches(size: int, folder: Path | None) -> Contender:
    buffer = EpisodicReplayBuffer(None, ENVS, size // ENVS, keep_episodic_info=True, scratch_dir=folder)
    filled(buffer, size // ENVS)
    return lambda: buffer.get_batch(BATCH, LENGTH)


def slices(size: int, _: Path | None) -> Contender:
    """Return a sample of TorchRL's buffer with the options of TD-MPC2, which allow a write before each sample."""
    sampler = SliceSampler(slice_len=LENGTH, traj_key="episode", strict_length=True)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=sampler, batch_size=BATCH * LENGTH, pin_memory=False
    )
    for time in range(0, size, CHUNK * ENVS):
        rows = steps_of(time, min(CHUNK * ENVS, size - time))[:, 0]
        rows["episode"] = torch.arange(time, time + len(rows)) // EPISODE
        buffer.extend(rows)
    return buffer.sample


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--sizes", type=float, nargs="*", default=[1e5, 1e6, 1e7, 6e7])
    parser.add_argument("--folder", type=Path, help="where memory-mapped cells lie; a temporary one by default")
    parser.add_argument("--check", action="store_true", help="exit with 1 where ours grows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    results: dict[str, list[Timing]] = {}
    good = True
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        disk = Path(name)
        for title, build, folder in (
            ("SequenceSampler, within episodes, in memory", sequences, None),
            ("SequenceSampler, within episodes, memory-mapped", sequences, disk),
            ("get_batch, in memory", batches, None),
            ("get_batch, memory-mapped", batches, disk),
            ("TorchRL's SliceSampler, in memory", slices, None),
        ):
            sizes = {f"{size:.0e}": build(int(size), folder) for size in sorted(arguments.sizes)}
            results[title] = timings = compare(sizes, repetitions=arguments.repetitions, clock=process_time)
            del sizes
            say(table(f"slices: {BATCH} windows of {LENGTH} by {title}", timings, timings[0].name))
            good = (build is slices or timings[-1].median <= GROWTH * timings[0].median) and good
    if arguments.json:
        write_json(arguments.json, results)
    return 0 if good or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
