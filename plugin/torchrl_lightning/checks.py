"""Checks of saved states that several families make, before anything is changed: of nested data and TorchRL's parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_lightning.entries import Path, name_of
from torchrl_lightning.state import described, mapping, saved


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


class TorchRLState:
    """The state of a part of TorchRL's, as a child of ours: a copy of the part tries a state before the part loads it.

    Args:
        name: What messages call it.
        part: The part.
        storage: The storage that it may read, which is not copied.
        check: Refuses a state that the part would take, but not bear; it gets the part's own, too.
    """

    def __init__(
        self, name: str, part: Any, storage: Any, check: Callable[[Any, Any], None] = lambda state, own: None
    ) -> None:
        self._name, self._part, self._storage, self._check = name, part, storage, check

    def state_dict(self, *, copy: bool) -> dict[str, Any]:
        """Return the state of the part."""
        return dict(saved(self._part.state_dict(), copy))

    def read_state(self, value: Any) -> Mapping[str, Any]:
        """Return a state that the part takes."""
        state = mapping(value, f"the state of the {self._name}")
        self._check(state, self._part.state_dict())
        try:
            copy.deepcopy(self._part, {id(self._storage): self._storage}).load_state_dict(copy.deepcopy(dict(state)))
        except Exception as error:  # a part may keep and refuse what it likes
            reason = " ".join(str(error).split())
            raise ValueError(f"The state does not fit the {self._name}: {reason}") from error
        return state

    def put_state(self, value: Any) -> None:
        """Let the part load its state."""
        self._part.load_state_dict(value)
