"""Where episodes of Gymnasium's MuJoCo bodies end, for world models."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from torchrl_lightning.ranges import one_of
from torchrl_lightning.trust import Nameable


class _Health(NamedTuple):
    """Bounds of the first numbers of an observation, and of all behind them."""

    bounds: tuple[tuple[float, float], ...]
    others: tuple[float, float] = (-math.inf, math.inf)
    inclusive: bool = False  # on the bound a body is healthy
    finite: bool = False  # and every number of it finite


_BODIES = {
    "hopper": _Health(((0.7, math.inf), (-0.2, 0.2)), others=(-100.0, 100.0)),
    "walker2d": _Health(((0.8, 2.0), (-1.0, 1.0))),
    "ant": _Health(((0.2, 1.0),), inclusive=True, finite=True),
    "humanoid": _Health(((1.0, 2.0),)),
    "inverted_pendulum": _Health(((-math.inf, math.inf), (-0.2, 0.2)), inclusive=True, finite=True),
}


class UnhealthyBody(Nameable):
    """Terminate where a body of Gymnasium's MuJoCo environments has fallen, by the rules of its environment's defaults.

    The observations are those that the environment shows by default: without the position along the ground, the height
    first. The hopper's rule for its velocities cannot be seen, as the environment clips what it shows of them.

    Args:
        body: ``hopper``, ``walker2d``, ``ant``, ``humanoid`` or ``inverted_pendulum``, in versions 4 and 5.

    Raises:
        ValueError: It is another body.

    Source:
        ``is_healthy`` of https://github.com/Farama-Foundation/Gymnasium/tree/main/gymnasium/envs/mujoco

    Examples:
        >>> import torch
        >>> fallen = UnhealthyBody("walker2d")
        >>> observation = torch.zeros(3, 17)
        >>> observation[:, 0] = torch.tensor([1.2, 0.7, 2.1])
        >>> fallen(observation, torch.zeros(3, 6), observation)
        tensor([False,  True,  True])
    """

    def __init__(self, body: str) -> None:
        self.body = one_of(body, "body", tuple(_BODIES))

    def __call__(self, observation: Tensor, action: Tensor, next_observation: Tensor) -> Tensor:
        """Return whether the body is unhealthy in each row ``[R]``."""
        bounds, others, inclusive, finite = _BODIES[self.body]
        behind = next_observation.shape[-1] - len(bounds)
        low, high = next_observation.new_tensor([*bounds, *[others] * behind]).T
        healthy = (next_observation > low) & (next_observation < high)
        if inclusive:
            healthy |= (next_observation == low) | (next_observation == high)
        if finite:
            healthy &= next_observation.isfinite()
        return ~healthy.all(-1)
