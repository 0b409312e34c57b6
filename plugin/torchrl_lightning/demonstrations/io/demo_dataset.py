"""Read and write data sets of demonstrations, and fill a replay buffer with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict

from torchrl_lightning._core.files import MANIFEST, read_state_folder
from torchrl_lightning._core.keys import ACTION, NEXT, REWARD
from torchrl_lightning._core.tree import path_of
from torchrl_lightning._core.untrusted import printable_errors
from torchrl_lightning._core.validators import integer
from torchrl_lightning.demonstrations._faults import DemonstrationFault
from torchrl_lightning.demonstrations.io.d4rl import d4rl_demonstrations
from torchrl_lightning.demonstrations.io.directory import DemonstrationDirectory
from torchrl_lightning.demonstrations.io.minari import minari_demonstrations, write_minari
from torchrl_lightning.demonstrations.io.recording import demonstration_specs
from torchrl_lightning.demonstrations.io.safetensors_files import SUFFIXES, read_demonstration
from torchrl_lightning.demonstrations.replay.playback import DemoPlayback
from torchrl_lightning.demonstrations.task_check import known_recipe, recipe_metadata
from torchrl_lightning.demonstrations.trajectory import Demonstration, end_flags, newest_frames
from torchrl_lightning.environments.recipe import EnvironmentRecipe
from torchrl_lightning.environments.specs import EnvironmentSpecs
from torchrl_lightning.replay import ExperienceBuffer, RingStorage

MINARI = "minari:"
D4RL = ".hdf5"
Source = ExperienceBuffer | Mapping[str, Any] | str | Path | Iterable[Demonstration]
"""The accepted sources of episodes."""


_MAX_DEPTH = 16  # maximum nesting of a state


def buffered_episodes(
    source: ExperienceBuffer | Mapping[str, Any], specs: EnvironmentSpecs, frame_stack: int, **fields: Any
) -> Iterator[Demonstration]:
    """Read the episodes in a buffer, one environment after another.

    Skip an episode if its first step was overwritten. If an episode is unfinished, or a restart cut it, both
    ``terminated`` and ``truncated`` are False, so that the value of the next state counts.

    Args:
        source: The buffer, or a state that contains buffers. While this function reads a shared buffer, all other
            processes wait.
        specs: The specs of the buffer's environment, without a frame stack.
        frame_stack: The number of images that the environment stacks. Only the newest image of each stack is read.
        fields: Values for other fields of all demonstrations.

    Raises:
        DemonstrationFault: The source lacks a buffer, or a buffer lacks ``done`` flags or entries of the environment.
        ValueError: A state is damaged, or its buffer stores each image of overlapping frame stacks only once.
    """
    buffers = [source] if isinstance(source, ExperienceBuffer) else list(buffers_in(source))
    if not buffers:
        raise DemonstrationFault(
            "the source contains no replay buffer. Train the run with data.checkpoint_buffer=inside to save it."
        )
    for buffer in buffers:
        if len(buffer):
            with buffer.lock_if_shared():
                yield from _ring_episodes(buffer, specs, frame_stack, fields)


def _ring_episodes(
    buffer: ExperienceBuffer, specs: EnvironmentSpecs, frame_stack: int, fields: Mapping[str, Any]
) -> Iterator[Demonstration]:
    storage, _, writer = buffer.parts
    if (index := writer.index) is None:
        raise DemonstrationFault("the buffer must have the entry ('next', 'done') to find the ends of episodes.")
    for number, (begin, stop) in enumerate(zip(writer.oldest.tolist(), writer.positions.tolist(), strict=True)):
        env = torch.tensor([number])
        while begin < stop:
            first, last = (int(bound) for bound in index.bounds(env, torch.tensor([begin]), clip=False))
            if first == begin:
                rows = storage.get(writer.cell(env, torch.arange(begin, last + 1))).cpu()
                _check_observations(rows, specs, frame_stack)
                steps, last_observation = (newest_frames(part, specs) for part in (rows, rows[NEXT][-1:]))
                for key in (ACTION, REWARD):
                    steps[key] = rows[key]
                ended = bool(index.finished(env, torch.tensor([last])))
                ends = end_flags(rows[NEXT], -1) if ended else {"terminated": False, "truncated": False}
                yield Demonstration(
                    steps, last_observation[0], name=f"step {begin} of environment {number}", **ends, **fields
                )
            begin = last + 1


def _check_observations(rows: Any, specs: EnvironmentSpecs, frame_stack: int) -> None:
    """Raise an error if rows lack an entry, or an observation has a wrong shape. Frame stacks are valid."""
    for key in (*specs.keys, ACTION, REWARD):
        if rows.get(key, None) is None:
            raise DemonstrationFault(f"the buffer must contain the entry {key!r}, got {sorted(rows.keys())}.")
    for key in specs.keys:
        stored_shape, env_shape = [*rows[key].shape[1:]], [*specs.observation[key].shape]
        stacks = [[*env_shape[:dim], size * frame_stack, *env_shape[dim + 1 :]] for dim, size in enumerate(env_shape)]
        if stored_shape not in (env_shape, [frame_stack, *env_shape], *stacks):
            raise DemonstrationFault(
                f"{key!r} must have the environment's shape {env_shape}, got {stored_shape} in the buffer. Name the "
                "environment that filled the buffer."
            )


def buffers_in(state: Any, depth: int = _MAX_DEPTH) -> Iterator[ExperienceBuffer]:
    """Build the replay buffers in a nested state, and restore only the steps of these buffers.

    Raises:
        ValueError: A state is damaged, or its buffer stores each image of overlapping frame stacks only once.
    """
    entries = list(state.values()) if isinstance(state, Mapping) else state if isinstance(state, list) else []
    storage, writer = (state.get(name) if isinstance(state, Mapping) else None for name in ("storage", "writer"))
    if isinstance(storage, Mapping) and isinstance(writer, Mapping) and "num_envs" in writer:
        if "frames" in storage:
            raise ValueError(
                "it stores each frame of a stack once. Load it into its buffer with loads(), and pass the buffer"
            )
        buffer = ExperienceBuffer(storage=RingStorage(storage["max_size"]), num_envs=writer["num_envs"])
        buffer.storage.load_state_dict(storage)
        buffer.writer.load_state_dict(writer)
        yield buffer
    elif depth:
        for entry in entries:
            yield from buffers_in(entry, depth - 1)


@printable_errors()
def read_dataset(dataset: Any, env: Any, *, limit: int | None = None) -> list[Demonstration]:
    """Read the demonstrations of a data set for one environment.

    Args:
        dataset: A path, ``"minari:ID"`` for a local Minari data set, or a ``minari.MinariDataset``. The path is a
            directory or a file, such as D4RL's ``.hdf5``. Unusable files of a directory are skipped with a warning.
        env: The environment of the demonstrations: its id, recipe, factory or instance.
        limit: The maximum unpacked size in bytes. None is 1 GiB for a file, and 4 GiB for a directory or a Minari data
            set. Before unpacking, the declared sizes of the files are compared with ``limit`` and the free memory.

    Raises:
        DemonstrationFault: The data set does not exist, is empty, or does not fit the environment.

    Examples:
        >>> read_dataset("nowhere", "CartPole-v1")
        Traceback (most recent call last):
            ...
        torchrl_lightning.demonstrations._faults.DemonstrationFault: dataset=nowhere: nowhere does not exist. \
Name a directory of demonstrations, or a .npz, .safetensors or .hdf5 file.
    """
    path, recipe = dataset_path(dataset), known_recipe(env)
    specs, frame_skip = demonstration_specs(env)
    options: dict[str, Any] = {} if limit is None else {"limit": integer(limit, "limit")}
    try:
        if path is not None:
            if path.is_dir() or path.suffix not in (*SUFFIXES, D4RL):
                return list(DemonstrationDirectory(path, specs, frame_skip, recipe=recipe, **options).initial)
            if path.suffix == D4RL:
                demonstrations = list(d4rl_demonstrations(path, specs, _time_limit(recipe), **options))
            else:
                demonstrations = [read_demonstration(path, specs, **options)]
        else:
            minari_source = dataset.removeprefix(MINARI) if isinstance(dataset, str) else dataset
            demonstrations = list(minari_demonstrations(minari_source, specs, **options))
        for demonstration in demonstrations:
            demonstration.fits(specs, frame_skip, recipe)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise DemonstrationFault(f"dataset={dataset}: {error}") from error
    if not demonstrations:
        raise DemonstrationFault(f"dataset={dataset} contains no episodes.")
    return demonstrations


def dataset_path(dataset: Any) -> Path | None:
    """Return the path of a data set in a directory or a file, or None for a Minari data set.

    Raises:
        DemonstrationFault: The path does not exist.
    """
    if not isinstance(dataset, str | Path) or str(dataset).startswith(MINARI):
        return None
    path = Path(dataset)
    if not path.exists():
        raise DemonstrationFault(
            f"dataset={dataset}: {path} does not exist. Name a directory of demonstrations, or a "
            f"{', '.join(SUFFIXES)} or {D4RL} file."
        )
    return path


def _time_limit(recipe: EnvironmentRecipe | None) -> int | None:
    """Return the maximum number of steps in an episode of an environment; None if unknown."""
    if recipe is not None and recipe.time_limit is None and isinstance(recipe.id, str):
        return gym.spec(recipe.id).max_episode_steps
    return None if recipe is None else recipe.time_limit


def write_dataset(dataset: str, source: Source, env: Any) -> None:
    """Write episodes of an environment as a local Minari data set that :func:`read_dataset` can read.

    An episode from a buffer is skipped if its first steps were overwritten. An episode that is unfinished or was cut by
    a restart is truncated at its last stored step. Only the newest image of a frame stack is written. If the last
    observation is unknown, the previous observation replaces it. The recipe and the frame skip of the environment are
    written, and :func:`read_dataset` checks them. The human flag, the value and other metadata are lost.

    Args:
        dataset: ``"minari:ID"``, for example ``"minari:cartpole/own-v0"``.
        source: A replay buffer, the folder that a buffer's ``dumps`` wrote, a state that contains buffers,
            demonstrations, or a path that :func:`read_dataset` accepts.
        env: The environment of the episodes: its id, recipe, factory or instance.

    Raises:
        DemonstrationFault: The data set exists already. Or the source lacks a complete episode or ``done`` flags, or
            has episodes of another environment. Nothing is written then.

    Examples:
        >>> write_dataset("cartpole", [], "CartPole-v1")
        Traceback (most recent call last):
            ...
        torchrl_lightning.demonstrations._faults.DemonstrationFault: dataset=cartpole: the name must be minari:ID, \
such as minari:cartpole/own-v0.
    """
    recipe = known_recipe(env)
    specs, frame_skip = demonstration_specs(env)

    def checked_demonstrations() -> Iterator[Demonstration]:
        episodes: Any = source
        if isinstance(source, str | Path):
            is_saved = (Path(source) / MANIFEST).is_file()
            episodes = read_state_folder(Path(source)) if is_saved else read_dataset(source, env)
        if isinstance(episodes, ExperienceBuffer | Mapping):
            stack, metadata = 1 if recipe is None else recipe.frame_stack, recipe_metadata(recipe)
            episodes = buffered_episodes(episodes, specs, stack, frame_skip=frame_skip, metadata=metadata)
        for demonstration in episodes:
            demonstration.fits(specs, frame_skip, recipe)
            yield demonstration

    try:
        if not dataset.startswith(MINARI):
            raise ValueError(f"the name must be {MINARI}ID, such as {MINARI}cartpole/own-v0.")
        write_minari(dataset.removeprefix(MINARI), checked_demonstrations(), specs, recipe)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise DemonstrationFault(f"dataset={dataset}: {error}") from error


def transitions(demonstration: Demonstration, specs: EnvironmentSpecs | None = None) -> TensorDict:
    """Return the steps of a demonstration, ``[T]``, in the format of a collector.

    :attr:`Demonstration.ends` determines the flags of the last step. If the last observation is unknown, the previous
    observation replaces it.

    Args:
        demonstration: The demonstration.
        specs: The specs of an environment that the demonstration fits. Images become frame stacks, as with an
            :class:`~torchrl_lightning.EnvironmentRecipe`. None keeps the observations unchanged.

    Examples:
        >>> steps = TensorDict({"observation": torch.arange(8.0).view(2, 4), "action": torch.tensor([0, 1])}, [2])
        >>> steps["next", "reward"] = torch.ones(2, 1)
        >>> rows = transitions(Demonstration(steps))
        >>> rows["next", "observation"][:, 0].tolist(), rows["next", "terminated"].flatten().tolist()
        ([4.0, 4.0], [False, True])
    """
    steps, length = demonstration.steps, demonstration.length
    first, is_last, all_false = torch.zeros(3, length, 1, dtype=torch.bool)
    first[0] = is_last[-1] = True
    terminated, truncated = demonstration.ends
    next_rows = {
        "reward": steps.get(REWARD),
        "done": is_last,
        "terminated": is_last if terminated else all_false,
        "truncated": is_last if truncated else all_false,
        "is_init": all_false,
    }
    rows = TensorDict({ACTION: steps.get(ACTION), "is_init": first, "next": next_rows}, [length])
    for key in demonstration.observation_keys:
        layout = steps.get(key)[0] if specs is None else specs.observation[key]
        frames = layout.shape.numel() // max(1, steps.get(key)[0].numel())
        observations = torch.from_numpy(DemoPlayback(demonstration, frames, 0).all_observations(key))
        rows[key], rows["next", *path_of(key)] = observations[:-1], observations[1:]
    return rows


def fill(buffer: ExperienceBuffer, dataset: Iterable[Demonstration], specs: EnvironmentSpecs | None = None) -> None:
    """Write demonstrations into a replay buffer. Each demonstration is stored in the ring with the fewest steps.

    Args:
        buffer: The buffer, which keeps its stored steps.
        dataset: Demonstrations of one environment, for example from :func:`read_dataset`.
        specs: See :func:`transitions`.

    Raises:
        DemonstrationFault: The demonstrations have more steps than the buffer has free cells. Nothing is written.

    Examples:
        >>> from torchrl_lightning import RingStorage, record_demonstrations
        >>> from tensordict.nn import TensorDictModule
        >>> left = TensorDictModule(lambda x: x[..., 0].long() * 0, in_keys=["observation"], out_keys=["action"])
        >>> buffer = ExperienceBuffer(storage=RingStorage(100))
        >>> fill(buffer, record_demonstrations("CartPole-v1", left, 3, seed=0))
        >>> len(buffer), buffer[:]["next", "terminated"].sum().item()
        (26, 3)
    """
    for ring, demonstration in assign_rings(buffer, dataset):
        write_episode(buffer, ring, transitions(demonstration, specs))


def assign_rings(
    buffer: ExperienceBuffer, dataset: Iterable[Demonstration], name: str = "the data set"
) -> deque[tuple[int, Demonstration]]:
    """Assign each demonstration to a ring of the buffer, and return the pairs.

    Args:
        buffer: The buffer.
        dataset: Demonstrations.
        name: The name of the data set in the error message.

    Raises:
        DemonstrationFault: The demonstrations have more steps than the buffer has free cells.
    """
    writer = buffer.parts[2]
    positions = writer.positions.tolist()
    steps, assigned = list(positions), deque[tuple[int, Demonstration]]()
    for demonstration in dataset:
        ring = steps.index(min(steps))
        steps[ring] += demonstration.length
        assigned.append((ring, demonstration))
    if max(steps) > writer.length:
        rings = f", {writer.length} for each of {writer.num_envs} environments" if writer.num_envs > 1 else ""
        filled = f", {sum(positions)} of them written" if any(positions) else ""
        raise DemonstrationFault(
            f"{name} has {sum(steps) - sum(positions)} steps in {len(assigned)} episodes, but the buffer has "
            f"max_size={buffer.storage.max_size}{rings}{filled}. Increase max_size."
        )
    return assigned


def write_episode(buffer: ExperienceBuffer, ring: int, rows: TensorDict) -> None:
    """Write rows ``[T]`` of one environment."""
    buffer.extend(rows, env_ids=None if buffer.parts[2].num_envs == 1 else torch.tensor([ring]))
