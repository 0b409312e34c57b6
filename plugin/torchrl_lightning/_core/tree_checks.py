"""Validate saved states of nested data and TorchRL components before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_lightning._core.state import describe_value, mapping, to_plain
from torchrl_lightning._core.tree import Path, key_text


def check_tree(data: Any, batch: torch.Size, owner: str, path: Path = ()) -> None:
    """Validate nested dicts of tensors with leading dimensions ``batch``; raise ValueError with the entry's name."""
    subject = f"entry {key_text(path)}" if path else "the data"
    if isinstance(data, dict):
        if not data or any(not isinstance(key, str) or not key for key in data):
            raise ValueError(f"The {owner} state is foreign: {subject} has the keys {list(data)}, expected names.")
        for key, value in data.items():
            check_tree(value, batch, owner, (*path, key))
    elif not (path and isinstance(data, Tensor) and data.layout is torch.strided and data.shape[: len(batch)] == batch):
        expected = f"a tensor of {list(batch)} rows"
        raise ValueError(f"The {owner} state is foreign: {subject} is {describe_value(data)}, expected {expected}.")


class TorchRLState:
    """Adapter for the state of a TorchRL component; it validates a state by loading the state into a copy.

    Args:
        name: The component's name in error messages.
        part: The component.
        storage: The storage that the component may read; it is not copied.
        check: Function of the new and the current state. It raises an error for invalid states that the component
            would accept.
    """

    def __init__(
        self, name: str, part: Any, storage: Any, check: Callable[[Any, Any], None] = lambda state, current: None
    ) -> None:
        self._name, self._part, self._storage, self._check = name, part, storage, check

    def state_dict(self, *, copy: bool) -> dict[str, Any]:
        """Return the state of the component."""
        return dict(to_plain(self._part.state_dict(), copy))

    def validate_state(self, value: Any) -> Mapping[str, Any]:
        """Return a state after validation; raise ValueError if the component cannot load it."""
        state = mapping(value, f"the state of the {self._name}")
        self._check(state, self._part.state_dict())
        try:
            copy.deepcopy(self._part, {id(self._storage): self._storage}).load_state_dict(copy.deepcopy(dict(state)))
        except Exception as error:  # a component may raise any error
            reason = " ".join(str(error).split())
            raise ValueError(f"The state does not fit the {self._name}: {reason}") from error
        return state

    def apply_state(self, value: Any) -> None:
        """Load a validated state into the component."""
        self._part.load_state_dict(value)
