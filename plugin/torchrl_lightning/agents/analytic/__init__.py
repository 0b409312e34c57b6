"""Faster updates, acting, values and optimizers for small perceptrons on one CPU, with the same results as torch.

The rest of the package imports only from this module. Torch computes all unsupported cases.
"""

from __future__ import annotations

import logging
from typing import Any

from torchrl_lightning.agents.analytic.acting import compiled_call as compiled_call
from torchrl_lightning.agents.analytic.optimization import FusedAdam as FusedAdam
from torchrl_lightning.agents.analytic.optimization import OptimizedParameters as OptimizedParameters
from torchrl_lightning.agents.analytic.optimization import SoftUpdate as SoftUpdate
from torchrl_lightning.agents.analytic.optimization import unflattenable_parameters as unflattenable_parameters
from torchrl_lightning.agents.analytic.perceptrons import Unsupported, defining_class
from torchrl_lightning.agents.analytic.perceptrons import compiled_values as compiled_values
from torchrl_lightning.agents.analytic.updates import AnalyticUpdate, DQNUpdate, PPOUpdate, SACUpdate, TD3Update

logger = logging.getLogger(__name__)
_UPDATES: dict[str, type[AnalyticUpdate]] = {
    "DQNModule": DQNUpdate,
    "SACModule": SACUpdate,
    "TD3Module": TD3Update,
    "PPOModule": PPOUpdate,
}


def make_analytic_update(agent: Any) -> AnalyticUpdate | None:
    """Return a function that writes the gradients of an agent's loss without autograd.

    Args:
        agent: An agent in a fit, with trainer, networks and optimizers.

    Returns:
        A function that takes a batch, or None if the agent, its networks or the run are not supported. The function
        returns None if autograd must compute the batch.
    """
    update_class = _UPDATES.get(defining_class(agent, "losses"))
    try:
        return None if update_class is None else update_class(agent)
    except Unsupported as reason:
        logger.debug("Autograd computes the gradients of %s: %s", type(agent).__name__, reason)
        return None
