"""An agent of your own: advantage-weighted regression (Peng et al., 2019) over rollouts.

Run, in this folder: torchrl-lightning-train --config-dir . '~experiment' model=awr data.total_frames=50000
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_lightning import ActorCriticModule
from torchrl_lightning._core.settings import Positive


class AWRModule(ActorCriticModule):
    """Make what went better than expected more likely, the more so the better it went.

    Args:
        temperature: Advantage by which a weight grows e-fold.
        max_weight: The largest weight.
        network: As in :class:`~torchrl_lightning.ActorCriticModule`, like everything that is not named here.
    """

    temperature: Positive = 1.0
    max_weight: Positive = 20.0

    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the losses of actor and critic, by names that begin with ``loss_``, and what is logged besides."""
        log_prob, entropy, values = self.evaluate(batch)
        weight = (self.advantage(batch) / self.temperature).exp().clamp_max(self.max_weight)
        return {
            "loss_actor": -(weight * log_prob).mean(),
            **self.critic_terms(batch, values),
            "entropy": entropy.detach().mean(),
        }
