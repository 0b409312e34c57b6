"""Checks of saved states that several families make, before anything is changed: of nested data and of transforms."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lightning.entries import Path, name_of
from torchrl_lightning.state import Check, described, mapping
from torchrl_lightning.stated import Entry, saved


def check_tree(data: Any, batch: torch.Size, owner: str, path: Path = ()) -> None:
    """Refuse what is not nested dicts of tensors that start with a batch size; the error names the entry."""
    what = f"entry {name_of(path)}" if path else "the data"
    if isinstance(data, dict):
        if not data or any(not isinstance(key, str) or not key for key in data):
            raise ValueError(f"The {owner} state is foreign: {what} has the keys {list(data)}, expected names.")
        for key, value in data.items():
            check_tree(value, batch, owner, (*path, key))
    elif not (path and isinstance(data, Tensor) and data.layout is torch.strided and data.shape[: len(batch)] == batch):
        expected = f"a tensor of {list(batch)} rows"
        raise ValueError(f"The {owner} state is foreign: {what} is {described(data)}, expected {expected}.")


def check_transform(transform: nn.Module, state: Mapping[str, Any], storage: Any = None) -> None:
    """Refuse the state of other transforms than these, which may read ``storage``; the error says what differs."""
    here, there = (
        {key: list(value.shape) if isinstance(value, Tensor) else None for key, value in entries.items()}
        for entries in (transform.state_dict(), state)
    )
    if here != there:
        raise ValueError(f"The state has other transforms: it holds {there}, this buffer's transform has {here}.")
    try:
        copy.deepcopy(transform, {id(storage): storage}).load_state_dict(dict(state))
    except Exception as error:  # a transform may keep and refuse what it likes
        raise ValueError(f"The state does not fit this buffer's transform: {error}") from error


class Transforms(Entry):
    """Keep the state of TorchRL's transforms, which may read the ``storage`` of the part that has them."""

    def save(self, part: Any, attribute: str, copy: bool) -> Any:
        """Return the state of the transforms."""
        return saved(dict(getattr(part, attribute).state_dict()), copy)

    def check(self, part: Any, attribute: str) -> Check:
        """Expect what the transforms take."""

        def check(value: Any, name: str, here: Any) -> Any:
            check_transform(getattr(part, attribute), mapping(value, name), part.storage)
            return value

        return check

    def put(self, part: Any, attribute: str, value: Any) -> None:
        """Let the transforms load their state."""
        getattr(part, attribute).load_state_dict(value)
