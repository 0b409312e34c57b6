"""Compare writes to and samples from rings with peers, interleaved on one thread.

    python tests/benchmarks/ring.py [--json timings.json] [--repetitions 11] [--sizes 4 5 6 7]
                                    [--images 10000] [--check]

The ring has 1e6 transitions of 165 bytes: observation 17, action 6, reward, done and next observation. One call samples
32 to 1024 transitions or adds one step of 8 environments. If a buffer takes a TensorDict, the time includes its
construction. The nine leaves are the same as in a DataModule, and an episode ends in each step. Images have 4x84x84
bytes.

Peers that are not installed are reported as absent. The last tables compare ours at 1e4 to 1e7 transitions, with one
size in memory at a time. ``--check`` exits with 1 if a budget is missed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_lightning.replay.replay_buffer import ExperienceBuffer
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.ring_writer import RingWriter

BATCH, ENVS, CHUNK = 256, 8, 10_000
BATCHES = (32, 128, 256, 1024)
OURS, GATHER, TORCHRL = "torchrl-lightning", "bare index_select of five leaves", "TorchRL"
FIELDS = {"observation": 17, "action": 6, "reward": 1, "done": 1, "next_observation": 17}
SAMPLE_FACTOR, ADD_FACTOR, PEER_FACTOR, GROWTH = 1.5, 2.8, 0.95, 1.5


def arrays(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    data = {key: rng.standard_normal((rows, width), dtype=np.float32) for key, width in FIELDS.items()}
    return {**data, "done": rng.random((rows, 1)) < 0.005}


def tensordict(data: dict[str, torch.Tensor]) -> TensorDict:
    following = {"observation": data["next_observation"], "reward": data["reward"], "done": data["done"]}
    root = {"observation": data["observation"], "action": data["action"], "next": following}
    return TensorDict(root, [len(data["done"])])


def tensors(rows: int) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in arrays(rows).items()}


def ours(size: int, **kwargs: Any) -> ExperienceBuffer:
    buffer = ExperienceBuffer(storage=RingStorage(size), writer=RingWriter(ENVS, **kwargs), batch_size=BATCH)
    data = tensordict(tensors(CHUNK)).reshape(-1, ENVS)
    for _ in range(size // CHUNK):
        buffer.extend(data, time_dim=0)
    return buffer


def torchrl(size: int) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=BATCH)
    for _ in range(size // CHUNK):
        buffer.extend(tensordict(tensors(CHUNK)))
    return buffer


def nine(done: torch.Tensor) -> TensorDict:
    step = tensors(ENVS)
    following = {"observation": step["next_observation"], "reward": step["reward"], "done": done, "terminated": done}
    root = {"observation": step["observation"], "action": step["action"], "is_init": ~done, "number": step["reward"]}
    return TensorDict({**root, "next": TensorDict({**following, "truncated": ~done}, [ENVS])}, [ENVS])


def gather(size: int) -> Callable[[int], object]:
    data = tensors(CHUNK)
    leaves = [leaf.repeat(size // CHUNK, 1) for leaf in data.values()]
    generator = torch.Generator().manual_seed(0)

    def run(batch: int) -> object:
        index = torch.randint(size, (batch,), generator=generator)
        return [leaf.index_select(0, index) for leaf in leaves]

    return run


def adding(buffer: Any) -> Contender:
    step = tensors(ENVS)
    return lambda: buffer.extend(tensordict(step))


def adding_nine(buffer: Any) -> Contender:
    done = torch.arange(ENVS).unsqueeze(-1) == 3
    buffer.extend(nine(~done & done))
    step = nine(done)
    inside = dict(step["next"].items())
    outside = {key: value for key, value in step.items() if key != "next"}
    return lambda: buffer.extend(TensorDict({**outside, "next": TensorDict(inside, [ENVS])}, [ENVS]))


def cpprb(size: int) -> tuple[Callable[[int], object], Contender]:
    from cpprb import ReplayBuffer

    spec = {key: {"shape": value.shape[1:], "dtype": value.dtype} for key, value in arrays(1).items()}
    buffer, step = ReplayBuffer(size, spec), arrays(ENVS)
    for _ in range(size // CHUNK):
        buffer.add(**arrays(CHUNK))
    return buffer.sample, lambda: buffer.add(**step)


def sb3(size: int) -> tuple[Callable[[int], object], Contender]:
    from gymnasium.spaces import Box
    from stable_baselines3.common.buffers import ReplayBuffer

    observation = Box(-np.inf, np.inf, (FIELDS["observation"],), np.float32)
    action = Box(-1, 1, (FIELDS["action"],), np.float32)
    buffer = ReplayBuffer(size, observation, action, device="cpu", n_envs=ENVS)
    buffer.full, step = True, arrays(ENVS)
    infos: list[dict[str, Any]] = [{} for _ in range(ENVS)]
    data = step["observation"], step["next_observation"], step["action"], step["reward"][:, 0], step["done"][:, 0]
    buffer.observations[:], buffer.next_observations[:], buffer.actions[:] = 1, 1, 1  # touch all memory pages
    return buffer.sample, lambda: buffer.add(*data, infos)


def image_buffers(size: int) -> dict[str, Contender]:
    frames = torch.randint(256, (1000, 4, 84, 84), dtype=torch.uint8)
    ours = ExperienceBuffer(storage=RingStorage(size), batch_size=BATCH)
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(size), batch_size=BATCH)
    for _ in range(size // len(frames)):
        for buffer in (ours, theirs):
            buffer.extend(TensorDict({"observation": frames}, [len(frames)]))
    found: dict[str, Contender] = {OURS: ours.sample, TORCHRL: theirs.sample}
    try:
        from cpprb import ReplayBuffer
    except ImportError:
        return found
    peer = ReplayBuffer(size, {"observation": {"shape": (4, 84, 84), "dtype": np.uint8}})
    for _ in range(size // len(frames)):
        peer.add(observation=frames.numpy())
    return {**found, "cpprb": lambda: peer.sample(BATCH)}


def contenders(size: int) -> tuple[dict[str, dict[str, Contender]], dict[str, Contender], dict[str, Contender]]:
    untracked, theirs, tracked = ours(size, track_episodes=False), torchrl(size), ours(size)
    samples: dict[str, Callable[[int], object]] = {OURS: tracked.sample, GATHER: gather(size), TORCHRL: theirs.sample}
    add = {OURS: adding(tracked), f"{OURS}, no episode index": adding(untracked), TORCHRL: adding(theirs)}
    rings = ExperienceBuffer(storage=RingStorage(size), num_envs=ENVS)
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(size))
    for name, build in (("cpprb", cpprb), ("SB3", sb3)):
        try:
            samples[name], add[name] = build(size)
        except ImportError:
            say(f"  absent: {name} (not installed)")
    by_batch = {
        f"sample {batch} of 1e6": {name: functools.partial(sample, batch) for name, sample in samples.items()}
        for batch in BATCHES
    }
    return by_batch, add, {OURS: adding_nine(rings), TORCHRL: adding_nine(plain)}


def verdicts(results: dict[str, list[Timing]], sizes: list[int]) -> list[tuple[str, bool]]:
    found = {title: {timing.name: timing.median for timing in timings} for title, timings in results.items()}
    sample = found[f"sample {BATCH} of 1e6"]
    said = [
        (f"sample / bare gather = {sample[OURS] / sample[GATHER]:.2f} (<= {SAMPLE_FACTOR})",
         sample[OURS] <= SAMPLE_FACTOR * sample[GATHER]),
    ]  # fmt: skip
    for title in ("add one step of 8 environments", "add one step with nine leaves, an episode ends"):
        ratio = found[title][TORCHRL] / found[title][OURS]
        said.append((f"TorchRL / ours, {title} = {ratio:.2f} (>= {ADD_FACTOR})", ratio >= ADD_FACTOR))
    for title, timings in found.items():
        if title.startswith("sample") and "cpprb" in timings:
            ratio = timings["cpprb"] / timings[OURS]
            said.append((f"cpprb / ours, {title} = {ratio:.2f} (>= {PEER_FACTOR})", ratio >= PEER_FACTOR))
    adds = [found[f"1e{size}"]["adding"] for size in sizes]
    said.append((f"growth of adding = {max(adds) / min(adds):.2f} (<= {GROWTH})", max(adds) <= GROWTH * min(adds)))
    # Reads of uncached cells get slower with size, also in the bare gather: use the ratio to the gather.
    ratios = [found[f"1e{size}"][OURS] / found[f"1e{size}"][GATHER] for size in sizes]
    text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    said.append((f"sample / bare gather, by size = {text} (the last <= {SAMPLE_FACTOR})", ratios[-1] <= SAMPLE_FACTOR))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write all timings")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 5, 6, 7], help="powers of ten")
    parser.add_argument("--images", type=int, default=10_000, help="how many images are stored")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a budget is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    by_batch, add, add_nine = contenders(10**6)
    several = {
        **by_batch,
        "add one step of 8 environments": add,
        "add one step with nine leaves, an episode ends": add_nine,
    }
    results = {title: compare(group, repetitions=arguments.repetitions) for title, group in several.items()}
    del by_batch, add, add_nine, several
    title = f"sample {BATCH} of {arguments.images} images"
    results[title] = compare(image_buffers(arguments.images), repetitions=arguments.repetitions)
    for power in arguments.sizes:
        buffer, bare = ours(10**power), gather(10**power)
        group = {OURS: buffer.sample, GATHER: functools.partial(bare, BATCH), "adding": adding(buffer)}
        results[f"1e{power}"] = compare(group, repetitions=arguments.repetitions)
        del buffer, bare, group
    for title, timings in results.items():
        say(table(title, timings, OURS))
    missed = False
    for text, kept in verdicts(results, arguments.sizes):
        say(f"  {'kept  ' if kept else 'MISSED'} {text}")
        missed |= not kept
    if arguments.json:
        write_json(arguments.json, results)
    sys.exit(int(arguments.check and missed))


if __name__ == "__main__":
    main()
