"""Checks of saved states, made before anything is changed: of rings, storages, samplers, transforms and batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.checks import check_tree
from torchrl_lightning.entries import Tree, difference, to_tensordict, tree_of
from torchrl_lightning.ranges import optional
from torchrl_lightning.replay.rings import Rings
from torchrl_lightning.state import (
    LARGEST,
    check_state,
    described,
    mapping,
    same,
    sequence,
    tensor,
    whole,
    wrong,
)

STATE_VERSION = 3


def check_cells_state(state_dict: Mapping[str, Any], max_size: int, tree: Tree) -> None:
    """Refuse a storage's state that does not fit: another version, capacity, or other keys, shapes or dtypes."""
    schema = {
        "max_size": same(max_size, "storage"),
        "count": whole(0, max_size),
        "cells": optional(tensor(torch.int64, None, low=0, high=max_size - 1)),
        "cursor": whole(-1, max_size - 1),
        "data": optional(mapping),
    }
    check_state(state_dict, schema, "storage", STATE_VERSION)
    data, count, cells = state_dict["data"], state_dict["count"], state_dict["cells"]
    if data is None and count:
        raise ValueError(f"The state claims {count} filled cells of {max_size} and does not hold them.")
    if cells is not None and (len(cells) != count or bool((cells[1:] <= cells[:-1]).any())):
        raise ValueError(f"The state lists {len(cells)} cells for {count} rows; expected as many, in ascending order.")
    if data is None:
        return
    check_tree(data, torch.Size([count]), "storage")
    other = difference(tree, to_tensordict(data, torch.Size([count])), devices=False) if tree else ""
    if other:
        raise ValueError(f"The state holds other data than this storage: {other}.")


def check_rings_state(state_dict: Mapping[str, Any], num_envs: int, length: int) -> None:
    """Refuse a writer's state that does not fit: another version, number of environments or length of the rings."""
    schema = {
        "num_envs": same(num_envs, "writer"),
        "length": same(length, "writer"),
        "positions": tensor(torch.int64, num_envs, low=0, high=LARGEST),
        "oldest": tensor(torch.int64, num_envs, low=0, high=LARGEST),
        "era": whole(),
        "write_count": whole(),
        "index": optional(mapping),
    }
    check_state(state_dict, schema, "writer", STATE_VERSION)
    rings = Rings.at(length, state_dict["positions"], state_dict["oldest"])
    if not rings.oldest.equal(state_dict["oldest"]) or bool((rings.filled < 0).any()):
        raise ValueError("The writer state is foreign: its oldest steps cannot be stored.")
    if state_dict["index"] is not None:
        check_index_state(state_dict["index"], rings)


def check_index_state(state_dict: Mapping[str, Any], rings: Rings) -> None:
    """Refuse the state of an episode index by which an episode of these rings would not hold its own steps."""
    cells, envs, newest = rings.filled_cells(), rings.num_envs, rings.positions - 1
    env = rings.env_of(cells)
    schema = {
        "column": tensor(torch.int64, len(cells), low=0, high=newest[env]),
        "done": tensor(torch.bool, len(cells)),
        "begin": tensor(torch.int64, envs, low=0, high=newest.clamp(min=0)),
        "open": tensor(torch.bool, envs),
        "headless_end": tensor(torch.int64, envs, low=-1, high=newest.clamp(min=-1)),
    }
    check_state(state_dict, schema, "episode index")
    column, position = state_dict["column"], rings.position_of(cells)
    begin = torch.where(column >= position, position, column)
    at_begin = torch.searchsorted(cells, rings.cell(env, begin)).clamp(max=max(len(cells) - 1, 0))
    end = torch.where(begin >= rings.oldest[env], column[at_begin], state_dict["headless_end"][env])
    running = state_dict["open"][env] & (begin == state_dict["begin"][env])
    end = torch.where(running, newest[env], end)
    if not (end >= position).all():
        raise ValueError("The episode index state is foreign: it holds steps behind the end of their episode.")


def check_sampler(sampler: Sampler, state: Mapping[str, Any], cells: int) -> None:
    """Refuse the state of a sampler, ours or one of TorchRL's, that does not fit a storage of so many cells."""
    if hasattr(sampler, "check_state"):
        sampler.check_state(state)
    else:
        _check_like(state, sampler.state_dict(), cells, type(sampler).__name__)


def load_sampler(sampler: Sampler, state: Mapping[str, Any]) -> None:
    """Restore a sampler, ours or one of TorchRL's; one that refuses its state keeps its own."""
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
    """Build the batch that :func:`pack_batch` described, of copies."""
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
        if key == () or any(not isinstance(part, str) for part in (key if isinstance(key, tuple) else (key,))):
            raise wrong(key, "a key of a prefetched batch", "a name")
        if not isinstance(value, Tensor):
            raise wrong(value, f"{key!r} of a prefetched batch", "a tensor")
        info[key] = value.clone()

    def build(tree: Tree) -> TensorDictBase:
        entries = {key: build(leaf) if isinstance(leaf, dict) else leaf.clone() for key, leaf in tree.items()}
        return new_tensordict(entries, size, names)

    return build(packed["batch"]), info
