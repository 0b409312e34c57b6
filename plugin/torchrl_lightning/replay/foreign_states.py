"""What else is part of a buffer's state: TorchRL's samplers, which check nothing, and batches drawn ahead."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.entries import Tree, tree_of
from torchrl_lightning.replay.checks import check_tree
from torchrl_lightning.state import check_state, described, mapping, optional, sequence, tensor, whole, wrong


def check_sampler(sampler: Sampler, state: Mapping[str, Any], cells: int) -> None:
    """Refuse the state of a sampler that does not fit; nothing is changed.

    Args:
        sampler: ours or one of TorchRL's.
        state: what its ``state_dict`` gave.
        cells: of the storage.

    Raises:
        ValueError: says what is wrong.
    """
    if hasattr(sampler, "check_state"):
        sampler.check_state(state)
    else:
        _check_like(state, sampler.state_dict(), cells, type(sampler).__name__)


def load_sampler(sampler: Sampler, state: Mapping[str, Any]) -> None:
    """Restore a sampler, ours or one of TorchRL's.

    Raises:
        ValueError: one of TorchRL's does not take it; it keeps its own.
    """
    if hasattr(sampler, "check_state"):
        sampler.load_state_dict(state)
        return
    before = copy.deepcopy(sampler.state_dict())
    try:
        sampler.load_state_dict(state)
    except Exception as error:
        sampler.load_state_dict(before)
        raise ValueError(f"{type(sampler).__name__} does not take its state: {error}") from error


def _check_like(state: Any, own: Any, cells: int, owner: str) -> None:
    if isinstance(own, Mapping):
        if not isinstance(state, Mapping) or (set(state) != set(own) and own):
            found = sorted(map(str, state)) if isinstance(state, Mapping) else described(state)
            raise ValueError(f"The {owner} state is foreign: it is {found}, expected {sorted(map(str, own))}.")
        for key, value in own.items():
            _check_like(state[key], value, cells, f"{owner}'s {key}")
    elif isinstance(own, Tensor | None) and isinstance(state, Tensor | None):
        if state is not None:  # cells, of which there may be any number, or flags of them
            unset = torch.bool if state.dtype == torch.bool else torch.int64
            tensor(unset if own is None else own.dtype, None, anywhere=True)(state, owner)
            if state.dtype == torch.int64:
                tensor(torch.int64, None, low=0, high=cells - 1, anywhere=True)(state, owner)
    elif isinstance(own, int) and not isinstance(own, bool):
        whole(min(own, 0))(state, owner)
    elif type(state) is not type(own):
        raise wrong(state, owner, described(own))


def pack_batch(batch: TensorDictBase, info: Mapping[Any, Any]) -> dict[str, Any]:
    """Describe a batch that was drawn ahead, and the entries that come with it, as a state."""
    return {
        "batch": tree_of(batch),
        "batch_size": list(batch.batch_size),
        "names": list(batch.names) if any(batch.names) else None,
        "info": [[list(key) if isinstance(key, tuple) else key, value] for key, value in info.items()],
    }


def unpack_batch(packed: Any) -> tuple[TensorDictBase, dict[Any, Any]]:
    """Build the batch that :func:`pack_batch` described, of copies.

    Raises:
        ValueError: says what is wrong.
    """
    schema = {"batch": mapping, "batch_size": sequence, "names": optional(sequence), "info": sequence}
    check_state(packed, schema, "prefetched batch")
    sizes, names = packed["batch_size"], packed["names"]
    for number in sizes:
        whole()(number, "a size of a prefetched batch")
    size = torch.Size(sizes)
    check_tree(packed["batch"], size, "prefetched batch")
    if names is not None and (len(names) != len(size) or any(not isinstance(name, str | None) for name in names)):
        raise ValueError(f"The state names the dimensions {list(size)} of a prefetched batch {names}.")
    info: dict[Any, Any] = {}
    for pair in packed["info"]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise wrong(pair, "an entry of a prefetched batch", "a key and its value")
        key, value = tuple(pair[0]) if isinstance(pair[0], list) else pair[0], pair[1]
        if any(not isinstance(part, str) for part in (key if isinstance(key, tuple) else (key,))):
            raise wrong(key, "a key of a prefetched batch", "a name")
        info[key] = value

    def build(tree: Tree) -> TensorDictBase:
        entries = {key: build(leaf) if isinstance(leaf, dict) else leaf.clone() for key, leaf in tree.items()}
        return new_tensordict(entries, size, names)

    return build(packed["batch"]), info
