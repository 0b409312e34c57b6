"""A custom agent: advantage-weighted regression (Peng et al., 2019) on rollouts.

Run, in this folder: torchrl-lightning-train --config-dir . '~experiment' model=awr data.total_frames=50000
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_lightning import ActorCriticModule
from torchrl_lightning._core.settings import Positive


class AWRModule(ActorCriticModule):
    """Raise the probability of each action in proportion to the exponential of its advantage.

    Args:
        temperature: Divisor of the advantage. A weight is ``exp(advantage / temperature)``.
        max_weight: Upper bound of the weights.
        network: See :class:`~torchrl_lightning.ActorCriticModule` for this and all other arguments.
    """

    temperature: Positive = 1.0
    max_weight: Positive = 20.0

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the losses of actor and critic under names with the prefix ``loss_``, and further logged values."""
        log_prob, entropy, values = self.evaluate(batch)
        weight = (self.advantage(batch) / self.temperature).exp().clamp_max(self.max_weight)
        return {
            "loss_actor": -(weight * log_prob).mean(),
            **self.critic_terms(batch, values),
            "entropy": entropy.detach().mean(),
        }
