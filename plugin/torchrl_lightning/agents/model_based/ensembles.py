"""Ensembles of perceptrons, evaluated together by batched matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_lightning._core.validators import integer, one_of
from torchrl_lightning.agents.networks.encoders import ACTIVATIONS
from torchrl_lightning.dynamics import StandardScaler

INITIAL_LOG_VARIANCE_BOUNDS = (-10.0, 0.5)


def to_layer_widths(value: Any, name: str) -> list[int]:
    """Validate layer widths and return them as a list of integers."""
    return [integer(width, name) for width in value]


Widths = Annotated[Sequence[int], to_layer_widths]


class GaussianEnsemble(nn.Module):
    r"""M independent perceptrons that map ``[M, B, I]`` to means and log-variances ``[M, B, O]`` of Gaussians.

    Each member learns soft bounds \(\ell_{\min}, \ell_{\max}\) of its log-variances: \(\ell \leftarrow \ell_{\max} -
    \mathrm{softplus}(\ell_{\max} - \ell)\) and \(\ell \leftarrow \ell_{\min} + \mathrm{softplus}(\ell - \ell_{\min})\).
    Initial weights are Normal with standard deviation \(1 / (2 \sqrt{I})\), truncated at two deviations. Initial biases
    are zero (Chua et al., 2018). Inputs and targets are standardised; the state dict contains their means and
    deviations.

    If ``ends_by`` is positive, each member has a second perceptron with the same hidden sizes. It predicts
    terminations from the next observation. It is trained separately and does not change the first perceptron.

    Args:
        num_members: Number of members, M.
        inputs: Number of inputs, I.
        outputs: Number of outputs, O.
        hidden_sizes: Width of each hidden layer.
        activation: Name of the activation.
        probabilistic: Predict log-variances; if False, the members minimise their squared errors.
        ends_by: Number of observation entries for the prediction of terminations. They are the first inputs, and
            their changes are the first targets. 0 learns no terminations.

    Examples:
        >>> mean, log_variance = GaussianEnsemble(3, 4, 2, [8])(torch.zeros(3, 5, 4))
        >>> mean.shape, log_variance.shape
        (torch.Size([3, 5, 2]), torch.Size([3, 5, 2]))
    """

    input_mean: Tensor
    input_std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self,
        num_members: int,
        inputs: int,
        outputs: int,
        hidden_sizes: Sequence[int] = (200, 200, 200),
        activation: str = "silu",
        probabilistic: bool = True,
        ends_by: int = 0,
    ) -> None:
        super().__init__()
        self.num_members, self.inputs, self.outputs = integer(num_members, "num_members"), inputs, outputs
        self.probabilistic = probabilistic
        self.activation = ACTIVATIONS[one_of(activation, "activation", ACTIVATIONS)]()
        sizes = [inputs, *to_layer_widths(hidden_sizes, "hidden_sizes")]
        last_size = outputs * 2 if probabilistic else outputs
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for input_size, output_size in zip(sizes, [*sizes[1:], last_size], strict=True):
            std = 0.5 / math.sqrt(input_size)
            # In the layout [M, in, out], products and gradients need no copies.
            weight = torch.empty(num_members, input_size, output_size)
            self.weights.append(nn.Parameter(nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std)))
            self.biases.append(nn.Parameter(torch.zeros(num_members, 1, output_size)))
        if probabilistic:
            low, high = (torch.full((num_members, 1, outputs), value) for value in INITIAL_LOG_VARIANCE_BOUNDS)
            self.min_log_variance, self.max_log_variance = nn.Parameter(low), nn.Parameter(high)
        for name, size in (("input", inputs), ("target", outputs)):
            # The input mean is subtracted from observations, which may be float64 with a large offset.
            dtype = torch.float64 if name == "input" else None
            self.register_buffer(f"{name}_mean", torch.zeros(size, dtype=dtype))
            self.register_buffer(f"{name}_std", torch.ones(size))
        self.ends: GaussianEnsemble | None = None
        if ends_by:
            self.ends = GaussianEnsemble(num_members, ends_by, 1, hidden_sizes, activation, probabilistic=False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return means and, if ``probabilistic``, log-variances ``[M, B, O]`` of standardised inputs ``[M, B, I]``."""
        x = inputs
        layers = list(zip(self.weights, self.biases, strict=True))
        for weight, bias in layers[:-1]:
            x = self.activation(torch.baddbmm(bias, x, weight))
        weight, bias = layers[-1]
        x = torch.baddbmm(bias, x, weight)
        if not self.probabilistic:
            return x, None
        mean, log_variance = x.chunk(2, -1)
        return mean, soft_clamp(log_variance, self.min_log_variance, self.max_log_variance)

    def loss(
        self, inputs: Tensor, targets: Tensor, weight_decay: float, terminated: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the loss terms on standardised inputs and targets ``[M, B, *]``, summed over the members.

        Each member's gradient equals the gradient of its own loss in :class:`~torchrl_lightning.DynamicsEnsemble`.
        ``terminated`` ``[M, B, 1]`` is 1 in rows that terminate and 0 otherwise. It is used only if terminations are
        learnt.
        """
        mean, log_variance = self(inputs)
        error = (mean - targets).square()
        if log_variance is None:
            terms = {"loss_error": error.mean((1, 2)).sum()}
        else:
            terms = {
                "loss_error": (error * (-log_variance).exp()).mean((1, 2)).sum(),
                "loss_variance": log_variance.mean((1, 2)).sum(),
                "loss_bounds": 0.01 * (self.max_log_variance.sum() - self.min_log_variance.sum()),
            }
        if weight_decay:
            terms["loss_decay"] = weight_decay * sum(weight.square().sum() for weight in self.weights)
        if self.ends is not None and terminated is not None:
            columns = self.ends.inputs
            change = targets[..., :columns] * self.target_std[:columns] + self.target_mean[:columns]
            logits, _ = self.ends(inputs[..., :columns] + change / self.input_std[:columns])
            cross_entropy = F.binary_cross_entropy_with_logits(logits, terminated, reduction="none")
            terms["loss_terminated"] = cross_entropy.mean((1, 2)).sum()
        return {**terms, "error": error.detach().mean()}

    @torch.no_grad()
    def errors(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return each member's squared error ``[M]``, summed over rows ``[B, *]`` shared by all members."""
        mean, _ = self(inputs.expand(self.num_members, *inputs.shape))
        return (mean - targets).square().mean(-1).sum(-1)

    @torch.no_grad()
    def copy_members(self, other: GaussianEnsemble, mask: Tensor | None = None) -> None:
        """Copy the standardisation, and the weights of all or some members, from an ensemble of the same shape.

        Args:
            other: The other ensemble.
            mask: Mask ``[M]`` of the copied members; None copies all.
        """
        for target, source in zip(self.parameters(), other.parameters(), strict=True):
            if mask is None:
                target.copy_(source)
            else:
                target[mask] = source[mask]
        for buffer, other_buffer in zip(self.buffers(), other.buffers(), strict=True):
            buffer.copy_(other_buffer)

    @torch.no_grad()
    def standardise(self, inputs: StandardScaler, targets: StandardScaler) -> None:
        """Set the mean and standard deviation of inputs and targets."""
        self.input_mean.copy_(inputs.mean)
        self.input_std.copy_(inputs.std)
        self.target_mean.copy_(targets.mean)
        self.target_std.copy_(targets.std)


def soft_clamp(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return values bounded by softplus, so that values and bounds have gradients."""
    return low + F.softplus(high - F.softplus(high - values) - low)
