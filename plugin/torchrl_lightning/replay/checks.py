"""Checks of the states of rings and storages, made before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lightning.entries import Path, Tree, difference, name_of, to_tensordict
from torchrl_lightning.replay.rings import Rings
from torchrl_lightning.state import LARGEST, check_state, described, mapping, optional, same, tensor, whole

STATE_VERSION = 3


def check_tree(data: Any, batch: torch.Size, owner: str, path: Path = ()) -> None:
    """Refuse what is not nested dicts of tensors that start with a batch size.

    Raises:
        ValueError: names the entry.
    """
    what = f"entry {name_of(path)}" if path else "the data"
    if isinstance(data, dict):
        if not data or any(not isinstance(key, str) or not key for key in data):
            raise ValueError(f"The {owner} state is foreign: {what} has the keys {list(data)}, expected names.")
        for key, value in data.items():
            check_tree(value, batch, owner, (*path, key))
    elif not (path and isinstance(data, Tensor) and data.layout is torch.strided and data.shape[: len(batch)] == batch):
        expected = f"a tensor of {list(batch)} rows"
        raise ValueError(f"The {owner} state is foreign: {what} is {described(data)}, expected {expected}.")


def check_cells_state(state_dict: Mapping[str, Any], max_size: int, tree: Tree) -> None:
    """Refuse a storage's state that does not fit.

    Args:
        state_dict: what ``RingStorage.state_dict`` gave.
        max_size: cells of the storage that shall take it.
        tree: its leaves; empty before the first write.

    Raises:
        ValueError: another version, capacity, or other keys, shapes or dtypes.
    """
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
    wrong = difference(tree, to_tensordict(data, torch.Size([count])), devices=False) if tree else ""
    if wrong:
        raise ValueError(f"The state holds other data than this storage: {wrong}.")


def check_rings_state(state_dict: Mapping[str, Any], num_envs: int, length: int) -> None:
    """Refuse a writer's state that does not fit.

    Raises:
        ValueError: another version, number of environments or length of the rings.
    """
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
    """Refuse the state of an episode index by which an episode would not hold its own steps.

    Args:
        state_dict: what ``EpisodeIndex.state_dict`` gave.
        rings: the rings that it describes.

    Raises:
        ValueError: says what is wrong.
    """
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


def check_transform(transform: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse the state of other transforms than these.

    Raises:
        ValueError: says what differs.
    """
    here, there = (
        {key: list(value.shape) if isinstance(value, Tensor) else None for key, value in entries.items()}
        for entries in (transform.state_dict(), state)
    )
    if here != there:
        raise ValueError(f"The state has other transforms: it holds {there}, this buffer's transform has {here}.")
    try:
        copy.deepcopy(transform).load_state_dict(dict(state))
    except Exception as error:  # a transform may keep and refuse what it likes
        raise ValueError(f"The state does not fit this buffer's transform: {error}") from error
