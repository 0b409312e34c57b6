"""Refuse a checkpoint that does not fit the run that was composed, with a message that says what differs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchrl_lightning.cli.checks import UsageError
from torchrl_lightning.cli.resuming import differences, plain, record_in


def check_checkpoint(
    path: Path,
    stored: dict[str, Any],
    data: Any,
    model: Any,
    world_size: int | None = None,
    config: DictConfig | None = None,
) -> None:
    """Refuse a checkpoint of another environment, capacity, network or number of ranks.

    Only a copy of the model is built, without memory. No ``world_size`` accepts any; ``config`` tells which of its
    settings differ.
    """
    from torchrl_lightning.ranks import state_of_rank

    state = stored.get(type(data).__qualname__)
    try:
        if state is None:
            streams = " and ".join(key for key in stored if key.endswith("DataModule")) or "no experience"
            raise ValueError(f"it holds {streams}, but this run has data={type(data).__qualname__}.")
        data.check_state(state, model)
        if world_size is not None and "ranks" in state:
            state_of_rank(state["ranks"], 0, world_size)
        if (make := copies(model, data)) is not None:
            _check_weights(make, stored, _other_settings(path, stored, config))
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{path} does not fit this run: {error}{_overrides_of(path, stored)}") from error
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{path} holds no state of ours: {type(error).__name__}: {error}.") from error
    finally:
        data.close()


def copies(model: Any, data: Any) -> Callable[[], Any] | None:
    """Return what makes copies of a model, with the networks that it would build for a DataModule."""
    if not hasattr(model, "build"):
        return None
    specs, options = data.specs, data.build_options
    return lambda: copy.deepcopy(model).build(specs, **copy.deepcopy(options))


def _check_weights(make: Callable[[], Any], stored: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Refuse the weights of other networks; name the first that differs and what settings do."""
    from torchrl_lightning.learn.weights import check_weights

    try:
        check_weights(make, stored, own=True)
    except ValueError as error:
        raise ValueError(" ".join([str(error), *settings])) from error


def _other_settings(checkpoint: Path, stored: Mapping[str, Any], config: DictConfig | None) -> list[str]:
    """List the fields of the model that had other values in the run that wrote a checkpoint."""
    record = record_in(stored, checkpoint)
    if config is None or record is None:
        return []
    model = ({"model": settings.get("model", {})} for settings in (record.config, plain(config)))
    return [f"{key} was {there} and is {here} now." for key, (there, here) in differences(*model).items()]


def _overrides_of(checkpoint: Path, stored: Mapping[str, Any]) -> str:
    record = record_in(stored, checkpoint)
    return (
        ""
        if record is None
        else f"\nThe run of that checkpoint was given: {' '.join(record.overrides) or 'no overrides'}"
    )
