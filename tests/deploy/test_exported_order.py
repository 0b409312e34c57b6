"""An exported file takes observations by name, then states, in the order of the page and the file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import Categorical, Composite, Unbounded

from kit.exported import by_name
from kit.extras import need_extra
from torchrl_lightning import (
    DQNModule,
    EnvironmentSpecs,
    LoadedPolicy,
    MLPNetwork,
    PPOModule,
    RecurrentNetwork,
    environment_specs,
    export_policy,
    make_vector_env,
)
from torchrl_lightning.deploy.export import _has_duplicates, _name_inputs_and_outputs, input_names

PAGE = Path(__file__).parents[2] / "examples" / "guide" / "leaving.md"
ROWS, STEPS = 7, 3


def box(size: int = 2, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(-1, 1, (size,), dtype)


SPACES: dict[str, spaces.Space[Any]] = {
    "one entry": box(4),
    "against the alphabet": spaces.Dict(velocity=box(), goal=box()),
    "nested": spaces.Dict(z=spaces.Dict(b=box(), a=box()), arm=spaces.Dict(touch=box(), force=box()), aim=box()),
    "unusual names": spaces.Dict({"z w": box(), "höhe": box(), "0": box(), "class": box(), "B": box(), "a": box()}),
    "dots and dashes": spaces.Dict({"a.b": box(), "a-b": box(), "a_b": box(), "a": spaces.Dict(c=box())}),
    "dtypes": spaces.Dict(
        wide=box(2, np.float64),
        bits=spaces.MultiBinary(2),
        choice=spaces.Discrete(3),
        many=spaces.MultiDiscrete([2, 3]),
    ),
    "mask": spaces.Dict(observation=box(4), action_mask=spaces.MultiBinary(4), aim=box()),
    "inner values of networks": spaces.Dict(linear=box(), relu=box(), val_0=box(), args_0=box(), N=box()),
}
NETWORKS = {"mlp": MLPNetwork([8]), "gru": RecurrentNetwork("gru", 8), "lstm": RecurrentNetwork("lstm", 8)}


def make_policy(space: spaces.Space[Any], network: Any, kind: Any = PPOModule) -> LoadedPolicy:
    """Build a policy with large weights, so that its actions depend on each entry."""

    class Env(gym.Env[Any, Any]):
        observation_space, action_space = space, spaces.Discrete(4)

        def reset(self, **_: Any) -> Any:
            return space.sample(), {}

    specs = environment_specs(make_vector_env(Env, 1))
    torch.manual_seed(0)
    module = kind(network).build(specs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4)
    return LoadedPolicy(module.policy, specs)


def observations(space: spaces.Space[Any], seed: int) -> Any:
    """Sample a batch of observations with the nesting of the space."""
    if isinstance(space, spaces.Dict):
        return {name: observations(part, seed + place) for place, (name, part) in enumerate(space.items())}
    space.seed(seed)
    values = np.stack([space.sample() for _ in range(ROWS)])
    if isinstance(space, spaces.MultiBinary):
        values[:, 0] = 1  # a mask allows an action
    return values


def run_file(path: Path, form: str) -> tuple[Any, dict[str, Any]]:
    """Load a file with the page's code; return a function of its positional inputs, and its metadata."""
    if form == "torch":
        extra = {"policy.json": ""}
        program: Any = torch.export.load(path, extra_files=extra).module()
        return lambda inputs: program(*map(torch.as_tensor, inputs)), json.loads(extra["policy.json"])
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["policy.json"])
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=True))), metadata


@pytest.mark.parametrize("form", ["torch", "onnx"])
@pytest.mark.parametrize(
    ("space", "network"),
    [*((name, "mlp") for name in SPACES), *((name, "lstm") for name in ("nested", "mask")), ("dtypes", "gru")],
)
def test_file_is_fed_by_the_text_of_the_page(space: str, network: str, form: str, tmp_path: Path) -> None:
    if form == "onnx":
        need_extra("onnx")
    policy, path = make_policy(SPACES[space], NETWORKS[network]), tmp_path / "policy"
    returned = export_policy(policy, path, format=form)  # type: ignore[arg-type]
    run, metadata = run_file(path, form)
    assert metadata == returned
    names = list(by_name(observations(SPACES[space], 0)))
    inputs = metadata["inputs"]
    ordered = sorted(inputs, key=lambda name: inputs[name]["position"])
    number = len(names)
    assert ordered == list(inputs) == [*sorted(names), *ordered[number:]]
    assert list(metadata["outputs"]) == ["action", *(f"next.{name}" for name in ordered[number:])]
    states = [np.zeros((ROWS, *inputs[name]["shape"][1:]), inputs[name]["dtype"]) for name in ordered[number:]]
    assert len(states) == {"mlp": 0, "gru": 1, "lstm": 2}[network]
    for step in range(STEPS):
        batch = observations(SPACES[space], 100 * step)
        entries = by_name(batch)
        given = [entries[name] for name in sorted(entries)]
        assert [str(value.dtype) for value in given] == [inputs[name]["dtype"] for name in sorted(entries)]
        output = run([*given, *states])
        action, *states = output if isinstance(output, tuple | list) else (output,)
        np.testing.assert_array_equal(np.asarray(action), policy.act(batch))


def graph(inputs: Any, nodes: Any, outputs: Any, initializers: Any = ()) -> SimpleNamespace:
    """Build a fake ONNX graph; a node has the names of its inputs and outputs, and optional subgraphs."""
    named = [[SimpleNamespace(name=name) for name in names] for names in (inputs, outputs, initializers)]
    empty = SimpleNamespace(input=(), output=(), value_info=(), initializer=(), node=())
    made = [
        SimpleNamespace(
            input=list(given),
            output=list(result),
            attribute=[SimpleNamespace(g=part, graphs=()) for part in (empty, *parts)],
        )
        for given, result, *parts in nodes
    ]
    return SimpleNamespace(input=named[0], output=named[1], initializer=named[2], value_info=[], node=made)


def test_values_within_an_onnx_graph_leave_their_names_to_the_inputs() -> None:
    inner = graph([], [(["linear"], ["action"])], ["action"])
    onnx = graph(
        ["args_0", "args_1"],
        [(["args_0", "w"], ["linear"]), (["linear", "args_1"], ["linear.0"], inner), (["linear.0"], ["add"])],
        ["add"],
        ["w"],
    )
    assert not _has_duplicates(onnx)
    _name_inputs_and_outputs(onnx, ["linear", "w"], ["action"])
    assert [value.name for value in (*onnx.input, *onnx.output, *onnx.initializer)] == ["linear", "w", "action", "w.0"]
    assert [(node.input, node.output) for node in (*onnx.node, *inner.node)] == [
        (["linear", "w.0"], ["linear.1"]),
        (["linear.1", "w"], ["linear.0"]),
        (["linear.0"], ["action"]),
        (["linear.1"], ["action.0"]),
    ]
    assert [value.name for value in inner.output] == ["action.0"]
    assert _has_duplicates(graph(["linear"], [(["linear"], ["linear"])], ["linear"]))
    assert _has_duplicates(graph(["w"], [], [], ["w"]))


def test_masked_values_are_fed_in_the_same_order(tmp_path: Path) -> None:
    policy = make_policy(SPACES["mask"], NETWORKS["mlp"], DQNModule)
    assert list(export_policy(policy, tmp_path / "a")["inputs"]) == ["action_mask", "aim", "observation"]


def test_entries_with_equal_names_stay_two_inputs(tmp_path: Path) -> None:
    observation = Composite({"a.b": Unbounded(2), "a": Composite(b=Unbounded(3))})
    specs = EnvironmentSpecs(observation, Categorical(3), 1)
    policy = LoadedPolicy(PPOModule(MLPNetwork([4])).build(specs).policy, specs)
    inputs = export_policy(policy, tmp_path / "a")["inputs"]
    assert {name: entry["shape"] for name, entry in inputs.items()} == {"a.b": ["N", 3], r"a\.b": ["N", 2]}
    assert list(inputs) == sorted(inputs)
    assert len(set(input_names(["a.b", ("a", "b"), r"a\.b", ("a\\", "b")]).values())) == 4


def test_page_states_the_order() -> None:
    text = " ".join(PAGE.read_text().split())
    for statement in ("`sorted(names)`", "joined by dots", "`position`", "`h` before `c`", "`action_mask`"):
        assert statement in text, statement
