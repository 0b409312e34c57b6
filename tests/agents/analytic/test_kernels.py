"""Kernels of layers equal plain loops to the last bit, so that faster forms do not change a run."""

from __future__ import annotations

import numpy as np
import pytest

from torchrl_lightning.agents.analytic import kernels
from torchrl_lightning.kernels.compiled import jitted

F = np.float32
SHAPES = [(1, 1), (3, 2), (37, 5), (256, 64), (258, 17)]


def arrays(rows: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    grad, values = (rng.standard_normal((rows, outputs)).astype(F) for _ in range(2))
    values[rng.random(values.shape) < 0.2] = 0.0
    return grad, np.tanh(values)


def slope(values: np.ndarray, activation: int) -> np.ndarray:
    if activation == kernels.RELU:
        return (values > 0).astype(F)
    if activation == kernels.TANH:
        # One rounding, as in a fused multiply and add.
        return (1.0 - values.astype(np.float64) ** 2).astype(F)
    return np.ones_like(values)


@pytest.mark.parametrize("activation", [kernels.NONE, kernels.RELU, kernels.TANH])
@pytest.mark.parametrize(("rows", "outputs"), SHAPES)
def test_gradient_of_an_activation_sums_the_rows_in_order(rows: int, outputs: int, activation: int) -> None:
    grad, values = arrays(rows, outputs)
    expected = grad * slope(values, activation)
    total = np.zeros(outputs, F)
    bias_grad = np.full(outputs, 7.0, F)
    jitted(kernels.backward_activation)(grad, values, activation, bias_grad)
    np.testing.assert_allclose(grad, expected, rtol=3e-7)
    for row in grad:
        total += row
    np.testing.assert_array_equal(bias_grad, total)


@pytest.mark.parametrize("activation", [kernels.NONE, kernels.RELU, kernels.TANH])
@pytest.mark.parametrize(("rows", "outputs"), SHAPES)
def test_gradient_of_some_rows_equals_these_rows_of_all(rows: int, outputs: int, activation: int) -> None:
    grad, values = arrays(rows, outputs)
    some = np.random.default_rng(1).permutation(rows)[: rows // 2 + 1]
    part, bias_grad = grad[some], np.empty(outputs, F)
    jitted(kernels.backward_activation)(grad, values, activation, bias_grad)
    jitted(kernels.backward_activation_of_rows)(part, values, some, activation)
    np.testing.assert_array_equal(part, grad[some])


@pytest.mark.parametrize("activation", [kernels.NONE, kernels.RELU, kernels.TANH])
@pytest.mark.parametrize(("rows", "outputs"), SHAPES)
def test_layer_equals_its_bias_and_activation(rows: int, outputs: int, activation: int) -> None:
    _, values = arrays(rows, outputs)
    bias = np.random.default_rng(2).standard_normal(outputs).astype(F)
    expected = values + bias
    if activation == kernels.RELU:
        expected = np.maximum(expected, F(0.0))
    jitted(kernels.activate)(flat := expected.reshape(-1).copy(), activation)
    jitted(kernels.add_and_activate)(values, bias, activation)
    np.testing.assert_array_equal(values, flat.reshape(values.shape))
