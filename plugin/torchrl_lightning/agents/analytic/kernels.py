"""Compiled passes of perceptrons: forward for a few rows with action selection, and losses with gradients.

All numbers are float32. A table ``[L + 1, 5]`` describes the L linear layers of an acting network. A row contains the
addresses of weight ``[out, in]`` and bias, the numbers of inputs and outputs, and the activation. The last row contains
the addresses of the head's vectors ``[A]``. In losses, the row weights ``weight`` add up to 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchrl_lightning.kernels.compiled import carray, fastmath, pointer

NONE, RELU, TANH = 0, 1, 2
L1, L2, SMOOTH_L1 = 0, 1, 2
_FURTHEST = 7.90531110763549805  # tanh is 1 in float32 from this value on
_LEAST_TAIL = -30.0  # log_tail uses a series below this value, before erfc underflows in float64


def forward(x: Any, layers: Any, work: Any, out: Any) -> None:
    """Compute a perceptron (numba).

    Args:
        x: inputs, ``[N, F]``.
        layers: the table of layers.
        work: memory for hidden layers, ``[2, >= N * widest]``.
        out: receives the output of the last layer, ``[N, O]``.
    """
    rows, given, last = len(x), x, len(layers) - 2
    for number in range(last + 1):
        weight_at, bias_at, inputs, outputs, activation = layers[number]
        weight = carray(pointer(weight_at), (outputs, inputs), np.float32)
        bias = carray(pointer(bias_at), (outputs,), np.float32)
        target = out if number == last else work[number % 2, : rows * outputs].reshape(rows, outputs)
        multiply(given, weight, bias, target)
        activate(target.reshape(-1), activation)
        given = target


@fastmath
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


@fastmath
def activate(values: Any, activation: int) -> None:
    """Apply an activation in place (numba); tanh is a rational approximation, exact to 2e-7, for SIMD code."""
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
    """Select the greedy action, or ``others`` ``[N]`` in rows with ``chance`` ``[N]`` below epsilon (numba)."""
    forward(x, layers, work, out)
    for r in range(len(out)):
        action[r] = others[r] if chance[r] < epsilon else out[r].argmax()


def choose_categorically(
    x: Any, layers: Any, work: Any, out: Any, draws: float, noise: Any, action: Any, log_prob: Any
) -> None:
    """Sample actions from logits by exponential noise ``[N, A]``, or take the mode; write log-probabilities (numba)."""
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
    x: Any, layers: Any, work: Any, out: Any, draws: float, noise: Any, action: Any, log_prob: Any
) -> None:
    """Sample actions from a clipped Normal or take its mean; write log-probabilities (numba).

    The head's vectors are center and half-range of the actions, the log deviation in units of the half-range, and the
    bounds low and high.
    """
    forward(x, layers, work, out)
    size = out.shape[1]
    center, half, log_std = vector(layers, 0, size), vector(layers, 1, size), vector(layers, 2, size)
    low, high = vector(layers, 3, size), vector(layers, 4, size)
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
    """Return the log CDF of the standard Normal (numba)."""
    if z > _LEAST_TAIL:
        return math.log(0.5 * math.erfc(-z / math.sqrt(2.0)))
    inverse = 1.0 / (z * z)
    return -0.5 * z * z - math.log(-z) - 0.5 * math.log(2.0 * math.pi) + math.log(1.0 - inverse * (1.0 - 3.0 * inverse))


def choose_squashed(
    x: Any, layers: Any, work: Any, out: Any, draws: float, limits: Any, noise: Any, action: Any
) -> None:
    """Sample actions from a tanh-squashed Normal or take its mean; ``out`` are means and log deviations (numba).

    The head's vectors are center and half-range of the actions. ``limits`` are the lowest and highest log deviation,
    and the largest absolute value after the tanh.
    """
    forward(x, layers, work, out)
    size = action.shape[1]
    center, half, (lowest, highest, most) = vector(layers, 0, size), vector(layers, 1, size), limits
    for r in range(len(out)):
        for a in range(size):
            value = out[r, a]
            if draws:
                log_std = out[r, size + a]
                value += np.exp(clamped(log_std, lowest, highest)) * noise[r, a]
            action[r, a] = center[a] + clamped(np.tanh(value), -most, most) * half[a]


def choose_noisily(x: Any, layers: Any, work: Any, out: Any, deviation: float, noise: Any, action: Any) -> None:
    """Select deterministic tanh actions with additive noise, scaled by center and half-range (numba)."""
    forward(x, layers, work, out)
    size, one = out.shape[1], np.float32(1.0)
    center, half = vector(layers, 0, size), vector(layers, 1, size)
    for r in range(len(out)):
        for a in range(size):
            value = np.tanh(out[r, a])
            if deviation:
                value = clamped(value + noise[r, a] * np.float32(deviation), -one, one)
            action[r, a] = center[a] + value * half[a]


def vector(layers: Any, number: int, size: int) -> Any:
    """Return a view of one of the head's vectors (numba)."""
    return carray(pointer(layers[-1, number]), (size,), np.float32)


def add_and_activate(values: Any, bias: Any, activation: int) -> None:
    """Add the bias to a linear layer's product ``[B, O]`` and apply its activation, in place (numba)."""
    for r in range(len(values)):
        row = values[r]
        if activation == RELU:
            for o in range(len(bias)):
                value = row[o] + bias[o]
                row[o] = np.float32(0.0) if value < np.float32(0.0) else value
        else:
            for o in range(len(bias)):
                row[o] += bias[o]
            activate(row, activation)


@fastmath
def backward_activation(d: Any, values: Any, rows: Any, activation: int, sums: Any) -> None:
    """Propagate a gradient ``[n, O]`` back through an activation, in place; ``values[rows]`` are its outputs (numba).

    ``sums`` receives the sum over the rows, the gradient of the bias, unless ``sums`` is empty.
    """
    sums[:] = np.float32(0.0)
    for i in range(len(d)):
        row, value = d[i], values[rows[i]]
        if activation == RELU:
            for o in range(len(row)):
                row[o] = row[o] if value[o] > np.float32(0.0) else np.float32(0.0)
        elif activation == TANH:
            for o in range(len(row)):
                row[o] *= np.float32(1.0) - value[o] * value[o]
        for o in range(len(sums)):
            sums[o] += row[o]


def distance(difference: Any, kind: int) -> Any:
    """Return a distance and its derivative (numba)."""
    size = abs(difference)
    if kind == L2:
        return difference * difference, difference + difference
    if kind == SMOOTH_L1 and size < 1.0:
        return np.float32(0.5) * difference * difference, difference
    return size - np.float32(0.5 if kind == SMOOTH_L1 else 0.0), np.sign(difference)


def shares(weight: Any) -> Any:
    """Return weights normalised to a sum of 1 (numba)."""
    return (weight / max(weight.sum(), np.float32(1.2e-38))).astype(np.float32)


def dqn_loss(
    values: Any, after: Any, chooser: Any, action: Any, step: Any, weight: Any, kind: int, d: Any, error: Any
) -> Any:
    """Return the DQN loss and the mean value of the executed actions, and write the gradient (numba).

    Args:
        values: values of all actions, ``[B, A]``.
        after: the target network's values of the next observation, ``[B, A]``.
        chooser: values that select the next action, ``[B, A]``.
        action: executed actions, ``[B]``.
        step: reward, terminated and discount, ``[B]`` each.
        weight: weights of the rows, ``[B]``.
        kind: number of the distance.
        d: receives the gradient, ``[B, A]``.
        error: receives the absolute errors, ``[B]``.
    """
    (reward, terminated, discount), d[:] = step, np.float32(0.0)
    loss = mean = 0.0
    for r in range(len(values)):
        target, chosen = reward[r], action[r]
        if not terminated[r]:
            target += discount[r] * after[r, chooser[r].argmax()]
        value = values[r, chosen]
        far, slope = distance(value - target, kind)
        loss += weight[r] * far
        mean += weight[r] * value
        d[r, chosen], error[r] = weight[r] * slope, abs(value - target)
    return loss, mean


def target_of(values: Any, log_prob: Any, alpha: float, step: Any, target: Any) -> None:
    """Write targets ``[B]`` from the minimum of critic values ``[N, B]`` minus alpha times log-probability (numba)."""
    reward, terminated, discount = step
    for r in range(len(target)):
        target[r] = reward[r]
        if not terminated[r]:
            target[r] += discount[r] * (values[:, r].min() - np.float32(alpha) * log_prob[r])


def learn_values(values: Any, target: Any, weight: Any, kind: int, d: Any, error: Any) -> Any:
    """Return the loss and the mean of a critic's values ``[B]`` (numba).

    ``d`` ``[B]`` receives the gradient. ``error`` ``[B]`` receives the maximum of its content and the absolute errors.
    """
    loss = mean = 0.0
    for r in range(len(target)):
        difference = values[r] - target[r]
        far, slope = distance(difference, kind)
        loss += weight[r] * far
        mean += weight[r] * values[r]
        d[r] = weight[r] * slope
        size = abs(difference)
        error[r] = error[r] if error[r] >= size else size
    return loss, mean


def sample_squashed(out: Any, noise: Any, limits: Any, log_range: float, action: Any, log_prob: Any) -> None:
    """Sample from tanh-squashed Normals ``[B, 2 A]`` with standard noise ``[B, A]``; actions are in [-1, 1] (numba)."""
    size, (lowest, highest, most) = noise.shape[1], limits
    constant = size * (0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0)) + log_range
    for r in range(len(out)):
        total = -constant
        for a in range(size):
            log_std = clamped(out[r, size + a], lowest, highest)
            value = np.float64(out[r, a] + np.exp(log_std) * noise[r, a])
            action[r, a] = clamped(np.float32(math.tanh(value)), -most, most)
            # log(1 - tanh^2 u) = 2 (log 2 - u - softplus(-2 u))
            total += 2.0 * (abs(value) + math.log1p(math.exp(-2.0 * abs(value)))) - log_std - 0.5 * noise[r, a] ** 2
        log_prob[r] = total


def pull_back_squashed(out: Any, noise: Any, limits: Any, alpha: float, weight: Any, da: Any, d: Any) -> None:
    """Write the gradients of means and log deviations from action gradients ``[B, A]`` and the entropy term (numba)."""
    size, (lowest, highest, most) = noise.shape[1], limits
    for r in range(len(out)):
        for a in range(size):
            given, scaled = out[r, size + a], np.float32(alpha) * weight[r]
            log_std = clamped(given, lowest, highest)
            spread = np.exp(log_std) * noise[r, a]
            value = np.tanh(out[r, a] + spread)
            slope = 2.0 * scaled * value
            if abs(value) <= most:
                slope += da[r, a] * (np.float32(1.0) - value * value)
            d[r, a] = slope
            d[r, size + a] = slope * spread - scaled if lowest <= given <= highest else 0.0


def clamped(value: Any, lowest: Any, highest: Any) -> Any:
    """Return a number clamped to bounds; NaN stays NaN (numba)."""
    if value > highest:
        return highest
    return lowest if value < lowest else value


def judge(values: Any, log_prob: Any, alpha: float, weight: Any, best: Any) -> Any:
    """Return the mean minimum of values ``[N, B]`` minus alpha log-probabilities, and the mean of these (numba).

    ``best`` ``[B]`` receives the index of the critic with the smallest value.
    """
    gain = mean = 0.0
    for r in range(len(best)):
        best[r] = values[:, r].argmin()
        gain += weight[r] * (values[best[r], r] - alpha * log_prob[r])
        mean += weight[r] * log_prob[r]
    return gain, mean


def smooth(out: Any, noise: Any, deviation: float, most: float, action: Any) -> None:
    """Write the tanh of ``out`` ``[B, A]`` plus clipped noise (numba)."""
    one, bound = np.float32(1.0), np.float32(most)
    for r in range(len(out)):
        for a in range(out.shape[1]):
            more = clamped(noise[r, a] * np.float32(deviation), -bound, bound)
            action[r, a] = clamped(np.tanh(out[r, a]) + more, -one, one)


def learn_choices_clipped(
    logits: Any, action: Any, behaviour: Any, advantage: Any, clip: float, entropy_coeff: float, d: Any
) -> Any:
    """Return the means of PPO's objective, entropy, KL, log-ratio and clip fraction for integer actions (numba).

    Args:
        logits: logits of all actions, ``[B, A]``.
        action: executed actions, ``[B]``.
        behaviour: log-probabilities of the actions at collection time, ``[B]``.
        advantage: advantages, ``[B]``.
        clip: clip range of the ratio around 1.
        entropy_coeff: weight of the entropy.
        d: receives the gradient of the objective minus the weighted entropy, ``[B, A]``.
    """
    rows, size = logits.shape
    share = np.float32(1.0 / rows)
    objective = entropy = kl = moved = beyond = 0.0
    for r in range(rows):
        row, most, total = logits[r], logits[r].max(), np.float32(0.0)
        for a in range(size):
            d[r, a] = np.exp(row[a] - most)
            total += d[r, a]
        scale, spread = most + np.log(total), np.float32(0.0)
        for a in range(size):
            d[r, a] /= total
            if d[r, a] > 0.0:  # a forbidden action has log-probability -inf and adds zero to the entropy
                spread -= d[r, a] * (row[a] - scale)
        log_ratio = row[action[r]] - scale - behaviour[r]
        gained, rises, is_beyond = clipped_gain(log_ratio, advantage[r], clip)
        slope = -share * gained if rises else np.float32(0.0)
        objective -= gained
        entropy += float(spread)
        kl += kl_estimate(log_ratio)
        moved += log_ratio
        beyond += is_beyond
        for a in range(size):
            p = d[r, a]
            bonus = p * (row[a] - scale + spread) if p > 0.0 else np.float32(0.0)
            d[r, a] = np.float32(entropy_coeff) * share * bonus - slope * p
        d[r, action[r]] += slope
    return objective / rows, entropy / rows, kl / rows, moved / rows, beyond / rows


def learn_normals_clipped(
    out: Any, action: Any, behaviour: Any, advantage: Any, clip: float, entropy_coeff: float, box: Any, d: Any, to: Any
) -> Any:
    """Return the means of PPO's objective, entropy, KL, log-ratio and clip fraction for clipped Normals (numba).

    Args:
        out: means in units of the half-range, ``[B, A]``.
        action: executed actions, ``[B, A]``.
        behaviour: log-probabilities of the actions at collection time, ``[B]``.
        advantage: advantages, ``[B]``.
        clip: clip range of the ratio around 1.
        entropy_coeff: weight of the entropy before clipping.
        box: center and half-range of the actions, the log deviation in units of the half-range, and the bounds low and
            high, ``[A]`` each.
        d: receives the gradient of the means, ``[B, A]``.
        to: receives the gradient of the log deviations, ``[A]``.
    """
    (rows, size), (center, half, log_std, low, high) = out.shape, box
    constant = 0.5 * math.log(2.0 * math.pi)
    scale, log_scale, tilt, sums = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    objective = kl = moved = beyond = entropy = 0.0
    for a in range(size):
        scale[a], log_scale[a] = math.exp(log_std[a]) * half[a], log_std[a] + math.log(half[a])
        entropy += log_scale[a] + 0.5 + constant
        sums[a] = -entropy_coeff
    for r in range(rows):
        total = 0.0
        for a in range(size):
            value = action[r, a]
            z = (value - np.float64(out[r, a]) * half[a] - center[a]) / scale[a]
            if low[a] < value < high[a]:
                total -= 0.5 * z * z + log_scale[a] + constant
                slope = -z
                tilt[a] = z * z - 1.0
            else:  # an action on a bound has the mass of the tail, and its derivative is the hazard rate
                side = 1.0 if value <= low[a] else -1.0
                tail = log_tail(side * z)
                total += tail
                slope = side * math.exp(-0.5 * z * z - constant - tail)
                tilt[a] = -slope * z
            d[r, a] = slope
        log_ratio = np.float32(total) - behaviour[r]
        gained, rises, is_beyond = clipped_gain(log_ratio, advantage[r], clip)
        objective -= gained
        kl += kl_estimate(log_ratio)
        moved += log_ratio
        beyond += is_beyond
        share = -gained / rows if rises else 0.0
        for a in range(size):
            sums[a] += share * tilt[a]
            d[r, a] *= -share * half[a] / scale[a]
    for a in range(size):
        to[a] = sums[a]
    return objective / rows, entropy, kl / rows, moved / rows, beyond / rows


def clipped_gain(log_ratio: Any, advantage: Any, clip: float) -> Any:
    """Return a step's PPO objective, True if it is the unclipped term, and 1 if the ratio is out of range (numba)."""
    ratio = np.exp(log_ratio)
    gained, bound = ratio * advantage, advantage + np.float32(clip) * abs(advantage)
    return min(gained, bound), gained <= bound, 1.0 if abs(ratio - np.float32(1.0)) > clip else 0.0


def kl_estimate(log_ratio: Any) -> Any:
    """Return :func:`torchrl_lightning.agents.losses.kl_estimate` for one step (numba)."""
    wide = float(log_ratio)
    return np.float32(math.expm1(wide) - min(wide, 88.0))


def learn_returns(values: Any, target: Any, coeff: float, kind: int, d: Any) -> Any:
    """Return the mean distance of values ``[B, 1]`` from targets ``[B, 1]``, times ``coeff`` (numba).

    ``d`` ``[B, 1]`` receives the gradient.
    """
    loss, share = 0.0, np.float32(coeff / len(values))
    for r in range(len(values)):
        far, slope = distance(values[r, 0] - target[r, 0], kind)
        loss += far
        d[r, 0] = share * slope
    return loss * coeff / len(values)
