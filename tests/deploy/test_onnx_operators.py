"""ONNX Runtime ignores NaN in maxima and in recurrent cells; exported policies return NaN and the actions of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, OneHot, Unbounded

from kit.extras import need_extra
from kit.specs import specs_of
from torchrl_lightning import DQNModule, LoadedPolicy, MLPNetwork, PPOModule, RecurrentNetwork, export_policy
from torchrl_lightning.deploy.onnx_operators import DECOMPOSITIONS, gru, lstm, translations

NAN, INF = math.nan, math.inf
ROWS = [[NAN] * 4, [1, NAN, 3, 2], [NAN, 1, 2, 3], [INF, 1, 2, NAN], [-INF] * 4, [1, 2, INF, INF], [3, 1, 3, 2]]
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "argmax, kept": lambda x: x.argmax(1, keepdim=True),
    "argmin": lambda x: x.argmin(-1),
    "argmax of all": lambda x: x[5:].argmax(),
    "argmax of integers": lambda x: x.nan_to_num(0.0, 5.0, -5.0).long().argmax(-1),
    "amax": lambda x: x.amax(-1),
    "amin, kept": lambda x: x.amin(-1, keepdim=True),
    "amax of two": lambda x: x[4:].amax((0, 1)),
    "amax of integers": lambda x: x.nan_to_num(0.0, 5.0, -5.0).long().amax(-1),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of a dimension": lambda x: tuple(x.max(-1)),
    "min of a dimension, kept": lambda x: tuple(x.min(-1, True)),
}


def run_onnx(function: Callable[..., Any], *inputs: torch.Tensor) -> list[Any]:
    """Translate a function like an exported policy, and run it in ONNX Runtime."""
    import onnxruntime

    class Module(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return function(*tensors)

    traced = torch.export.export(Module(), inputs).run_decompositions(DECOMPOSITIONS)
    options: dict[str, Any] = {"custom_translation_table": translations(), "dynamo": True, "verbose": False}
    program: Any = torch.onnx.export(traced, **options)
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return list(session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)}))


@pytest.mark.parametrize("name", OPERATORS)
def test_maximum_is_nan_or_the_first_nan(name: str) -> None:
    need_extra("onnx")
    rows = torch.tensor(ROWS)
    expected = OPERATORS[name](rows)
    outputs = run_onnx(OPERATORS[name], rows)
    for output, value in zip(outputs, expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_array_equal(output, value.numpy(), strict=True)


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(("cell", "layers"), [(nn.GRU, 1), (nn.GRU, 2), (nn.LSTM, 1), (nn.LSTM, 3)])
def test_cells_equal_torch_for_one_step(cell: Any, layers: int, biases: bool) -> None:
    torch.manual_seed(0)
    module = cell(3, 4, layers, bias=biases, batch_first=True)
    x, states = torch.randn(5, 1, 3), [torch.randn(layers, 5, 4) for _ in range(2 if cell is nn.LSTM else 1)]
    x[0, 0, 0], x[1, 0, 1] = NAN, INF
    settings = (list(module.parameters()), biases, layers, 0.0, False, False, True)
    with torch.no_grad():
        output, expected_states = module(x, states[0] if cell is nn.GRU else tuple(states))
        outputs: Any = gru(x, states[0], *settings) if cell is nn.GRU else lstm(x, states, *settings)
    torch.testing.assert_close(outputs[0], output, equal_nan=True)
    expected_states = (expected_states,) if cell is nn.GRU else expected_states
    for state, expected in zip(outputs[1:], expected_states, strict=True):
        torch.testing.assert_close(state, expected, equal_nan=True)


def test_longer_sequences_keep_their_operator() -> None:
    module = nn.GRU(3, 4, batch_first=True)
    arguments = torch.zeros(1, 4), list(module.parameters()), True, 1, 0.0, False
    assert gru(torch.zeros(2, 5, 3), *arguments, False, True) is NotImplemented
    assert gru(torch.zeros(2, 1, 3), *arguments, True, True) is NotImplemented


BOX = Bounded(torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0]))
POLICIES: dict[str, tuple[Any, Any, Any]] = {
    "choice": (PPOModule, MLPNetwork([8]), Categorical(4)),
    "choices": (PPOModule, MLPNetwork([8]), MultiCategorical([2, 3])),
    "one-hot": (PPOModule, MLPNetwork([8]), OneHot(3)),
    "one-hot values": (DQNModule, MLPNetwork([8]), OneHot(3)),
    "values": (DQNModule, MLPNetwork([8]), Categorical(3)),
    "box": (PPOModule, MLPNetwork([8]), BOX),
    "gru": (PPOModule, RecurrentNetwork("gru", 6), BOX),
    "lstm": (PPOModule, RecurrentNetwork("lstm", 6, 2), Categorical(3)),
}


@pytest.mark.parametrize(
    ("name", "masked"),
    [*((name, False) for name in POLICIES), *((n, True) for n in POLICIES if POLICIES[n][2] is not BOX)],
)
def test_infinite_observation_leads_to_the_same_action(name: str, masked: bool, tmp_path: Path) -> None:
    need_extra("onnx")
    import onnxruntime

    kind, network, action = POLICIES[name]
    choices = 5 if name == "choices" else 0 if action is BOX else int(action.space.n)
    mask = {"action_mask": Binary(choices)} if masked else {}
    specs = specs_of(action, observation=Unbounded(4), **mask)
    torch.manual_seed(1)
    module = kind(network).build(specs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    policy = LoadedPolicy(module.policy, specs)
    inputs = export_policy(policy, tmp_path / "policy.onnx", format="onnx")["inputs"]
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx", providers=["CPUExecutionProvider"])
    rows = np.array([[INF, 0, 0, 0], [INF, INF, 0, 0], [INF, -INF, INF, 1], [0, -INF, INF, -INF], [1, 2, 3, 4]])
    observation: dict[str, Any] = {"observation": rows.astype(np.float32)}
    if masked:
        observation["action_mask"] = np.ones((5, choices), bool)
        observation["action_mask"][:, 0] = [False, True, False, True, False]
        if name == "choices":
            observation["action_mask"][1] = False  # the episode of this row has ended
    states = [np.zeros([5, *entry["shape"][1:]], entry["dtype"]) for entry in list(inputs.values())[len(observation) :]]
    for step in range(3):
        values = [observation[name].astype(inputs[name]["dtype"]) for name in sorted(observation)]
        output, *states = session.run(None, dict(zip(inputs, [*values, *states], strict=True)))
        expected = np.asarray(policy.act(observation, starts=step == 0))
        assert output.dtype == expected.dtype
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
        for state, known in zip(states, policy.state.values(), strict=True):
            np.testing.assert_allclose(state, known, rtol=1e-5, atol=1e-6)
        observation["observation"] = np.roll(observation["observation"], 1, axis=1)
