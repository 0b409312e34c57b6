"""Functions that build and validate the parts of a buffer."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import ConsumingSampler, Sampler

from torchrl_lightning._core.keys import NEXT, REPEATED
from torchrl_lightning._core.protocols import SamplerApi
from torchrl_lightning._core.tree import check_tensordict, key_text, nested_keys, path_of
from torchrl_lightning.kernels.indices import unique_last
from torchrl_lightning.replay.cells import check_values
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.rewrites import plan_entries
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.ring_writer import RingWriter
from torchrl_lightning.replay.rings import Rings

logger = logging.getLogger(__name__)


def find_prioritized(sampler: Sampler) -> PrioritizedSampler | None:
    """Return the :class:`PrioritizedSampler`: ``sampler`` itself or its attribute ``prioritized``, else None."""
    prioritized = getattr(sampler, "prioritized", sampler)
    return prioritized if isinstance(prioritized, PrioritizedSampler) else None


def uses_priorities(sampler: Sampler) -> bool:
    """Return whether a sampler of any kind uses priorities."""
    inner = getattr(sampler, "prioritized", sampler)
    return inner is not None and type(inner).update_priority is not Sampler.update_priority


def init_priorities(sampler: Sampler | None, max_size: int) -> None:
    """Allocate priorities for ``max_size`` cells, unless the prioritized sampler was built with ``max_capacity``."""
    prioritized = None if sampler is None else find_prioritized(sampler)
    if prioritized is not None:
        prioritized.init_table(max_size)


def entries_to_write(
    storage: RingStorage, batch: TensorDictBase, shape: torch.Size, key: NestedKey, n_steps: int
) -> list[tuple[tuple[str, ...], Tensor]]:
    """Return a batch's entries at or below ``key``, to write them back; raise an error if one is unsuitable."""
    if n_steps > 1 and path_of(key)[0] == "next":
        raise ValueError(
            f"keys must not be below 'next' with n_steps={n_steps}, because a batch reads these entries from a later "
            f"step, got {key!r}. Write back other entries."
        )
    entries = []
    for path, stored in storage.leaves(key):
        values = batch.get(path, None)
        if not isinstance(values, Tensor):
            raise KeyError(f"The batch has no entry {key_text(path)} to write back.")
        check_values(path, stored, values, shape)
        entries.append((path, values.detach()))
    return entries


def plan_write_back(
    storage: RingStorage, rings: Rings, batch: TensorDictBase, keys: Sequence[NestedKey], n_steps: int
) -> Callable[[], Tensor]:
    """Validate entries of a sampled batch; return a function that writes them back and returns the cells.

    An error in one entry is raised before any entry is written.
    """
    check_tensordict(batch)
    index, write_versions = batch.get("index", None), batch.get("write_position", None)
    if index is None:
        raise KeyError(f"The batch has no entry 'index'; it has {sorted(map(str, batch.keys()))}.")
    if write_versions is None:
        raise KeyError("The batch has no entry 'write_position'; without it, overwritten cells are unknown.")
    values = [pair for key in nested_keys(keys) for pair in entries_to_write(storage, batch, index.shape, key, n_steps)]
    if not values:
        return lambda: index.new_zeros(0).cpu()
    cells = index.detach().reshape(-1).cpu()
    is_current = rings.is_unchanged(cells, write_versions.reshape(-1).cpu())
    mask = batch.get("mask", None)
    if mask is not None:
        is_current &= mask.to(is_current.device).reshape(-1)
    rows = is_current.nonzero().squeeze(1)
    rows = rows[unique_last(cells[rows])]
    cells = cells[rows]
    changes = {path: leaf.flatten(0, index.ndim - 1)[rows.to(leaf.device)] for path, leaf in values}
    write = plan_entries(storage, changes, cells)

    def write_cells() -> Tensor:
        rings.before_change(rings.env_of(cells).numpy())
        write()
        return cells

    return write_cells


def drop_next_entries(info: dict[Any, Any]) -> None:
    """Remove a sampler's entries below ``"next"``. N-step returns read the next entries from a later step."""
    for key in tuple(info):
        if key[0] == NEXT:
            del info[key]


def excluded_keys(buffer: Any) -> list[str]:
    """Return the names of a rollout's entries that the buffer need not store; its sampler does not read them."""
    key = SamplerApi.of(buffer.sampler).traj_key
    trajectory_key = key[0] if isinstance(key, tuple) else key
    return [name for name in REPEATED if name != trajectory_key]


def check_single_steps(sampler: Any, method: str) -> None:
    """Raise a ValueError if a sampler draws windows; ``method`` is the buffer's method that returns windows."""
    length = SamplerApi.of(sampler).batch_length
    if length is not None:
        raise ValueError(
            f"sampler must draw single steps here, got a {type(sampler).__name__} with batch_length={length}. "
            f"Call {method}(), which returns windows."
        )


def default_storage() -> RingStorage:
    """Build a storage of 1000 cells, TorchRL's default, and log a warning that this is small."""
    logger.warning(
        "storage is not set, so this ExperienceBuffer has 1000 cells, TorchRL's default; pass storage=RingStorage(N)."
    )
    return RingStorage(1000)


def ring_writer(
    writer: RingWriter | None, num_envs: int | None, track_episodes: bool | None, **options: Any
) -> RingWriter:
    """Return ``writer``, or build a new writer with these options; None means the default.

    Raises:
        ValueError: both a writer and options are given.
    """
    if writer is None:
        return RingWriter(1 if num_envs is None else num_envs, track_episodes=track_episodes, **options)
    if conflicting := [f"{name}={value!r}" for name, value in options.items() if value not in (None, True)]:
        raise ValueError(
            f"{', '.join(conflicting)} must be an argument of the writer if a writer is given, got both. Build it with "
            f"RingWriter({', '.join(conflicting)})."
        )
    return writer


def check_parts(storage: Any, writer: Any, sampler: Any) -> None:
    """Validate the parts of a buffer over rings; raise TypeError or ValueError if a part is unsuitable."""
    for name, part, expected_type in (("storage", storage, RingStorage), ("writer", writer, RingWriter)):
        if part is not None and not isinstance(part, expected_type):
            raise TypeError(
                f"{name} must be a {expected_type.__name__}, got a {type(part).__name__}. Use TorchRL's "
                "TensorDictReplayBuffer for other storages and writers; it also accepts our samplers."
            )
    if isinstance(sampler, ConsumingSampler):
        raise TypeError(
            f"sampler must not remove cells, because rings remove only the oldest, got a {type(sampler).__name__}. Use "
            "TorchRL's TensorDictReplayBuffer(consume_after_n_samples=...)."
        )
    if storage is not None and writer is not None and storage.writer not in (None, writer):
        gc.collect()  # another buffer that used a part may be deleted but not yet collected
        if storage.writer is not None:
            raise ValueError(
                "storage must not belong to another buffer, got a RingStorage that another buffer fills, e.g. because "
                "functools.partial(ExperienceBuffer, storage=RingStorage(...)) was called twice. Build a storage and a "
                "sampler for each buffer, e.g. with lambda num_envs: ExperienceBuffer(storage=RingStorage(...), "
                "num_envs=num_envs), or pass the same writer."
            )


def check_lengths(buffer: Any) -> None:
    """Raise ValueError if returns or windows are longer than a ring, or the sampler has too few priorities.

    A buffer without a DataModule may skip this check. The buffer then shortens returns, and pads or rejects windows.
    """
    size, num_envs, sampler = buffer.storage.max_size, buffer.writer.num_envs, buffer.sampler
    length = size // num_envs
    if buffer.n_steps > length:
        raise ValueError(
            f"n_steps must be at most max_size / num_envs = {length}, got {buffer.n_steps}, because a ring "
            "stores no longer return. Raise max_size, or lower n_steps."
        )
    api = SamplerApi.of(sampler)
    window = api.batch_length
    if window is not None and window > length and api.episode_ends != "pad":
        raise ValueError(
            f"batch_length must be at most max_size / num_envs = {length}, got {window}, because a ring stores "
            "no longer window. Raise max_size, or lower batch_length."
        )
    prioritized = find_prioritized(sampler)
    if prioritized is not None:
        prioritized.check_capacity(size)
