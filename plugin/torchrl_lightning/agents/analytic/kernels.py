"""Compiled kernels for perceptrons: action selection for a few rows, and losses with gradients.

All numbers are float32. A table ``[L + 1, 5]`` describes the L linear layers of an acting network. A row contains the
addresses of weight ``[out, in]`` and bias, the numbers of inputs and outputs, and the activation. The last row contains
the addresses of the head's vectors ``[A]``. The losses expect that ``weight``, the weights of the rows, adds up to 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchrl_lightning.kernels.bounds import clamp, log_normal_cdf
from torchrl_lightning.kernels.compiled import carray, fastmath, pointer

NONE, RELU, TANH = 0, 1, 2
L1, L2, SMOOTH_L1 = 0, 1, 2
_TANH_SATURATION = 7.90531110763549805  # tanh is 1 in float32 from this value on


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
    if activation == RELU:
        for r in range(len(values)):
            for o in range(len(bias)):
                value = values[r, o] + bias[o]
                values[r, o] = np.float32(0.0) if value < np.float32(0.0) else value
    else:
        for r in range(len(values)):
            for o in range(len(bias)):
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
    for i, r in enumerate(rows):
        if activation == RELU:
            for o in range(grad.shape[1]):
                grad[i, o] = grad[i, o] if values[r, o] > np.float32(0.0) else np.float32(0.0)
        elif activation == TANH:
            for o in range(grad.shape[1]):
                grad[i, o] *= np.float32(1.0) - values[r, o] * values[r, o]


def distance(difference: Any, kind: int) -> Any:
    """Return a distance and its derivative (numba)."""
    absolute = abs(difference)
    if kind == L2:
        return difference * difference, difference + difference
    if kind == SMOOTH_L1 and absolute < 1.0:
        return np.float32(0.5) * difference * difference, difference
    return absolute - np.float32(0.5 if kind == SMOOTH_L1 else 0.0), np.sign(difference)


def normalized_weights(weight: Any) -> Any:
    """Return weights normalised to a sum of 1 (numba)."""
    return (weight / max(weight.sum(), np.float32(1.2e-38))).astype(np.float32)


def dqn_loss(
    values: Any, next_values: Any, selection: Any, action: Any, step: Any, weight: Any, kind: int, grad: Any, error: Any
) -> Any:
    """Return the DQN loss and the mean value of the executed actions, and write the gradient (numba).

    Args:
        values: values of all actions, ``[B, A]``.
        next_values: the target network's values of the next observation, ``[B, A]``.
        selection: values that select the next action, ``[B, A]``.
        action: executed actions, ``[B]``.
        step: reward, terminated and discount, ``[B]`` each.
        weight: weights of the rows, ``[B]``.
        kind: number that selects the distance.
        grad: receives the gradient, ``[B, A]``.
        error: receives the absolute errors, ``[B]``.
    """
    (reward, terminated, discount), grad[:] = step, np.float32(0.0)
    loss = mean = 0.0
    for r in range(len(values)):
        target, executed = reward[r], action[r]
        if not terminated[r]:
            target += discount[r] * next_values[r, selection[r].argmax()]
        value = values[r, executed]
        loss_term, slope = distance(value - target, kind)
        loss += weight[r] * loss_term
        mean += weight[r] * value
        grad[r, executed], error[r] = weight[r] * slope, abs(value - target)
    return loss, mean


def write_critic_targets(values: Any, log_prob: Any, alpha: float, step: Any, target: Any) -> None:
    """Write targets ``[B]`` from the minimum of critic values ``[N, B]`` minus alpha times log-probability (numba)."""
    reward, terminated, discount = step
    for r in range(len(target)):
        target[r] = reward[r]
        if not terminated[r]:
            target[r] += discount[r] * (values[:, r].min() - np.float32(alpha) * log_prob[r])


def critic_loss(values: Any, target: Any, weight: Any, kind: int, grad: Any, max_error: Any) -> Any:
    """Return the loss and the mean of a critic's values ``[B]`` (numba).

    ``grad`` ``[B]`` receives the gradient. ``max_error`` ``[B]`` receives each absolute error that is larger than the
    stored value.
    """
    loss = mean = 0.0
    for r in range(len(target)):
        difference = values[r] - target[r]
        loss_term, slope = distance(difference, kind)
        loss += weight[r] * loss_term
        mean += weight[r] * values[r]
        grad[r] = weight[r] * slope
        error = abs(difference)
        max_error[r] = max_error[r] if max_error[r] >= error else error
    return loss, mean


def sample_tanh_normal(out: Any, noise: Any, limits: Any, log_range: float, action: Any, log_prob: Any) -> None:
    """Sample from tanh-squashed Normals ``[B, 2 A]`` with standard noise ``[B, A]``; actions are in [-1, 1] (numba)."""
    size, (min_log_std, max_log_std, max_tanh) = noise.shape[1], limits
    constant = size * (0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0)) + log_range
    for r in range(len(out)):
        total = -constant
        for a in range(size):
            log_std = clamp(out[r, size + a], min_log_std, max_log_std)
            value = np.float64(out[r, a] + np.exp(log_std) * noise[r, a])
            action[r, a] = clamp(np.float32(math.tanh(value)), -max_tanh, max_tanh)
            # log(1 - tanh^2 u) = 2 (log 2 - u - softplus(-2 u))
            total += 2.0 * (abs(value) + math.log1p(math.exp(-2.0 * abs(value)))) - log_std - 0.5 * noise[r, a] ** 2
        log_prob[r] = total


def backward_tanh_normal(
    out: Any, noise: Any, limits: Any, alpha: float, weight: Any, action_grad: Any, grad: Any
) -> None:
    """Write the gradients of means and log deviations from action gradients ``[B, A]`` and the entropy term (numba)."""
    size, (min_log_std, max_log_std, max_tanh) = noise.shape[1], limits
    for r in range(len(out)):
        for a in range(size):
            unclamped, entropy_weight = out[r, size + a], np.float32(alpha) * weight[r]
            log_std = clamp(unclamped, min_log_std, max_log_std)
            scaled_noise = np.exp(log_std) * noise[r, a]
            value = np.tanh(out[r, a] + scaled_noise)
            slope = 2.0 * entropy_weight * value
            if abs(value) <= max_tanh:
                slope += action_grad[r, a] * (np.float32(1.0) - value * value)
            grad[r, a] = slope
            is_inside = min_log_std <= unclamped <= max_log_std
            grad[r, size + a] = slope * scaled_noise - entropy_weight if is_inside else 0.0


def actor_objective(values: Any, log_prob: Any, alpha: float, weight: Any, best: Any) -> Any:
    """Return the mean of ``min Q - alpha log pi``, with values ``[N, B]``, and the mean of ``log pi`` (numba).

    ``best`` ``[B]`` receives the index of the critic with the smallest value.
    """
    objective = mean = 0.0
    for r in range(len(best)):
        best[r] = values[:, r].argmin()
        objective += weight[r] * (values[best[r], r] - alpha * log_prob[r])
        mean += weight[r] * log_prob[r]
    return objective, mean


def smooth_target_actions(out: Any, noise: Any, scale: float, max_noise: float, action: Any) -> None:
    """Write the tanh of ``out`` ``[B, A]`` plus clipped noise (numba)."""
    one, bound = np.float32(1.0), np.float32(max_noise)
    for r in range(len(out)):
        for a in range(out.shape[1]):
            clipped_noise = clamp(noise[r, a] * np.float32(scale), -bound, bound)
            action[r, a] = clamp(np.tanh(out[r, a]) + clipped_noise, -one, one)


def ppo_categorical_loss(
    logits: Any, action: Any, old_log_prob: Any, advantage: Any, rows: int, clip: float, entropy_coeff: float, grad: Any
) -> Any:
    """Return PPO's objective, entropy, KL, log-ratio and clip fraction for integer actions (numba).

    The rows are a block of a batch. The results of the blocks add up to the means of the batch.

    Args:
        logits: logits of all actions, ``[R, A]``.
        action: executed actions, ``[R]``.
        old_log_prob: log-probabilities of the actions at collection time, ``[R]``.
        advantage: advantages, ``[R]``.
        rows: number of rows of the whole batch.
        clip: clipping range of the ratio around 1.
        entropy_coeff: weight of the entropy.
        grad: receives the gradient of the objective minus the weighted entropy, ``[R, A]``.
    """
    size, weight = logits.shape[1], np.float32(1.0 / rows)
    objective = entropy = kl = log_ratios = clipped = 0.0
    for r in range(len(logits)):
        row, max_logit, total = logits[r], logits[r].max(), np.float32(0.0)
        for a in range(size):
            grad[r, a] = np.exp(row[a] - max_logit)
            total += grad[r, a]
        log_total, row_entropy = max_logit + np.log(total), np.float32(0.0)
        for a in range(size):
            grad[r, a] /= total
            if grad[r, a] > 0.0:  # a forbidden action has log-probability -inf and adds zero to the entropy
                row_entropy -= grad[r, a] * (row[a] - log_total)
        log_ratio = row[action[r]] - log_total - old_log_prob[r]
        row_objective, has_gradient, is_clipped = clipped_objective(log_ratio, advantage[r], clip)
        slope = -weight * row_objective if has_gradient else np.float32(0.0)
        objective -= row_objective
        entropy += float(row_entropy)
        kl += kl_estimate(log_ratio)
        log_ratios += log_ratio
        clipped += is_clipped
        for a in range(size):
            p = grad[r, a]
            entropy_grad = p * (row[a] - log_total + row_entropy) if p > 0.0 else np.float32(0.0)
            grad[r, a] = np.float32(entropy_coeff) * weight * entropy_grad - slope * p
        grad[r, action[r]] += slope
    return objective / rows, entropy / rows, kl / rows, log_ratios / rows, clipped / rows


def ppo_clipped_normal_loss(
    out: Any,
    action: Any,
    old_log_prob: Any,
    advantage: Any,
    rows: int,
    clip: float,
    entropy_coeff: float,
    box: Any,
    grad: Any,
    log_std_grad: Any,
) -> Any:
    """Return PPO's objective, entropy, KL, log-ratio and clip fraction for clipped Normals (numba).

    The rows are a block of a batch. The results of the blocks add up to the means of the batch.

    Args:
        out: means in units of the half-range, ``[R, A]``.
        action: executed actions, ``[R, A]``.
        old_log_prob: log-probabilities of the actions at collection time, ``[R]``.
        advantage: advantages, ``[R]``.
        rows: number of rows of the whole batch.
        clip: clipping range of the ratio around 1.
        entropy_coeff: weight of the entropy before clipping.
        box: center and half-range of the actions, the log deviation in units of the half-range, and the bounds low and
            high, ``[A]`` each.
        grad: receives the gradient of the means, ``[R, A]``.
        log_std_grad: receives the gradient of the log deviations, ``[A]``.
    """
    size, (center, half_range, log_std, low, high) = out.shape[1], box
    constant, fraction = 0.5 * math.log(2.0 * math.pi), len(out) / rows
    scale, log_scale, log_std_slope, log_std_sum = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    objective = kl = log_ratios = clipped = entropy = 0.0
    for a in range(size):
        scale[a], log_scale[a] = math.exp(log_std[a]) * half_range[a], log_std[a] + math.log(half_range[a])
        entropy += log_scale[a] + 0.5 + constant
        log_std_sum[a] = -entropy_coeff * fraction
    for r in range(len(out)):
        log_prob = 0.0
        for a in range(size):
            value = action[r, a]
            z = (value - np.float64(out[r, a]) * half_range[a] - center[a]) / scale[a]
            if low[a] < value < high[a]:
                log_prob -= 0.5 * z * z + log_scale[a] + constant
                slope = -z
                log_std_slope[a] = z * z - 1.0
            else:  # an action on a bound has the tail's mass; the derivative of its log is the hazard rate
                side = 1.0 if value <= low[a] else -1.0
                log_mass = log_normal_cdf(side * z)
                log_prob += log_mass
                slope = side * math.exp(-0.5 * z * z - constant - log_mass)
                log_std_slope[a] = -slope * z
            grad[r, a] = slope
        log_ratio = np.float32(log_prob) - old_log_prob[r]
        row_objective, has_gradient, is_clipped = clipped_objective(log_ratio, advantage[r], clip)
        objective -= row_objective
        kl += kl_estimate(log_ratio)
        log_ratios += log_ratio
        clipped += is_clipped
        log_prob_grad = -row_objective / rows if has_gradient else 0.0
        for a in range(size):
            log_std_sum[a] += log_prob_grad * log_std_slope[a]
            grad[r, a] *= -log_prob_grad * half_range[a] / scale[a]
    for a in range(size):
        log_std_grad[a] = log_std_sum[a]
    return objective / rows, entropy * fraction, kl / rows, log_ratios / rows, clipped / rows


def clipped_objective(log_ratio: Any, advantage: Any, clip: float) -> Any:
    """Return a step's PPO objective, whether it is the unclipped term, and 1 if the ratio is out of range (numba)."""
    ratio = np.exp(log_ratio)
    unclipped, bound = ratio * advantage, advantage + np.float32(clip) * abs(advantage)
    return min(unclipped, bound), unclipped <= bound, 1.0 if abs(ratio - np.float32(1.0)) > clip else 0.0


def kl_estimate(log_ratio: Any) -> Any:
    """Return :func:`torchrl_lightning.agents.loss_functions.kl_estimate` for one step (numba)."""
    log_ratio_64 = float(log_ratio)
    return np.float32(math.expm1(log_ratio_64) - min(log_ratio_64, 88.0))


def ppo_value_loss(values: Any, target: Any, rows: int, coeff: float, kind: int, grad: Any) -> Any:
    """Return the summed distance of values ``[R, 1]`` from targets ``[R, 1]``, times ``coeff / rows`` (numba).

    The rows are a block of a batch of ``rows`` rows. ``grad`` ``[R, 1]`` receives the gradient.
    """
    loss, weight = 0.0, np.float32(coeff / rows)
    for r in range(len(values)):
        loss_term, slope = distance(values[r, 0] - target[r, 0], kind)
        loss += loss_term
        grad[r, 0] = weight * slope
    return loss * coeff / rows
