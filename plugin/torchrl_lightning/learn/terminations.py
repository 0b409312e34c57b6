"""Whether a world model ends episodes where the environment does."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from torchrl_lightning.dynamics.targets import IS_RESET
from torchrl_lightning.entries import entry_of, next_key
from torchrl_lightning.learn.world_models import WorldModel

_logger = logging.getLogger(__name__)


@dataclass
class TerminationCheck:
    """Compare a world model's termination function with stored transitions, and say once where they disagree."""

    is_said: bool = False

    @torch.no_grad()
    def __call__(self, model: WorldModel, *parts: TensorDictBase) -> None:
        """Compare transitions ``[N]`` in parts; those that no model may learn from are left out."""
        targets, known = model.targets, model.terminated
        if self.is_said or any(entry_of(part, targets.terminated_key) is None for part in parts):
            return
        keys = [*targets.observation_keys, *map(next_key, targets.observation_keys), targets.action_key]
        keys += [targets.terminated_key, IS_RESET]
        rows: TensorDictBase = torch.cat([part.select(*keys, strict=False) for part in parts])
        rows = rows[targets.usable(rows)]
        stored = targets.terminated(rows).flatten().bool()
        steps, ends = len(stored), int(stored.sum())
        if known is None:
            if ends and not model.learns_terminated:
                self._say(
                    f"{ends} of {steps} stored steps terminate their episode, but the world model never ends one and "
                    "goes on behind them: where each step is worth as much as another, all plans are equal. Give "
                    "terminated=, such as OutsideBox(low, high), or a function of observations, actions and next "
                    "observations; or have it learnt by data.terminated=true (model.dynamics.learn_terminated=true of "
                    "MBPO)."
                )
            return
        action = targets.action(rows.get(targets.action_key), rows.shape)
        told = known(targets.observation(rows), action, targets.observation(rows.get("next")))
        told = told.reshape(steps).bool().to(stored.device)
        missed, invented = int((stored & ~told).sum()), int((told & ~stored).sum())
        if missed or invented:
            self._say(
                f"terminated= disagrees with {missed + invented} of {steps} stored steps: it misses {missed} of the "
                f"{ends} that terminate their episode, and ends {invented} others; plans go wrong there. Mend the "
                "function, which is given observations, actions and next observations as columns."
            )

    def _say(self, warning: str) -> None:
        self.is_said = True
        _logger.warning(warning)
