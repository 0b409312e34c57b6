"""Compare samples of 16 sequences of 64 steps after a write: ours, TorchRL's SliceSampler and Flashbax.

    python tests/benchmarks/sequences.py [--grow]

Each write adds one step of 8 environments. Transitions have 165 bytes, episodes have U[20, 1000) steps, and all code
runs on one thread. Flashbax ignores episode ends and runs if it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table

one_thread()

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer  # noqa: E402

from torchrl_lightning import ExperienceBuffer, RingStorage, SequenceSampler  # noqa: E402

ENVS, WINDOWS, STEPS = 8, 16, 64


def make_steps(steps: int, envs: int = ENVS) -> TensorDict:
    """Return steps ``[T, N]``, time-major, of 165 bytes each."""
    done = torch.zeros(steps, envs, 1, dtype=torch.bool)
    for env in range(envs):
        ends = torch.randint(20, 1000, (steps // 20 + 1,)).cumsum(0) - 1
        done[ends[ends < steps], env] = True
    return TensorDict(
        {
            "observation": torch.randn(steps, envs, 17),
            "action": torch.randn(steps, envs, 6),
            "next": {"observation": torch.randn(steps, envs, 17), "reward": torch.randn(steps, envs, 1), "done": done},
        },
        [steps, envs],
    )


def fill(buffer: TensorDictReplayBuffer, write: Callable[[TensorDict], object], capacity: int) -> None:
    """Write slightly more than ``capacity`` transitions, so that the ring is full and wraps around."""
    chunk = min(capacity // ENVS, 1 << 14)
    for _ in range(capacity // ENVS // chunk + 1):
        write(make_steps(chunk))


def ours(capacity: int, **options: object) -> tuple[Contender, Contender, Contender]:
    """Return three functions: write, sample, and both."""
    buffer = ExperienceBuffer(
        storage=RingStorage(capacity), num_envs=ENVS, sampler=SequenceSampler(STEPS, **options), batch_size=WINDOWS
    )
    fill(buffer, lambda steps: buffer.extend(steps, time_dim=0), capacity)
    step = make_steps(1)[0]

    def both() -> None:
        buffer.extend(step)
        buffer.sample()

    return lambda: buffer.extend(step), buffer.sample, both


def bare_gather(capacity: int, stride: int) -> Contender:
    """Return a plain torch read of the same number of rows. Steps of a window are ``stride`` rows apart."""
    # Use written memory: all pages of untouched zeros share one physical page.
    leaves = [torch.ones(capacity, *shape) for shape in ((17,), (6,), (17,), (1,))]
    leaves.append(torch.ones(capacity, 1, dtype=torch.bool))
    steps = torch.arange(STEPS) * stride

    def gather() -> None:
        index = (torch.randint(capacity - stride * STEPS, (WINDOWS, 1)) + steps).view(-1)
        for leaf in leaves:
            leaf.index_select(0, index)

    return gather


def torchrl(capacity: int, **options: object) -> Contender:
    """Return a function that writes 8 transitions and draws a sample. The storage has one stream, the best case."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=SliceSampler(slice_len=STEPS, end_key=("next", "done"), **options),
        batch_size=WINDOWS * STEPS,
    )
    fill(buffer, lambda steps: buffer.extend(steps.transpose(0, 1).reshape(-1)), capacity)
    step = make_steps(1)[0]
    step["next", "done"].fill_(True)

    def both() -> None:
        buffer.extend(step)
        buffer.sample()

    return both


def flashbax(capacity: int) -> dict[str, Contender]:
    """Return two blocking functions for a trajectory buffer: sample, and write with sample."""
    try:
        import flashbax as fbx
        import jax
        from jax import numpy as jnp
    except ImportError:
        return {}
    buffer = fbx.make_trajectory_buffer(
        add_batch_size=ENVS,
        sample_batch_size=WINDOWS,
        sample_sequence_length=STEPS,
        period=1,
        min_length_time_axis=STEPS,
        max_length_time_axis=capacity // ENVS,
    )
    row = {
        "observation": jnp.zeros(17),
        "action": jnp.zeros(6),
        "next_observation": jnp.zeros(17),
        "reward": jnp.zeros(()),
        "done": jnp.zeros((), bool),
    }
    state = buffer.init(row)
    add, sample = jax.jit(buffer.add, donate_argnums=0), jax.jit(buffer.sample)

    def steps(count: int) -> dict[str, object]:
        return {name: jnp.zeros((ENVS, count, *leaf.shape), leaf.dtype) for name, leaf in row.items()}

    holder = {"state": add(state, steps(capacity // ENVS)), "key": jax.random.PRNGKey(0)}
    step = steps(1)
    # Prepare the keys: a split would add a call.
    keys = list(jax.random.split(holder["key"], 4096))
    turn = [0]

    def draw() -> None:
        turn[0] = (turn[0] + 1) % len(keys)
        jax.block_until_ready(sample(holder["state"], keys[turn[0]]).experience)

    def both() -> None:
        holder["state"] = add(holder["state"], step)
        draw()

    return {"Flashbax, sample": draw, "Flashbax, write and sample": both}


def at_a_million() -> list[Timing]:
    """Compare at 1e6 transitions."""
    write, sample, both = ours(1_000_000)
    return compare(
        {
            "bare gather, interleaved as ours": bare_gather(1_000_000, ENVS),
            "bare gather, contiguous": bare_gather(1_000_000, 1),
            "ours, sample": sample,
            "ours, write": write,
            "ours, write and sample": both,
            "ours, padded, both": ours(1_000_000, episode_ends="pad")[2],
            "TorchRL, write and sample": torchrl(1_000_000),
            **flashbax(1_000_000),
        }
    )


def growth(size: int) -> list[Timing]:
    """Time write and sample at ``size`` and at 1e4 transitions, with the bare gather as reference."""
    return compare({"1e4": ours(10_000)[2], f"{size:.0e}": ours(size)[2], "bare gather": bare_gather(size, ENVS)})


def main() -> None:
    """Print the table of one million transitions. ``--grow`` adds the tables of other sizes."""
    torch.manual_seed(0)
    say(table("16 x 64 steps of 1e6", at_a_million(), "ours, sample"))
    if "--grow" in sys.argv:
        for power in (5, 6, 7):
            say("\n" + table(f"write and sample, 1e{power}", growth(10**power), "1e4"))


if __name__ == "__main__":
    main()
