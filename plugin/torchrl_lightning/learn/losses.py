r"""On-policy losses as plain functions of tensors: log-probabilities and advantages ``[*B]``, values ``[*B, 1]``.

They are means over every step. Values and gradients are those of TorchRL's ``ClipPPOLoss``, ``A2CLoss`` and
``ReinforceLoss`` (tested to 1e-6).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

DISTANCES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    r"""Return \(-\mathbb{E}\,A \log\pi(a|s)\) (Williams, 1992).

    Args:
        log_prob: Of the actions taken, ``[*B]``.
        advantage: ``[*B]``.

    Example:
        >>> policy_gradient_loss(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5]))
        tensor(1.)
    """
    _same_shape(log_prob, advantage)
    return -(log_prob * advantage).mean()


def clipped_surrogate_loss(log_ratio: Tensor, advantage: Tensor, epsilon: float | Tensor) -> Tensor:
    r"""Return \(-\mathbb{E}\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon, 1+\epsilon) A)\) (Schulman et al., 2017).

    Args:
        log_ratio: \(\log\rho = \log\pi(a|s) - \log\mu(a|s)\) with the policy \(\mu\) that acted, ``[*B]``.
        advantage: ``[*B]``.
        epsilon: Range of the ratio around 1 in which it may gain.

    Example:
        >>> clipped_surrogate_loss(torch.tensor([2.0, 0.5]).log(), torch.tensor([1.0, -1.0]), 0.2)
        tensor(-0.2000)
    """
    _same_shape(log_ratio, advantage)
    gain = log_ratio.exp() * advantage
    # (1 + epsilon) A where A >= 0, and (1 - epsilon) A elsewhere: beyond it nothing is gained.
    bound = advantage + epsilon * advantage.abs()
    return -torch.minimum(gain, bound).mean()


def critic_loss(
    value: Tensor,
    target: Tensor,
    distance: str = "l2",
    *,
    old_value: Tensor | None = None,
    clip_value: float | None = None,
) -> Tensor:
    r"""Return \(\mathbb{E}\,d(V, \hat V)\), or the larger of this and the distance of the clipped value.

    Args:
        value: ``[*B, 1]``.
        target: ``[*B, 1]``.
        distance: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        old_value: What was predicted when the steps were collected, ``[*B, 1]``; needed for clipping.
        clip_value: Clip the change from ``old_value`` to this; None does not clip.

    Example:
        >>> critic_loss(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
        tensor(5.)
    """
    _same_shape(value, target)
    if clip_value is None or old_value is None:
        return DISTANCES[distance](value, target)
    _same_shape(value, old_value)
    clipped = old_value + (value - old_value).clamp(-clip_value, clip_value)
    far = DISTANCES[distance](value, target, reduction="none")
    return torch.maximum(far, DISTANCES[distance](clipped, target, reduction="none")).mean()


def check_distance(distance: str, name: str) -> str:
    """Return the name of a distance between values, given as the argument ``name``; raise ValueError if unknown."""
    if distance not in DISTANCES:
        raise ValueError(f"{name} is {distance!r}; expected one of {', '.join(DISTANCES)}.")
    return distance


def standardized(advantage: Tensor) -> Tensor:
    """Return advantages with mean 0 and standard deviation 1; a single one as it is."""
    if advantage.numel() < 2:
        return advantage
    std, mean = torch.std_mean(advantage)
    return (advantage - mean) / std.clamp_min(1e-6)


def _same_shape(a: Tensor, b: Tensor) -> None:
    # [B] against [B, 1] would broadcast to [B, B] without a word.
    if a.shape != b.shape:
        raise ValueError(f"the loss compares {list(a.shape)} with {list(b.shape)}; give both the same shape")
