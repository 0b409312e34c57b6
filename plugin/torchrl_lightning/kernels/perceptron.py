"""Compiled perceptrons for a handful of rows, and the actions that are chosen by what they return.

A network is a table ``[L, 5]`` of its linear layers: addresses of the weight ``[out, in]`` and of the bias, inputs,
outputs, and the activation behind it. All numbers are float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchrl_lightning.kernels.compiled import carray, in_any_order, pointer

NONE, RELU, TANH = 0, 1, 2
_FURTHEST = 7.90531110763549805  # from there on tanh is 1 in float32
_LEAST_TAIL = -30.0  # where erfc is not yet too small for float64


def forward(x: Any, layers: Any, work: Any, out: Any) -> None:
    """Compute a perceptron (numba).

    Args:
        x: its inputs, ``[N, F]``.
        layers: the table.
        work: memory for what lies between the layers, ``[2, >= N * widest]``.
        out: receives what the last layer returns, ``[N, O]``.
    """
    rows, given, last = len(x), x, len(layers) - 1
    for number in range(last + 1):
        weight_at, bias_at, inputs, outputs, activation = layers[number]
        weight = carray(pointer(weight_at), (outputs, inputs), np.float32)
        bias = carray(pointer(bias_at), (outputs,), np.float32)
        target = out if number == last else work[number % 2, : rows * outputs].reshape(rows, outputs)
        multiply(given, weight, bias, target)
        activate(target.reshape(-1), activation)
        given = target


@in_any_order
def multiply(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """Compute a linear layer, four outputs at a time (numba)."""
    (rows, inputs), outputs = x.shape, len(bias)
    whole = outputs // 4 * 4
    for r in range(rows):
        for o in range(0, whole, 4):
            a = b = c = d = np.float32(0.0)
            for i in range(inputs):
                value = x[r, i]
                a += value * weight[o, i]
                b += value * weight[o + 1, i]
                c += value * weight[o + 2, i]
                d += value * weight[o + 3, i]
            out[r, o], out[r, o + 1] = a + bias[o], b + bias[o + 1]
            out[r, o + 2], out[r, o + 3] = c + bias[o + 2], d + bias[o + 3]
        for o in range(whole, outputs):
            a = np.float32(0.0)
            for i in range(inputs):
                a += x[r, i] * weight[o, i]
            out[r, o] = a + bias[o]


@in_any_order
def activate(values: Any, activation: int) -> None:
    """Apply an activation in place (numba); tanh by a ratio of polynomials, true to 2e-7, as vectors can compute it."""
    f = np.float32
    if activation == RELU:
        for i in range(len(values)):
            value = values[i]
            values[i] = f(0.0) if value < f(0.0) else value
    elif activation == TANH:
        for i in range(len(values)):
            x = values[i]
            x = f(_FURTHEST) if x > f(_FURTHEST) else x
            x = f(-_FURTHEST) if x < f(-_FURTHEST) else x
            y = x * x
            p = f(-2.76076847742355e-16) * y + f(2.00018790482477e-13)
            p = (p * y + f(-8.60467152213735e-11)) * y + f(5.12229709037114e-08)
            p = (p * y + f(1.48572235717979e-05)) * y + f(6.37261928875436e-04)
            p = p * y + f(4.89352455891786e-03)
            q = f(1.19825839466702e-06) * y + f(1.18534705686654e-04)
            q = (q * y + f(2.26843463243900e-03)) * y + f(4.89352518554385e-03)
            values[i] = x * p / q


def choose_greedily(
    x: Any, layers: Any, work: Any, out: Any, epsilon: float, chance: Any, others: Any, action: Any
) -> None:
    """Choose the best of action values, or where a chance ``[N]`` is below epsilon another action ``[N]`` (numba)."""
    forward(x, layers, work, out)
    for r in range(len(out)):
        action[r] = others[r] if chance[r] < epsilon else out[r].argmax()


def choose_categorically(
    x: Any, layers: Any, work: Any, out: Any, draws: bool, noise: Any, action: Any, log_prob: Any
) -> None:
    """Choose by logits (numba), with exponential noise ``[N, A]`` or the likeliest; write log-probabilities too."""
    forward(x, layers, work, out)
    for r in range(len(out)):
        logits, best, choice = out[r], np.float32(-np.inf), 0
        highest, total = logits.max(), np.float32(0.0)
        for a in range(len(logits)):
            total += np.exp(logits[a] - highest)
        shift = np.log(total)
        for a in range(len(logits)):
            logits[a] = logits[a] - highest - shift
            score = np.exp(logits[a]) / noise[r, a] if draws else logits[a]
            if score > best:
                best, choice = score, a
        action[r], log_prob[r] = choice, logits[choice]


def choose_clipped(
    x: Any, layers: Any, work: Any, out: Any, draws: bool, noise: Any, shape: Any, action: Any, log_prob: Any
) -> None:
    """Choose by a Normal that is clipped to a box (numba); write log-probabilities too.

    ``shape`` ``[5]`` are the addresses of center and half of the range of its mean, the logarithm of its deviation in
    units of the latter, low and high, ``[A]`` each.
    """
    forward(x, layers, work, out)
    size = out.shape[1]
    center, half, log_std = floats(shape[0], size), floats(shape[1], size), floats(shape[2], size)
    low, high = floats(shape[3], size), floats(shape[4], size)
    for r in range(len(out)):
        total = 0.0
        for a in range(size):
            loc, scale = center[a] + out[r, a] * half[a], np.exp(log_std[a]) * half[a]
            value = loc + noise[r, a] * scale if draws else loc
            value = low[a] if value < low[a] else value
            value = high[a] if value > high[a] else value
            z = np.float64(value - loc) / scale
            if value >= high[a]:
                total += log_tail(-z)
            elif value <= low[a]:
                total += log_tail(z)
            else:
                total -= 0.5 * z * z + log_std[a] + math.log(half[a]) + 0.5 * math.log(2.0 * math.pi)
            action[r, a] = value
        log_prob[r] = total


def log_tail(z: float) -> float:
    """Return the logarithm of a standard Normal's mass below a number (numba)."""
    if z > _LEAST_TAIL:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
    inverse = 1.0 / (z * z)
    return -0.5 * z * z - math.log(-z) - 0.5 * math.log(2.0 * math.pi) + math.log(1.0 - inverse * (1.0 - 3.0 * inverse))


def choose_squashed(
    x: Any, layers: Any, work: Any, out: Any, draws: bool, noise: Any, shape: Any, limits: Any, action: Any
) -> None:
    """Choose by a Normal behind a tanh (numba); ``out`` are its means and the logarithms of its deviations.

    ``shape`` ``[2]`` are the addresses of center and half of the range, ``[A]`` each; ``limits`` the lowest and the
    highest logarithm of a deviation, and the greatest absolute value behind the tanh.
    """
    forward(x, layers, work, out)
    size = action.shape[1]
    center, half, (lowest, highest, most) = floats(shape[0], size), floats(shape[1], size), limits
    for r in range(len(out)):
        for a in range(size):
            value = out[r, a]
            if draws:
                log_std = out[r, size + a]
                log_std = lowest if log_std < lowest else log_std
                value += np.exp(highest if log_std > highest else log_std) * noise[r, a]
            action[r, a] = center[a] + bounded(np.tanh(value), most) * half[a]


def choose_noisily(
    x: Any, layers: Any, work: Any, out: Any, deviation: float, noise: Any, shape: Any, action: Any
) -> None:
    """Choose what lies behind a tanh, with noise within the range ``shape`` as above (numba)."""
    forward(x, layers, work, out)
    size = out.shape[1]
    center, half = floats(shape[0], size), floats(shape[1], size)
    for r in range(len(out)):
        for a in range(size):
            value = np.tanh(out[r, a])
            if deviation:
                value = bounded(value + noise[r, a] * np.float32(deviation), np.float32(1.0))
            action[r, a] = center[a] + value * half[a]


def bounded(value: Any, most: Any) -> Any:
    """Return a number within ``most`` of 0, or NaN as it is (numba)."""
    if value > most:
        return most
    return -most if value < -most else value


def floats(address: int, size: int) -> Any:
    """View ``size`` numbers at an address (numba)."""
    return carray(pointer(address), (size,), np.float32)
