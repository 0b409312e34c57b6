"""Compute updates without autograd: analytic gradients of DQN, SAC, TD3 and PPO for perceptrons.

NumPy computes the matrix products, and kernels compute the other operations. Parameters and gradients are not copied.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS

from torchrl_lightning._core.keys import REPLAYED
from torchrl_lightning.agents.analytic import kernels
from torchrl_lightning.agents.analytic.perceptrons import (
    BLOCK_ROWS,
    Array,
    GradBuffers,
    Gradients,
    LayerOutputs,
    ModuleGuard,
    Perceptron,
    Unsupported,
    addresses,
    array_of,
    defining_class,
    perceptron_from_modules,
    perceptrons_from_ensemble,
    require_class,
    to_vector_array,
)
from torchrl_lightning.kernels.compiled import jitted

_INPUT_KEYS = ("action_log_prob", "advantage", "value_target")
_UNSUPPORTED_KEYS = (*AUTO_LOSS_MASK_KEYS, REPLAYED)
"""PPO's update reads the entries in ``_INPUT_KEYS``. A batch with an entry in ``_UNSUPPORTED_KEYS`` needs autograd."""
ObservationPair = tuple[Array, Array]
"""Observations and next observations of a batch."""
DISTANCES = {"l1": kernels.L1, "l2": kernels.L2, "smooth_l1": kernels.SMOOTH_L1}


class AnalyticUpdate(ABC):
    """Analytic gradients of an agent's loss, written directly into the gradients of its optimizers.

    Args:
        agent: An agent with trainer and optimizers.

    Attributes:
        batch_size: The number of rows of a batch.
        all_rows: The indices of all rows.
        idle: The parameters without a gradient in this update.

    Raises:
        Unsupported: Autograd has to compute the gradients.
    """

    methods: ClassVar[tuple[str, ...]] = ("losses",)
    """The agent's methods that this class replaces. If user code overrides these methods, autograd is necessary."""

    def __init__(self, agent: Any) -> None:
        _check_run(agent, self.methods)
        self.agent = agent
        self.idle: set[nn.Parameter] = set()
        self._is_supported = True
        self._build(1)

    def __call__(self, batch: Any) -> Any:
        """Write the same gradients as ``agent.losses`` and ``backward``, and return the same values as ``losses``.

        Return None and write nothing if autograd must compute the batch.
        """
        batch_size = self.supported_size(batch) if self._is_supported else None
        if batch_size is None:
            return None
        if batch_size != self.batch_size or list(map(Tensor.data_ptr, self._parameters)) != self._addresses:
            try:
                self._build(batch_size)
            except Unsupported:
                self._is_supported = False
                return None
        if not self._guard.unchanged() or torch.is_anomaly_enabled():
            return None
        for parameter in self._trained:
            if not parameter.requires_grad or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return None
        terms = self.write_gradients(batch)
        for group in self.agent._groups.values():
            group.publish_gradients(self.idle)
        return terms

    def _build(self, batch_size: int) -> None:
        groups = self.agent._groups.values()
        gradients = {key: view for group in groups for key, view in group.gradients().items()}
        self._trained = [parameter for group in groups for parameter in group.parameters]
        if any(parameter not in gradients for parameter in self._trained):
            raise Unsupported("All trained parameters must be flattened.")
        self.batch_size, self.all_rows = batch_size, np.arange(batch_size)
        modules = self.bind(gradients)
        self._guard = ModuleGuard(*modules)
        parameters = (parameter for module in modules for parameter in module.parameters())
        self._parameters = list(dict.fromkeys([*self._trained, *parameters]))
        self._addresses = addresses(self._parameters)

    @abstractmethod
    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract the networks and allocate arrays for ``batch_size``; return the modules that must not change.

        Args:
            gradients: The tensor for the gradient of each parameter.

        Raises:
            Unsupported: The networks are not perceptrons, or the loss has unsupported terms.
        """

    @abstractmethod
    def supported_size(self, batch: Any) -> int | None:
        """Return the number of rows of a batch, or None if the batch has unsupported entries."""

    @abstractmethod
    def write_gradients(self, batch: Any) -> Any:
        """Write the gradients of a batch of ``batch_size``; return the same values as the agent's ``losses``."""


def _check_run(agent: Any, methods: Sequence[str]) -> None:
    """Raise Unsupported for custom updates, backward hooks, compilation, several ranks, a GPU or other precision."""
    trainer, hooks = agent.trainer, ("on_before_zero_grad", "on_before_backward", "on_after_backward")
    if (
        any(is_overridden(hook, owner) for owner in (agent, *trainer.callbacks) for hook in hooks)
        or agent.compiled
        or not defining_class(agent, *methods, "training_step", "compute", "minimise", "update")
        or type(trainer.strategy) is not SingleDeviceStrategy
        or trainer.strategy.root_device.type != "cpu"
        or trainer.precision != "32-true"
    ):
        raise Unsupported("The run needs autograd.")


class TransitionUpdate(AnalyticUpdate):
    """Base of updates on transitions ``[B]``."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Allocate the weights and return the modules; see :meth:`AnalyticUpdate.bind`."""
        agent, batch_size = self.agent, self.batch_size
        if agent.memory is not None:
            raise Unsupported("Recurrent agents need autograd.")
        self.uniform_weights = np.full(batch_size, 1.0 / batch_size, np.float32)
        self.constant_discount = np.empty(batch_size, np.float32)
        self.distance = DISTANCES[agent.loss_function]
        return [agent.policy.network, *(getattr(agent, name) for name in agent.target_names), agent.targets]

    def supported_size(self, batch: Any) -> int | None:
        """Return the number of transitions of a batch, or None if it has a mask, sequences or unsupported dtypes."""
        for value in (batch.reward, batch.weight, batch.discount):
            if isinstance(value, Tensor) and value.dtype is not torch.float32:
                return None
        is_supported = batch.mask is None and batch.reward.ndim == 1 and batch.reward.is_cpu
        is_supported = is_supported and batch.action.dtype in (torch.int64, torch.float32)
        return len(batch.reward) if is_supported else None

    def write_gradients(self, batch: Any) -> tuple[dict[str, float], Tensor]:
        """Write the gradients; return the loss terms and diagnostics, and the absolute errors ``[B]``."""
        if isinstance(batch.discount, Tensor):
            discount: Array = batch.discount.numpy()
        else:
            discount = self.constant_discount
            discount.fill(batch.discount)
        observations = to_vector_array(batch.now), to_vector_array(batch.after)
        step = batch.reward.numpy(), batch.terminated.numpy(), discount
        weight = (
            self.uniform_weights if batch.weight is None else jitted(kernels.normalized_weights)(batch.weight.numpy())
        )
        error = torch.empty(self.batch_size)
        return self.write_from_arrays(observations, batch.action.numpy(), step, weight, error.numpy()), error

    @abstractmethod
    def write_from_arrays(
        self, observations: ObservationPair, action: Array, step: Any, weight: Array, error: Array
    ) -> dict[str, float]:
        """Write the gradients and the absolute errors; return the loss terms and diagnostics.

        Args:
            observations: Observations and next observations, ``[B, F]`` each.
            action: Executed actions, ``[B]`` or ``[B, A]``.
            step: Reward, terminated and discount, ``[B]`` each.
            weight: Each row's weight in a mean, ``[B]``.
            error: Receives the absolute errors, ``[B]``.
        """


class DQNUpdate(TransitionUpdate):
    """The update of DQN with one value for each action."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract the network and its target network."""
        modules, agent = super().bind(gradients), self.agent
        online, target = agent.q_network, agent.targets.q_network
        require_class(online, "QNetwork")
        if agent.masked or agent.margin_coeff or online.action_space != "categorical":
            raise Unsupported("Masks, margins and one-hot actions need autograd.")
        self.online = perceptron_from_modules(online.trunk, online.head, gradients)
        self.target = perceptron_from_modules(target.trunk, target.head)
        self.outputs, self.next_outputs = (self.online.allocate(self.batch_size) for _ in range(2))
        self.selection_outputs = self.online.allocate(self.batch_size) if agent.double_q else self.next_outputs
        self.value_grad = np.empty_like(self.outputs[-1])
        self._loss = jitted(kernels.dqn_loss)
        return modules

    def write_from_arrays(
        self, observations: ObservationPair, action: Array, step: Any, weight: Array, error: Array
    ) -> dict[str, float]:
        """Write the gradients of the network."""
        observation, next_observation = observations
        next_values = self.target.forward(next_observation, self.next_outputs)
        selection = next_values
        if self.agent.double_q:
            selection = self.online.forward(next_observation, self.selection_outputs)
        values = self.online.forward(observation, self.outputs)
        arguments = action.reshape(-1), step, weight, self.distance, self.value_grad, error
        loss, mean = self._loss(values, next_values, selection, *arguments)
        self.online.backward(observation, self.outputs, self.value_grad)
        return {"loss_value": loss, "value": mean}


class ActorCriticUpdate(TransitionUpdate):
    """Base of SAC and TD3: critics evaluate an observation and an action, and their values train an actor."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract actor and critics."""
        modules, agent, rows = super().bind(gradients), self.agent, self.batch_size
        actor = agent.actor_network
        self.critics = perceptrons_from_ensemble(agent.critics, gradients)
        self.targets = perceptrons_from_ensemble(agent.targets.critics)
        self.actor = perceptron_from_modules(actor.trunk, actor.head, gradients)
        self.center, self.half_range = array_of(actor.head.center), array_of(actor.head.half_range)
        self.features, self.actions = len(self.actor.layers[0][0]), len(self.center)
        # Each update moves these arrays through the caches, so allocate few arrays. Only outputs that the actor's loss
        # reads again have their own arrays.
        buffers: GradBuffers = {}
        self.actor_outputs = self.actor.allocate(rows, buffers)
        self.critic_outputs = [critic.allocate(rows, buffers) for critic in self.critics]
        self.shared_outputs = self.critic_outputs[:1] * len(self.critics)
        self.stored_input, self.policy_input = np.empty((2, rows, self.features + self.actions), np.float32)
        self.policy_action = self.policy_input[:, self.features :]
        self.values = np.empty((len(self.critics), rows), np.float32)
        self.value_grads, self.action_grad = np.empty_like(self.values), np.empty((rows, self.actions), np.float32)
        self.target, self.log_prob = np.zeros((2, rows), np.float32)
        self.noise = torch.empty(rows, self.actions)
        return modules

    def policy_values(self, critics: list[Perceptron], outputs: list[LayerOutputs], observation: Array) -> Array:
        """Return the critics' values ``[N, B]`` of the actions already stored in ``policy_action``."""
        self.policy_input[:, : self.features] = observation
        for critic, layer_outputs, values in zip(critics, outputs, self.values, strict=False):
            values[:] = critic.forward(self.policy_input, layer_outputs)[:, 0]
        return self.values

    def write_critic_gradients(
        self, observations: ObservationPair, action: Array, step: Any, alpha: float, weight: Array, error: Array
    ) -> dict[str, float]:
        """Write the critics' gradients; ``policy_action`` must already contain the next actions."""
        target_values = self.policy_values(self.targets, self.shared_outputs, observations[1])
        jitted(kernels.write_critic_targets)(target_values, self.log_prob, alpha, step, self.target)
        self.stored_input[:, : self.features] = observations[0]
        np.divide(action - self.center, self.half_range, out=self.stored_input[:, self.features :])
        error.fill(0.0)
        losses, means = [], []
        for critic, outputs, grad in zip(self.critics, self.shared_outputs, self.value_grads, strict=True):
            values = critic.forward(self.stored_input, outputs)[:, 0]
            loss, mean = jitted(kernels.critic_loss)(values, self.target, weight, self.distance, grad, error)
            critic.backward(self.stored_input, outputs, grad[:, None])
            losses.append(loss)
            means.append(mean)
        return {"loss_qvalue": sum(losses), "value": means[0]}

    def write_action_gradient(self, number: int, rows: Array, weight: Array) -> None:
        """Write, for some rows, the gradient of a critic's negative weighted values with respect to the actions."""
        critic, outputs = self.critics[number], self.critic_outputs[number]
        self.action_grad[rows] = critic.input_gradient(outputs, rows, -weight[rows, None], self.actions)


class SACUpdate(ActorCriticUpdate):
    """The update of SAC with a tanh-squashed Normal."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract the networks."""
        modules, head = super().bind(gradients), self.agent.actor_network.head
        require_class(head, "SquashedHead")
        self.limits = tuple(map(np.float32, head.limits))
        self.log_range, self.best_critic = float(head.log_range), np.empty(self.batch_size, np.int64)
        self.actor_grad = np.empty((self.batch_size, 2 * self.actions), np.float32)
        self.log_alpha_grad = gradients.get(self.agent.log_alpha)
        return modules

    def write_from_arrays(
        self, observations: ObservationPair, action: Array, step: Any, weight: Array, error: Array
    ) -> dict[str, float]:
        """Write the gradients of critics, actor and temperature."""
        observation, next_observation = observations
        log_alpha = self.agent.log_alpha.item()
        alpha = math.exp(log_alpha)
        self._sample(next_observation)
        terms = self.write_critic_gradients(observations, action, step, alpha, weight, error)
        out = self._sample(observation)
        values = self.policy_values(self.critics, self.critic_outputs, observation)
        arguments = self.log_prob, alpha, weight, self.best_critic
        objective, mean_log_prob = jitted(kernels.actor_objective)(values, *arguments)
        for number in range(len(self.critics)):
            self.write_action_gradient(number, np.flatnonzero(self.best_critic == number), weight)
        noise = self.noise.numpy()
        jitted(kernels.backward_tanh_normal)(out, noise, self.limits, alpha, weight, self.action_grad, self.actor_grad)
        self.actor.backward(observation, self.actor_outputs, self.actor_grad)
        terms["loss_actor"] = -objective
        if self.log_alpha_grad is not None:
            slope = -(mean_log_prob + (self.agent.target_entropy or 0.0))
            self.log_alpha_grad.fill_(slope)
            terms["loss_alpha"] = slope * log_alpha
        return {**terms, "entropy": -mean_log_prob, "alpha": alpha}

    def _sample(self, observation: Array) -> Array:
        out, noise = self.actor.forward(observation, self.actor_outputs), self.noise.normal_().numpy()
        arguments = self.limits, self.log_range, self.policy_action, self.log_prob
        jitted(kernels.sample_tanh_normal)(out, noise, *arguments)
        return out


class TD3Update(ActorCriticUpdate):
    """The update of TD3 with a deterministic actor."""

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract the networks."""
        modules, target = super().bind(gradients), self.agent.targets.actor_network
        require_class(self.agent.actor_network.head, "DeterministicHead")
        self.target_actor = perceptron_from_modules(target.trunk, target.head)
        return modules

    def write_from_arrays(
        self, observations: ObservationPair, action: Array, step: Any, weight: Array, error: Array
    ) -> dict[str, float]:
        """Write the gradients of the critics, and of the actor if this update includes it."""
        agent, (observation, next_observation) = self.agent, observations
        out, noise = self.target_actor.forward(next_observation, self.actor_outputs), self.noise.normal_().numpy()
        jitted(kernels.smooth_target_actions)(out, noise, agent.policy_noise, agent.noise_clip, self.policy_action)
        terms = self.write_critic_gradients(observations, action, step, 0.0, weight, error)
        self.idle = set() if agent.is_actor_update() else set(agent.actor_network.parameters())
        if not self.idle:
            squashed = np.tanh(self.actor.forward(observation, self.actor_outputs), out=self.policy_action)
            values = self.policy_values(self.critics[:1], self.critic_outputs, observation)[0]
            self.write_action_gradient(0, self.all_rows, weight)
            actor_grad = self.action_grad * (1.0 - squashed * squashed)
            self.actor.backward(observation, self.actor_outputs, actor_grad)
            terms["loss_actor"] = -float(weight.dot(values))
        return terms


class PPOUpdate(AnalyticUpdate):
    """The update of clipped PPO with a categorical or clipped Normal actor, and a critic with its own trunk."""

    methods = ("losses", "evaluate", "entropy_terms", "critic_terms")

    def bind(self, gradients: Gradients) -> list[nn.Module]:
        """Extract actor and critic."""
        agent, actor, critic = self.agent, self.agent.policy, self.agent.critic
        head_class = require_class(actor.head, "CategoricalHead", "ClippedNormalHead")
        if critic.is_shared or critic.out_keys != ["state_value"] or critic.trunks[0].in_keys != actor.trunk.in_keys:
            raise Unsupported("The critic must have one value and its own trunk over the actor's observation.")
        if actor.masked or agent.clip_value is not None or agent.intrinsic is not None:
            raise Unsupported("Masks, clipped values and intrinsic rewards need autograd.")
        self._keys, self._distance = actor.trunk.in_keys, DISTANCES[agent.loss_critic_type]
        self._actor = perceptron_from_modules(actor.trunk, actor.head, gradients)
        self._critic = perceptron_from_modules(critic.trunks[0], critic.module[0], gradients)
        self._block = -(-self.batch_size // -(-self.batch_size // BLOCK_ROWS))  # blocks of almost equal size
        self._actor_outputs, self._critic_outputs = (net.allocate(self._block) for net in (self._actor, self._critic))
        self._actor_grad = np.empty_like(self._actor_outputs[-1])
        self._value_grad = np.empty_like(self._critic_outputs[-1])
        self._log_std_grads: tuple[Array, Array] | None = None  # of the batch, and of a block
        self._box: tuple[Any, ...] = ()
        if head_class == "CategoricalHead":
            self._actor_loss = jitted(kernels.ppo_categorical_loss)
        else:
            head, layer = actor.head, actor.head.layers
            box = tuple(map(array_of, (layer.center, layer.half_range, layer.log_std, head.low, head.high)))
            self._actor_loss, self._box = jitted(kernels.ppo_clipped_normal_loss), (box,)
            total = gradients[layer.log_std].numpy()
            self._log_std_grads = total, np.empty_like(total)
        return [actor, critic]

    def supported_size(self, batch: TensorDictBase) -> int | None:
        """Return the number of steps of a mini-batch, or None for replayed steps, masks, sequences or other dtypes."""
        if batch.ndim != 1 or any(batch.get(key, None) is not None for key in _UNSUPPORTED_KEYS):
            return None
        entries = [batch.get(key, None) for key in (*_INPUT_KEYS, "action", *self._keys)]
        if not all(isinstance(entry, Tensor) and entry.is_cpu for entry in entries):
            return None
        *input_dtypes, action_dtype = (entry.dtype for entry in entries[: len(_INPUT_KEYS) + 1])
        is_supported = set(input_dtypes) == {torch.float32} and action_dtype in (torch.int64, torch.float32)
        return len(batch) if is_supported else None

    def write_gradients(self, batch: TensorDictBase) -> dict[str, float]:
        """Write the gradients; return the loss terms and diagnostics."""
        x = to_vector_array([batch.get(key) for key in self._keys])
        action, old_log_prob, target = (batch.get(key).numpy() for key in ("action", "action_log_prob", "value_target"))
        columns = x, action, old_log_prob, self.agent.advantage(batch).numpy(), target
        totals = [0.0] * 6
        # A block passes both networks while it is in the processor's cache. Gradients are infinite or NaN if the KL
        # divergence is infinite; suppress NumPy's warnings then.
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, self.batch_size, self._block):
                block = [column[start : start + self._block] for column in columns]
                terms = self._write_block(start == 0, *block)
                totals = [total + term for total, term in zip(totals, terms, strict=True)]
        objective, entropy, kl, log_ratio, clip_fraction, critic_loss = totals
        return {
            "loss_objective": objective,
            "loss_entropy": -float(self.agent.entropy_coeff) * entropy,
            "entropy": entropy,
            "loss_critic": critic_loss,
            "kl_approx": kl,
            "kl_approx_k1": -log_ratio,
            "clip_fraction": clip_fraction,
        }

    def _write_block(
        self, is_first: bool, x: Array, action: Array, old_log_prob: Array, advantage: Array, target: Array
    ) -> tuple[float, ...]:
        """Write the gradients of the first rows of a batch, or add those of later rows; return their loss terms."""
        agent, size, rows = self.agent, self.batch_size, len(x)
        log_std_grads = self._log_std_grads
        actor_outputs = [output[:rows] for output in self._actor_outputs]
        critic_outputs = [output[:rows] for output in self._critic_outputs]
        actor_grad, value_grad = self._actor_grad[:rows], self._value_grad[:rows]
        grads = (actor_grad,) if log_std_grads is None else (actor_grad, log_std_grads[0 if is_first else 1])
        steps = self._actor.forward(x, actor_outputs), action, old_log_prob, advantage
        coefficients = size, float(agent.clip_epsilon), float(agent.entropy_coeff)
        terms = self._actor_loss(*steps, *coefficients, *self._box, *grads)
        values = self._critic.forward(x, critic_outputs)
        arguments = values, target, size, agent.critic_coeff, self._distance, value_grad
        critic_loss = jitted(kernels.ppo_value_loss)(*arguments)
        self._actor.backward(x, actor_outputs, actor_grad, accumulate=not is_first)
        self._critic.backward(x, critic_outputs, value_grad, accumulate=not is_first)
        if log_std_grads is not None and not is_first:
            log_std_grads[0][:] += log_std_grads[1]
        return *terms, critic_loss
