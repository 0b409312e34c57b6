"""Dry run: one forward and one backward pass through a copy of an agent's networks before collection starts."""

from __future__ import annotations

import copy
import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, OneHot, TensorSpec

from torchrl_lightning._core.errors import IncompatibleError, UserError
from torchrl_lightning._core.keys import ACTION_MASK
from torchrl_lightning._core.modules import device_of
from torchrl_lightning._core.protocols import LearnerApi
from torchrl_lightning.agents.networks.network_protocol import EncoderNetwork
from torchrl_lightning.agents.networks.q_networks import ActionValue
from torchrl_lightning.agents.networks.target_networks import TargetNetworks
from torchrl_lightning.agents.networks.trunks import RecurrentTrunk, Trunk
from torchrl_lightning.environments.policy_calls import recurrent_states

ROWS = 2
MAX_COPIED_BYTES = 50 << 20
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["tensordict"]))


class NetworkFault(UserError):
    """Raised if a network cannot be built or fails in the dry run; the message is one line."""


@contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Restore the global generators of torch (also on GPUs), NumPy and Python when the block ends."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    # Reading the states would initialise CUDA. After that, processes could not fork.
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


@contextmanager
def network_errors(agent: Any, specs: Any) -> Iterator[None]:
    """Raise a NetworkFault if a user's network raises while an agent builds its networks."""
    try:
        yield
    except (UserError, IncompatibleError):
        raise
    except Exception as error:
        network = LearnerApi.of(agent).network
        user_network = network.wrapped if isinstance(network, EncoderNetwork) else network
        frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_user_code = not type(user_network).__module__.startswith("torchrl_lightning.")
        # Compare types, because a trial builds the networks from a copy of the settings.
        if (
            user_network is None
            or not is_user_code
            or not any(type(frame_self) is type(user_network) for frame_self in frames)
        ):
            raise
        raise _network_error(agent, specs, "build its encoder", _format_error(error)) from error


def dry_run(agent: Any, specs: Any, device: torch.device | None = None, autocast: Any = None) -> None:
    """Run a forward and a backward pass through copies of actor and critics; raise NetworkFault if they fail.

    Neither the agent nor any global generator changes.

    Args:
        agent: An agent with networks.
        specs: The environment's specs.
        device: The training device; the agent's current device by default.
        autocast: Context manager for the forward passes; none by default.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in agent.parameters())
    # A copy of a large network shares the parameters and computes no gradients, to save memory.
    is_large = size > MAX_COPIED_BYTES
    shared = {id(parameter): parameter for parameter in agent.parameters()} if is_large else {}
    with preserved_rng_state():
        try:
            copied = copy.deepcopy(agent, dict(shared))
        except Exception:  # running the original would change it, so skip a module that cannot be copied
            return
        if is_large or device is None:
            device = device_of(agent) or torch.device("cpu")
        else:
            copied.to(device)
        # Compiling a user's encoder would take seconds.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        with eager, torch.device(device), autocast or nullcontext(), torch.set_grad_enabled(not is_large):
            _forward_and_backward(copied, specs, device, with_gradients=not is_large)


def _forward_and_backward(agent: Any, specs: Any, device: torch.device, *, with_gradients: bool) -> None:
    rows = {
        key: _plausible_rows(key, spec) for key, spec in specs.observation.items(True, True) if spec.dtype is not None
    }
    step = TensorDict(rows, [ROWS])
    step = step.update({**recurrent_states(agent.policy, ROWS), "is_init": torch.zeros(ROWS, 1, dtype=torch.bool)})
    step = step.to(device)
    for encoder, keys in _encoders(agent):
        if all(step.get(key, None) is not None for key in keys):
            for shape in agent.batch_shapes:
                entries = [step.get(key).reshape(*shape, *step.get(key).shape[1:]).clone() for key in keys]
                _check_encoder(agent, specs, encoder, entries, shape, with_gradients=with_gradients)
    try:
        outputs = agent.network_outputs(step.clone())
        if with_gradients:
            loss = sum((output.float().mean() for output in outputs if output.requires_grad), torch.zeros(()))
            parameters = [parameter for parameter in agent.parameters() if parameter.requires_grad]
            if loss.requires_grad:
                torch.autograd.grad(loss, parameters, allow_unused=True)
    except Exception as error:
        raise _network_error(
            agent, specs, "run forward and backward in actor and critics", _format_error(error)
        ) from error


def _encoders(agent: Any) -> Iterator[tuple[nn.Module, Sequence[NestedKey]]]:
    """Yield each trained observation encoder and the keys of its inputs."""
    children = [child for child in agent.children() if not isinstance(child, TargetNetworks)]
    roots = [*children, *(module for module in (agent.policy, LearnerApi.of(agent).critic) if module is not None)]
    encoder_ids: set[int] = set()
    for module in (module for root in roots if isinstance(root, nn.Module) for module in root.modules()):
        if isinstance(module, Trunk):
            keys = module.observation_keys if isinstance(module, RecurrentTrunk) else module.in_keys
        elif isinstance(module, ActionValue) and not module.encodes_action:
            keys = module.observation_keys
        else:
            continue
        if id(module.encoder) not in encoder_ids:
            encoder_ids.add(id(module.encoder))
            yield module.encoder, keys


def _check_encoder(
    agent: Any,
    specs: Any,
    encoder: nn.Module,
    entries: list[Tensor],
    shape: Sequence[int],
    *,
    with_gradients: bool,
) -> None:
    before = [(entry._version, entry.clone()) for entry in entries]
    shapes = ", ".join(str(list(entry.shape)) for entry in entries)
    call, width = f"{type(encoder).__name__}({shapes})", encoder.features
    requirement = f"return features [*B, {width}], with the width in its attribute features"
    parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    gradients: Sequence[Tensor | None] = parameters
    try:
        features = encoder(*entries)
        if with_gradients and parameters and isinstance(features, Tensor):
            total = features.float().sum()
            gradients = torch.autograd.grad(total, parameters, allow_unused=True) if total.requires_grad else []
    except Exception as error:
        raise _network_error(agent, specs, requirement, f"{_format_error(error)} from {call}") from error
    expected = (*shape, width)
    if not isinstance(features, Tensor) or features.shape != expected:
        got = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise _network_error(agent, specs, f"return features {list(expected)} from {call}", str(got))
    dtype = next((parameter.dtype for parameter in agent.parameters()), torch.get_default_dtype())
    if features.dtype != dtype and not torch.is_autocast_enabled(features.device.type):
        raise _network_error(agent, specs, f"return features of {dtype} from {call}", str(features.dtype))
    if any(
        entry._version != version or not torch.equal(entry, content)
        for entry, (version, content) in zip(entries, before, strict=True)
    ):
        raise _network_error(agent, specs, f"leave its inputs unchanged in {call}", "an in-place operation on them")
    if not any(gradient is not None for gradient in gradients) and parameters:
        advice = " Set requires_grad=False for frozen parameters."
        raise _network_error(agent, specs, f"give its parameters gradients in {call}", "none for any parameter", advice)


def _network_error(agent: Any, specs: Any, expected: str, got: str, advice: str = "") -> NetworkFault:
    network = LearnerApi.of(agent).network
    network = network.wrapped if isinstance(network, EncoderNetwork) else network
    entries = ", ".join(
        f"{'.'.join(key) if isinstance(key, tuple) else key} {list(spec.shape)} {spec.dtype}"
        for key, spec in specs.observation.items(True, True)
    ).replace("torch.", "")
    name = type(agent if network is None else network).__name__
    return NetworkFault(
        f"The network {name} of {type(agent).__name__}, for observations {entries}, must {expected}, got {got}."
        f"{advice or ' Correct its encoder(specs).'}"
    )


def _format_error(error: Exception) -> str:
    """Return an exception in one line, with the last line of user code in its traceback."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    calls = [
        f" at {Path(call.filename).name}:{call.lineno}"
        for call in traceback.extract_tb(error.__traceback__)
        if not call.filename.startswith((_PACKAGE, *_LIBRARIES)) and not call.filename.startswith("<frozen")
    ]
    return f"{type(error).__name__}: {text}{calls[-1] if calls else ''}"


def _plausible_rows(key: NestedKey, spec: TensorSpec) -> Tensor:
    """Return rows of plausible values; the spec's own samples could be infinite."""
    if key == ACTION_MASK:
        return torch.ones(ROWS, *spec.shape, dtype=spec.dtype)
    if isinstance(spec, Categorical | OneHot | MultiCategorical | Binary):
        return spec.rand([ROWS])
    values = torch.rand(ROWS, *spec.shape).to(spec.dtype)
    if isinstance(spec, Bounded):
        values = values.clamp(spec.space.low, spec.space.high)
    return values
