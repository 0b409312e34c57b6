"""Reading windows ``[B, T]`` out of a storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.entries import Path, Tree, leaves_of, moved, tree_of
from torchrl_lightning.replay.storage import RingStorage

NAMES = (None, "time")


def first_states(storage: Storage, index: Tensor, keys: Collection[Path], across: bool) -> dict[Path, Tensor]:
    """Read recurrent states of windows, ``[B, T, ...]``, as TorchRL's ``GRUModule`` and ``LSTMModule`` read them.

    Only the first state of a window is read and expanded over ``T``, because these modules read the state at the first
    step of a row and wherever ``is_init`` splits it; there it is zero. Beside it, if stored, comes the state after the
    step, under ``"next"``, for unrolling over the next observations: that of the first step, and at a later ``is_init``
    the stored one.

    Args:
        storage: where the cells are.
        index: cells, ``[B, T]``.
        keys: root keys of recurrent states.
        across: whether episodes may begin inside a window.

    Returns:
        Leaves by path; empty if nothing of that name is stored.
    """
    if not keys:
        return {}
    if isinstance(storage, RingStorage) and not any(key[0] in storage.tree for key in keys):
        return {}
    cells = index if across else index[:, :1]
    tree = storage.tree if isinstance(storage, RingStorage) else _read(storage.get(cells))
    if not any(_below(tree, key) is not None for key in keys):
        return {}
    if isinstance(storage, RingStorage):
        cells = cells.to(storage.device)
    else:  # what was read, is read; number it
        cells = torch.arange(cells.numel(), device=index.device).view(cells.shape)
    init = _below(tree, ("is_init",))
    begins = None
    if isinstance(init, Tensor):
        begins = init.index_select(0, cells.reshape(-1).to(init.device)).reshape(*cells.shape, -1).any(-1)
    one_step = not isinstance(storage, RingStorage) or storage.n_step is None
    states: dict[Path, Tensor] = {}
    for key in keys:
        for path, leaf in _leaves(tree, key):
            states[path] = _expanded(leaf, cells, index.shape, begins, zero=True)
        # With n-step returns the state after the last step is read, with everything else of that step.
        for path, leaf in _leaves(tree, ("next", *key)) if one_step else ():
            states[path] = _expanded(leaf, cells, index.shape, begins, zero=False)
    return states


def read_windows(storage: RingStorage, index: Tensor, info: Mapping[Any, Any]) -> TensorDict:
    """Read windows ``[B, T]``, less the entries that a sampler gives itself.

    Args:
        storage: where the cells are.
        index: cells, ``[B, T]``; all of them filled.
        info: entries beside those that are stored, or in their place.
    """
    device = storage.device if isinstance(storage.device, torch.device) else index.device
    index = moved(index, device)
    own = {key: value for key, value in info.items() if isinstance(key, tuple)}
    entries = storage.gather(index, NAMES, own)
    entries["index"] = index
    for key, value in info.items():
        if isinstance(key, str):
            entries[key] = moved(value, device)
    batch = new_tensordict(entries, index.shape, NAMES, device)
    for key, value in own.items():
        batch.set(key, value)
    return batch


def _expanded(leaf: Tensor, cells: Tensor, shape: torch.Size, begins: Tensor | None, *, zero: bool) -> Tensor:
    cells = cells.to(leaf.device)
    state = leaf.index_select(0, cells[:, 0])
    tail = [1] * (state.ndim - 1)
    if zero and begins is not None:
        state = state.masked_fill(begins[:, 0].view(-1, *tail), 0)
    states = state.unsqueeze(1).expand(*shape, *state.shape[1:])
    if begins is None or begins.shape[1] == 1:
        return states
    row, step = begins[:, 1:].nonzero(as_tuple=True)
    if not len(row):
        return states
    states = states.clone()
    states[row, step + 1] = 0 if zero else leaf.index_select(0, cells[row, step + 1])
    return states


def _read(rows: TensorDictBase) -> Tree:
    return tree_of(rows.reshape(-1))


def _below(tree: Tree, path: Path) -> Any:
    node: Any = tree
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _leaves(tree: Tree, path: Path) -> Iterable[tuple[Path, Tensor]]:
    node = _below(tree, path)
    if isinstance(node, dict):
        return leaves_of(node, path)
    return [] if node is None else [(path, node)]
