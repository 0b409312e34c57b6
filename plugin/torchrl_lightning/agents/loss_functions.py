r"""Losses as functions of tensors, with the same values and gradients as TorchRL's losses (tested to 1e-6).

On-policy losses take log-probabilities and advantages ``[*B]`` and values ``[*B, 1]``, and return the mean over all
steps. The off-policy functions start at ``value_of_action``. They take the values of one critic ``[*B]`` or of several
critics ``[N, *B]``, and return ``[*B]``.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_lightning._core.settings import choices

DISTANCES = {"l1": F.l1_loss, "l2": F.mse_loss, "smooth_l1": F.smooth_l1_loss}
Distance = Annotated[str, choices(*DISTANCES)]


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    r"""Return \(-\mathbb{E}\,A \log\pi(a|s)\) (Williams, 1992).

    Args:
        log_prob: Log-probabilities of the executed actions, ``[*B]``.
        advantage: Advantages, ``[*B]``.

    Examples:
        >>> policy_gradient_loss(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5]))
        tensor(1.)
    """
    _check_same_shape(log_prob, advantage)
    return -(log_prob * advantage).mean()


def clipped_surrogate_loss(log_ratio: Tensor, advantage: Tensor, epsilon: float | Tensor) -> Tensor:
    r"""Return \(-\mathbb{E}\min(\rho A, \mathrm{clip}(\rho, 1-\epsilon, 1+\epsilon) A)\) (Schulman et al., 2017).

    Args:
        log_ratio: \(\log\rho = \log\pi(a|s) - \log\mu(a|s)\) with the behaviour policy \(\mu\), ``[*B]``.
        advantage: Advantages, ``[*B]``.
        epsilon: Clipping range of the ratio around 1.

    Examples:
        >>> clipped_surrogate_loss(torch.tensor([2.0, 0.5]).log(), torch.tensor([1.0, -1.0]), 0.2)
        tensor(-0.2000)
    """
    _check_same_shape(log_ratio, advantage)
    gain = log_ratio.exp() * advantage
    # The largest gain that the objective counts is (1 + epsilon) A if A >= 0, else (1 - epsilon) A.
    bound = advantage + epsilon * advantage.abs()
    return -torch.minimum(gain, bound).mean()


def kl_estimate(log_ratio: Tensor) -> Tensor:
    r"""Return \(\rho - 1 - \log\rho \ge 0\) for actions of \(\mu\): an estimate of \(\mathrm{KL}(\mu \| \pi)\).

    Its mean is unbiased and has less variance than the mean of \(-\log\rho\), which may be negative. The result is
    infinite for a ratio of 0 and for a ratio outside the range of the dtype.

    Args:
        log_ratio: \(\log\rho = \log\pi(a|s) - \log\mu(a|s)\), ``[*B]``.

    Source:
        Schulman (2020), Approximating KL Divergence (the estimator k3), http://joschu.net/blog/kl-approx.html

    Examples:
        >>> kl_estimate(torch.tensor([0.0, 0.5, -0.5, 1000.0]))
        tensor([0.0000, 0.1487, 0.1065,    inf])
    """
    # exp(88) is close to float32's limit. Above 88, exp dominates, and the clamp prevents infinity - infinity = NaN.
    return log_ratio.expm1() - log_ratio.clamp(max=88.0)


def critic_loss(
    value: Tensor,
    target: Tensor,
    distance: str = "l2",
    *,
    old_value: Tensor | None = None,
    clip_value: float | None = None,
) -> Tensor:
    r"""Return \(\mathbb{E}\,d(V, \hat V)\); with clipping, \(d\) is the larger distance of \(V\) and the clipped \(V\).

    Args:
        value: Predicted values \(V\), ``[*B, 1]``.
        target: Regression targets \(\hat V\), ``[*B, 1]``.
        distance: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        old_value: Predicted values at collection time, ``[*B, 1]``; required for clipping.
        clip_value: Maximum change from ``old_value``; larger changes are clipped. None does not clip.

    Examples:
        >>> critic_loss(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1))
        tensor(5.)
    """
    _check_same_shape(value, target)
    if clip_value is None or old_value is None:
        return DISTANCES[distance](value, target)
    _check_same_shape(value, old_value)
    clipped = old_value + (value - old_value).clamp(-clip_value, clip_value)
    unclipped = DISTANCES[distance](value, target, reduction="none")
    return torch.maximum(unclipped, DISTANCES[distance](clipped, target, reduction="none")).mean()


def standardized(advantage: Tensor) -> Tensor:
    """Return advantages with mean 0 and standard deviation 1; a single advantage is returned unchanged."""
    if advantage.numel() < 2:
        return advantage
    std, mean = torch.std_mean(advantage)
    return (advantage - mean) / std.clamp_min(1e-6)


def _check_same_shape(a: Tensor, b: Tensor) -> None:
    # [B] and [B, 1] would silently broadcast to [B, B].
    if a.shape != b.shape:
        raise ValueError(f"the loss compares {list(a.shape)} with {list(b.shape)}. Both must have the same shape.")


def value_of_action(values: Tensor, action: Tensor, *, one_hot: bool = False) -> Tensor:
    r"""Return \(Q(s, a)\) from values ``[*B, A]`` and actions ``[*B]``, or ``[*B, A]`` if one-hot.

    Examples:
        >>> value_of_action(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0]))
        tensor([2., 3.])
    """
    if one_hot:
        assert action.shape == values.shape, f"actions {list(action.shape)}, values {list(values.shape)}"
        return (values * action).sum(-1)
    index = action.unsqueeze(-1) if action.ndim < values.ndim else action
    return values.gather(-1, index).squeeze(-1)


def margin_loss(values: Tensor, action: Tensor, margin: float, *, one_hot: bool = False) -> Tensor:
    r"""Return \(\max_b [Q(s, b) + m\,1_{b \ne a}] - Q(s, a)\), ``[*B]``, of values ``[*B, A]`` (Hester et al., 2018).

    The loss is 0 if the value of the demonstrated action exceeds all other values by at least the margin.

    Examples:
        >>> margin_loss(torch.tensor([[1.0, 2.0], [1.0, 3.0]]), torch.tensor([0, 1]), 0.8)
        tensor([1.8000, 0.0000])
    """
    one_hot_action = action if one_hot else F.one_hot(action.reshape(values.shape[:-1]), values.shape[-1])
    return (values + margin * (1 - one_hot_action.to(values.dtype))).amax(-1) - value_of_action(
        values, action, one_hot=one_hot
    )


def double_q_value(values: Tensor, selector: Tensor) -> Tensor:
    r"""Return \(\bar Q(s', \arg\max_a Q(s', a))\) from values \(\bar Q\) and a selector \(Q\), ``[*B, A]`` each.

    The values come from the target network, and the selector comes from the online network (van Hasselt et al., 2016).

    Examples:
        >>> double_q_value(torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 4.0]]))
        tensor([1.])
    """
    assert values.shape == selector.shape, f"values {list(values.shape)}, selector {list(selector.shape)}"
    return values.gather(-1, selector.argmax(-1, keepdim=True)).squeeze(-1)


def soft_value(values: Tensor, log_prob: Tensor, alpha: Tensor) -> Tensor:
    r"""Return \(\min_i Q_i(s, a) - \alpha \log\pi(a|s)\) (Haarnoja et al., 2018); its negative is the policy's loss.

    Examples:
        >>> soft_value(torch.tensor([[1.0], [2.0]]), torch.tensor([-3.0]), torch.tensor(0.5))
        tensor([2.5000])
    """
    assert values.shape[1:] == log_prob.shape, f"values {list(values.shape)}, log_prob {list(log_prob.shape)}"
    return values.amin(0) - alpha * log_prob


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    r"""Return \(-\log\alpha\,(\log\pi(a|s) + \bar H)\), \(\bar H\) in nats (Haarnoja et al., 2018).

    Examples:
        >>> temperature_loss(torch.tensor(2.0), torch.tensor([1.0]), -3.0)
        tensor([4.])
    """
    return -log_alpha * (log_prob.detach() + target_entropy)


def smooth_action(action: Tensor, deviation: float, bound: float) -> Tensor:
    r"""Return \(\mathrm{clip}(a + \mathrm{clip}(\epsilon, -c, c), -1, 1)\), \(\epsilon\sim\mathcal N(0, \sigma)\).

    This is target policy smoothing (Fujimoto et al., 2018), in units of half the action range.

    Examples:
        >>> smooth_action(torch.tensor([2.0]), deviation=0.0, bound=0.5)
        tensor([1.])
    """
    return (action + (torch.randn_like(action) * deviation).clamp_(-bound, bound)).clamp_(-1.0, 1.0)


def td_loss(
    values: Tensor, target: Tensor, distance: str = "l2", mask: Tensor | None = None, reduction: str = "none"
) -> tuple[Tensor, Tensor]:
    r"""Return the loss \(\sum_i d(Q_i(s, a), y)\) and the error \(\max_i |Q_i(s, a) - y|\), ``[*B]`` each.

    The error has no gradient. The steps excluded by ``mask`` may have any target, even NaN, and their error is 0. With
    ``reduction="mean"``, the loss is the mean over all steps, computed in one operation.

    Examples:
        >>> td_loss(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0]))
        (tensor([5.]), tensor([2.]))
    """
    has_several_critics = values.ndim > target.ndim
    assert values.shape[has_several_critics:] == target.shape, (
        f"values {list(values.shape)}, target {list(target.shape)}"
    )
    if mask is not None:
        # NaN in a target would make the gradient NaN even if the loss is masked afterwards.
        target = torch.where(mask, target, values.detach()[0] if has_several_critics else values.detach())
    loss = DISTANCES[distance](values, target.expand_as(values) if has_several_critics else target, reduction=reduction)
    error = (values.detach() - target).abs_()
    if has_several_critics:
        loss, error = (loss * len(values) if reduction == "mean" else loss.sum(0)), error.amax(0)
    return loss, error if mask is None else torch.where(mask, error, 0.0)
