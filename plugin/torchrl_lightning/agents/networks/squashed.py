"""Actors for bounded actions: a state-dependent Normal with tanh (SAC), and a deterministic actor (TD3)."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded
from torchrl.modules import TanhNormal

from torchrl_lightning._core.keys import FEATURES
from torchrl_lightning._core.modules import set_unregistered
from torchrl_lightning.agents.networks.action_heads import (
    POLICY_GAIN,
    ActionHead,
    ActionScaling,
    Parameters,
    action_bounds,
    action_name,
    check_action_bounds,
)
from torchrl_lightning.agents.networks.actors import Actor, trunk_and_layers
from torchrl_lightning.agents.networks.encoders import MLPNetwork, orthogonal
from torchrl_lightning.agents.networks.network_protocol import Network

DEFAULT_NETWORK = MLPNetwork([256, 256], "relu")
LOG_STD_RANGE = (-20.0, 2.0)
_LOG_PROB_CONSTANT = 0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0)


def action_range(spec: TensorSpec, *, allow_constants: bool = False) -> tuple[Tensor, Tensor]:
    """Return the center and the half-width of an action vector's range, ``[A]`` each.

    Args:
        spec: The spec of an action.
        allow_constants: Accept components with only one value; their half-width is 0.

    Raises:
        TypeError: The actions are not a floating-point vector with finite bounds.
        ValueError: A component has only one value.
    """
    if isinstance(spec, Bounded) and spec.dtype.is_floating_point and len(spec.shape) == 1:
        low, high = action_bounds(spec)
        if bool((low.isfinite() & high.isfinite()).all()):
            if not allow_constants:
                check_action_bounds(low, high)
            return (high + low) / 2, (high - low) / 2
    wrapper = "a wrapper such as gymnasium.wrappers.TransformAction"
    unbounded, remedy = "", "Use DQN for Discrete, and PPO for any discrete actions"
    if isinstance(spec, Bounded | Unbounded):
        is_vector = spec.dtype.is_floating_point and len(spec.shape) == 1
        unbounded, remedy = (" without bounds", f"Use PPO, or {wrapper}") if is_vector else ("", f"Use {wrapper}")
    elif isinstance(spec, Categorical) and not spec.shape:
        remedy += (
            ". For offline data use model=discrete_cql or discrete_iql; discrete_iql with model.loss.temperature=0 "
            "clones behaviour"
        )
    raise TypeError(
        "the action space of learners such as SAC, TD3 and BC must be a one-dimensional floating-point Box with finite "
        f"bounds, got {action_name(spec)}{unbounded}. {remedy}."
    )


def safetanh_limit(dtype: torch.dtype) -> float:
    """Return the largest tanh output, which TorchRL sets below 1 so that the action stays invertible."""
    return 1.0 - torch.finfo(dtype).resolution


class _MeanAndLogStd(nn.Module):
    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.linear = orthogonal(nn.Linear(features, 2 * size), POLICY_GAIN)

    def forward(self, features: Tensor) -> Parameters:
        loc, log_std = self.linear(features).chunk(2, -1)
        return loc, log_std.clamp(*LOG_STD_RANGE).exp()


class SquashedHead(ActionHead, ActionScaling):
    r"""A Normal with mean \(\mu(s)\) and standard deviation \(\sigma(s)\), squashed by \(a = c + h \tanh u\).

    \(\log\pi(a|s) = \log\mathcal N(u) - \sum_i \log(h_i (1 - \tanh^2 u_i))\) (Haarnoja et al., 2018, appendix C). The
    head returns the samples and log-probabilities of TorchRL's ``TanhNormal``, but builds no distribution objects.
    """

    log_range: Tensor
    limits = (*LOG_STD_RANGE, safetanh_limit(torch.float32))
    """Bounds of the log standard deviation, and the largest tanh output in float32."""

    def __init__(self, features: int, spec: TensorSpec, hidden: nn.Module | None = None) -> None:
        center, half_range = action_range(spec)
        output_layer = _MeanAndLogStd(features, center.numel())
        bounds = {"low": center - half_range, "high": center + half_range, "event_dims": 1}
        layers = output_layer if hidden is None else nn.Sequential(hidden, output_layer)
        super().__init__(layers, ["loc", "scale"], TanhNormal, bounds)
        self.set_scaling(center, half_range)
        self.register_buffer("log_range", half_range.log().sum(), persistent=False)

    def act(self, parameters: Parameters, deterministic: bool) -> Tensor:
        """Return actions ``[*B, A]``."""
        loc, std = parameters
        preimage = loc if deterministic else torch.addcmul(loc, std, torch.randn_like(loc))
        return self.scale(self._tanh(preimage))

    def rsample(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """Return actions ``[*B, A]`` and their log-probabilities ``[*B]``, both differentiable."""
        loc, std = parameters
        noise = torch.randn_like(loc)
        preimage = torch.addcmul(loc, std, noise)
        action = self.scale(self._tanh(preimage))
        # log(1 - tanh^2 u) = 2 (log 2 - u - softplus(-2 u))
        log_probs = 2.0 * (preimage + nn.functional.softplus(-2.0 * preimage)) - std.log() - 0.5 * noise.square()
        return action, log_probs.sum(-1) - (_LOG_PROB_CONSTANT * loc.shape[-1] + self.log_range)

    def sample(self, parameters: Parameters, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Return actions ``[*B, A]`` and log-probabilities ``[*B]``.

        As for stored actions, the log-probabilities are computed from the actions and not from the samples before the
        tanh.
        """
        if deterministic:
            return super().sample(parameters, deterministic)
        action = self.act(parameters, deterministic)
        log_prob: Tensor = self.distribution(parameters).log_prob(action)
        return action, log_prob

    @staticmethod
    def _tanh(preimage: Tensor) -> Tensor:
        limit = safetanh_limit(preimage.dtype)
        return preimage.tanh().clamp(-limit, limit)


class DeterministicHead(ActionScaling):
    """One linear layer and a tanh, scaled to the action range; ``hidden`` layers come before the linear layer."""

    def __init__(self, features: int, spec: TensorSpec, hidden: nn.Module | None = None) -> None:
        super().__init__()
        self.set_scaling(*action_range(spec))
        output_layer = orthogonal(nn.Linear(features, self.center.numel()), POLICY_GAIN)
        self.layers = output_layer if hidden is None else nn.Sequential(hidden, output_layer)

    def squashed(self, features: Tensor) -> Tensor:
        """Return actions ``[*B, A]`` in [-1, 1]."""
        return self.layers(features).tanh()

    def forward(self, features: Tensor) -> Tensor:
        """Return actions ``[*B, A]`` in the environment's units."""
        return self.scale(self.squashed(features))


class DeterministicActor(TensorDictSequential):
    """A trunk and a deterministic head; it writes ``action``."""

    def __init__(self, trunk: TensorDictModuleBase, head: DeterministicHead) -> None:
        super().__init__(trunk, TensorDictModule(head, in_keys=[FEATURES], out_keys=["action"]))
        set_unregistered(self, trunk=trunk, head=head)


def build_squashed_actor(specs: Any, network: Network | None = None) -> Actor:
    """Build the actor of SAC; mean and standard deviation depend on the observation.

    The arguments are the same as in :func:`build_actor`. The default network has two layers of 256 rectified units.

    Raises:
        TypeError: The actions are not bounded floating-point vectors.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> build_squashed_actor(specs)(specs.observation.zero([5]))["action"].shape
        torch.Size([5, 1])
    """
    trunk, hidden, features = trunk_and_layers(specs, network or DEFAULT_NETWORK)
    return Actor(trunk, SquashedHead(features, specs.action, hidden), specs.action)


def build_deterministic_actor(specs: Any, network: Network | None = None) -> DeterministicActor:
    """Build the actor of TD3; arguments and errors are the same as in ``build_squashed_actor``.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> build_deterministic_actor(specs)(specs.observation.zero([5]))["action"].shape
        torch.Size([5, 1])
    """
    trunk, hidden, features = trunk_and_layers(specs, network or DEFAULT_NETWORK)
    return DeterministicActor(trunk, DeterministicHead(features, specs.action, hidden))
