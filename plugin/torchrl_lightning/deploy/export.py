"""Export a policy to a file that runs without this package, by ``torch.export`` or ONNX."""

from __future__ import annotations

import io
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
from torchrl_lightning.environments.masks import action_mask
from torchrl_lightning.environments.normalization import NormalizedPolicy, ObservationNormalizer, scaled_by_torch
from torchrl_lightning.environments.policy_calls import recurrent_states

Format: TypeAlias = Literal["torch", "onnx"]
SUFFIXES: dict[str, str] = {"torch": ".pt2", "onnx": ".onnx"}
DESCRIBED = "policy.json"  # name of the description of inputs and outputs in an exported file
_ROWS = (1, 64)  # batch sizes of the random observations in check_program
_FAR = 1e6  # larger bounds count as missing
_LACKING = re.compile(r"No ONNX function found for .*?(\w+\.\w+)")
_Run = Callable[[list[Tensor]], Sequence[Any]]


class PolicyProgram(nn.Module):
    """A policy as a function of tensors, from raw observations to actions in the environment's format.

    The inputs are the observations, then the recurrent states. The outputs are the action, then the next recurrent
    states. Pass the states in :attr:`first` at the start of an episode. The action is the mode of the distribution.

    Args:
        policy: The policy.

    Raises:
        ValueError: The policy cannot be traced; its attribute ``cannot_be_exported`` contains the reason.
    """

    normalizer: ObservationNormalizer | None

    def __init__(self, policy: LoadedPolicy) -> None:
        super().__init__()
        acting: Any = policy.policy
        self.normalizer = acting.normalizer if isinstance(acting, NormalizedPolicy) else None
        if self.normalizer is not None:
            acting = acting.policy
        reason = getattr(acting, "cannot_be_exported", None)
        if reason is not None:
            raise ValueError(f"a {type(acting).__name__} cannot be exported: {reason}")
        self.acting = acting
        self.form = policy.specs.action_format
        leaves = dict(policy.specs.observation.items(True, True))
        read = {path_of(key) for key in policy.in_keys}
        self.observed = {key: spec for key, spec in leaves.items() if path_of(key) in read} or leaves
        self.mask = action_mask(policy.specs.observation, policy.specs.action) if ACTION_MASK in self.observed else None
        self.first = {key: state[0] for key, state in recurrent_states(acting, 1).items()}

    @property
    def inputs(self) -> dict[str, Tensor | TensorSpec]:
        """The inputs by name, in order, each with the shape and dtype of one row."""
        return {".".join(path_of(key)): each for key, each in {**self.observed, **self.first}.items()}

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        return [ACTION, *(f"next.{'.'.join(path_of(key))}" for key in self.first)]

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Map observations ``[N, *F]`` and states ``[N, *S]`` to the action ``[N, *A]``, and the next states."""
        rows = inputs[0].shape[0]
        given: dict[Any, Tensor] = dict(zip((*self.observed, *self.first), inputs, strict=True))
        if self.normalizer is not None:
            for key in self.observed:
                if (constants := self.normalizer.constants(key)) is not None:
                    given[key] = scaled_by_torch(given[key], *constants, self.normalizer.clip)
        begins = torch.zeros(rows, 1, dtype=torch.bool, device=inputs[0].device)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            step = self.acting(TensorDict({**given, "is_init": begins}, [rows]))
        action = self.form.to_environment(step[ACTION])
        return (action, *(step["next", *path_of(key)] for key in self.first)) if self.first else action

    def drawn(self, rows: int) -> dict[NestedKey, Tensor]:
        """Return random states ``[rows, *S]`` and observations ``[rows, *F]``, around the normaliser's mean if any."""
        found: dict[NestedKey, Tensor] = {}
        for key, spec in self.observed.items():
            constants = None if self.normalizer is None else self.normalizer.constants(key)
            if constants is None:
                found[key] = _drawn(spec, rows)
            else:
                mean, factor = constants
                found[key] = (mean + 2 * torch.randn(rows, *spec.shape) / factor).to(spec.dtype)
        if self.mask is not None:
            found[ACTION_MASK] = self.mask.usable(found[ACTION_MASK])
        states = {
            key: torch.rand(rows, *state.shape).mul(2).sub(1).to(state.dtype) for key, state in self.first.items()
        }
        return {**found, **states}


def _drawn(spec: TensorSpec, rows: int) -> Tensor:
    """Return random entries ``[rows, *F]``: uniform within the bounds, and around zero without bounds."""
    if not (isinstance(spec, Bounded | Unbounded) and spec.dtype.is_floating_point):
        return spec.rand(torch.Size([rows]))
    normal = 2 * torch.randn(rows, *spec.shape, dtype=spec.dtype)
    if not isinstance(spec, Bounded):
        return normal
    low, high = spec.space.low, spec.space.high
    even = low + (high - low) * torch.rand_like(normal)
    return torch.where((low > -_FAR) & (high < _FAR), even, normal.clamp(low, high))


def export_policy(policy: LoadedPolicy, path: str | Path, *, format: Format = "torch") -> dict[str, Any]:
    """Write a policy and its observation normaliser to one file that runs without this package.

    The inputs of the exported program are one tensor ``[N, *F]`` for each observation entry of the policy, then the
    recurrent states. The outputs are the action ``[N, *A]`` in the environment's shape, dtype and numbering, then the
    next states. The action is the mode of the distribution.
    Before writing, the outputs are compared with the policy's on random observations.

    Args:
        policy: The policy from :func:`load_policy`.
        path: The file; an existing file is replaced as a whole.
        format: ``"torch"`` for ``torch.export.load(path).module()``, ``"onnx"`` for ONNX, with the extra ``onnx``.

    Returns:
        ``inputs`` and ``outputs`` by name, each with shape and dtype. The file also contains this description: a torch
        file as the extra file ``policy.json``, an ONNX file in its metadata.

    Raises:
        ValueError: The policy cannot be traced, for example a planner, or the format does not support it; the
            message, one line, gives the reason.
        ImportError: The extra is missing.

    Examples:
        >>> export_policy(load_policy("logs/run"), "policy.pt2")["outputs"]  # doctest: +SKIP
        {'action': {'shape': ['N'], 'dtype': 'int64'}}
    """
    path = Path(path)
    if one_of(format, "format", SUFFIXES) == "onnx":
        _check_extra()
    program = PolicyProgram(policy).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(0)
        example = list(program.drawn(3).values())
        described = _described(program, example)
        try:
            batch = torch.export.Dim("batch")
            traced = torch.export.export(program, tuple(example), dynamic_shapes=(tuple({0: batch} for _ in example),))
        except Exception as error:  # user-defined parts of a policy can raise any exception
            raise ValueError(
                f"the policy cannot be traced by torch.export: {type(error).__name__}: {_line(error)}"
            ) from error
        content, run = (_as_onnx if format == "onnx" else _as_torch)(traced, described)
        check_program(policy, program, run, f"format={format}")
    with replaced_files(path) as (file,):
        file.write(content)
    return described


def _described(program: PolicyProgram, example: list[Tensor]) -> dict[str, Any]:
    given = program(*example)
    sides = {
        "inputs": dict(zip(program.inputs, example, strict=True)),
        "outputs": dict(zip(program.outputs, given if program.first else (given,), strict=True)),
    }
    return {
        side: {
            name: {"shape": ["N", *tensor.shape[1:]], "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in tensors.items()
        }
        for side, tensors in sides.items()
    }


def _as_torch(traced: torch.export.ExportedProgram, described: Mapping[str, Any]) -> tuple[bytes, _Run]:
    """Return the content of a torch file, and a function that runs the program loaded from it."""
    buffer = io.BytesIO()
    torch.export.save(traced, buffer, extra_files={DESCRIBED: json.dumps(described)})
    read = torch.export.load(io.BytesIO(buffer.getvalue())).module()

    def run(given: list[Tensor]) -> Sequence[Any]:
        found = read(*given)
        return found if isinstance(found, tuple) else (found,)

    return buffer.getvalue(), run


def _as_onnx(traced: torch.export.ExportedProgram, described: Mapping[str, Any]) -> tuple[bytes, _Run]:
    """Return the content of an ONNX file, and a function that runs it."""
    import onnxruntime

    try:
        made: Any = torch.onnx.export(
            traced,
            dynamo=True,
            input_names=list(described["inputs"]),
            output_names=list(described["outputs"]),
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        lacking = next(filter(None, map(_LACKING.search, map(str, _causes(error)))), None)
        reason = f"has no operator for {lacking[1]}" if lacking else f"does not hold it: {_line(error)}"
        raise ValueError(f"ONNX {reason}, which the policy computes; take format=torch") from error
    model = made.model_proto
    _name_batch(model.graph)
    entry = model.metadata_props.add()
    entry.key, entry.value = DESCRIBED, json.dumps(described)
    content: bytes = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(given: list[Tensor]) -> Sequence[Any]:
        tensors = {name: tensor.numpy() for name, tensor in zip(described["inputs"], given, strict=True)}
        return [torch.from_numpy(found) for found in session.run(list(described["outputs"]), tensors)]

    return content, run


def _name_batch(graph: Any) -> None:
    """Rename the batch dimension of an ONNX graph to N; the exporter chooses its own name."""
    shapes = [value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output, *graph.value_info)]
    batch = shapes[0][0].dim_param
    for dimension in (each for shape in shapes for each in shape if each.dim_param == batch):
        dimension.dim_param = "N"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warnings about recurrent weights and its ONNX log messages about missing libraries."""
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


def check_program(policy: LoadedPolicy, program: PolicyProgram, run: _Run, name_of_run: str) -> None:
    """Compare a program with its policy on one row and on many; raise ValueError if their outputs differ."""
    twin = LoadedPolicy(policy.policy, policy.specs)  # a second object, so that the policy's states stay unchanged
    unread = {key: spec for key, spec in policy.specs.observation.items(True, True) if key not in program.observed}
    for rows in _ROWS:
        given = program.drawn(rows)
        states = {key: given[key] for key in program.first}
        shown = {key: given[key] for key in program.observed} | {key: spec.zero([rows]) for key, spec in unread.items()}
        action = twin.act(TensorDict(shown, [rows]).to_dict(), state=states)
        expected = [torch.as_tensor(action), *(twin.state[key] for key in states)]
        for name, found, wanted in zip(program.outputs, run(list(given.values())), expected, strict=True):
            exact = not wanted.is_floating_point()
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                reason = f"{list(found.shape)} of {found.dtype}, not {list(wanted.shape)} of {wanted.dtype}"
            elif exact and not torch.equal(found, wanted):
                reason = f"another one for {int((found != wanted).reshape(rows, -1).any(1).sum())} of {rows}"
            elif not exact and not torch.allclose(found, wanted, rtol=1e-3, atol=1e-5):
                reason = f"as far off as {float((found - wanted).abs().max()):.3g}"
            else:
                continue
            raise ValueError(
                f"{name_of_run} does not give what the policy gives: of {rows} random observations {name!r} is "
                f"{reason}; does the policy draw random numbers, or decide by what it sees?"
            )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
