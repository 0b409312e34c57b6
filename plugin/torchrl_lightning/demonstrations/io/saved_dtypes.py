"""The dtypes of saved demonstrations. Users set them with the documented names of the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchrl.data.utils import numpy_to_torch_dtype_dict

from torchrl_lightning._core.keys import ACTION, REWARD
from torchrl_lightning.demonstrations._faults import DemonstrationFault
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments import EnvironmentSpecs

FIELDS = ("Observation", "Action", "Reward")
Dtype = torch.dtype | np.dtype[Any] | type[Any] | str


def saved_dtypes(dtypes: Mapping[str, Dtype] | None) -> dict[str, torch.dtype]:
    """Convert dtypes or their names to torch dtypes; raise ValueError for unknown fields or dtypes."""
    checked = {}
    for name, dtype in (dtypes or {}).items():
        torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if isinstance(torch_dtype, type | np.dtype):
            torch_dtype = numpy_to_torch_dtype_dict.get(np.dtype(torch_dtype))
        if name not in FIELDS or not isinstance(torch_dtype, torch.dtype):
            raise ValueError(
                f"demo_dtypes must map names of {list(FIELDS)} to dtypes such as 'uint8', got {name!r}: {dtype!r}."
            )
        checked[name] = torch_dtype
    return checked


def check_saved_dtypes(dtypes: Mapping[str, torch.dtype], specs: EnvironmentSpecs) -> None:
    """Raise a DemonstrationFault if fractions would be saved as integers."""
    parts = {"Observation": [specs.observation[key].dtype for key in specs.keys], "Action": [specs.action.dtype]}
    for name, env_dtypes in {**parts, "Reward": [torch.float32]}.items():
        dtype = dtypes.get(name)
        if (
            dtype is not None
            and not dtype.is_floating_point
            and any(env_dtype.is_floating_point for env_dtype in env_dtypes)
        ):
            raise DemonstrationFault(
                f"demo_dtypes must have a float dtype for {name}, which can have fractions ({env_dtypes}), got {dtype}."
            )


def with_saved_dtypes(demonstration: Demonstration, dtypes: Mapping[str, torch.dtype]) -> Demonstration:
    """Convert a demonstration to the saved dtypes; raise a ValueError if an integer would change."""
    if not dtypes:
        return demonstration
    keys = {"Observation": demonstration.observation_keys, "Action": [ACTION], "Reward": [REWARD]}
    steps, last = demonstration.steps.clone(), demonstration.last_observation
    last = None if last is None else last.clone()
    for name, dtype in dtypes.items():
        for key in keys[name]:
            for part in (steps, last) if name == "Observation" else (steps,):
                if part is not None:
                    leaf = part.get(key)
                    cast = leaf.to(dtype)
                    if not leaf.is_floating_point() and not torch.equal(cast.to(leaf.dtype), leaf):
                        raise ValueError(
                            f"demo_dtypes saves {name} as {dtype}, which cannot represent {leaf.max().item()}."
                        )
                    part[key] = cast.to(torch.float32) if name == "Reward" else cast
    return replace(demonstration, steps=steps, last_observation=last)
