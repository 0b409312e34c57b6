"""The dtypes of saved demonstrations, by the documented names of their fields."""

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
    """Return the torch dtypes of names, torch or numpy dtypes; raise ValueError for other fields or dtypes."""
    checked = {}
    for name, dtype in (dtypes or {}).items():
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if isinstance(found, type | np.dtype):
            found = numpy_to_torch_dtype_dict.get(np.dtype(found))
        if name not in FIELDS or not isinstance(found, torch.dtype):
            raise ValueError(
                f"demo_dtypes has {name!r}: {dtype!r}, expected dtypes, such as 'uint8', of {list(FIELDS)}."
            )
        checked[name] = found
    return checked


def check_saved_dtypes(dtypes: Mapping[str, torch.dtype], specs: EnvironmentSpecs) -> None:
    """Raise a DemonstrationFault if fractions would be saved as integers."""
    parts = {"Observation": [specs.observation[key].dtype for key in specs.keys], "Action": [specs.action.dtype]}
    for name, given in {**parts, "Reward": [torch.float32]}.items():
        dtype = dtypes.get(name)
        if dtype is not None and not dtype.is_floating_point and any(each.is_floating_point for each in given):
            raise DemonstrationFault(
                f"demo_dtypes saves {name} as {dtype}, but it holds fractions ({given}); name a float dtype."
            )


def with_saved_dtypes(demonstration: Demonstration, dtypes: Mapping[str, torch.dtype]) -> Demonstration:
    """Return a demonstration with the saved dtypes; raise a ValueError if an integer changes."""
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
                            f"demo_dtypes saves {name} as {dtype}, which does not hold {leaf.max().item()}."
                        )
                    part[key] = cast.to(torch.float32) if name == "Reward" else cast
    return replace(demonstration, steps=steps, last_observation=last)
