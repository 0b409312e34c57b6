"""Compiled kernels for perceptrons: layers with their gradients, and action selection for a few rows.

All numbers are float32. A table ``[L + 1, 5]`` describes the L linear layers of an acting network. A row contains the
addresses of weight ``[out, in]`` and bias, the numbers of inputs and outputs, and the activation. The last row contains
the addresses of the head's vectors ``[A]``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchrl_lightning.kernels.compiled import carray, fastmath, pointer

NONE, RELU, TANH = 0, 1, 2
_TANH_SATURATION = 7.90531110763549805  # tanh is 1 in float32 from this value on
_SERIES_BELOW = -30.0  # log_normal_cdf uses a series below this value, before erfc underflows in float64


def forward(x: Any, layers: Any, work: Any, out: Any) -> None:
    """Compute a perceptron (numba).

    Args:
        x: inputs, ``[N, F]``.
        layers: the table of layers.
        work: memory for hidden layers, ``[2, >= N * widest]``.
        out: receives the output of the last layer, ``[N, O]``.
    """
    rows, layer_input, last = len(x), x, len(layers) - 2
    for number in range(last + 1):
        weight_address, bias_address, inputs, outputs, activation = layers[number]
        weight = carray(pointer(weight_address), (outputs, inputs), np.float32)
        bias = carray(pointer(bias_address), (outputs,), np.float32)
        layer_output = out if number == last else work[number % 2, : rows * outputs].reshape(rows, outputs)
        multiply(layer_input, weight, bias, layer_output)
        activate(layer_output.reshape(-1), activation)
        layer_input = layer_output


@fastmath
def multiply(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """Compute a linear layer, four outputs at a time (numba)."""
    (rows, inputs), outputs = x.shape, len(bias)
    blocked = outputs // 4 * 4  # number of outputs in blocks of four
    for r in range(rows):
        for o in range(0, blocked, 4):
            a = b = c = d = np.float32(0.0)
            for i in range(inputs):
                value = x[r, i]
                a += value * weight[o, i]
                b += value * weight[o + 1, i]
                c += value * weight[o + 2, i]
                d += value * weight[o + 3, i]
            out[r, o], out[r, o + 1] = a + bias[o], b + bias[o + 1]
            out[r, o + 2], out[r, o + 3] = c + bias[o + 2], d + bias[o + 3]
        for o in range(blocked, outputs):
            a = np.float32(0.0)
            for i in range(inputs):
                a += x[r, i] * weight[o, i]
            out[r, o] = a + bias[o]


@fastmath
def activate(values: Any, activation: int) -> None:
    """Apply an activation in place (numba); for SIMD code, tanh is a rational approximation, exact to 2e-7."""
    f = np.float32
    if activation == RELU:
        for i in range(len(values)):
            value = values[i]
            values[i] = f(0.0) if value < f(0.0) else value
    elif activation == TANH:
        for i in range(len(values)):
            x = values[i]
            x = f(_TANH_SATURATION) if x > f(_TANH_SATURATION) else x
            x = f(-_TANH_SATURATION) if x < f(-_TANH_SATURATION) else x
            y = x * x
            p = f(-2.76076847742355e-16) * y + f(2.00018790482477e-13)
            p = (p * y + f(-8.60467152213735e-11)) * y + f(5.12229709037114e-08)
            p = (p * y + f(1.48572235717979e-05)) * y + f(6.37261928875436e-04)
            p = p * y + f(4.89352455891786e-03)
            q = f(1.19825839466702e-06) * y + f(1.18534705686654e-04)
            q = (q * y + f(2.26843463243900e-03)) * y + f(4.89352518554385e-03)
            values[i] = x * p / q


def act_epsilon_greedy(
    x: Any, layers: Any, work: Any, out: Any, epsilon: float, uniform: Any, random_actions: Any, action: Any
) -> None:
    """Select the greedy action, or ``random_actions`` ``[N]`` if ``uniform`` ``[N]`` is below epsilon (numba)."""
    forward(x, layers, work, out)
    for r in range(len(out)):
        action[r] = random_actions[r] if uniform[r] < epsilon else out[r].argmax()


def act_categorical(
    x: Any, layers: Any, work: Any, out: Any, exploration: float, noise: Any, action: Any, log_prob: Any
) -> None:
    """Sample actions from logits by exponential noise ``[N, A]`` or take the mode; write log-probabilities (numba)."""
    forward(x, layers, work, out)
    for r in range(len(out)):
        logits, best_score, best_action = out[r], np.float32(-np.inf), 0
        max_logit, total = logits.max(), np.float32(0.0)
        for a in range(len(logits)):
            total += np.exp(logits[a] - max_logit)
        log_total = np.log(total)
        for a in range(len(logits)):
            logits[a] = logits[a] - max_logit - log_total
            score = np.exp(logits[a]) / noise[r, a] if exploration else logits[a]
            if score > best_score:
                best_score, best_action = score, a
        action[r], log_prob[r] = best_action, logits[best_action]


def act_clipped_normal(
    x: Any, layers: Any, work: Any, out: Any, exploration: float, noise: Any, action: Any, log_prob: Any
) -> None:
    """Sample actions from a clipped Normal or take its mean; write log-probabilities (numba).

    The head's vectors are center and half-range of the actions, the log deviation in units of the half-range, and the
    bounds low and high.
    """
    forward(x, layers, work, out)
    size = out.shape[1]
    center, half_range, log_std = vector(layers, 0, size), vector(layers, 1, size), vector(layers, 2, size)
    low, high = vector(layers, 3, size), vector(layers, 4, size)
    for r in range(len(out)):
        total = 0.0
        for a in range(size):
            loc, scale = center[a] + out[r, a] * half_range[a], np.exp(log_std[a]) * half_range[a]
            value = loc + noise[r, a] * scale if exploration else loc
            value = low[a] if value < low[a] else value
            value = high[a] if value > high[a] else value
            z = np.float64(value - loc) / scale
            if value >= high[a]:
                total += log_normal_cdf(-z)
            elif value <= low[a]:
                total += log_normal_cdf(z)
            else:
                total -= 0.5 * z * z + log_std[a] + math.log(half_range[a]) + 0.5 * math.log(2.0 * math.pi)
            action[r, a] = value
        log_prob[r] = total


def log_normal_cdf(z: float) -> float:
    """Return the log CDF of the standard Normal (numba)."""
    if z > _SERIES_BELOW:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
    inverse = 1.0 / (z * z)
    return -0.5 * z * z - math.log(-z) - 0.5 * math.log(2.0 * math.pi) + math.log(1.0 - inverse * (1.0 - 3.0 * inverse))


def act_tanh_normal(
    x: Any, layers: Any, work: Any, out: Any, exploration: float, limits: Any, noise: Any, action: Any
) -> None:
    """Sample actions from a tanh-squashed Normal or take its mean; ``out`` has means and log deviations (numba).

    The head's vectors are center and half-range of the actions. ``limits`` are the lowest and highest log deviation,
    and the largest absolute value after the tanh.
    """
    forward(x, layers, work, out)
    size = action.shape[1]
    center, half_range = vector(layers, 0, size), vector(layers, 1, size)
    min_log_std, max_log_std, max_tanh = limits
    for r in range(len(out)):
        for a in range(size):
            value = out[r, a]
            if exploration:
                log_std = out[r, size + a]
                value += np.exp(clamp(log_std, min_log_std, max_log_std)) * noise[r, a]
            action[r, a] = center[a] + clamp(np.tanh(value), -max_tanh, max_tanh) * half_range[a]


def act_noisy_tanh(x: Any, layers: Any, work: Any, out: Any, noise_scale: float, noise: Any, action: Any) -> None:
    """Select deterministic tanh actions with additive noise, scaled by center and half-range (numba)."""
    forward(x, layers, work, out)
    size, one = out.shape[1], np.float32(1.0)
    center, half_range = vector(layers, 0, size), vector(layers, 1, size)
    for r in range(len(out)):
        for a in range(size):
            value = np.tanh(out[r, a])
            if noise_scale:
                value = clamp(value + noise[r, a] * np.float32(noise_scale), -one, one)
            action[r, a] = center[a] + value * half_range[a]


def vector(layers: Any, number: int, size: int) -> Any:
    """Return a view of one of the head's vectors (numba)."""
    return carray(pointer(layers[-1, number]), (size,), np.float32)


def add_and_activate(values: Any, bias: Any, activation: int) -> None:
    """Add the bias to a linear layer's product ``[B, O]`` and apply its activation, in place (numba)."""
    rows, outputs = values.shape
    if activation == RELU:
        for r in range(rows):
            for o in range(outputs):
                value = values[r, o] + bias[o]
                values[r, o] = np.float32(0.0) if value < np.float32(0.0) else value
    else:
        for r in range(rows):
            for o in range(outputs):
                values[r, o] += bias[o]
        activate(values.reshape(-1), activation)


@fastmath
def backward_activation(grad: Any, values: Any, activation: int, bias_grad: Any) -> None:
    """Propagate a gradient ``[B, O]`` back through an activation with the outputs ``values``, in place (numba).

    ``bias_grad`` receives the sum over the rows, in their order. Four rows at a time keep it in registers.
    """
    (rows, outputs), flat_grad, flat_values = grad.shape, grad.reshape(-1), values.reshape(-1)
    if activation == RELU:
        for i in range(len(flat_grad)):
            flat_grad[i] = flat_grad[i] if flat_values[i] > np.float32(0.0) else np.float32(0.0)
    elif activation == TANH:
        for i in range(len(flat_grad)):
            flat_grad[i] *= np.float32(1.0) - flat_values[i] * flat_values[i]
    bias_grad[:] = np.float32(0.0)
    in_fours = rows // 4 * 4
    for r in range(0, in_fours, 4):
        for o in range(outputs):
            total = bias_grad[o] + grad[r, o]
            bias_grad[o] = ((total + grad[r + 1, o]) + grad[r + 2, o]) + grad[r + 3, o]
    for r in range(in_fours, rows):
        for o in range(outputs):
            bias_grad[o] += grad[r, o]


@fastmath
def backward_activation_of_rows(grad: Any, values: Any, rows: Any, activation: int) -> None:
    """Propagate a gradient ``[n, O]`` back through an activation with outputs ``values[rows]``, in place (numba)."""
    for i in range(len(rows)):
        r = rows[i]
        if activation == RELU:
            for o in range(grad.shape[1]):
                grad[i, o] = grad[i, o] if values[r, o] > np.float32(0.0) else np.float32(0.0)
        elif activation == TANH:
            for o in range(grad.shape[1]):
                grad[i, o] *= np.float32(1.0) - values[r, o] * values[r, o]


def clamp(value: Any, low: Any, high: Any) -> Any:
    """Return a number clamped to bounds; NaN stays NaN (numba)."""
    if value > high:
        return high
    return low if value < low else value
