"""ALF's replay buffer: one ring per environment, with episodes, priorities, recent-data sampling and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Transform

from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning._core.tree import check_tensordict, entry_of, is_below
from torchrl_lightning._core.validators import Checked, integer
from torchrl_lightning.episodic.batch_info import BatchInfo, first_steps, make_batch_info
from torchrl_lightning.episodic.episodic_return import DEFAULT_RETURN, EpisodicReturn, check_return_settings
from torchrl_lightning.episodic.recent import RecentSampler, check_sampling
from torchrl_lightning.episodic.time_steps import TIME_STEPS, TRANSITIONS, StepLayout
from torchrl_lightning.kernels.indices import as_integers
from torchrl_lightning.replay.builders import find_prioritized
from torchrl_lightning.replay.episode_index import NO_INDEX_HINT, EpisodeIndex
from torchrl_lightning.replay.positions import MissingStepsError, check_steps, steps_between, steps_of
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.replay_buffer import ExperienceBuffer
from torchrl_lightning.replay.ring_storage import RingStorage


class EpisodicReplayBuffer(ExperienceBuffer):
    """ALF's replay buffer: one ring for each environment, written together or separately.

    By default, a row is a transition with this package's keys. If ``data_spec`` has a ``step_type``, a row is one of
    ALF's time steps. :mod:`torchrl_lightning.episodic.time_steps` compares the two layouts. All TorchRL methods also
    work: ``sample`` draws single steps, and :meth:`get_batch` draws windows. A position counts the steps of an
    environment since the buffer was emptied.

    Args:
        data_spec: ``Composite`` spec or TensorDict of one row, without batch size. ``None`` uses the first write.
        num_environments: number of rings.
        max_length: capacity of each ring; new steps replace the oldest.
        num_earliest_frames_ignored: number of oldest steps per environment excluded from sampling.
        prioritized_sampling: draw in proportion to priorities.
        initial_priority: minimum priority of new steps; new steps get the highest stored priority if it is larger.
        recent_data_steps: see :class:`RecentSampler`, which also documents the next two arguments.
        recent_data_ratio: fraction of a batch drawn from the newest steps.
        with_replacement: draw start positions independently instead of spreading them evenly.
        device: device of the stored steps and the batches.
        allow_multiprocess: call :meth:`ExperienceBuffer.share`, so that processes forked or spawned later can write,
            read and wait for each other. Needs a ``data_spec``. Each process has separate priorities, also for new
            steps, so update priorities and draw in the same process. To load a state, build the buffer without this
            argument, load, and call ``share()``. ``share(timeout=...)`` limits the waiting time.
        keep_episodic_info: keep an index of episodes; ``None`` means True if the data have flags for episode ends.
            Recorded returns need these flags.
        record_episodic_return: store every step's return; :class:`EpisodicReturn` documents the next 3 arguments.
        default_return: value stored for a step without a known return.
        gamma: discount of the return.
        reward_clip: (lowest, highest) bounds for rewards in the return.
        enable_checkpoint: True if a resumed run resets its environments. Then loading a state ends the unfinished
            episodes. If False, new steps that equal the stored successors continue these episodes.
        name: name in ``repr``.
        critic: as in :class:`EpisodicReturn`.
        layout: keys of the row entries; by default, this package's keys or ALF's keys.
        overwrite: replace the oldest steps of a full ring. If False, a write that does not wait raises an error.
        scratch_dir: as in :class:`RingStorage`.
        sampler: replaces the sampler configured by the arguments above.
        generator: see :class:`ExperienceBuffer`, which also documents the remaining arguments.

    Raises:
        KeyError: returns are recorded, but ``data_spec`` has no rewards.
        ValueError: an argument is out of range, or two arguments contradict each other.

    Source:
        https://github.com/HorizonRobotics/alf

    Examples:
        >>> from tensordict import TensorDict
        >>> row = TensorDict({"step_type": torch.tensor(0), "reward": torch.tensor(0.0)})
        >>> buffer = EpisodicReplayBuffer(row, num_environments=2, max_length=8)
        >>> for kind in (0, 1, 1, 2):
        ...     step = {"step_type": torch.tensor([kind, kind]), "reward": torch.tensor([1.0, 2.0])}
        ...     _ = buffer.add_batch(TensorDict(step, [2]))
        >>> batch, info = buffer.get_batch(batch_size=4, batch_length=2)
        >>> batch.shape, info.env_ids.tolist()
        (torch.Size([4, 2]), [0, 1, 0, 1])
    """

    num_earliest_frames_ignored = Checked(lambda value, name: integer(value, name, 0))

    def __init__(
        self,
        data_spec: Composite | TensorDictBase | None,
        num_environments: int,
        max_length: int = 1024,
        num_earliest_frames_ignored: int = 0,
        prioritized_sampling: bool = False,
        initial_priority: float = 1.0,
        recent_data_steps: int = 1,
        recent_data_ratio: float = 0.0,
        with_replacement: bool = False,
        device: torch.device | str = "cpu",
        allow_multiprocess: bool = False,
        keep_episodic_info: bool | None = None,
        record_episodic_return: bool = False,
        default_return: float = DEFAULT_RETURN,
        gamma: float | None = None,
        reward_clip: Sequence[float] | None = None,
        enable_checkpoint: bool = False,
        name: str = "ReplayBuffer",
        *,
        critic: Callable[[TensorDictBase], TensorDictBase] | None = None,
        layout: StepLayout | None = None,
        overwrite: bool = True,
        scratch_dir: str | Path | None = None,
        sampler: Sampler | None = None,
        generator: torch.Generator | None = None,
        batch_size: int | None = None,
        priority_key: NestedKey = "td_error",
        transform: Transform | Callable[[Any], Any] | None = None,
        done_reduce: str | None = None,
        check_successors: bool = True,
        time_dim: int | None = None,
    ) -> None:
        if allow_multiprocess and data_spec is None:
            raise ValueError("data_spec must be a row or its spec if allow_multiprocess=True, got None. Pass a row.")
        ignored = integer(num_earliest_frames_ignored, "num_earliest_frames_ignored", 0)
        if record_episodic_return and keep_episodic_info is False:
            raise ValueError("keep_episodic_info must not be False if record_episodic_return=True. Leave it out.")
        row = data_spec.zero() if isinstance(data_spec, Composite) else data_spec
        if row is not None:
            check_tensordict(row)
            if row.ndim:
                raise ValueError(f"data_spec must be one row without batch size, got {list(row.shape)}. Pass row[0].")
        if layout is None:
            layout = TRANSITIONS if row is None or entry_of(row, "step_type") is None else TIME_STEPS
        envs, length = integer(num_environments, "num_environments"), integer(max_length, "max_length")
        if ignored >= length:
            raise ValueError(f"num_earliest_frames_ignored must be below max_length={length}, got {ignored}.")
        track_episodes = record_episodic_return or keep_episodic_info
        recent_options = recent_data_steps, recent_data_ratio, with_replacement
        check_sampling(sampler, prioritized_sampling, initial_priority, *recent_options)
        check_return_settings(record_episodic_return, reward_clip, default_return, critic)
        if sampler is None:
            prioritized = None
            if prioritized_sampling:
                prioritized = PrioritizedSampler(
                    envs * length, alpha=1.0, beta=1.0, eps=0.0, max_priority_within_buffer=True,
                    stratified=not with_replacement, initial_priority=initial_priority, batch_length=1,
                    num_earliest_frames_ignored=ignored,
                )  # fmt: skip
            sampler = prioritized
            if prioritized is None or recent_data_ratio:
                sampler = RecentSampler(
                    1, recent_data_steps=recent_data_steps, recent_data_ratio=recent_data_ratio,
                    with_replacement=with_replacement, num_earliest_frames_ignored=ignored, prioritized=prioritized,
                )  # fmt: skip
        super().__init__(
            storage=RingStorage(envs * length, device=device, scratch_dir=scratch_dir),
            writer=layout.writer(envs, track_episodes, overwrite, done_reduce, check_successors),
            sampler=sampler,
            generator=generator,
            batch_size=batch_size,
            priority_key=priority_key,
            transform=transform,
            time_dim=time_dim,
        )
        if getattr(self.sampler, "batch_length", None) == 1:
            self.sample_options = {"batch_length": None}  # single steps
        self.num_environments, self.max_length, self.layout, self.name = envs, length, layout, name
        self.num_earliest_frames_ignored, self.enable_checkpoint = ignored, enable_checkpoint
        self._initial_priority = initial_priority
        self.returns: EpisodicReturn | None = None
        if record_episodic_return:
            self.returns = EpisodicReturn(
                self.storage, gamma=gamma, reward_clip=reward_clip, default_return=default_return, critic=critic,
                layout=layout,
            )  # fmt: skip
        if row is not None:
            first = row.unsqueeze(0).to(device)
            self.storage.allocate(first if self.returns is None else self.returns.with_default(first))
            if allow_multiprocess:
                self.share()

    # ------------------------------------------------------------------ writing

    def add_batch(self, batch: TensorDictBase, env_ids: Tensor | None = None, blocking: bool = False) -> bool:
        """Add one step of some environments, or several in a ``"time"`` dimension; full rings drop their oldest steps.

        Args:
            batch: ``[B]``, one step for each id; without ids, one step for each environment in order.
            env_ids: distinct environment ids, ``[B]``.
            blocking: wait until another process has removed enough steps (:meth:`dequeue`), and drop no steps.

        Returns:
            True if the batch was added; False if :meth:`stop` ended the waiting.

        Raises:
            KeyError: an entry for the index or the returns is missing.
            TimeoutError: no process made room within the timeout of :meth:`share`.
            TypeError: the batch is not a TensorDict.
            ValueError: ids are out of range or repeated; the batch has another size or schema, or more steps than a
                ring; the ring is full and ``overwrite`` is False; or ``blocking`` is True and the buffer is not shared.
                Nothing is written.
        """
        if not blocking:
            self.extend(batch, env_ids)
            return True
        check_tensordict(batch)
        env, rings = self.writer.check_ids(env_ids), self.writer.rings
        steps = -(-batch.numel() // len(env))
        if steps > self.max_length:
            raise ValueError(self._too_many_steps(steps))
        written = self.wait_for(lambda: self.extend(batch, env_ids) if rings.has_room(env, steps).all() else None)
        return written is not None

    def extend(
        self,
        data: TensorDictBase,
        env_ids: Tensor | None = None,
        *,
        time_dim: int | None = None,
        update_priority: bool | None = None,
    ) -> Tensor:
        """Write steps; see :meth:`ExperienceBuffer.extend`."""
        if self.returns is not None:
            check_tensordict(data)
            data = self.returns.with_default(data)
        return super().extend(data, env_ids, time_dim=time_dim, update_priority=update_priority)

    def dequeue(self, env_ids: Tensor | None = None, n: int = 1, blocking: bool = False) -> TensorDictBase | None:
        """Remove the oldest steps of environments and return them, ``[B, n]``.

        Args:
            env_ids: distinct environment ids; None selects all.
            n: number of steps per environment.
            blocking: wait until each environment holds ``n`` steps.

        Returns:
            The steps, or None if :meth:`stop` ended the waiting. No other process gets the removed steps, even if this
            process dies.

        Raises:
            TimeoutError: no process wrote enough steps within the timeout of :meth:`share`.
            MissingStepsError: an environment holds fewer steps, or ``n`` exceeds its ring. This error is also a
                ValueError and an AssertionError.
            ValueError: ids are out of range or repeated, or ``blocking`` is True and the buffer is not shared. The
                buffer stays unchanged after each of these errors.
        """
        integer(n, "n")
        if not blocking:
            with self.locked():
                return self._remove_oldest(n, env_ids)
        env = self.writer.check_ids(env_ids)
        if n > self.max_length:
            raise MissingStepsError(self._too_many_steps(n))
        return self.wait_for(
            lambda: self._remove_oldest(n, env_ids) if int(self.writer.filled[env].min()) >= n else None
        )

    def _remove_oldest(self, count: int, env_ids: Tensor | None) -> TensorDictBase:
        # Reading after the removal is safe: the lock blocks all writers.
        return self._read(self.writer.drop(count, env_ids).view(-1, count))

    def _too_many_steps(self, steps: int) -> str:
        return f"The steps of an environment must be at most max_length={self.max_length}, got {steps}. Wait for fewer."

    def clear(self, env_ids: Tensor | None = None) -> None:
        """Delete steps, episodes, priorities and returns of all environments or of some.

        Raises:
            ValueError: ids are out of range or repeated; nothing is deleted.
        """
        if env_ids is None:
            self.empty()
            return
        with self.locked():
            self.writer.drop(None, env_ids)
            self.writer.cut(env_ids)

    # ------------------------------------------------------------------ reading

    @property
    def total_size(self) -> int:
        """Number of stored steps in all environments."""
        return len(self)

    def get_batch(self, batch_size: int, batch_length: int) -> tuple[TensorDictBase, BatchInfo]:
        """Draw windows of successive steps; a window may continue in the next episode.

        Args:
            batch_size: number of windows.
            batch_length: steps per window.

        Returns:
            The windows, ``[batch_size, batch_length]``, and their origin, ``[batch_size]``.

        Raises:
            MissingStepsError: the buffer is empty, no environment holds ``batch_length`` steps besides the ignored
                steps, or all priorities are zero. This error is also a ValueError and an AssertionError.
        """
        writer, steps = self.writer, integer(batch_length, "batch_length")
        with self.locked():
            batch = self.read(batch_size, self._fetch, batch_length=steps)
            index: Any = entry_of(batch, "index")
            env, position = steps_of(index.cpu().numpy()[:, 0], writer.length, writer.rings.arrays[0])
            info_entries: dict[str, Any] = {"env_ids": torch.from_numpy(env), "positions": torch.from_numpy(position)}
            weights = entry_of(batch, "importance_weights")
            if weights is not None:
                info_entries["importance_weights"] = first_steps(weights)
            if self.returns is not None:
                value: Any = entry_of(batch, self.returns.key)
                info_entries["discounted_return"] = first_steps(value)
            info = make_batch_info(self, info_entries, batch.batch_size[:1])
            return (self.transform(batch) if self.transforms else batch), info  # the transform may read more cells

    def gather_all(
        self, ignore_earliest_frames: bool = False, convert_to_default_device: bool = True
    ) -> tuple[TensorDictBase, BatchInfo]:
        """Return all steps in order, ``[num_environments, T]``, and their origin.

        Args:
            ignore_earliest_frames: leave out the ``num_earliest_frames_ignored`` oldest steps of each environment.
            convert_to_default_device: move the steps to torch's default device.

        Raises:
            MissingStepsError: the environments hold different numbers of steps, or only ignored steps. This error is
                also a ValueError and an AssertionError.
        """
        writer = self.writer
        with self.locked():
            filled, ignored = writer.filled, self.num_earliest_frames_ignored if ignore_earliest_frames else 0
            if int(filled.min()) != int(filled.max()):
                raise MissingStepsError(f"Numbers of stored steps must be equal, got {filled.tolist()}. Use get_field.")
            if int(filled[0]) <= ignored:
                raise MissingStepsError(f"Environments must hold more than {ignored} steps, got {int(filled[0])}.")
            begin = writer.oldest + ignored
            env, position, _ = steps_between(begin.numpy(), writer.positions.numpy() - 1)
            cells = writer.cell(torch.from_numpy(env), torch.from_numpy(position))
            num_envs = self.num_environments
            batch = self._read(cells.view(num_envs, -1))
            info = BatchInfo(torch.arange(num_envs), begin, replay_buffer=self, batch_size=[num_envs])
        device = torch.get_default_device() if convert_to_default_device else self.storage.device
        return (batch if batch.device == device else batch.to(device)), info

    def get_field(self, field_name: Any, env_ids: Tensor, positions: Tensor) -> Any:
        """Return one or several entries of stored steps, with the broadcast shape of ids and positions.

        Args:
            field_name: a key, or a nested key as a string with dots; the empty string returns all entries. A list, a
                dict, or a tuple that is not a stored key selects several entries; the result has the same structure.
            env_ids: environments.
            positions: positions of the steps.

        Raises:
            IndexError: a step is not stored, or an environment id is out of range.
            KeyError: an entry does not exist.
        """
        with self.lock_if_shared():
            return self._gather_fields(field_name, self._cells_of(env_ids, positions))

    def _gather_fields(self, name: Any, cells: Tensor) -> Any:
        if isinstance(name, Mapping):
            return {key: self._gather_fields(part, cells) for key, part in name.items()}
        if name == "":
            return self._read(cells)
        key, storage = tuple(name.split(".")) if isinstance(name, str) else name, self.storage
        skip = [path for path in storage.cells.leaf_index if not is_below(path, key)]
        if len(skip) == len(storage.cells.leaf_index) and not isinstance(name, str):
            return getattr(name, "_make", type(name))(self._gather_fields(part, cells) for part in name)
        storage.leaves(key)  # raises KeyError for an unknown name
        value: Any = storage.gather(cells.to(storage.device), None, skip)
        for part in key:
            value = value[part]
        return value

    def _cells_of(self, env_ids: Tensor, positions: Tensor) -> Tensor:
        env, position = torch.broadcast_tensors(
            as_integers(env_ids, "env_ids").cpu(), as_integers(positions, "positions").cpu()
        )
        writer = self.writer
        check_steps(env.numpy(), position.numpy(), writer.oldest.numpy(), writer.positions.numpy())
        cells: Tensor = writer.cell(env, position)
        return cells

    def _read(self, cells: Tensor) -> TensorDictBase:
        storage, names = self.storage, (None, "time") if cells.ndim == 2 else None
        cells = cells.to(storage.device)
        return new_tensordict(storage.gather(cells, names), cells.shape, names, cells.device)

    # ------------------------------------------------------------------ episodes

    def _episode_index(self) -> EpisodeIndex:
        index: EpisodeIndex | None = self.writer.index
        if index is None:
            raise RuntimeError(
                "The buffer has no index of episodes: it is empty, keep_episodic_info=False, or the data have no entry "
                f"{self.layout.done!r}. {NO_INDEX_HINT}"
            )
        return index

    def steps_to_episode_end(self, pos: Tensor, env_ids: Tensor) -> Tensor:
        """Return the number of later steps in the same episode; a running episode counts up to its newest step.

        Raises:
            IndexError: a step is not stored, or an environment id is out of range.
            RuntimeError: the buffer has no index of episodes.
        """
        with self.lock_if_shared():
            return self._episode_index().steps_to_end(env_ids, pos)

    def get_episode_begin_position(self, pos: Tensor, env_ids: Tensor) -> Tensor:
        """Return the first position of each step's episode; the first step itself may already be overwritten.

        Raises:
            IndexError: a step is not stored, or an environment id is out of range.
            RuntimeError: the buffer has no index of episodes.
        """
        with self.lock_if_shared():
            return self._episode_index().begin(env_ids, pos, clip=False)

    def get_disc_0_begin_position(self, pos: Tensor, env_ids: Tensor) -> Tensor:
        """Return the first position of each step's life, the part of an episode between two terminations.

        A life begins with the first step of the episode or with the step after a termination. If rows are time steps,
        the step with discount zero begins the next life. If the first step of the life is overwritten, the result is
        the first position of the episode. The cost grows with the earlier stored steps of the episode.

        Raises:
            IndexError: a step is not stored, or an environment id is out of range.
            KeyError: the data have no termination flag.
            RuntimeError: the buffer has no index of episodes.
        """
        env, position = torch.broadcast_tensors(env_ids, pos)
        shape, env, position = env.shape, env.flatten(), position.flatten()
        offset = int(not self.layout.time_steps)  # a terminating transition is the last step of its life
        with self.lock_if_shared():
            begin = self.get_episode_begin_position(position, env)
            oldest = self.writer.oldest[env]
            group, steps, _ = steps_between(begin.maximum(oldest).numpy(), position.numpy() - offset)
            owner = torch.from_numpy(group)
            is_terminated = self._terminated(self.writer.cell(env[owner], torch.from_numpy(steps)))
        life_begin = torch.from_numpy(steps)[is_terminated] + offset
        return begin.scatter_reduce(0, owner[is_terminated], life_begin, "amax").view(shape)

    def _terminated(self, cells: Tensor) -> Tensor:
        (_, leaf), *_ = self.storage.leaves(self.layout.terminated)
        flags = leaf.index_select(0, cells.to(leaf.device))
        return torch.from_numpy(self.layout.terminates(flags, self.writer.done_reduce))

    # ------------------------------------------------------------------ priorities

    @property
    def initial_priority(self) -> float:
        """Priority of new steps."""
        prioritized = find_prioritized(self.sampler)
        return self._initial_priority if prioritized is None else prioritized.default_priority

    def update_priority(self, env_ids: Tensor, positions: Tensor, priorities: Tensor | None = None) -> None:
        """Set priorities of steps; ignore steps that were overwritten in the meantime.

        Two arguments are cells and their priorities, as in TorchRL.

        Args:
            env_ids: environments, ``[B]``.
            positions: positions of the steps, ``[B]``, from a :class:`BatchInfo`.
            priorities: ``[B]``, or ``[B, ...]`` for the sampler's ``reduction``.

        Raises:
            IndexError: a step was not written yet, or an environment id is out of range.
            ValueError: a priority is negative, NaN or infinite, shapes differ, or the buffer draws without priorities.
        """
        if priorities is None:
            super().update_priority(env_ids, positions)
            return
        if find_prioritized(self.sampler) is None:
            raise ValueError("The buffer samples without priorities. Set prioritized_sampling=True.")
        env, position = as_integers(env_ids, "env_ids").cpu(), as_integers(positions, "positions").cpu()
        priority = torch.as_tensor(priorities)
        if not env.shape == position.shape == priority.shape[:1] or env.ndim != 1:
            shapes = [list(tensor.shape) for tensor in (env, position, priority)]
            raise ValueError(f"env_ids and positions must be [B], and priorities [B, ...], got the shapes {shapes}.")
        with self.locked():
            writer, begin = self.writer, np.zeros(self.num_environments, np.int64)
            check_steps(env.numpy(), position.numpy(), begin, writer.positions.numpy())
            stored = position >= writer.oldest[env]
            self.set_priority(writer.cell(env, position)[stored], priority[stored.to(priority.device)])

    # ------------------------------------------------------------------ state

    def _post_load(self) -> None:
        if self.enable_checkpoint:  # end the unfinished episodes
            self.writer.cut()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.num_environments} x {self.max_length}, {len(self)} stored)"
