"""Velora's buffer files: six float32 tensors in a safetensors file, and metadata in a JSON file.

Two renames replace the old files after both new files are complete and on disk. The header of the safetensors file also
stores position and size, so the files stay readable if a process dies between the two renames.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchrl_lightning._core.files import replaced_files
from torchrl_lightning._core.memory import check_free_memory
from torchrl_lightning._core.state import any_value, bounded_integer, check_state

NAMES = ("states", "actions", "rewards", "next_states", "dones", "hiddens")
DIMS = ("capacity", "state_dim", "action_dim", "hidden_dim")
COUNTERS = ("position", "size")
CHUNK = 1 << 16  # rows converted at a time
_logger = logging.getLogger(__name__)


def tensor_shapes(metadata: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the shapes of the six tensors, ``[capacity, dim]``."""
    capacity, state, action, hidden = (metadata[name] for name in DIMS)
    return dict(zip(NAMES, ((capacity, dim) for dim in (state, action, 1, state, 1, hidden)), strict=True))


def save_files(dirpath: str | Path, prefix: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write both files from the filled part ``[size, dim]`` of the six tensors; an error leaves old files intact."""
    # A prefix may contain dots.
    state_path, metadata_path = (Path(dirpath) / f"{prefix}{name}" for name in ("state.safetensors", "metadata.json"))
    state_path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_files(state_path, metadata_path) as (state_file, metadata_file):
        _write_tensors(state_file, tensors, metadata)
        metadata_file.write(json.dumps(dict(metadata), indent=2).encode())


def _write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    # The safetensors package would need every tensor at full capacity in memory.
    shapes = tensor_shapes(metadata)
    header: dict[str, Any] = {"__metadata__": {name: str(metadata[name]) for name in COUNTERS}}
    start = 0
    for name in sorted(NAMES):
        stop = start + 4 * shapes[name][0] * shapes[name][1]
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in sorted(NAMES):
        for rows in tensors[name].split(CHUNK):
            file.write(rows.to("cpu", torch.float32).contiguous().numpy().data)
        missing = 4 * (shapes[name][0] - len(tensors[name])) * shapes[name][1]
        for chunk in range(0, missing, CHUNK):
            file.write(bytes(min(CHUNK, missing - chunk)))


def check_files(state_path: str | Path, metadata: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Check a saved buffer without reading its tensors; return the path of the tensor file and the metadata."""
    checked = _check_metadata(metadata)
    path = _find_tensor_file(Path(state_path))
    # Reading needs memory for the buffer and one copy. Use the file size, because the tensors cannot be larger.
    needed = 2 * path.stat().st_size
    check_free_memory(
        needed, str(path), "free some, or change the metadata's device", device=checked["device"] or "cpu"
    )

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not iterable
            stored = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
            header = file.metadata() or {}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}. Save the buffer again.") from error
    expected = {name: ("F32", list(shape)) for name, shape in tensor_shapes(checked).items()}
    if stored != expected:
        differing = sorted(name for name in {*stored, *expected} if stored.get(name) != expected.get(name))
        differences = "; ".join(f"{name!r} is {stored.get(name)}, expected {expected.get(name)}" for name in differing)
        raise ValueError(f"{path} does not fit its metadata: {differences}.")
    return path, _with_file_counters(checked, header, path)


def _find_tensor_file(path: Path) -> Path:
    # Velora replaces the text after the last dot, so it writes a buffer "run.1_" to "run.safetensors".
    candidates = [path, Path(f"{path}.safetensors"), path.with_suffix(".safetensors")]
    for candidate in candidates if path.suffix == ".safetensors" else candidates[1:]:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"{path} does not exist; tried {sorted({str(c) for c in candidates})}.")


def _check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    schema = {
        **dict.fromkeys(DIMS, bounded_integer(1)),
        **dict.fromkeys(COUNTERS, bounded_integer()),
        "device": any_value,
    }
    check_state(metadata, schema, "metadata")
    checked = {name: metadata[name] for name in schema}
    try:
        torch.empty(0, device=checked["device"] or "cpu")
    except Exception as error:  # each missing backend raises a different type
        raise ValueError(
            f"The metadata has device={checked['device']!r}, which does not exist on this machine. Set it to 'cpu'."
        ) from error
    _check_counters(checked)
    return checked


def _check_counters(metadata: Mapping[str, Any]) -> None:
    capacity, position, size = (metadata[name] for name in ("capacity", "position", "size"))
    if size > capacity or position >= capacity or (size < capacity and position != size):
        raise ValueError(
            f"The metadata has position={position} and size={size} at capacity={capacity}; expected a position below "
            "the capacity, a size of at most the capacity, and both equal until the buffer is full."
        )


def _with_file_counters(metadata: dict[str, Any], header: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Return the metadata with the position and size in the tensor file's header, because these match the tensors."""
    try:
        counters = {name: int(header[name]) for name in COUNTERS if name in header}
    except ValueError as error:
        raise ValueError(
            f"{path} has an invalid header, position and size must be integers, got {dict(header)}."
        ) from error
    if any(metadata[name] != value for name, value in counters.items()):
        merged = {**metadata, **counters}
        _check_counters(merged)
        _logger.warning("%s is newer than its metadata file; position and size are read from it: %s.", path, counters)
        return merged
    return metadata
