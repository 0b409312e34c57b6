"""The gradients of PPO."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS

from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.keys import REPLAYED
from torchrl_lightning.learn.analytic import kernels
from torchrl_lightning.learn.analytic.perceptrons import (
    Array,
    Gradients,
    Unsupported,
    array_of,
    perceptron_of,
    require_class,
)
from torchrl_lightning.learn.analytic.updates import DISTANCES, AnalyticUpdate, vectors_of

_READ = ("action_log_prob", "advantage", "value_target")
_NOT_KNOWN = (*AUTO_LOSS_MASK_KEYS, REPLAYED)


class PPOUpdate(AnalyticUpdate):
    """The clipped objective over a categorical or a clipped Normal, and a critic with its own trunk."""

    methods = ("terms", "evaluate", "entropy_terms", "critic_terms")

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Find actor and critic."""
        agent, actor, critic = self.agent, self.agent.policy, self.agent.critic
        kind = require_class(actor.head, "CategoricalHead", "ClippedNormalHead")
        if critic.is_shared or critic.out_keys != ["state_value"] or critic.trunks[0].in_keys != actor.trunk.in_keys:
            raise Unsupported("Only one critic is known, over the actor's observation and with its own trunk.")
        if actor.masked or agent.clip_value is not None or agent.intrinsic is not None:
            raise Unsupported("Neither masks, clipped values nor intrinsic rewards are known.")
        self._keys, self._distance = actor.trunk.in_keys, DISTANCES[agent.loss_critic_type]
        self._actor = perceptron_of(actor.trunk, actor.head, gradients)
        self._critic = perceptron_of(critic.trunks[0], critic.module[0], gradients)
        self._acting, self._valuing = self._actor.memory(self.rows), self._critic.memory(self.rows)
        self._d_out, self._d_values = np.empty_like(self._acting[-1]), np.empty_like(self._valuing[-1])
        self._arguments: tuple[Any, ...] = (self._d_out,)
        if kind == "CategoricalHead":
            self._learn = jitted(kernels.learn_choices_clipped)
        else:
            head, layer = actor.head, actor.head.layers
            box = tuple(map(array_of, (layer.center, layer.half_range, layer.log_std, head.low, head.high)))
            self._learn = jitted(kernels.learn_normals_clipped)
            self._arguments = box, self._d_out, gradients[layer.log_std].numpy()
        return [actor, critic]

    def count(self, batch: TensorDictBase) -> int | None:
        """Return the number of steps of a mini-batch; None if some are replayed, masked, or parts of sequences."""
        if batch.ndim != 1 or any(batch.get(key, None) is not None for key in _NOT_KNOWN):
            return None
        entries = [batch.get(key, None) for key in (*_READ, "action", *self._keys)]
        if not all(isinstance(entry, Tensor) and entry.is_cpu for entry in entries):
            return None
        *read, action = (entry.dtype for entry in entries[: len(_READ) + 1])
        return len(batch) if set(read) == {torch.float32} and action in (torch.int64, torch.float32) else None

    def write(self, batch: TensorDictBase) -> dict[str, float]:
        """Write the gradients; return the parts of the loss and diagnostics."""
        agent, x = self.agent, vectors_of([batch.get(key) for key in self._keys])
        entropy_coeff, out = float(agent.entropy_coeff), self._actor.forward(x, self._acting)
        action, behaviour = (batch.get(key).numpy() for key in ("action", "action_log_prob"))
        steps, clip = (out, action, behaviour, agent.advantage(batch).numpy()), float(agent.clip_epsilon)
        objective, entropy, kl, moved, clipped = self._learn(*steps, clip, entropy_coeff, *self._arguments)
        values, target = self._critic.forward(x, self._valuing), batch.get("value_target").numpy()
        arguments = values, target, agent.critic_coeff, self._distance, self._d_values
        far = jitted(kernels.learn_returns)(*arguments)
        if kl == math.inf:  # the gradients are not finite either, which NumPy would warn of
            with np.errstate(invalid="ignore", over="ignore"):
                self._backward(x)
        else:
            self._backward(x)
        return {
            "loss_objective": objective,
            "loss_entropy": -entropy_coeff * entropy,
            "entropy": entropy,
            "loss_critic": far,
            "kl_approx": kl,
            "kl_approx_k1": -moved,
            "clip_fraction": clipped,
        }

    def _backward(self, x: Array) -> None:
        self._actor.backward(x, self._acting, self._d_out, self.every)
        self._critic.backward(x, self._valuing, self._d_values, self.every)
