"""Write collected steps into a replay buffer, and convert batches for checkpoints.

:class:`PreparedWrite` writes rows that always have the same memory: it checks them against the buffer only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lightning._core.keys import ENV_IDS, VALID
from torchrl_lightning._core.protocols import SamplerApi, SourceApi
from torchrl_lightning._core.state import state_error
from torchrl_lightning.datamodules._run.collector_stream import CollectorStream, Part
from torchrl_lightning.datamodules._run.episode_statistics import FinishedEpisodes, ends_of
from torchrl_lightning.environments.backends.next_step import tracks_resets
from torchrl_lightning.environments.env_ids import Trajectories, mark_truncated, ring_ids
from torchrl_lightning.kernels.row_copies import NO_FLAGS
from torchrl_lightning.replay import ExperienceBuffer


def steps_in(rollout: TensorDictBase) -> list[TensorDictBase]:
    """Split a rollout ``[N, T]`` with reset rows into rollouts ``[M, t]`` without them.

    Each part stores its environment ids; a rollout without resets is returned unchanged.
    """
    made = rollout.get(VALID, None)
    if made is None or made.all():
        return [rollout]
    change = (made[:, 1:] != made[:, :-1]).any(0).nonzero().flatten() + 1
    parts = []
    for begin, end in pairwise([0, *change.tolist(), made.shape[1]]):
        ids = made[:, begin].nonzero().flatten()
        if len(ids):
            part = rollout[ids, begin:end]
            part[ENV_IDS] = ids[:, None].expand(part.shape)
            parts.append(part)
    return parts


def check_resets(env: Any, buffer: ExperienceBuffer, ranks: int) -> None:
    """Raise a ValueError if reset rows meet a sampler that needs evenly filled rings, or several ranks."""
    if not tracks_resets(env):
        return
    if ranks > 1:
        raise ValueError(
            f"{env.unwrapped} has AutoresetMode.NEXT_STEP, with which {ranks} ranks would collect different numbers of "
            "frames. Give env= an id, or AutoresetMode.SAME_STEP."
        )
    if not SamplerApi.of(buffer.sampler).supports_uneven_rings:
        raise ValueError(
            f"{env.unwrapped} has AutoresetMode.NEXT_STEP, whose rows fill the rings unevenly, which "
            f"{type(buffer.sampler).__name__} cannot read. Take a UniformSampler, or give env= an id."
        )


class Steps:
    """A rollout of a collector.

    Args:
        rollout: ``[N, T]``.
        num_envs: number of environments in the buffer.
        left_out: entries that are not stored.
        trajectories: finds trajectories that the collector cuts; None if flags mark all beginnings.

    Attributes:
        ids: Environment of each row; None for all environments in order.
        ends: Rewards, end flags, and the mask of replayed steps.
    """

    def __init__(
        self,
        rollout: TensorDictBase,
        num_envs: int,
        left_out: list[str],
        trajectories: Trajectories | None = None,
    ) -> None:
        self.rollout, self._left_out, self.trajectories = rollout, left_out, trajectories
        self.ids: Tensor | None = ring_ids(rollout, num_envs)
        self.ends: dict[str, Any] = ends_of(rollout)

    def write(self, buffer: Any, truncated: bool = False) -> None:
        """Write the steps into a buffer, or into a source that stores the rows.

        Args:
            buffer: the buffer or source.
            truncated: the environments are reset afterwards, so that the last steps are truncated.
        """
        if truncated:
            mark_truncated(self.rollout)
        buffer.extend(self.rollout.exclude(*self._left_out), env_ids=self.ids)

    def write_in_parts(self, buffer: Any, truncated: bool = False) -> Iterator[tuple[Part, dict[str, Any]]]:
        """Write the steps in parts, split at cut trajectories, and yield each part with its :attr:`ends`.

        A trajectory is cut by ids, by ``is_init``, by ``writer.cut()``, or by a first row that differs from the stored
        successor.

        Args:
            buffer: a buffer, or a source that stores the rows; None to write nothing.
            truncated: as in :meth:`write`.
        """
        assert self.trajectories is not None
        length, ends = self.rollout.shape[1], self.ends
        if truncated:
            ends = {**ends, "done": ends["done"].clone()}  # before mark_truncated() changes it
            mark_truncated(self.rollout)
        rows = self.rollout.exclude(*self._left_out)
        for begin, end, found in self.trajectories.split(self.rollout, self.ids):
            steps = slice(begin, end)
            cut = torch.tensor(found, dtype=torch.int64)
            if buffer is not None:
                if found:
                    _cut(buffer, cut)
                part = rows if end - begin == length else rows[:, steps]
                cut = torch.cat([cut, _write(buffer, part, self.ids)]).unique()
            those = {name: None if value is None else value[:, steps] for name, value in ends.items()}
            yield Part(self.rollout[:, steps], cut if len(cut) else None, end == length), those

    def store_in_parts(
        self,
        buffer: Any,
        cut: bool,
        feed: CollectorStream,
        episodes: FinishedEpisodes,
        note: Callable[..., None] | None = None,
    ) -> None:
        """Write a rollout of a user's collector, and count the same episodes as the buffer stores.

        Args:
            buffer: The buffer or source; None if another process writes the rollout.
            cut: The environments are reset afterwards, so that the last steps are truncated.
            feed: Resets the sums over cut episodes.
            episodes: Counts finished episodes.
            note: Adds the rollout to the normalisation statistics; None without normalisation.
        """
        for part, ends in self.write_in_parts(buffer, cut):
            if part.begun is not None:
                feed.forget_unfinished(part.begun)
            is_reset = cut and part.is_last
            episodes.add(**ends, env_ids=self.ids, cut=is_reset)
            if note is not None:
                note(part.rollout, self.ids, cut=is_reset)


def _write(buffer: Any, rows: TensorDictBase, env_ids: Tensor | None) -> Tensor:
    """Write rows; return environments with a new episode at the first row, if known."""
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


def _cut(buffer: Any, env_ids: Tensor) -> None:
    """End the trajectories of environments, if the buffer or source supports it."""
    if isinstance(buffer, ExperienceBuffer):
        with buffer.locked():
            buffer.writer.cut(env_ids)
    elif (cut := SourceApi.of(buffer).cut) is not None:
        cut(env_ids)


class SharedMemorySteps:
    """Rows in the layout of the rings; the collector overwrites the same memory for each rollout.

    Args:
        rows: ``[N]``, or ``[T, N]`` for several steps.
    """

    ids = trajectories = None

    def __init__(self, rows: TensorDictBase) -> None:
        self.rows = rows
        self.rollout = rows.unsqueeze(1) if rows.ndim == 1 else rows.transpose(0, 1)  # the same memory as [N, T]
        self.ends: dict[str, Any] = ends_of(self.rollout)
        self._prepared: PreparedWrite | None = None
        self._is_known = False  # whether the buffer has stored such rows

    def write(self, buffer: ExperienceBuffer, truncated: bool = False) -> None:
        """Write the current rows into a buffer; from the third write on, with one compiled call if possible."""
        if truncated:
            mark_truncated(self.rollout)
        if self._prepared is not None and self._prepared.buffer is buffer:
            self._prepared.write()
            return
        buffer.extend(self.rows)
        if self._is_known:
            with suppress(ValueError):
                self._prepared = PreparedWrite(buffer, self.rows)
        self._is_known = True


def plain_batch(batch: TensorDictBase | None) -> dict[str, Any] | None:
    """Return a batch as plain data."""
    if batch is None:
        return None
    return {"shape": list(batch.batch_size), "names": list(batch.names), "entries": batch.cpu().to_dict()}


def read_batch(value: Any, name: str) -> TensorDictBase | None:
    """Rebuild a batch from the result of :func:`plain_batch`."""
    if value is None:
        return None
    try:
        return TensorDict(value["entries"], value["shape"], names=value["names"]).clone()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        raise state_error(value, name, "a batch: shape, names, entries") from None


class PreparedWrite:
    """Write the same TensorDict repeatedly with one compiled call, with the effect of ``buffer.extend(rows)``.

    Args:
        buffer: the buffer; it has stored these rows before.
        rows: steps of all environments, ``[num_envs]`` or time-major ``[T, num_envs]``.

    Raises:
        ValueError: ``extend`` would have to convert or transform the rows, or to set priorities.

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
            raise ValueError(f"Rows are prepared for a ring that has stored some, got {storage} and {writer}.")
        flat = rows if rows.ndim == 1 else rows.reshape(-1)
        count = flat.shape[0]
        self._writer, self._storage, self._steps = writer, storage, count // writer.num_envs
        self._leaves, addresses = storage.check(flat, count)  # keep the leaves: their addresses stay valid
        self._done, self._init = writer.flags(flat, self._leaves, self._steps)
        given = [rows.get(path).data_ptr() for path in storage.cells.places]
        flags = [flag for key in (writer.done_key, writer.init_key) if (flag := flat.get(key, None)) is not None]
        if (
            addresses is None
            or given != [leaf.data_ptr() for leaf in self._leaves]
            or any(flag.dtype != torch.bool or flag.numel() != count for flag in flags)
            or flat.get(buffer.priority_key, None) is not None
            or buffer.transforms
        ):
            raise ValueError(
                "Rows that are converted, transformed or bring priorities cannot be prepared; write them by extend."
            )
        self._sources = addresses[0]

    def write(self) -> Tensor:
        """Write the current rows, and return their cells."""
        return self.buffer.write_with(self._advance)

    def _advance(self) -> Tensor:
        writer, cells = self._writer, self._storage.cells
        assert cells is not None
        flags = (NO_FLAGS, NO_FLAGS) if writer.rings.index is None else (self._done, self._init)
        return writer.advance((self._sources, cells.table), None, self._steps, *flags)
