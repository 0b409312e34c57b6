"""Episodes in a replay buffer, or in the state of one, as demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchrl_lightning.demonstrations._faults import DemonstrationFault
from torchrl_lightning.demonstrations.trajectory import Demonstration, ends_at, newest_frames
from torchrl_lightning.environments.specs import EnvironmentSpecs
from torchrl_lightning.keys import ACTION, NEXT, REWARD
from torchrl_lightning.replay import ExperienceBuffer, RingStorage

_DEPTH = 16  # of the parts of a state


def buffered_episodes(
    source: ExperienceBuffer | Mapping[str, Any], specs: EnvironmentSpecs, frame_stack: int, **known: Any
) -> Iterator[Demonstration]:
    """Read the episodes in a buffer, environment by environment; one whose first step was overwritten is left out.

    One that has not ended, or was cut by a restart, neither terminated nor was truncated, so that the value of what
    follows counts.

    Args:
        source: The buffer, for which other processes that share it wait meanwhile; or a state that holds some.
        specs: What its environment shows and takes, without a frame stack.
        frame_stack: How many images its environment stacks; the newest of each stack is read.
        known: Other fields of the demonstrations.

    Raises:
        DemonstrationFault: There is none, it does not know its episodes, or does not hold what the environment shows.
        ValueError: A state is damaged, or that of a buffer that keeps the frames of a stack once.
    """
    buffers = [source] if isinstance(source, ExperienceBuffer) else list(buffers_in(source))
    if not buffers:
        raise DemonstrationFault("no replay buffer is there; a run saves its own by data.checkpoint_buffer=inside.")
    for buffer in buffers:
        if len(buffer):
            with buffer.undisturbed():
                yield from _episodes(buffer, specs, frame_stack, known)


def _episodes(
    buffer: ExperienceBuffer, specs: EnvironmentSpecs, frame_stack: int, known: Mapping[str, Any]
) -> Iterator[Demonstration]:
    storage, _, writer = buffer.parts
    if (index := writer.index) is None:
        raise DemonstrationFault("the buffer does not know where episodes end; it needs ('next', 'done').")
    for number, (begin, stop) in enumerate(zip(writer.oldest.tolist(), writer.positions.tolist(), strict=True)):
        env = torch.tensor([number])
        while begin < stop:
            first, last = (int(bound) for bound in index.bounds(env, torch.tensor([begin]), clip=False))
            if first == begin:
                rows = storage.get(writer.cell(env, torch.arange(begin, last + 1))).cpu()
                _check_shown(rows, specs, frame_stack)
                steps, seen = (newest_frames(part, specs) for part in (rows, rows[NEXT][-1:]))
                for key in (ACTION, REWARD):
                    steps[key] = rows[key]
                ended = bool(index.finished(env, torch.tensor([last])))
                ends = ends_at(rows[NEXT], -1) if ended else {"terminated": False, "truncated": False}
                yield Demonstration(steps, seen[0], name=f"step {begin} of environment {number}", **ends, **known)
            begin = last + 1


def _check_shown(rows: Any, specs: EnvironmentSpecs, frame_stack: int) -> None:
    """Refuse rows that lack an entry, or have an observation of another shape, a stack of images or not."""
    for key in (*specs.keys, ACTION, REWARD):
        if rows.get(key, None) is None:
            raise DemonstrationFault(f"the buffer holds no {key!r}, but {sorted(rows.keys())}.")
    for key in specs.keys:
        held, shown = [*rows[key].shape[1:]], [*specs.observation[key].shape]
        stacks = [[*shown[:dim], size * frame_stack, *shown[dim + 1 :]] for dim, size in enumerate(shown)]
        if held not in (shown, [frame_stack, *shown], *stacks):
            raise DemonstrationFault(
                f"the buffer holds {key!r} as {held}, the environment shows {shown}; name the one that filled it."
            )


def buffers_in(state: Any, depth: int = _DEPTH) -> Iterator[ExperienceBuffer]:
    """Build the replay buffers that a state holds, however deep it is nested; of each, its steps alone.

    Raises:
        ValueError: A state is damaged, or that of a buffer that keeps the frames of a stack once.
    """
    entries = list(state.values()) if isinstance(state, Mapping) else state if isinstance(state, list) else []
    storage, writer = (state.get(name) if isinstance(state, Mapping) else None for name in ("storage", "writer"))
    if isinstance(storage, Mapping) and isinstance(writer, Mapping) and "num_envs" in writer:
        if "frames" in storage:
            raise ValueError("it keeps each frame of a stack once; load it into its buffer, by loads, and give that")
        buffer = ExperienceBuffer(storage=RingStorage(storage["max_size"]), num_envs=writer["num_envs"])
        buffer.storage.load_state_dict(storage)
        buffer.writer.load_state_dict(writer)
        yield buffer
    elif depth:
        for entry in entries:
            yield from buffers_in(entry, depth - 1)
