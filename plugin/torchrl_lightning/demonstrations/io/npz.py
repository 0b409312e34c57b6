"""Read and write PyTorchRL's ``.npz`` files of four arrays, without pickle and within a size limit."""

from __future__ import annotations

import io
import math
import zipfile
from typing import IO, Any, BinaryIO

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.file_limits import UNPACKED_AT_ONCE
from torchrl_lightning._core.keys import ACTION, REWARD
from torchrl_lightning._core.memory import check_free_memory
from torchrl_lightning.demonstrations.trajectory import Demonstration

ARRAYS = ("Observation", "Action", "Reward", "FrameSkip")
# PyTorch supports only some operations on unsigned integers above 8 bits.
_SIGNED_DTYPES: dict[Any, np.dtype[Any]] = {
    np.dtype(np.uint16): np.dtype(np.int32),
    np.dtype(np.uint32): np.dtype(np.int64),
}


def npz_fields(data: bytes, observation: NestedKey, limit: int) -> dict[str, Any]:
    """Read the fields of a :class:`Demonstration`. The array ``Observation`` gets the key ``observation``.

    Raises:
        ValueError: The archive does not contain exactly the four numeric arrays, or has more than ``limit`` bytes.
        Exception: The archive is damaged. The zip and numpy readers may raise any exception.
    """
    arrays = _read_arrays(data, limit)
    frame_skip = arrays.pop("FrameSkip")
    if frame_skip.numel() != 1 or frame_skip.is_floating_point():
        raise ValueError(f"FrameSkip must be one integer, got {list(frame_skip.shape)} of {frame_skip.dtype}")
    steps = TensorDict({}, [])
    for key, name in ((observation, "Observation"), (ACTION, "Action"), (REWARD, "Reward")):
        steps[key] = arrays[name]
    return {"steps": steps, "frame_skip": int(frame_skip)}


def _read_arrays(data: bytes, limit: int) -> dict[str, Tensor]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if sorted(member.filename for member in members) != sorted(f"{name}.npy" for name in ARRAYS):
            names = ", ".join(repr(member.filename) for member in members[:8])
            raise ValueError(f"it must contain only {', '.join(ARRAYS)} (as .npy), got {names or 'nothing'}")
        # Comparing the declared sizes is enough, because a member is never decompressed beyond its declared size.
        declared = sum(member.file_size for member in members)
        if declared > limit:
            raise ValueError(f"its arrays have {declared} bytes, more than the limit of {limit}")
        check_free_memory(declared, "it", "free some memory, or split it into several files")
        if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
            raise ValueError("its compression must be one that numpy writes")
        arrays = {}
        for member in members:
            with archive.open(member) as stream:
                name = member.filename.removesuffix(".npy")
                arrays[name] = torch.from_numpy(_read_array(stream, name, member.file_size))
        return arrays


def _read_array(stream: IO[bytes], name: str, size: int) -> np.ndarray[Any, Any]:
    # numpy's reader would allocate the array size in the header before it checks the available data.
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{name} must have version 1.0 or 2.0 of numpy's format, got {version}")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError(f"{name} must contain numbers, got pickled objects, which could run code")
    if dtype.kind not in "biuf" or dtype.itemsize > (4 if dtype.kind == "u" else 8):
        raise ValueError(f"{name} must have a numeric dtype that PyTorch supports, got {dtype}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or stream.tell() + num_bytes != size:
        raise ValueError(f"{name} declares shape {list(shape)} of {dtype}, which does not match its {size} bytes")
    native = dtype.newbyteorder("=")
    flat = np.empty(math.prod(shape), _SIGNED_DTYPES.get(native, native))
    rows = max(1, UNPACKED_AT_ONCE // dtype.itemsize)
    for start in range(0, len(flat), rows):
        part = flat[start : start + rows]
        # Read a block of known size. Otherwise zip unpacks the whole member before it drops undeclared bytes.
        part[:] = np.frombuffer(stream.read(len(part) * dtype.itemsize), dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def write_npz(file: BinaryIO, demonstration: Demonstration) -> None:
    """Write the four arrays. The value, human flag, metadata, last observation and end flags are not stored.

    Raises:
        ValueError: The observation has more than one entry.
    """
    keys = demonstration.observation_keys
    if len(keys) != 1:
        raise ValueError(
            f"Demonstration {demonstration.name!r} has the observation entries {keys}, but an .npz file can store "
            "only one. Write a .safetensors file."
        )
    entries = zip(ARRAYS, (keys[0], ACTION, REWARD), strict=False)
    arrays = {name: demonstration.steps.get(key).cpu().numpy() for name, key in entries}
    if arrays["Action"].ndim == 1:
        arrays["Action"] = arrays["Action"][:, None]
    np.savez_compressed(file, **arrays, FrameSkip=demonstration.frame_skip)
