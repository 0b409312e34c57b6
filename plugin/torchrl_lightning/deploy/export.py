"""Export a policy to a file that runs without this package, by ``torch.export`` or ONNX."""

from __future__ import annotations

import io
import itertools
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Bounded, TensorSpec, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_lightning._core.files import replaced_files
from torchrl_lightning._core.keys import ACTION, ACTION_MASK
from torchrl_lightning._core.tree import path_of
from torchrl_lightning._core.validators import one_of
from torchrl_lightning.deploy.loading import LoadedPolicy
from torchrl_lightning.deploy.onnx_operators import DECOMPOSITIONS, translations
from torchrl_lightning.environments.masks import action_mask
from torchrl_lightning.environments.normalization import NormalizedPolicy, ObservationNormalizer, standardize_traceable
from torchrl_lightning.environments.policy_calls import recurrent_states

Format: TypeAlias = Literal["torch", "onnx"]
SUFFIXES: dict[str, str] = {"torch": ".pt2", "onnx": ".onnx"}
DESCRIPTION_FILE = "policy.json"  # entry of an exported file that describes its inputs and outputs
_ROWS = (1, 64)  # batch sizes of the random observations in check_program
_LARGEST_BOUND = 1e6  # larger bounds count as missing
_MISSING_OPERATOR = re.compile(r"No ONNX function found for .*?(\w+\.\w+)")
_Run = Callable[[list[Tensor]], Sequence[Any]]


class PolicyProgram(nn.Module):
    """A policy as a function of tensors, from raw observations to actions in the environment's format.

    The inputs are the observations in the order of their names, then the recurrent states in the policy's order. The
    outputs are the action, then the next recurrent states in the same order. The states are zeros at the start of an
    episode. The action is the mode of the distribution.

    Args:
        policy: The policy.

    Raises:
        ValueError: The policy cannot be traced; its attribute ``cannot_be_exported`` contains the reason.
    """

    normalizer: ObservationNormalizer | None

    def __init__(self, policy: LoadedPolicy) -> None:
        super().__init__()
        module: Any = policy.policy
        self.normalizer = module.normalizer if isinstance(module, NormalizedPolicy) else None
        if self.normalizer is not None:
            module = module.policy
        reason = getattr(module, "cannot_be_exported", None)
        if reason is not None:
            raise ValueError(f"A {type(module).__name__} cannot be exported: {reason}")
        self.policy = module
        self.action_format = policy.specs.action_format
        leaves = dict(policy.specs.observation.items(True, True))
        read_paths = {path_of(key) for key in policy.in_keys}
        read = {key: spec for key, spec in leaves.items() if path_of(key) in read_paths} or leaves
        states = {key: state[0] for key, state in recurrent_states(module, 1).items()}
        self.names = input_names([*read, *states])
        self.observation_specs = {key: read[key] for key in sorted(read, key=self.names.__getitem__)}
        self.initial_states = states
        self.mask = (
            action_mask(policy.specs.observation, policy.specs.action)
            if ACTION_MASK in self.observation_specs
            else None
        )

    @property
    def inputs(self) -> dict[str, Tensor | TensorSpec]:
        """The inputs by name, in order, each with the shape and dtype of one row."""
        return {self.names[key]: value for key, value in {**self.observation_specs, **self.initial_states}.items()}

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        return [ACTION, *(f"next.{self.names[key]}" for key in self.initial_states)]

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Map observations ``[N, *F]`` and states ``[N, *S]`` to the action ``[N, *A]``, and the next states."""
        rows = inputs[0].shape[0]
        entries: dict[Any, Tensor] = dict(zip((*self.observation_specs, *self.initial_states), inputs, strict=True))
        if self.normalizer is not None:
            for key in self.observation_specs:
                if (constants := self.normalizer.constants(key)) is not None:
                    entries[key] = standardize_traceable(entries[key], *constants, self.normalizer.clip)
        is_init = torch.zeros(rows, 1, dtype=torch.bool, device=inputs[0].device)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            step = self.policy(TensorDict({**entries, "is_init": is_init}, [rows]))
        action = self.action_format.to_environment(step[ACTION])
        return (
            (action, *(step["next", *path_of(key)] for key in self.initial_states)) if self.initial_states else action
        )

    def random_inputs(self, rows: int) -> dict[NestedKey, Tensor]:
        """Return random states ``[rows, *S]`` and observations ``[rows, *F]``; normalised entries are near the mean."""
        entries: dict[NestedKey, Tensor] = {}
        for key, spec in self.observation_specs.items():
            constants = None if self.normalizer is None else self.normalizer.constants(key)
            if constants is None:
                entries[key] = _random_entries(spec, rows)
            else:
                mean, factor = constants
                entries[key] = (mean + 2 * torch.randn(rows, *spec.shape) / factor).to(spec.dtype)
        if self.mask is not None:
            entries[ACTION_MASK] = self.mask.nonempty_mask(entries[ACTION_MASK])
        states = {
            key: torch.rand(rows, *state.shape).mul(2).sub(1).to(state.dtype)
            for key, state in self.initial_states.items()
        }
        return {**entries, **states}


def input_names(keys: Sequence[NestedKey]) -> dict[NestedKey, str]:
    r"""Return a different name for each key: its parts, joined by dots.

    If two keys would have the same name, a backslash precedes each dot and each backslash within a part of a key.

    Examples:
        >>> input_names(["arm.force", ("arm", "touch")])
        {'arm.force': 'arm.force', ('arm', 'touch'): 'arm.touch'}
        >>> list(input_names(["arm.touch", ("arm", "touch")]).values())
        ['arm\\.touch', 'arm.touch']
    """
    names = {key: ".".join(path_of(key)) for key in keys}
    if len(set(names.values())) == len(names):
        return names
    return {key: ".".join(re.sub(r"[.\\]", r"\\\g<0>", part) for part in path_of(key)) for key in keys}


def _random_entries(spec: TensorSpec, rows: int) -> Tensor:
    """Return random entries ``[rows, *F]``: uniform within the spec's bounds, or around zero without bounds."""
    if not (isinstance(spec, Bounded | Unbounded) and spec.dtype.is_floating_point):
        return spec.rand(torch.Size([rows]))
    normal = 2 * torch.randn(rows, *spec.shape, dtype=spec.dtype)
    if not isinstance(spec, Bounded):
        return normal
    low, high = spec.space.low, spec.space.high
    uniform = low + (high - low) * torch.rand_like(normal)
    return torch.where((low > -_LARGEST_BOUND) & (high < _LARGEST_BOUND), uniform, normal.clamp(low, high))


def export_policy(policy: LoadedPolicy, path: str | Path, *, format: Format = "torch") -> dict[str, Any]:
    """Write a policy and its observation normaliser to one file that runs without this package.

    The inputs of the exported program are one tensor ``[N, *F]`` for each observation entry of the policy in the order
    of their names, then the recurrent states. The parts of a nested name are joined by dots. The outputs are the action
    ``[N, *A]`` in the environment's shape, dtype and numbering, then the next states. The action is the mode of the
    distribution. Before the file is written, the outputs are compared with the policy's for random observations.

    Args:
        policy: The policy from :func:`load_policy`.
        path: The file. An existing file is replaced atomically.
        format: ``"torch"`` for ``torch.export.load(path).module()``, ``"onnx"`` for ONNX, with the extra ``onnx``.

    Returns:
        ``inputs`` and ``outputs`` by name, in order, each with shape and dtype, inputs also with their position. The
        file also contains this description: a torch
        file as the extra file ``policy.json``, an ONNX file in its metadata.

    Raises:
        ValueError: The policy cannot be traced (a planner cannot, for example), or the format does not support the
            policy. The message is one line with the reason.
        ImportError: The extra ``onnx`` is not installed.

    Examples:
        >>> export_policy(load_policy("logs/run"), "policy.pt2")["outputs"]  # doctest: +SKIP
        {'action': {'shape': ['N'], 'dtype': 'int64'}}
    """
    path = Path(path)
    if one_of(format, "format", SUFFIXES) == "onnx":
        _check_extra()
    program = PolicyProgram(policy).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _without_export_warnings():
        torch.manual_seed(0)
        example = list(program.random_inputs(3).values())
        description = _describe(program, example)
        try:
            batch = torch.export.Dim("batch")
            traced = torch.export.export(program, tuple(example), dynamic_shapes=(tuple({0: batch} for _ in example),))
        except Exception as error:  # user-defined parts of a policy can raise any exception
            raise ValueError(
                f"the policy cannot be traced by torch.export: {type(error).__name__}: {_one_line(error)}"
            ) from error
        content, run = (_as_onnx if format == "onnx" else _as_torch)(traced, description)
        check_program(policy, program, run, f"format={format}")
    with replaced_files(path) as (file,):
        file.write(content)
    return description


def _describe(program: PolicyProgram, example: list[Tensor]) -> dict[str, Any]:
    outputs = program(*example)
    return {
        "inputs": {
            name: {**_describe_tensor(tensor), "position": position}
            for position, (name, tensor) in enumerate(zip(program.inputs, example, strict=True))
        },
        "outputs": {
            name: _describe_tensor(tensor)
            for name, tensor in zip(program.outputs, outputs if program.initial_states else (outputs,), strict=True)
        },
    }


def _describe_tensor(tensor: Tensor) -> dict[str, Any]:
    return {"shape": ["N", *tensor.shape[1:]], "dtype": str(tensor.dtype).removeprefix("torch.")}


def _as_torch(traced: torch.export.ExportedProgram, description: Mapping[str, Any]) -> tuple[bytes, _Run]:
    """Return the content of a torch file, and a function that runs the program loaded from it."""
    buffer = io.BytesIO()
    torch.export.save(traced, buffer, extra_files={DESCRIPTION_FILE: json.dumps(description)})
    module = torch.export.load(io.BytesIO(buffer.getvalue())).module()

    def run(inputs: list[Tensor]) -> Sequence[Any]:
        outputs = module(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return buffer.getvalue(), run


def _as_onnx(traced: torch.export.ExportedProgram, description: Mapping[str, Any]) -> tuple[bytes, _Run]:
    """Return the content of an ONNX file, and a function that runs it."""
    import onnxruntime

    inputs, outputs = list(description["inputs"]), list(description["outputs"])
    try:
        model = _to_onnx(traced, input_names=inputs, output_names=outputs)
        if _has_duplicates(model.graph):  # an observation has the name of a value within the graph
            model = _to_onnx(traced)
            _name_inputs_and_outputs(model.graph, inputs, outputs)
    except torch.onnx.errors.OnnxExporterError as error:
        missing_operator = next(filter(None, map(_MISSING_OPERATOR.search, map(str, _cause_chain(error)))), None)
        reason = f"ONNX has no operator for {missing_operator[1]}" if missing_operator else _one_line(error)
        raise ValueError(f"format=onnx cannot export this policy: {reason}. Use format=torch") from error
    _name_batch(model.graph)
    entry = model.metadata_props.add()
    entry.key, entry.value = DESCRIPTION_FILE, json.dumps(description)
    content: bytes = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(inputs: list[Tensor]) -> Sequence[Any]:
        tensors = {name: tensor.numpy() for name, tensor in zip(description["inputs"], inputs, strict=True)}
        return [torch.from_numpy(output) for output in session.run(list(description["outputs"]), tensors)]

    return content, run


def _to_onnx(traced: torch.export.ExportedProgram, **names: list[str]) -> Any:
    options: dict[str, Any] = {"custom_translation_table": translations(), "dynamo": True, "verbose": False, **names}
    program: Any = torch.onnx.export(traced.run_decompositions(DECOMPOSITIONS), **options)
    return program.model_proto


def _has_duplicates(graph: Any) -> bool:
    """Return whether two values of an ONNX graph have the same name."""
    inputs = [value.name for value in graph.input]
    others = [value.name for value in graph.initializer if value.name not in inputs]
    names = [*inputs, *others, *(name for node in graph.node for name in node.output if name)]
    return len(set(names)) < len(names) or not {value.name for value in graph.initializer}.isdisjoint(inputs)


def _name_inputs_and_outputs(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename the inputs and outputs of an ONNX graph, and each value within the graph that has a new name already."""
    pairs = [*zip(graph.input, inputs, strict=True), *zip(graph.output, outputs, strict=True)]
    renamed = {value.name: name for value, name in pairs}
    inner = _value_names(graph) - set(renamed)
    for name in inner.intersection(renamed.values()):
        number = next(n for n in itertools.count() if f"{name}.{n}" not in {*inner, *renamed, *renamed.values()})
        renamed[name] = f"{name}.{number}"
    _rename_values(graph, renamed)


def _value_names(graph: Any) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer)}
    for node in graph.node:
        names |= {*node.input, *node.output}.union(*(_value_names(part) for part in _subgraphs(node)))
    return names


def _rename_values(graph: Any, renamed: Mapping[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = renamed.get(value.name, value.name)
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
        for part in _subgraphs(node):
            _rename_values(part, renamed)


def _subgraphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        yield attribute.g
        yield from attribute.graphs


def _name_batch(graph: Any) -> None:
    """Rename the batch dimension of an ONNX graph to N; the exporter chooses its own name."""
    shapes = [value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output, *graph.value_info)]
    batch = shapes[0][0].dim_param
    for dimension in (size for shape in shapes for size in shape if size.dim_param == batch):
        dimension.dim_param = "N"


@contextmanager
def _without_export_warnings() -> Iterator[None]:
    """Hide torch's warnings about recurrent weights, and the ONNX exporter's log messages about missing libraries."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attributes .*_flat_weights")
            yield
    finally:
        log.setLevel(level)


def _check_extra() -> None:
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(f"format=onnx needs {' and '.join(missing)}: pip install 'torchrl-lightning[onnx]'")


def check_program(policy: LoadedPolicy, program: PolicyProgram, run: _Run, program_name: str) -> None:
    """Compare the outputs of a program and its policy for one row and for 64; raise ValueError if they differ."""
    reference = LoadedPolicy(policy.policy, policy.specs)  # a second object, so that the policy's states stay unchanged
    unread = {
        key: spec for key, spec in policy.specs.observation.items(True, True) if key not in program.observation_specs
    }
    for rows in _ROWS:
        inputs = program.random_inputs(rows)
        states = {key: inputs[key] for key in program.initial_states}
        observation = {key: inputs[key] for key in program.observation_specs} | {
            key: spec.zero([rows]) for key, spec in unread.items()
        }
        action = reference.act(TensorDict(observation, [rows]).to_dict(), state=states)
        expected = [torch.as_tensor(action), *(reference.state[key] for key in states)]
        for name, output, expected_output in zip(program.outputs, run(list(inputs.values())), expected, strict=True):
            is_exact = not expected_output.is_floating_point()
            if output.shape != expected_output.shape or output.dtype != expected_output.dtype:
                shapes = list(output.shape), list(expected_output.shape)
                reason = f"{shapes[0]} of {output.dtype} instead of {shapes[1]} of {expected_output.dtype}"
            elif is_exact and not torch.equal(output, expected_output):
                reason = (
                    f"different values for {int((output != expected_output).reshape(rows, -1).any(1).sum())} of them"
                )
            elif not is_exact and not torch.allclose(output, expected_output, rtol=1e-3, atol=1e-5):
                reason = f"differences of up to {float((output - expected_output).abs().max()):.3g}"
            else:
                continue
            raise ValueError(
                f"{program_name} must give the policy's {name!r} for {rows} random observations, got {reason}. A "
                "policy that draws random numbers or branches on observations cannot be exported"
            )


def _cause_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
