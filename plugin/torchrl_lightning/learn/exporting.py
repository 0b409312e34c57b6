"""A policy as a program that needs nothing of this package: traced by ``torch.export``, or in ONNX."""

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

from torchrl_lightning.entries import path_of
from torchrl_lightning.environments.masks import action_mask
from torchrl_lightning.environments.normalization import NormalizedPolicy, ObservationNormalizer, scaled_by_torch
from torchrl_lightning.environments.policies import recurrent_states
from torchrl_lightning.files import replaced_files
from torchrl_lightning.keys import ACTION, ACTION_MASK
from torchrl_lightning.learn.loading import LoadedPolicy
from torchrl_lightning.ranges import one_of

Format: TypeAlias = Literal["torch", "onnx"]
SUFFIXES: dict[str, str] = {"torch": ".pt2", "onnx": ".onnx"}
DESCRIBED = "policy.json"  # where a file says what it takes and gives
_ROWS = (1, 64)  # of the random observations that a file is checked on
_FAR = 1e6  # bounds beyond it are none
_LACKING = re.compile(r"No ONNX function found for .*?(\w+\.\w+)")
_Run = Callable[[list[Tensor]], Sequence[Any]]


class PolicyProgram(nn.Module):
    """What a policy computes, from tensors to tensors: observations as the environment shows them, and actions for it.

    Recurrent states come behind the observations, and the next ones behind the action; where an episode begins, they
    are given as :attr:`first` has them. Of a distribution it takes the mode.

    Args:
        policy: The policy.

    Raises:
        ValueError: It is one that cannot be traced, and says why in ``cannot_be_exported``.
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
        """What it takes, by names and in order: something that has shape and dtype, without the batch."""
        return {".".join(path_of(key)): each for key, each in {**self.observed, **self.first}.items()}

    @property
    def outputs(self) -> list[str]:
        """The names of what it gives."""
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
        """Draw observations ``[rows, *F]``, where its moments are if it normalises them, and states ``[rows, *S]``."""
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
    """Draw entries ``[rows, *F]``: evenly within bounds, and around zero where there are none."""
    if not (isinstance(spec, Bounded | Unbounded) and spec.dtype.is_floating_point):
        return spec.rand(torch.Size([rows]))
    normal = 2 * torch.randn(rows, *spec.shape, dtype=spec.dtype)
    if not isinstance(spec, Bounded):
        return normal
    low, high = spec.space.low, spec.space.high
    even = low + (high - low) * torch.rand_like(normal)
    return torch.where((low > -_FAR) & (high < _FAR), even, normal.clamp(low, high))


def export_policy(policy: LoadedPolicy, path: str | Path, *, format: Format = "torch") -> dict[str, Any]:
    """Write a policy as one file that acts without this package; whatever normalises its observations is inside.

    It takes the observations, one tensor ``[N, *F]`` for each entry that the policy reads, then its recurrent states,
    and gives the action ``[N, *A]`` in the environment's shape, dtype and numbering, which is the mode of the
    distribution, then the next states.
    Whether it gives what the policy gives is seen on random observations before anything is written.

    Args:
        policy: What :func:`load_policy` gives.
        path: The file; one of this name is replaced as a whole.
        format: ``"torch"`` for ``torch.export.load(path).module()``, ``"onnx"`` for ONNX, with the extra ``onnx``.

    Returns:
        What the file takes and gives: ``inputs`` and ``outputs`` by name, with shape and dtype each. The file has it,
        too: as ``policy.json`` among the extra files of torch's, as metadata of ONNX's.

    Raises:
        ValueError: The policy cannot be traced, as one that plans, or has no form in this format; the message, one
            line, says why.
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
        except Exception as error:  # by whatever the parts of a policy of the user's own raise
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
    """Return the content of a file of torch's, and what runs what is read from it."""
    buffer = io.BytesIO()
    torch.export.save(traced, buffer, extra_files={DESCRIBED: json.dumps(described)})
    read = torch.export.load(io.BytesIO(buffer.getvalue())).module()

    def run(given: list[Tensor]) -> Sequence[Any]:
        found = read(*given)
        return found if isinstance(found, tuple) else (found,)

    return buffer.getvalue(), run


def _as_onnx(traced: torch.export.ExportedProgram, described: Mapping[str, Any]) -> tuple[bytes, _Run]:
    """Return the content of an ONNX file, and what runs it."""
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
    """Call the batch of an ONNX graph N, for which the exporter has a name of its own making."""
    shapes = [value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output, *graph.value_info)]
    batch = shapes[0][0].dim_param
    for dimension in (each for shape in shapes for each in shape if each.dim_param == batch):
        dimension.dim_param = "N"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch says of its own parts: of the weights of its recurrent layers, and of libraries that it lacks."""
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
    """Refuse what does not give what the policy gives, in one environment or in many, by a ValueError."""
    twin = LoadedPolicy(policy.policy, policy.specs)  # which remembers states of its own
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
