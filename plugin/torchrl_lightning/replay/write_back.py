"""Writing of changed entries of a sampled batch back into the cells that they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor

from torchrl_lightning.entries import check_tensordict, leaves_of, name_of, path_of
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.writer import RingWriter
from torchrl_lightning.segment_kernels import last_of_each

if TYPE_CHECKING:
    from torchrl_lightning.replay.buffer import ExperienceBuffer


def write_back(buffer: ExperienceBuffer, batch: TensorDictBase, keys: Sequence[NestedKey]) -> Tensor:
    """Write entries of a batch into its cells; the caller holds the locks.

    Args:
        buffer: where the batch is from.
        batch: flat ``[B]``, or windows ``[B, T]`` with a ``mask``.
        keys: leaves, or levels of which everything is written.

    Returns:
        The cells written, each once.

    Raises:
        KeyError: an entry is neither stored nor in the batch, or nothing says what was overwritten since.
        TypeError: the batch is not a TensorDict, or the cells do not lie in a :class:`RingStorage`.
        ValueError: a shape or dtype differs from what is stored, or an entry is that of a later step (n-step returns).
    """
    check_tensordict(batch)
    storage, _, _ = buffer.parts
    if not isinstance(storage, RingStorage):
        raise TypeError(f"Entries are written back into a RingStorage, this buffer has a {type(storage).__name__}.")
    index = batch.get("index", None)
    if index is None:
        raise KeyError(f"The batch has no entry 'index'; it has {sorted(map(str, batch.keys()))}.")
    keys = [keys] if isinstance(keys, str) else keys
    pairs = [pair for key in keys for pair in _pairs(storage, batch, index.shape, key, buffer.n_steps)]
    if not pairs:
        return torch.zeros(0, dtype=torch.int64)
    keep = _unchanged(buffer, batch, index)
    mask = batch.get("mask", None)
    if mask is not None:
        keep &= mask.to(keep.device).reshape(-1)
    cells = index.detach().reshape(-1).cpu()
    rows = keep.nonzero().squeeze(1)
    rows = rows[last_of_each(cells[rows])]
    cells = cells[rows]
    if len(rows):
        for stored, values in pairs:
            flat = values.reshape(-1, *stored.shape[1:])
            stored.index_copy_(0, cells.to(stored.device), flat[rows.to(flat.device)].to(stored.device))
        storage.touch()
    return cells


def _pairs(
    storage: RingStorage, batch: TensorDictBase, shape: torch.Size, key: NestedKey, n_steps: int
) -> list[tuple[Tensor, Tensor]]:
    unraveled = unravel_key(key)
    path = path_of(unraveled)
    if n_steps > 1 and path[0] == "next":
        raise ValueError(
            f"With n_steps={n_steps} the entry {key!r} of a batch is not that of its cells but of a later step; write "
            "back entries outside of 'next' alone."
        )
    node: Any = storage.tree
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    if node is None:
        raise KeyError(f"There is no stored entry {key!r} to write back to; stored are {sorted(storage.tree)}.")
    found = []
    for leaf_path, stored in leaves_of(node, path) if isinstance(node, dict) else [(path, node)]:
        values = batch.get(leaf_path, None)
        if not isinstance(values, Tensor):
            raise KeyError(f"The batch has no entry {name_of(leaf_path)} to write back.")
        expected = torch.Size([*shape, *stored.shape[1:]])
        if values.shape != expected or values.dtype != stored.dtype:
            raise ValueError(
                f"Entry {name_of(leaf_path)} is {list(values.shape)} {values.dtype}, to be written back it must be "
                f"{list(expected)} {stored.dtype}; nothing was written."
            )
        found.append((stored, values.detach()))
    return found


def _unchanged(buffer: ExperienceBuffer, batch: TensorDictBase, index: Tensor) -> Tensor:
    _, sampler, writer = buffer.parts
    cells = index.reshape(-1).cpu()
    stamp, generation = batch.get("write_position", None), batch.get("write_generation", None)
    if stamp is not None and isinstance(writer, RingWriter):
        return writer.is_unchanged(cells, stamp.reshape(-1).cpu())
    if generation is not None and isinstance(sampler, PrioritizedSampler):
        return sampler.table.generations.cpu()[cells] == generation.reshape(-1).cpu()
    raise KeyError(
        "The batch does not say which of its cells were overwritten since: it needs 'write_position' (a RingWriter's "
        "buffer adds it to every batch) or 'write_generation' (from PrioritizedSampler)."
    )
