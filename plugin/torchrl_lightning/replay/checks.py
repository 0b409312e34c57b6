"""Whether a saved state fits, asked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_lightning.replay.tree import Tree, difference, leaves_of, name_of, to_tensordict

STATE_VERSION = 2


def check_version(state_dict: Mapping[str, Any], owner: str) -> None:
    """Refuse a state of another version.

    Raises:
        ValueError: names both versions.
    """
    version = state_dict.get("schema_version")
    if version != STATE_VERSION:
        raise ValueError(f"The {owner} state has schema version {version!r}, this release reads {STATE_VERSION}.")


def require(state_dict: Any, keys: str, owner: str) -> None:
    """Refuse a state that lacks entries.

    Raises:
        ValueError: names them.
    """
    missing = set(keys.split()) - set(state_dict) if isinstance(state_dict, Mapping) else {"everything"}
    if missing:
        raise ValueError(f"The {owner} state is foreign: it lacks {', '.join(sorted(missing))}.")


def check_cells_state(state_dict: Mapping[str, Any], max_size: int, tree: Tree) -> None:
    """Refuse a storage's state that does not fit.

    Args:
        state_dict: what ``RingStorage.state_dict`` gave.
        max_size: cells of the storage that shall take it.
        tree: its leaves; empty before the first write.

    Raises:
        ValueError: another version, capacity, or other keys, shapes or dtypes.
    """
    check_version(state_dict, "storage")
    require(state_dict, "max_size count cells cursor data", "storage")
    if state_dict["max_size"] != max_size:
        raise ValueError(
            f"The state has max_size={state_dict['max_size']}, this storage has max_size={max_size}; "
            f"build it with max_size={state_dict['max_size']} or load a matching state."
        )
    data, count, cells = state_dict["data"], state_dict["count"], state_dict["cells"]
    if not 0 <= count <= max_size or (data is None and count):
        raise ValueError(f"The state claims {count} filled cells of {max_size} and does not hold them.")
    if cells is not None and len(cells) != count:
        raise ValueError(f"The state lists {len(cells)} cells for {count} rows.")
    if cells is not None and count and not 0 <= int(cells.min()) <= int(cells.max()) < max_size:
        raise ValueError(f"The state lists cells beyond max_size={max_size}.")
    if data is None:
        return
    for path, leaf in leaves_of(data):
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != count:
            raise ValueError(f"Entry {name_of(path)} of the state does not hold {count} rows.")
    wrong = difference(tree, to_tensordict(data, torch.Size([count])), devices=False) if tree else ""
    if wrong:
        raise ValueError(f"The state holds other data than this storage: {wrong}.")


def check_rings_state(state_dict: Mapping[str, Any], num_envs: int, length: int) -> None:
    """Refuse a writer's state that does not fit.

    Raises:
        ValueError: another version, number of environments or length of the rings.
    """
    check_version(state_dict, "writer")
    require(state_dict, "num_envs length positions era write_count index", "writer")
    for name, here in (("num_envs", num_envs), ("length", length)):
        there = state_dict[name]
        if here != there:
            raise ValueError(
                f"The state has {name}={there}, this writer has {name}={here}; build it with {name}={there} or load a "
                "matching state."
            )
    positions = state_dict["positions"]
    if positions.shape != (num_envs,) or positions.dtype != torch.int64 or int(positions.min()) < 0:
        raise ValueError(f"The state's positions are not {num_envs} positions.")
    filled = positions.clamp(max=length)
    index = state_dict["index"]
    if index is not None:
        require(index, "column done begin open headless_end", "episode index")
    if index is not None and (len(index["column"]) != int(filled.sum()) or len(index["done"]) != int(filled.sum())):
        raise ValueError(f"The state's episode index does not describe its {int(filled.sum())} steps.")
