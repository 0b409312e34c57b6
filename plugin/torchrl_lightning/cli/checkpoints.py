"""Refuse a checkpoint that does not fit the run that was composed, with a message that says what differs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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
    *,
    resumes: bool = False,
    plays: bool = False,
) -> None:
    """Refuse a checkpoint of another environment, capacity, network or number of ranks.

    With ``plays``, only the environment and the networks are compared, which are all that an evaluation builds.

    A copy of the model is built without memory. With ``resumes``, the states of the optimizers are compared as well, on
    a second copy in memory. No ``world_size`` accepts any; ``config`` names the settings that differ.
    """
    from torchrl_lightning.datamodules.arguments import check_environment
    from torchrl_lightning.learn.agents import AgentModule
    from torchrl_lightning.learn.weights import check_weights
    from torchrl_lightning.ranks import state_of_rank

    state = stored.get(type(data).__qualname__)
    try:
        if state is None:
            streams = " and ".join(key for key in stored if key.endswith("DataModule")) or "no experience"
            raise ValueError(f"it holds {streams}, but this run has data={type(data).__qualname__}.")
        if plays:
            check_environment(data, state)
        else:
            data.check_state(state, model)
        if world_size is not None and "ranks" in state:
            state_of_rank(state["ranks"], 0, world_size)
        if (make := copies(model, data)) is not None:
            check_weights(make, stored, own=True)
            if resumes and isinstance(model, AgentModule) and "optimizer_states" in stored:
                make().check_optimizer_states(stored["optimizer_states"])
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{path} does not fit this run: {error}{_differences(path, stored, config)}") from error
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


def _differences(checkpoint: Path, stored: Mapping[str, Any], config: DictConfig | None) -> str:
    """Say which settings of the model had other values in the run of a checkpoint, and what that run was given."""
    record = record_in(stored, checkpoint)
    if record is None:
        return ""
    here = record.config if config is None else plain(config)
    models = ({"model": settings.get("model", {})} for settings in (record.config, here))
    changed = "".join(f" {key} was {then} and is {now} now." for key, (then, now) in differences(*models).items())
    return f"{changed}\nThe run of that checkpoint was given: {' '.join(record.overrides) or 'no overrides'}"
