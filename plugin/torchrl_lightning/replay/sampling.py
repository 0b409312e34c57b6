"""What our samplers share: which cells a storage holds, and files for their state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.writer import RingWriter


def ring_of(storage: Storage) -> RingWriter | None:
    """The writer of the rings in this storage, unless its filled cells are simply the first ``len(storage)`` ones.

    Example:
        >>> ring_of(RingStorage(4)) is None
        True
    """
    return storage.writer if isinstance(storage, RingStorage) and not storage.is_prefix else None


def stored_cells(storage: Storage) -> Tensor:
    """All cells that hold something, in ascending order: ``O(capacity)``.

    Example:
        >>> from tensordict import TensorDict
        >>> storage = RingStorage(4)
        >>> storage.set(slice(0, 2), TensorDict({"a": torch.arange(2)}, [2]))
        >>> stored_cells(storage).tolist()
        [0, 1]
    """
    writer = ring_of(storage)
    return torch.arange(len(storage)) if writer is None else writer.filled_cells()


def check_entries(
    state: Mapping[str, Any], name: str, version: int, keys: set[str], generator: torch.Generator
) -> None:
    """Refuse the state of a sampler that lacks entries, or is of another version.

    Args:
        state: what was saved.
        name: of the sampler.
        version: that is read.
        keys: the entries beside version and generator.
        generator: one of the right kind.

    Raises:
        ValueError: says what is wrong.
    """
    if missing := sorted({"schema_version", "generator", *keys} - set(state)):
        raise ValueError(f"The state of the {name} lacks {missing}; it has {sorted(state)}.")
    if state["schema_version"] != version:
        raise ValueError(
            f"The state of the {name} has version {state['schema_version']!r}, this release reads version {version}."
        )
    came, wanted = state["generator"], generator.get_state()
    if not isinstance(came, Tensor) or came.dtype != wanted.dtype or came.shape != wanted.shape:
        raise ValueError(f"The generator in the state of the {name} is none: expected {wanted.numel()} bytes.")


def save_state(file: Path, state: Mapping[str, Any]) -> None:
    """Write a flat state of tensors and numbers as safetensors; an older file is replaced only by a whole one.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "state.safetensors"
        >>> save_state(file, {"a": torch.arange(2), "b": 0.5, "c": True})
        >>> read_state(file)
        {'a': tensor([0, 1]), 'b': 0.5, 'c': True}
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}
    tensors = {
        key: value.contiguous() if isinstance(value, Tensor) else torch.tensor(value, dtype=kinds[type(value)])
        for key, value in state.items()
    }
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        save_file(tensors, temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def read_state(file: Path) -> dict[str, Any]:
    """Read what :func:`save_state` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, corrupted or foreign.
    """
    if not file.is_file():
        raise FileNotFoundError(f"There is no sampler state at {file}; save one with dumps.")
    try:
        loaded = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no whole safetensors file: {error}. Save the buffer again.") from error
    return {key: loaded[key] if loaded[key].ndim else loaded[key].item() for key in sorted(loaded)}
