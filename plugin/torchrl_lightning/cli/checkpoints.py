"""Refuse a checkpoint that does not fit the run that was composed, with a message that says what differs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
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

    Only a copy of the model is built. No ``world_size`` accepts any; ``config`` tells which of its settings differ.
    """
    import torch

    from torchrl_lightning.ranks import state_of_rank

    state = stored.get(type(data).__qualname__)
    try:
        if state is None:
            streams = " and ".join(key for key in stored if key.endswith("DataModule")) or "no experience"
            raise ValueError(f"it holds {streams}, but this run has data={type(data).__qualname__}.")
        if hasattr(data, "check_state"):
            data.check_state(state, model)
        if world_size is not None and "ranks" in state:
            state_of_rank(state["ranks"], 0, world_size)
        if hasattr(model, "build"):
            with torch.random.fork_rng(devices=[]):
                networks = copy.deepcopy(model).build(data.specs)
            _check_weights(networks, stored["state_dict"], _other_settings(path, stored, config))
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{path} does not fit this run: {error}{_overrides_of(path, stored)}") from error
    finally:
        data.close()


def _check_weights(networks: Any, stored: Mapping[str, Any], settings: Sequence[str]) -> None:
    """Refuse the weights of other networks, by loading them; name the first that differs and what settings do."""
    try:
        networks.load_state_dict(stored)
    except RuntimeError as error:
        states = (stored, networks.state_dict())
        there, here = ({name: list(getattr(each, "shape", [])) for name, each in state.items()} for state in states)
        differ = [
            f"{name} is {there.get(name, 'absent')} in the checkpoint and {here.get(name, 'absent')} in this run"
            for name in dict.fromkeys((*there, *here))
            if there.get(name) != here.get(name)
        ]
        more = f" (and {len(differ) - 1} more weights)" if len(differ) > 1 else ""
        found = f"the networks differ: {differ[0]}{more}." if differ else str(error)
        raise ValueError(" ".join([found, *settings])) from error


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
