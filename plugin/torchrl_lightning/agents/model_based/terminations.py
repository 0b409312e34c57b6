"""Terminations in world models: a check against stored terminations, and the rules of Gymnasium's MuJoCo bodies."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.tree import entry_of, next_key
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import one_of
from torchrl_lightning.agents.model_based.world_models import WorldModel
from torchrl_lightning.dynamics.targets import IS_RESET

_logger = logging.getLogger(__name__)


@dataclass
class TerminationCheck:
    """Compare a world model's termination function with stored transitions, and warn once if they disagree."""

    has_warned: bool = False

    @torch.no_grad()
    def __call__(self, model: WorldModel, *batches: TensorDictBase) -> None:
        """Compare batches of transitions ``[N]``, without the rows that are unusable for the model."""
        targets, function = model.targets, model.terminated
        if self.has_warned or any(entry_of(batch, targets.terminated_key) is None for batch in batches):
            return
        keys = [*targets.observation_keys, *map(next_key, targets.observation_keys), targets.action_key]
        keys += [targets.terminated_key, IS_RESET]
        rows: TensorDictBase = torch.cat([batch.select(*keys, strict=False) for batch in batches])
        rows = rows[targets.usable(rows)]
        stored = targets.terminated(rows).flatten().bool()
        steps, terminations = len(stored), int(stored.sum())
        if function is None:
            if terminations and not model.learns_terminated:
                self._warn(
                    f"{terminations} of {steps} stored steps terminate their episode, but the world model predicts no "
                    "terminations. It then predicts rewards after the end of an episode; if all steps have the same "
                    "reward, all plans have the same return. Set terminated, such as OutsideBox(low, high), or a "
                    "function of observations, actions and next observations; or learn terminations by "
                    "data.terminated=true (model.dynamics.learn_terminated=true of MBPO)."
                )
            return
        action = targets.action(rows.get(targets.action_key), rows.shape)
        predicted = function(targets.observation(rows), action, targets.observation(rows.get("next")))
        predicted = predicted.reshape(steps).bool().to(stored.device)
        missed, spurious = int((stored & ~predicted).sum()), int((predicted & ~stored).sum())
        if missed or spurious:
            self._warn(
                f"the function terminated disagrees with {missed + spurious} of {steps} stored steps: it misses "
                f"{missed} of the {terminations} terminations, and terminates {spurious} other steps. Plans are wrong "
                "there. Correct the function; its arguments are observations, actions and next observations as "
                "columns."
            )

    def _warn(self, warning: str) -> None:
        self.has_warned = True
        _logger.warning(warning)


class _HealthyRanges(NamedTuple):
    """Bounds of the first elements of an observation, and of all other elements."""

    bounds: tuple[tuple[float, float], ...]
    others: tuple[float, float] = (-math.inf, math.inf)
    inclusive: bool = False  # whether a body exactly on a bound is healthy
    finite: bool = False  # all elements must be finite


_BODIES = {
    "hopper": _HealthyRanges(((0.7, math.inf), (-0.2, 0.2)), others=(-100.0, 100.0)),
    "walker2d": _HealthyRanges(((0.8, 2.0), (-1.0, 1.0))),
    "ant": _HealthyRanges(((0.2, 1.0),), inclusive=True, finite=True),
    "humanoid": _HealthyRanges(((1.0, 2.0),)),
    "inverted_pendulum": _HealthyRanges(((-math.inf, math.inf), (-0.2, 0.2)), inclusive=True, finite=True),
}


class MujocoTermination(ConfigSafe):
    """Terminate when a body of Gymnasium's MuJoCo environments has fallen, by the default rules of its environment.

    The observations must have the environment's default format. It starts with the height, and omits the position along
    the ground. The hopper's rule for velocities cannot be checked, because the environment clips the observed
    velocities.

    Args:
        body: ``hopper``, ``walker2d``, ``ant``, ``humanoid`` or ``inverted_pendulum``, in versions 4 and 5.

    Raises:
        ValueError: The body is unknown.

    Source:
        ``is_healthy`` of https://github.com/Farama-Foundation/Gymnasium/tree/main/gymnasium/envs/mujoco

    Examples:
        >>> import torch
        >>> fallen = MujocoTermination("walker2d")
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
        num_others = next_observation.shape[-1] - len(bounds)
        low, high = next_observation.new_tensor([*bounds, *[others] * num_others]).T
        healthy = (next_observation > low) & (next_observation < high)
        if inclusive:
            healthy |= (next_observation == low) | (next_observation == high)
        if finite:
            healthy &= next_observation.isfinite()
        return ~healthy.all(-1)
