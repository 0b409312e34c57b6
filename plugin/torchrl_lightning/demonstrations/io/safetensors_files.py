"""Read and write demonstration files: ``.safetensors`` with any keys and metadata, and PyTorchRL's ``.npz``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.checksums import checksum
from torchrl_lightning._core.file_limits import FILE_BYTES
from torchrl_lightning._core.files import DTYPES, replaced_files
from torchrl_lightning._core.keys import ACTION, REWARD
from torchrl_lightning._core.state import any_value, bounded_integer, check_state, flag, mapping, state_error
from torchrl_lightning._core.tree import join, keyed_leaves, path_of
from torchrl_lightning._core.untrusted import printable, printable_errors
from torchrl_lightning._core.validators import Check, integer, optional
from torchrl_lightning.demonstrations.io.npz import npz_fields, write_npz
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments.specs import EnvironmentSpecs

SUFFIXES = (".npz", ".safetensors")
VERSION = 2  # version 1 did not store the end of the episode
_HEADER_KEY = "demonstration"  # key in the safetensors metadata for our header, as JSON
_CHECKSUM_KEY = "checksum"  # key in the header for the checksum of header and tensors
_MAX_DEPTH = 16  # maximum nesting of observation keys
_STEPS, _LAST = "steps", "last_observation"


@printable_errors()
def read_demonstration(
    path: str | Path, specs: EnvironmentSpecs | None = None, *, limit: int = FILE_BYTES
) -> Demonstration:
    """Read a demonstration from our ``.safetensors`` or PyTorchRL's ``.npz`` file, without running code in the file.

    With ``specs``, entries get the environment's dtypes, such as ``uint8`` for images and ``int8`` for actions. A value
    that would change raises an error. Discrete actions ``[T, 1]`` become ``[T]``. Rewards become float32.
    :meth:`Demonstration.fits` checks the rest.

    Args:
        path: The file. Its suffix determines the format.
        specs: The environment's specs. Without specs, dtypes stay, and the array ``Observation`` of an ``.npz`` file
            gets the key ``"observation"``.
        limit: The maximum size of the file, and of its unpacked content, in bytes.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is too large, damaged or of another format. Or it contains pickled objects, lacks an
            episode, or has values that the environment's dtypes cannot represent. The message names the file.

    Examples:
        >>> import tempfile
        >>> steps = TensorDict({"observation": torch.zeros(2, 4), "action": torch.tensor([0, 1])}, [2])
        >>> steps["next", "reward"] = torch.ones(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_demonstration(f"{folder}/demo.npz", Demonstration(steps, frame_skip=4))
        ...     found = read_demonstration(f"{folder}/demo.npz")
        >>> found.length, found.total_reward, found.frame_skip, found.steps["action"].shape
        (2, 2.0, 4, torch.Size([2, 1]))
    """
    path, limit = Path(path), integer(limit, "limit")
    _check_suffix(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; a demonstration is a {' or '.join(SUFFIXES)} file.")
    with path.open("rb") as file:
        data = file.read(limit + 1)
    try:
        if len(data) > limit:
            raise ValueError(f"it has more than the limit of {limit} bytes")
        if path.suffix == ".npz":
            fields = npz_fields(data, "observation" if specs is None else _npz_observation_key(specs), limit)
        else:
            fields = _from_safetensors(data)
    except Exception as error:  # a damaged file can make the zip, numpy and safetensors readers raise any exception
        prefix = (
            ""
            if isinstance(error, ValueError)
            else f"it is not a complete {path.suffix} file: {type(error).__name__}: "
        )
        raise ValueError(f"{path} was refused: {prefix}{printable(error).rstrip('.')}.") from error
    return with_env_dtypes({**fields, "name": str(path)}, specs)


def write_demonstration(path: str | Path, demonstration: Demonstration) -> None:
    """Write a demonstration to a file. The suffix of the file determines the format.

    An existing file is replaced as a whole. An ``.npz`` file contains only one observation entry, actions, rewards and
    the frame skip. It lacks the flags of the episode's end.

    Raises:
        ValueError: The suffix is unknown, or an ``.npz`` file cannot contain the observation.
        OSError: The folder is missing or cannot be written to. An existing file stays complete.
    """
    write_demonstrations({Path(path): demonstration})


def write_demonstrations(demonstrations: Mapping[Path, Demonstration]) -> None:
    """Write several files. No old file is replaced before all new files are complete and on disk."""
    for path in demonstrations:
        _check_suffix(path)
    with replaced_files(*demonstrations) as files:
        for file, (path, demonstration) in zip(files, demonstrations.items(), strict=True):
            if path.suffix == ".npz":
                write_npz(file, demonstration)
            else:
                file.write(_to_safetensors(demonstration))


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix!r}, expected {' or '.join(map(repr, SUFFIXES))}.")


def _npz_observation_key(specs: EnvironmentSpecs) -> NestedKey:
    return single_observation_key(specs, "an .npz file", "record it again as .safetensors")


def single_observation_key(specs: EnvironmentSpecs, subject: str, remedy: str) -> NestedKey:
    """Return the only observation key, because the file has one observation array; raise ValueError for several."""
    if len(specs.keys) != 1:
        raise ValueError(f"{subject} stores one observation array, but the environment has {specs.keys}; {remedy}")
    return specs.keys[0]


# -- our own form ------------------------------------------------------------------------------------------------------
def _to_safetensors(demonstration: Demonstration) -> bytes:
    value = demonstration.value
    header = {
        "schema_version": VERSION,
        "frame_skip": demonstration.frame_skip,
        "is_human": demonstration.is_human,
        "value": None if value == -math.inf else value,  # JSON does not support infinity
        "terminated": demonstration.terminated,
        "truncated": demonstration.truncated,
        "metadata": dict(demonstration.metadata),
        # For users who inspect the file. This package does not read the entries below.
        "length": demonstration.length,
        "return": demonstration.total_reward,
    }
    parts = {_STEPS: demonstration.steps, _LAST: demonstration.last_observation}
    tensors = {
        "/".join(map(_escape, (root, *path_of(key)))): leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        for root, part in parts.items()
        if part is not None
        for key, leaf in keyed_leaves(part)
    }
    header = json.loads(json.dumps(header))  # JSON converts all keys to strings, as in the file
    return safetensors.torch.save(
        tensors, {_HEADER_KEY: json.dumps({**header, _CHECKSUM_KEY: checksum([header, tensors])})}
    )


def _from_safetensors(data: bytes) -> dict[str, Any]:
    tensors = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    if _HEADER_KEY not in header:
        raise ValueError(
            f"it is not a demonstration file: its metadata must contain {_HEADER_KEY!r}, got {sorted(header)}"
        )
    content: Any = json.loads(header[_HEADER_KEY])
    if isinstance(content, dict) and (stored_checksum := content.pop(_CHECKSUM_KEY, None)) not in (
        None,
        checksum([content, tensors]),
    ):
        raise ValueError(f"it is damaged: its checksum is another than {stored_checksum}, with which it was written")
    ends = dict.fromkeys(("terminated", "truncated"), optional(flag))
    schema: dict[str, Check] = {
        "frame_skip": bounded_integer(1),
        "is_human": flag,
        "value": any_value,
        "metadata": _metadata,
    }
    if isinstance(content, dict) and content.get("schema_version") == 1:
        content = {**content, **dict.fromkeys(ends), "schema_version": VERSION}
    check_state(content, {**schema, **ends}, _HEADER_KEY, VERSION)
    value = -math.inf if content["value"] is None else content["value"]
    if type(value) not in (int, float):
        raise ValueError(f"value must be a number or null, got {value!r}")
    parts = {_STEPS: TensorDict({}, []), _LAST: TensorDict({}, [])}
    for name, leaf in sorted(tensors.items()):  # parents first, so that a child of a tensor raises an error
        root, *path = map(_unescape, name.split("/"))
        if len(path) > _MAX_DEPTH:
            raise ValueError(f"a tensor's name has {len(path)} levels, more than {_MAX_DEPTH}")
        if root not in parts or not path or leaf.dtype not in DTYPES.values():
            raise ValueError(f"the tensor {name!r} of {leaf.dtype} does not belong to a demonstration")
        parts[root][join((), tuple(path))] = leaf
    return {
        "steps": parts[_STEPS],
        "last_observation": None if parts[_LAST].is_empty() else parts[_LAST],
        "value": value,
        **{name: content[name] for name in ("frame_skip", "is_human", "metadata", *ends)},
    }


def _metadata(value: Any, name: str) -> None:
    mapping(value, name)
    for key, entry in value.items():
        if not isinstance(entry, str | int | float):
            raise state_error(entry, f"{name}[{key!r}]", "a text or a number")


def _escape(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


def _unescape(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


# -- conversion to the environment's dtypes ---------------------------------------------------------------------------
def demonstration_from_arrays(
    specs: EnvironmentSpecs | None,
    observations: Mapping[NestedKey, NDArray[Any]],
    actions: Any,
    rewards: Any,
    *,
    last_known: bool = True,
    **fields: Any,
) -> Demonstration:
    """Build a demonstration from observations ``[T + 1, ...]``, actions and rewards.

    If the last observation is unknown, ``observations`` has ``T`` rows. :func:`with_env_dtypes` converts the dtypes.
    """
    steps, last = TensorDict({}, []), TensorDict({}, []) if last_known else None
    for key, array in observations.items():
        leaf = torch.from_numpy(array)
        steps[key] = leaf if last is None else leaf[:-1]
        if last is not None:
            last[key] = leaf[-1]
    steps[ACTION] = torch.from_numpy(np.array(actions))
    steps[REWARD] = torch.from_numpy(np.array(rewards))[:, None]
    return with_env_dtypes({"steps": steps, "last_observation": last, **fields}, specs)


def with_env_dtypes(fields: dict[str, Any], specs: EnvironmentSpecs | None) -> Demonstration:
    """Build a demonstration from its fields, with float32 rewards and the dtypes of an environment.

    Raises:
        ValueError: A value cannot be represented, or the episode is invalid. The message names the demonstration.
    """
    name, steps, last = fields["name"], fields["steps"], fields.get("last_observation")
    _convert(steps, REWARD, torch.float32, name, rounded=True)  # the dtype of collectors
    if specs is not None:
        for key in specs.keys:
            for part in (steps, last):
                if part is not None:
                    _convert(part, key, specs.observation[key].dtype, name)
        is_precise = specs.action_format.dtype == np.float64  # networks compute float64 actions in float32
        _convert(steps, ACTION, specs.action.dtype, name, rounded=is_precise)
        action = steps.get(ACTION, None)
        if not specs.action.shape and isinstance(action, Tensor) and action.ndim == 2 and action.shape[1] == 1:
            steps[ACTION] = action.squeeze(1)
    return Demonstration(**fields)


def _convert(part: TensorDict, key: NestedKey, dtype: torch.dtype, name: str, rounded: bool = False) -> None:
    leaf = part.get(key, None)
    if not isinstance(leaf, Tensor) or leaf.dtype == dtype:
        return
    if not rounded and leaf.numel() and not leaf.is_complex():
        lowest, highest = leaf.min().item(), leaf.max().item()
        limits = None if dtype.is_floating_point or dtype is torch.bool else torch.iinfo(dtype)
        # An integer out of range can wrap around and back, so that the comparison of the values finds no difference.
        fits = limits is None or (limits.min <= lowest and highest <= limits.max)
        if not fits or not torch.equal(leaf.to(dtype).to(leaf.dtype), leaf):
            raise ValueError(
                f"{name} was refused: {key!r} is {leaf.dtype} with values from {lowest} to {highest}, which the "
                f"environment's {dtype} cannot represent; record it in this environment."
            )
    part[key] = leaf.to(dtype)
