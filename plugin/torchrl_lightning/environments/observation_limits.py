"""Largest magnitudes of float64 observations that a policy with float32 parameters can read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.normalization import NormalizedPolicy
from torchrl_lightning.environments.policy_calls import is_float64

FLOAT32_MAX = torch.finfo(torch.float32).max
NORMALIZED_MAX = 1e150
"""The square of a larger number overflows float64, so that the variance would be infinite."""


def magnitude_limits(policy: object, observation: Composite) -> dict[NestedKey, float]:
    """Return the largest magnitude that a policy can read, for each float64 observation; others are not limited.

    A policy without parameters, or with float64 parameters, has no limits. The limit of normalised entries is larger,
    because they become float32 only after normalisation.

    Args:
        policy: The policy.
        observation: Specs of the observation.
    """
    if not isinstance(policy, nn.Module) or is_float64(policy) or not any(True for _ in policy.parameters()):
        return {}
    normalized = {
        key for part in policy.modules() if isinstance(part, NormalizedPolicy) for key in part.normalizer.keys
    }
    leaves = observation.items(include_nested=True, leaves_only=True)
    return {
        key: NORMALIZED_MAX if key in normalized else FLOAT32_MAX for key, spec in leaves if spec.dtype is torch.float64
    }


def expected_magnitude(limit: float) -> str:
    """Return the expected range and the remedy, for an error message about a number beyond its limit.

    Args:
        limit: The largest magnitude.
    """
    reason = "the networks compute in float32" if limit == FLOAT32_MAX else "their squares must fit float64"
    return (
        f"magnitudes of at most {limit:.3g}, because {reason}. Rescale it by gymnasium.wrappers.TransformObservation"
        + (", or set normalize_observation=True." if limit == FLOAT32_MAX else ".")
    )


def check_magnitudes(entries: Mapping[NestedKey, Tensor], limits: Mapping[NestedKey, float]) -> None:
    """Validate magnitudes of observations; raise an EnvironmentFault that names the first entry beyond its limit.

    Args:
        entries: The observations.
        limits: The limits of :func:`magnitude_limits`.
    """
    for key, limit in limits.items():
        value = entries[key]
        if value.numel() and bool((largest := value.abs().max()) > limit):
            raise EnvironmentFault(
                f"the environment returned observation {key!r} with {largest.item()}, expected "
                f"{expected_magnitude(limit)}"
            )
