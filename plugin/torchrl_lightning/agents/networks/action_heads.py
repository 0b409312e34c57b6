"""Action heads: map features to distribution parameters, actions and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Binary, Bounded, Categorical, OneHot, TensorSpec, Unbounded
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal

from torchrl_lightning._core.validators import one_of
from torchrl_lightning.agents.networks.distributions import (
    ClippedNormal,
    MultiCategorical,
    clipped_normal_log_prob,
    normal_entropy,
)
from torchrl_lightning.agents.networks.encoders import category_counts, orthogonal
from torchrl_lightning.environments.autocast import HALF, to_single
from torchrl_lightning.environments.specs import spec_fields

POLICY_GAIN = 0.01  # makes the initial policy nearly uniform (Andrychowicz et al., 2021)
# Beyond these limits, densities and their gradients overflow in float32.
MAX_BOUND, MIN_WIDTH = 1e37, 1e-37
Parameters = tuple[Tensor, ...]


class ActionHead(nn.Module):
    """One layer from features ``[*B, H]`` to the parameters of a distribution.

    ``parameter_keys`` are the distribution's argument names. The optional ``hidden`` layers come before the last layer.
    """

    def __init__(
        self,
        layers: nn.Module,
        parameter_keys: Sequence[str],
        distribution_class: Callable[..., D.Distribution],
        distribution_kwargs: dict[str, Any] | None = None,
        hidden: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.hidden = hidden
        self.parameter_keys = list(parameter_keys)
        self.distribution_class = distribution_class
        self.distribution_kwargs = distribution_kwargs or {}

    def forward(self, features: Tensor) -> Parameters:
        """Return the distribution's parameters."""
        parameters = self.layers(features if self.hidden is None else self.hidden(features))
        parameters = parameters if isinstance(parameters, tuple) else (parameters,)
        if parameters[0].dtype in HALF:  # autocast returns half precision, which is too coarse for log-probabilities
            return tuple(map(to_single, parameters))
        return parameters

    def sampling_parameters(self, features: Tensor) -> Parameters:
        """Return the parameters for ``sample`` and ``evaluate``."""
        return self(features)

    def distribution(self, parameters: Parameters) -> D.Distribution:
        """Return the distribution with these parameters."""
        return self.distribution_class(
            **dict(zip(self.parameter_keys, parameters, strict=True)), **self.distribution_kwargs
        )

    def sample(self, parameters: Parameters, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Return actions and log-probabilities, with the same random numbers as TorchRL's generic path."""
        dist: Any = self.distribution(parameters)
        sample = dist.rsample if dist.has_rsample else dist.sample
        action = dist.deterministic_sample if deterministic else sample()
        return action, dist.log_prob(action)

    def evaluate(self, parameters: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities ``[*B]`` and entropies ``[*B]``; a TanhNormal's entropy is a sample estimate."""
        dist = self.distribution(parameters)
        if isinstance(dist, TanhNormal):
            return dist.log_prob(action), -dist.rsample_and_log_prob()[1]
        return dist.log_prob(action), dist.entropy()


class CategoricalHead(ActionHead):
    """Compute a categorical distribution over integer actions directly from the logits."""

    def sample(self, parameters: Parameters, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Return integer actions ``[*B]`` and log-probabilities ``[*B]``."""
        logits = parameters[0].log_softmax(-1)
        if deterministic:
            action = logits.argmax(-1, keepdim=True)
        else:
            # Sample as torch.multinomial does for one sample per row, but without checks of the probabilities.
            action = (logits.exp() / torch.empty_like(logits).exponential_()).argmax(-1, keepdim=True)
        return action.squeeze(-1), logits.gather(-1, action).squeeze(-1)

    def evaluate(self, parameters: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities ``[*B]`` and entropies ``[*B]``."""
        logits = parameters[0].log_softmax(-1)
        log_prob = logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        # A forbidden action has log-probability -inf and adds zero to the entropy.
        return log_prob, -(logits.clamp_min(torch.finfo(logits.dtype).min) * logits.exp()).sum(-1)


class ClippedNormalHead(ActionHead):
    """Compute a :class:`ClippedNormal` over bounded actions from mean and deviation; bounds are ``[A]``."""

    layers: GaussianLayer
    low: Tensor
    high: Tensor

    def __init__(self, layer: GaussianLayer, low: Tensor, high: Tensor, hidden: nn.Module | None = None) -> None:
        super().__init__(layer, ["loc", "scale"], ClippedNormal, {"low": low, "high": high}, hidden)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def sampling_parameters(self, features: Tensor) -> Parameters:
        """Return the mean ``[*B, A]``, and the standard deviation and its logarithm ``[A]``."""
        layer = self.layers
        loc = layer.loc(features if self.hidden is None else self.hidden(features))
        return loc, layer.log_std.exp() * layer.half_range, layer.log_std + layer.half_range.log()

    def sample(self, parameters: Parameters, deterministic: bool) -> tuple[Tensor, Tensor]:
        """Return actions ``[*B, A]`` inside the box and log-probabilities ``[*B]``."""
        loc, scale, log_scale = parameters
        with torch.no_grad():
            action = loc if deterministic else torch.addcmul(loc, torch.randn_like(loc), scale)
            action = action.clamp(self.low, self.high)
        return action, clipped_normal_log_prob(action, loc, scale, log_scale, self.low, self.high)

    def evaluate(self, parameters: Parameters, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities ``[*B]`` and entropies before clipping ``[*B]``."""
        loc, scale, log_scale = parameters
        log_prob = clipped_normal_log_prob(action, loc, scale, log_scale, self.low, self.high)
        return log_prob, normal_entropy(log_scale).expand_as(log_prob)


class ActionScaling(nn.Module):
    """A module that expresses actions in units of ``half_range`` around ``center``; both are ``[A]``."""

    center: Tensor
    half_range: Tensor

    def set_scaling(self, center: Tensor, half_range: Tensor) -> None:
        """Register the range as buffers that the state dict does not contain."""
        self.register_buffer("center", center, persistent=False)
        self.register_buffer("half_range", half_range, persistent=False)

    def scale(self, action: Tensor) -> Tensor:
        """Return actions in the environment's units."""
        return torch.addcmul(self.center, action, self.half_range)


class GaussianLayer(ActionScaling):
    """A linear mean and a state-independent standard deviation, both learnt in units of the action range."""

    def __init__(self, features: int, center: Tensor, half_range: Tensor, initial_std: float) -> None:
        super().__init__()
        self.mean = orthogonal(nn.Linear(features, center.numel()), POLICY_GAIN)
        self.log_std = nn.Parameter(torch.full((center.numel(),), math.log(initial_std)))
        self.set_scaling(center, half_range)

    def forward(self, features: Tensor) -> Parameters:
        """Return mean and standard deviation, ``[*B, A]`` each."""
        loc = self.loc(features)
        return loc, (self.log_std.exp() * self.half_range).expand_as(loc)

    def loc(self, features: Tensor) -> Tensor:
        """Return the mean ``[*B, A]``."""
        return self.scale(self.mean(features))


def build_head(
    spec: TensorSpec, features: int, distribution: str, initial_std: float, hidden: nn.Module | None
) -> ActionHead:
    """Build the head for an unbatched action spec; the optional ``hidden`` layers come before the last layer.

    The action spec selects the distribution:

    - Integer actions use ``Categorical``.
    - One-hot actions use TorchRL's ``OneHotCategorical``.
    - Vectors of integers use a joint ``MultiCategorical``.
    - Bounded boxes use ``ClippedNormal`` (``distribution="normal"``, the default) or TorchRL's ``TanhNormal``
      (``"tanh_normal"``).
    - Unbounded boxes use ``IndependentNormal``.

    Raises:
        ValueError: ``distribution`` is unknown or does not fit the actions, or an action component has only one value.
        TypeError: No distribution supports these actions.
    """
    one_of(distribution, "distribution", ("auto", "normal", "tanh_normal"))

    def logits_layer(size: int) -> nn.Module:
        return orthogonal(nn.Linear(features, size), POLICY_GAIN)

    sizes = _action_category_counts(spec)
    if sizes:
        head = ActionHead(logits_layer(sum(sizes)), ["logits"], MultiCategorical, {"sizes": sizes}, hidden)
    elif isinstance(spec, Categorical) and not spec.shape:
        head = CategoricalHead(logits_layer(int(spec.space.n)), ["logits"], D.Categorical, None, hidden)
    elif isinstance(spec, OneHot):
        head = ActionHead(logits_layer(int(spec.space.n)), ["logits"], OneHotCategorical, None, hidden)
    elif isinstance(spec, Bounded | Unbounded) and spec.dtype.is_floating_point and len(spec.shape) == 1:
        head = _gaussian_head(spec, features, distribution, initial_std, hidden)
        distribution = "auto"
    else:
        raise TypeError(
            "the action space must be Discrete, MultiDiscrete, a one-dimensional MultiBinary or a one-dimensional "
            f"floating-point Box, got {action_name(spec)}. Convert the actions by a wrapper, such as "
            "gymnasium.wrappers.TransformAction."
        )
    if not isinstance(spec, Bounded | Unbounded) and initial_std != 1.0:
        raise ValueError(
            f"initial_std must be left at 1.0 unless actions are continuous, got {initial_std} for "
            f"{action_name(spec)}. Leave it out."
        )
    if distribution != "auto":
        raise ValueError(
            f"distribution must be left at 'auto' unless actions are continuous, got {distribution!r} for "
            f"{action_name(spec)}. Leave it out."
        )
    return head


def action_name(spec: TensorSpec) -> str:
    """Return the name of the Gymnasium space for an action spec.

    Examples:
        >>> from torchrl.data import MultiCategorical
        >>> action_name(Categorical(3)), action_name(MultiCategorical([2, 3])), action_name(Bounded(0, 1, (2, 2)))
        ('Discrete(3)', 'MultiDiscrete([2, 3])', 'Box of shape (2, 2) and dtype float32')
    """
    fields = spec_fields(spec)
    match fields["kind"]:
        case "Categorical" if not spec.shape:
            return f"Discrete({fields['n']})"
        case "OneHot":
            return f"one-hot Discrete({fields['n']})"
        case "Categorical" | "MultiCategorical":
            return f"MultiDiscrete({_action_category_counts(spec) or tuple(spec.shape)})"
        case "Binary":
            return f"MultiBinary({spec.shape[0] if len(spec.shape) == 1 else list(spec.shape)})"
        case "Bounded" | "Unbounded":
            return f"Box of shape {tuple(spec.shape)} and dtype {fields['dtype']}"
    return str(fields["kind"])


def action_bounds(spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Return the bounds of floating-point actions, ``[A]`` each; a missing bound is infinite.

    A bound of magnitude 1e37 or more counts as missing, because float32 cannot compute with these actions. TorchRL
    stores a missing bound as the largest float32 number.
    """
    unbounded = torch.full(spec.shape, math.inf, dtype=torch.float32)
    low = getattr(spec.space, "low", -unbounded).to(torch.float32)
    high = getattr(spec.space, "high", unbounded).to(torch.float32)
    return tuple(  # type: ignore[return-value]
        torch.where(bound.abs() >= MAX_BOUND, math.inf * bound.sign(), bound) for bound in (low, high)
    )


def check_action_bounds(low: Tensor, high: Tensor) -> None:
    """Validate that each action component has several values; raise ValueError if heads cannot scale to its range."""
    narrow = ~(high - low >= MIN_WIDTH)  # also true for NaN, the difference of two equal infinite bounds
    if narrow.any():
        component = int(narrow.nonzero()[0])
        raise ValueError(
            f"the bounds of action component {component} must differ by at least {MIN_WIDTH:g} in float32, got "
            f"low={low[component].item():g} and high={high[component].item():g}. Leave the component out, or rescale "
            "it, by a wrapper, such as gymnasium.wrappers.TransformAction."
        )


def _action_category_counts(spec: TensorSpec) -> list[int]:
    """Return the number of values of each part of a one-dimensional discrete action; empty for other actions."""
    if len(spec.shape) != 1:
        return []
    return [2] * spec.shape[0] if isinstance(spec, Binary) else category_counts(spec)


def _gaussian_head(
    spec: TensorSpec, features: int, distribution: str, initial_std: float, hidden: nn.Module | None
) -> ActionHead:
    low, high = action_bounds(spec)
    check_action_bounds(low, high)
    bounded, squashed = low.isfinite() & high.isfinite(), distribution == "tanh_normal"
    if squashed and not bounded.all():
        raise ValueError(
            "distribution must be 'normal' unless all actions have finite bounds, got 'tanh_normal' for low="
            f"{low.tolist()} and high={high.tolist()}. Leave it out, or bound the actions by a wrapper, such as "
            "gymnasium.wrappers.TransformAction."
        )
    is_scaled = torch.zeros_like(bounded) if squashed else bounded  # TanhNormal scales to the bounds itself
    center = torch.where(is_scaled, (high + low) / 2, 0.0)
    half_range = torch.where(is_scaled, (high - low) / 2, 1.0)
    layer = GaussianLayer(features, center, half_range, initial_std)
    if squashed:
        bounds = {"low": low, "high": high, "event_dims": 1}
        return ActionHead(layer, ["loc", "scale"], TanhNormal, bounds, hidden)
    if bool(low.isinf().all() & high.isinf().all()):
        return ActionHead(layer, ["loc", "scale"], IndependentNormal, None, hidden)
    return ClippedNormalHead(layer, low, high, hidden)
