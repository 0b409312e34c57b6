"""Convert a batch to plain data for checkpoints, and back."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase

from torchrl_lightning._core.state import state_error


def plain_batch(batch: TensorDictBase | None) -> dict[str, Any] | None:
    """Return a batch as plain data."""
    if batch is None:
        return None
    return {"shape": list(batch.batch_size), "names": list(batch.names), "entries": batch.cpu().to_dict()}


def read_batch(value: Any, name: str) -> TensorDictBase | None:
    """Rebuild a batch from the result of :func:`plain_batch`."""
    if value is None:
        return None
    try:
        return TensorDict(value["entries"], value["shape"], names=value["names"]).clone()
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        raise state_error(value, name, "a batch: shape, names, entries") from None
