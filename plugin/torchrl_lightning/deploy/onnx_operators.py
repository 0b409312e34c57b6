"""ONNX forms of operators for which ONNX Runtime's own operators do not return NaN as torch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Translation = Callable[..., Any]
_Cell = Callable[[Tensor, list[Tensor], tuple[Tensor, ...]], list[Tensor]]
aten: Any = torch.ops.aten
_BOOL = 9  # onnx.TensorProto.BOOL


# -- recurrent cells -------------------------------------------------------------------------------------------------


def gru(
    input: Tensor,
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the next state of a GRU for one step; arguments as in ``torch.ops.aten.gru.input``."""
    settings = num_layers, bidirectional, batch_first
    outputs = _step(input, [hx], params, has_biases, *settings, _gru_cell)
    return outputs if outputs is NotImplemented else (outputs[0], outputs[1][0])


def lstm(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and the next states of an LSTM for one step; arguments as in ``torch.ops.aten.lstm.input``."""
    settings = num_layers, bidirectional, batch_first
    outputs = _step(input, hx, params, has_biases, *settings, _lstm_cell)
    return outputs if outputs is NotImplemented else (outputs[0], *outputs[1])


def _step(
    input: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    cell: _Cell,
) -> Any:
    """Return output and next states for one step; NotImplemented for longer sequences, which keep their operator."""
    time = 1 if batch_first else 0
    weights_per_layer = 4 if has_biases else 2
    if bidirectional or input.ndim != 3 or input.shape[time] != 1 or len(params) != weights_per_layer * num_layers:
        return NotImplemented
    x = input.squeeze(time)
    following: list[list[Tensor]] = []
    for layer in range(num_layers):
        weights = tuple(params[layer * weights_per_layer : (layer + 1) * weights_per_layer])
        following.append(cell(x, [state[layer] for state in states], weights))
        x = following[-1][0]
    return x.unsqueeze(time), [torch.stack(list(layers)) for layers in zip(*following, strict=True)]


def _gates(x: Tensor, hidden: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    input_weight, hidden_weight, *biases = weights
    input_bias, hidden_bias = biases or (None, None)
    return F.linear(x, input_weight, input_bias), F.linear(hidden, hidden_weight, hidden_bias)


def _gru_cell(x: Tensor, states: list[Tensor], weights: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the next state of ``torch.nn.GRUCell``."""
    (hidden,) = states
    from_input, from_hidden = (gates.chunk(3, -1) for gates in _gates(x, hidden, weights))
    reset, update = ((a + b).sigmoid() for a, b in zip(from_input[:2], from_hidden[:2], strict=True))
    candidate = (from_input[2] + reset * from_hidden[2]).tanh()
    return [(hidden - candidate) * update + candidate]


def _lstm_cell(x: Tensor, states: list[Tensor], weights: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the next states of ``torch.nn.LSTMCell``."""
    hidden, cell = states
    from_input, from_hidden = _gates(x, hidden, weights)
    entry, forget, candidate, output = (from_input + from_hidden).chunk(4, -1)
    cell = forget.sigmoid() * cell + entry.sigmoid() * candidate.tanh()
    return [output.sigmoid() * cell.tanh(), cell]


DECOMPOSITIONS: dict[Any, Translation] = {aten.gru.input: gru, aten.lstm.input: lstm}
"""ONNX Runtime's LSTM and GRU bound their inputs, so that a state would be finite after a NaN."""


# -- maxima ----------------------------------------------------------------------------------------------------------


def translations() -> dict[Any, Translation]:
    """Return translations of maxima and minima, which are NaN, or the index of the first NaN, if there is a NaN.

    ONNX Runtime's operators ignore NaN.
    """
    from onnxscript import opset18 as op

    def nan_as_one(x: Any) -> Any:
        return op.CastLike(op.IsNaN(x), x)

    def index(x: Any, dim: int | None, keepdim: bool, largest: bool) -> Any:
        is_float = x.dtype.is_floating_point()
        if dim is None:  # the index within the flat tensor
            x, dim = op.Reshape(x, op.Constant(value_ints=[-1])), 0
        if is_float:
            marks = nan_as_one(x)
            has_nan = op.Cast(op.ReduceMax(marks, op.Constant(value_ints=[dim]), keepdims=1), to=_BOOL)
            x = op.Where(has_nan, marks if largest else op.Neg(marks), x)
        return (op.ArgMax if largest else op.ArgMin)(x, axis=dim, keepdims=int(keepdim))

    def value(x: Any, dims: Sequence[int], keepdim: bool, largest: bool) -> Any:
        axes = [op.Constant(value_ints=list(dims))] if dims else []
        found = (op.ReduceMax if largest else op.ReduceMin)(x, *axes, keepdims=int(keepdim))
        if not x.dtype.is_floating_point():
            return found
        only_nan = op.Where(op.IsNaN(x), x, op.CastLike(0.0, x))
        return op.Add(found, op.ReduceSum(only_nan, *axes, keepdims=int(keepdim)))

    def arg(largest: bool) -> Translation:
        return lambda x, dim=None, keepdim=False: index(x, dim, keepdim, largest)

    def reduce(largest: bool) -> Translation:
        return lambda x, dim=(), keepdim=False: value(x, dim, keepdim, largest)

    def both(largest: bool) -> Translation:
        return lambda x, dim, keepdim=False: (value(x, [dim], keepdim, largest), index(x, dim, keepdim, largest))

    return {
        aten.argmax.default: arg(True),
        aten.argmin.default: arg(False),
        aten.amax.default: reduce(True),
        aten.amin.default: reduce(False),
        aten.max.default: lambda x: value(x, (), False, True),
        aten.min.default: lambda x: value(x, (), False, False),
        aten.max.dim: both(True),
        aten.min.dim: both(False),
    }
