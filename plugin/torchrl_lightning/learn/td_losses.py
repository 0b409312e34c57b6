r"""Off-policy losses as plain functions of tensors: values of one critic ``[*B]`` or of several ``[N, *B]``.

What the modules make of them are the losses and gradients of TorchRL's ``DQNLoss``, ``SACLoss`` and ``TD3Loss`` (tested
to 1e-6).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lightning.learn.losses import DISTANCES


def value_of_action(values: Tensor, action: Tensor, *, one_hot: bool = False) -> Tensor:
    r"""Return \(Q(s, a)\), ``[*B]``.

    Args:
        values: Of every action, ``[*B, A]``.
        action: The actions taken: ``[*B]``, or ``[*B, A]`` if one-hot.
        one_hot: How actions are encoded.

    Example:
        >>> value_of_action(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0]))
        tensor([2., 3.])
    """
    if one_hot:
        assert action.shape == values.shape, f"actions {list(action.shape)}, values {list(values.shape)}"
        return (values * action).sum(-1)
    index = action.unsqueeze(-1) if action.ndim < values.ndim else action
    return values.gather(-1, index).squeeze(-1)


def double_q_value(values: Tensor, selector: Tensor) -> Tensor:
    r"""Return \(\bar Q(s', \arg\max_a Q(s', a))\), ``[*B]`` (van Hasselt et al., 2016).

    Args:
        values: The target network's \(\bar Q\), ``[*B, A]``.
        selector: The online network's \(Q\), ``[*B, A]``.

    Example:
        >>> double_q_value(torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 4.0]]))
        tensor([1.])
    """
    assert values.shape == selector.shape, f"values {list(values.shape)}, selector {list(selector.shape)}"
    return values.gather(-1, selector.argmax(-1, keepdim=True)).squeeze(-1)


def soft_value(values: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    r"""Return \(\min_i Q_i(s, a) - \alpha \log\pi(a|s)\), ``[*B]`` (Haarnoja et al., 2018).

    Its negative is the policy's loss.

    Args:
        values: ``[N, *B]``.
        log_prob: Of a sampled action, ``[*B]``.
        alpha: The temperature.

    Example:
        >>> soft_value(torch.tensor([[1.0], [2.0]]), torch.tensor([-3.0]), torch.tensor(0.5))
        tensor([2.5000])
    """
    assert values.shape[1:] == log_prob.shape, f"values {list(values.shape)}, log_prob {list(log_prob.shape)}"
    return values.amin(0) - alpha * log_prob


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    r"""Return \(-\log\alpha\,(\log\pi(a|s) + \bar H)\), ``[*B]`` (Haarnoja et al., 2018).

    Args:
        log_alpha: Logarithm of the temperature, a scalar.
        log_prob: Of a sampled action, ``[*B]``; gets no gradient.
        target_entropy: \(\bar H\), in nats.

    Example:
        >>> temperature_loss(torch.tensor(2.0), torch.tensor([1.0]), -3.0)
        tensor([4.])
    """
    return -log_alpha * (log_prob.detach() + target_entropy)


def smoothed(action: Tensor, deviation: float, bound: float) -> Tensor:
    r"""Return \(\mathrm{clip}(a + \mathrm{clip}(\epsilon, -c, c), -1, 1)\), \(\epsilon\sim\mathcal N(0, \sigma)\).

    Target policy smoothing (Fujimoto et al., 2018).

    Args:
        action: In units of half the action range, ``[*B, A]``.
        deviation: \(\sigma\), in the same units.
        bound: \(c\), in the same units.

    Example:
        >>> smoothed(torch.tensor([2.0]), 0.0, 0.5)
        tensor([1.])
    """
    return (action + (torch.randn_like(action) * deviation).clamp_(-bound, bound)).clamp_(-1.0, 1.0)


def td_loss(values: Tensor, target: Tensor, distance: str = "l2", mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Return \(\sum_i d(Q_i(s, a), y)\), and \(\max_i |Q_i(s, a) - y|\) without a gradient, ``[*B]`` each.

    Args:
        values: ``[N, *B]``, or ``[*B]`` of a single critic.
        target: \(y\), ``[*B]``.
        distance: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        mask: Which steps count; what the others hold may be anything, also NaN, and their error is 0.

    Example:
        >>> td_loss(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0]))
        (tensor([5.]), tensor([2.]))
    """
    several = values.ndim > target.ndim
    assert values.shape[several:] == target.shape, f"values {list(values.shape)}, target {list(target.shape)}"
    if mask is not None:
        # NaN in a target would make the gradient NaN even behind a selection.
        target = torch.where(mask, target, values.detach()[0] if several else values.detach())
    loss = DISTANCES[distance](values, target.expand_as(values) if several else target, reduction="none")
    error = (values.detach() - target).abs_()
    if several:
        loss, error = loss.sum(0), error.amax(0)
    return loss, error if mask is None else torch.where(mask, error, 0.0)
