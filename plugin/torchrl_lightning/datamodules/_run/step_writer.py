"""Write collected steps into a replay buffer.

:class:`PreparedWrite` writes rows that always have the same memory. It checks once whether the rows fit the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.keys import ENV_IDS, VALID
from torchrl_lightning._core.protocols import SamplerApi, SourceApi
from torchrl_lightning.datamodules._run.collector_stream import CollectorStream, RolloutPart
from torchrl_lightning.datamodules._run.episode_statistics import FinishedEpisodes, read_episode_data
from torchrl_lightning.environments.backends.next_step import tracks_resets
from torchrl_lightning.environments.env_ids import TrajectorySplitter, mark_truncated, ring_ids
from torchrl_lightning.kernels.row_copies import NO_FLAGS
from torchrl_lightning.replay import ExperienceBuffer


def split_at_resets(rollout: TensorDictBase) -> list[TensorDictBase]:
    """Split a rollout ``[N, T]`` with reset rows into rollouts ``[M, t]`` without reset rows.

    Each part stores its environment ids; a rollout without resets is returned unchanged.
    """
    valid = rollout.get(VALID, None)
    if valid is None or valid.all():
        return [rollout]
    change = (valid[:, 1:] != valid[:, :-1]).any(0).nonzero().flatten() + 1
    parts = []
    for begin, end in pairwise([0, *change.tolist(), valid.shape[1]]):
        ids = valid[:, begin].nonzero().flatten()
        if len(ids):
            part = rollout[ids, begin:end]
            part[ENV_IDS] = ids[:, None].expand(part.shape)
            parts.append(part)
    return parts


def check_resets(env: Any, buffer: ExperienceBuffer, ranks: int) -> None:
    """Raise a ValueError if a run with reset rows has several ranks, or a sampler that needs evenly filled rings."""
    if not tracks_resets(env):
        return
    if ranks > 1:
        raise ValueError(
            f"env must use AutoresetMode.SAME_STEP on {ranks} ranks, got AutoresetMode.NEXT_STEP of {env.unwrapped}, "
            "with which the ranks would collect different numbers of frames. Change the mode, or pass env= as an id."
        )
    if not SamplerApi.of(buffer.sampler).supports_uneven_rings:
        raise ValueError(
            f"env must use AutoresetMode.SAME_STEP with {type(buffer.sampler).__name__}, got AutoresetMode.NEXT_STEP "
            f"of {env.unwrapped}, which fills the rings unevenly. Use a UniformSampler, or pass env= as an id."
        )


class Steps:
    """A rollout of a collector.

    Args:
        rollout: ``[N, T]``.
        num_envs: number of environments in the buffer.
        excluded: entries that are not stored.
        trajectories: finds trajectories that the collector cuts; None if flags mark the start of each trajectory.

    Attributes:
        ids: Environment of each row; None for all environments in order.
        episode_data: Rewards, end flags, and the mask of replayed steps.
    """

    def __init__(
        self,
        rollout: TensorDictBase,
        num_envs: int,
        excluded: list[str],
        trajectories: TrajectorySplitter | None = None,
    ) -> None:
        self.rollout, self._excluded, self.trajectories = rollout, excluded, trajectories
        self.ids: Tensor | None = ring_ids(rollout, num_envs)
        self.episode_data: dict[str, Any] = read_episode_data(rollout)

    def write(self, buffer: Any, truncated: bool = False) -> None:
        """Write the steps into a buffer, or into a source that stores the rows.

        Args:
            buffer: the buffer or source.
            truncated: whether to mark the last steps as truncated, because the environments are reset afterwards.
        """
        if truncated:
            mark_truncated(self.rollout)
        buffer.extend(self.rollout.exclude(*self._excluded), env_ids=self.ids)

    def write_in_parts(self, buffer: Any, truncated: bool = False) -> Iterator[tuple[RolloutPart, dict[str, Any]]]:
        """Write the steps in parts, split at cut trajectories, and yield each part with its :attr:`episode_data`.

        Trajectories are cut by changed ids, by ``is_init``, by ``writer.cut()``, and by a first row that differs from
        the stored successor.

        Args:
            buffer: a buffer, or a source that stores the rows; None to write nothing.
            truncated: as in :meth:`write`.
        """
        assert self.trajectories is not None
        length, episode_data = self.rollout.shape[1], self.episode_data
        if truncated:
            episode_data = {**episode_data, "done": episode_data["done"].clone()}  # before mark_truncated() changes it
            mark_truncated(self.rollout)
        rows = self.rollout.exclude(*self._excluded)
        for begin, end, cut_ids in self.trajectories.split(self.rollout, self.ids):
            steps = slice(begin, end)
            cut = torch.tensor(cut_ids, dtype=torch.int64)
            if buffer is not None:
                if cut_ids:
                    _end_trajectories(buffer, cut)
                part = rows if end - begin == length else rows[:, steps]
                cut = torch.cat([cut, _write(buffer, part, self.ids)]).unique()
            part_data = {name: None if value is None else value[:, steps] for name, value in episode_data.items()}
            yield RolloutPart(self.rollout[:, steps], cut if len(cut) else None, end == length), part_data

    def store_in_parts(
        self,
        buffer: Any,
        cut: bool,
        stream: CollectorStream,
        episodes: FinishedEpisodes,
        update_statistics: Callable[..., None] | None = None,
    ) -> None:
        """Write a rollout of a user's collector, and count the episodes that the buffer stores.

        Args:
            buffer: The buffer or source; None if another process writes the rollout.
            cut: Whether to mark the last steps as truncated, because the environments are reset afterwards.
            stream: Resets the sums over cut episodes.
            episodes: Counts finished episodes.
            update_statistics: Adds the rollout to the normalisation statistics; None without normalisation.
        """
        for part, episode_data in self.write_in_parts(buffer, cut):
            if part.cut_env_ids is not None:
                stream.forget_unfinished(part.cut_env_ids)
            is_reset = cut and part.is_last
            episodes.add(**episode_data, env_ids=self.ids, cut=is_reset)
            if update_statistics is not None:
                update_statistics(part.rollout, self.ids, cut=is_reset)


def _write(buffer: Any, rows: TensorDictBase, env_ids: Tensor | None) -> Tensor:
    """Write rows; return the environments with a new episode at the first row; empty if this is unknown."""
    writer = buffer.writer if isinstance(buffer, ExperienceBuffer) else None
    if writer is None or writer.index is None:
        buffer.extend(rows, env_ids=env_ids)
        return torch.empty(0, dtype=torch.int64)
    env = torch.arange(writer.num_envs) if env_ids is None else env_ids
    first = writer.positions[env]
    buffer.extend(rows, env_ids=env_ids)
    stored = first >= writer.oldest[env]
    env, first = env[stored], first[stored]
    return env[writer.index.begin(env, first, clip=False) == first]


def _end_trajectories(buffer: Any, env_ids: Tensor) -> None:
    """End the trajectories of environments, if the buffer or source supports it."""
    if isinstance(buffer, ExperienceBuffer):
        with buffer.locked():
            buffer.writer.cut(env_ids)
    elif (cut := SourceApi.of(buffer).cut) is not None:
        cut(env_ids)


class SharedMemorySteps:
    """Rows in the layout of the rings, in a block of memory that the collector overwrites with each rollout.

    Args:
        rows: ``[N]``, or ``[T, N]`` for several steps.
    """

    ids = trajectories = None

    def __init__(self, rows: TensorDictBase) -> None:
        self.rows = rows
        self.rollout = rows.unsqueeze(1) if rows.ndim == 1 else rows.transpose(0, 1)  # the same memory as [N, T]
        self.episode_data: dict[str, Any] = read_episode_data(self.rollout)
        self._prepared: PreparedWrite | None = None
        self._is_stored = False  # whether the buffer has already stored these rows

    def write(self, buffer: ExperienceBuffer, truncated: bool = False) -> None:
        """Write the current rows into a buffer; the third and later writes use one compiled call if possible."""
        if truncated:
            mark_truncated(self.rollout)
        if self._prepared is not None and self._prepared.buffer is buffer:
            self._prepared.write()
            return
        buffer.extend(self.rows)
        if self._is_stored:
            with suppress(ValueError):
                self._prepared = PreparedWrite(buffer, self.rows)
        self._is_stored = True


class PreparedWrite:
    """Write the same TensorDict repeatedly with one compiled call, with the effect of ``buffer.extend(rows)``.

    Args:
        buffer: the buffer, which must have stored these rows once.
        rows: steps of all environments, ``[num_envs]`` or time-major ``[T, num_envs]``.

    Raises:
        ValueError: ``extend`` would convert or transform the rows, or set priorities.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning.replay import ExperienceBuffer, RingStorage
        >>> buffer, rows = ExperienceBuffer(storage=RingStorage(4)), TensorDict({"a": torch.zeros(1)}, [1])
        >>> _ = buffer.extend(rows)
        >>> prepared = PreparedWrite(buffer, rows)
        >>> rows["a"].fill_(3)
        tensor([3.])
        >>> prepared.write().tolist(), buffer[:]["a"].tolist()
        ([1], [0.0, 3.0])
    """

    def __init__(self, buffer: ExperienceBuffer, rows: TensorDictBase) -> None:
        self.buffer, self.rows = buffer, rows
        storage, _, writer = buffer.parts
        if storage.cells is None:
            raise ValueError(
                f"buffer must be a ring with stored rows, got {storage} and {writer}. Write the rows once by extend."
            )
        flat = rows if rows.ndim == 1 else rows.reshape(-1)
        count = flat.shape[0]
        self._writer, self._storage, self._steps = writer, storage, count // writer.num_envs
        self._leaves, addresses = storage.check(flat, count)  # keep the leaves: their addresses stay valid
        self._done, self._init = writer.flags(flat, self._leaves, self._steps)
        pointers = [rows.get(path).data_ptr() for path in storage.cells.leaf_index]
        flags = [flag for key in (writer.done_key, writer.init_key) if (flag := flat.get(key, None)) is not None]
        if (
            addresses is None
            or pointers != [leaf.data_ptr() for leaf in self._leaves]
            or any(flag.dtype != torch.bool or flag.numel() != count for flag in flags)
            or flat.get(buffer.priority_key, None) is not None
            or buffer.transforms
        ):
            raise ValueError(
                "rows must be stored without conversion, transforms or priorities to be prepared. Write them by extend."
            )
        self._sources = addresses[0]

    def write(self) -> Tensor:
        """Write the current rows, and return their cells."""
        return self.buffer.write_with(self._advance)

    def _advance(self) -> Tensor:
        writer, cells = self._writer, self._storage.cells
        assert cells is not None
        flags = (NO_FLAGS, NO_FLAGS) if writer.rings.index is None else (self._done, self._init)
        return writer.write_rows((self._sources, cells.table), None, self._steps, *flags)
