"""Compiled passes over what lies between the products of a perceptron, forward and backward, and over its losses.

All numbers are float32; ``weight`` is each row's share of a mean, which sums up to 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchrl_lightning.kernels.compiled import in_any_order
from torchrl_lightning.kernels.perceptron import RELU, TANH, activate, bounded, log_tail

L1, L2, SMOOTH_L1 = 0, 1, 2


def add_and_activate(values: Any, bias: Any, activation: int) -> None:
    """Finish a linear layer's product ``[B, O]`` in place: its bias, and the activation behind it (numba)."""
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


@in_any_order
def pull_back(d: Any, values: Any, rows: Any, activation: int, sums: Any) -> None:
    """Take a gradient ``[n, O]`` back through the activation that gave some rows of ``values`` (numba).

    ``sums`` receives its sums over the rows, the gradient of a bias, unless it is empty.
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
    """Return each row's share of a mean (numba)."""
    return (weight / max(weight.sum(), np.float32(1.2e-38))).astype(np.float32)


def learn_choices(
    values: Any, after: Any, chooser: Any, action: Any, step: Any, weight: Any, kind: int, d: Any, error: Any
) -> Any:
    """Compute the loss of the values of chosen actions, and their mean (numba).

    Args:
        values: of all actions, ``[B, A]``.
        after: the target network's values of the successor, ``[B, A]``.
        chooser: the values by which its action is chosen, ``[B, A]``.
        action: the chosen ones, ``[B]``.
        step: reward, whether the successor is terminal, and the factor of its value, ``[B]`` each.
        weight: ``[B]``.
        kind: the distance.
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
    """Write targets ``[B]`` by the least of several critics' values ``[N, B]`` less alpha log-probabilities (numba)."""
    reward, terminated, discount = step
    for r in range(len(target)):
        target[r] = reward[r]
        if not terminated[r]:
            target[r] += discount[r] * (values[:, r].min() - np.float32(alpha) * log_prob[r])


def learn_values(values: Any, target: Any, weight: Any, kind: int, d: Any, error: Any) -> Any:
    """Compute the loss of a critic's values ``[B]``, and their mean (numba).

    ``d`` ``[B]`` receives the gradient, ``error`` ``[B]`` the absolute errors that are greater than those there.
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
    """Draw from Normals behind a tanh ``[B, 2 A]`` by standard noise ``[B, A]`` (numba); actions are within 1."""
    size, (lowest, highest, most) = noise.shape[1], limits
    constant = size * (0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0)) + log_range
    for r in range(len(out)):
        total = -constant
        for a in range(size):
            log_std = clamped(out[r, size + a], lowest, highest)
            value = np.float64(out[r, a] + np.exp(log_std) * noise[r, a])
            action[r, a] = bounded(np.float32(math.tanh(value)), most)
            # log(1 - tanh^2 u) = 2 (log 2 - u - softplus(-2 u))
            total += 2.0 * (abs(value) + math.log1p(math.exp(-2.0 * abs(value)))) - log_std - 0.5 * noise[r, a] ** 2
        log_prob[r] = total


def pull_back_squashed(out: Any, noise: Any, limits: Any, alpha: float, weight: Any, da: Any, d: Any) -> None:
    """Take gradients ``[B, A]`` at drawn actions, and alpha's share of log-probabilities', to the Normals (numba)."""
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
    """Return a number within bounds, or NaN as it is (numba)."""
    if value > highest:
        return highest
    return lowest if value < lowest else value


def judge(values: Any, log_prob: Any, alpha: float, weight: Any, best: Any) -> Any:
    """Return the mean of the least values ``[N, B]`` less alpha log-probabilities, and of these (numba).

    ``best`` ``[B]`` receives whose value it is.
    """
    gain = mean = 0.0
    for r in range(len(best)):
        best[r] = values[:, r].argmin()
        gain += weight[r] * (values[best[r], r] - alpha * log_prob[r])
        mean += weight[r] * log_prob[r]
    return gain, mean


def smooth(out: Any, noise: Any, deviation: float, most: float, action: Any) -> None:
    """Write what lies behind a tanh ``[B, A]``, with bounded noise added (numba)."""
    one = np.float32(1.0)
    for r in range(len(out)):
        for a in range(out.shape[1]):
            more = bounded(noise[r, a] * np.float32(deviation), np.float32(most))
            action[r, a] = bounded(np.tanh(out[r, a]) + more, one)


def learn_choices_clipped(
    logits: Any, action: Any, behaviour: Any, advantage: Any, clip: float, entropy_coeff: float, d: Any
) -> Any:
    """Compute the clipped objective of chosen actions, entropy, KL, log-ratio and clipped share, all means (numba).

    Args:
        logits: of all actions, ``[B, A]``.
        action: the chosen ones, ``[B]``.
        behaviour: their log-probabilities when they were chosen, ``[B]``.
        advantage: ``[B]``.
        clip: the range of the ratio around 1.
        entropy_coeff: the weight of the entropy.
        d: receives the gradient of the objective less the weighted entropy, ``[B, A]``.
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
            if d[r, a] > 0.0:  # a forbidden action has log-probability -inf; its share of the entropy is zero
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
    """Compute the same of actions ``[B, A]`` that were drawn from Normals and clipped to a box (numba).

    Args:
        out: the means, in units of half the range, ``[B, A]``.
        action: what was done, ``[B, A]``.
        behaviour: its log-probabilities when it was chosen, ``[B]``.
        advantage: ``[B]``.
        clip: the range of the ratio around 1.
        entropy_coeff: the weight of the entropy, which is that before clipping.
        box: center and half of the range of a mean, the logarithm of the deviation in units of the latter, and the
            bounds, low and high, ``[A]`` each.
        d: receives the gradient of the means, ``[B, A]``.
        to: receives that of the logarithms, ``[A]``.
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
            else:  # the mass of the tail, whose slope is its hazard
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
    """Return PPO's objective of a step, whether it rises with the ratio, and whether that is clipped (numba)."""
    ratio = np.exp(log_ratio)
    gained, bound = ratio * advantage, advantage + np.float32(clip) * abs(advantage)
    return min(gained, bound), gained <= bound, 1.0 if abs(ratio - np.float32(1.0)) > clip else 0.0


def kl_estimate(log_ratio: Any) -> Any:
    """Return the estimate :func:`torchrl_lightning.learn.losses.kl_estimate` of one step (numba)."""
    wide = float(log_ratio)
    return np.float32(math.expm1(wide) - min(wide, 88.0))


def learn_returns(values: Any, target: Any, coeff: float, kind: int, d: Any) -> Any:
    """Compute the weighted mean distance of values ``[B, 1]`` from targets ``[B, 1]`` (numba).

    ``d`` ``[B, 1]`` receives the gradient.
    """
    loss, share = 0.0, np.float32(coeff / len(values))
    for r in range(len(values)):
        far, slope = distance(values[r, 0] - target[r, 0], kind)
        loss += far
        d[r, 0] = share * slope
    return loss * coeff / len(values)
