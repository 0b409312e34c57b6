"""The state of a whole buffer: gathered, checked, restored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.replay.checks import STATE_VERSION, check_version, require
from torchrl_lightning.replay.memmap import map_files
from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.tree import Tree, leaves_of, map_leaves, tree_of
from torchrl_lightning.replay.writer import RingWriter

if TYPE_CHECKING:
    from torchrl_lightning.replay.buffer import ExperienceBuffer


def gather_state(buffer: ExperienceBuffer, *, copy: bool = True, in_place: str | None = None) -> dict[str, Any]:
    """Everything that decides what the buffer samples next: tensors and scalars only.

    Args:
        buffer: whose state.
        copy: give copies of the stored cells; otherwise views, to be written away at once.
        in_place: refer to memory-mapped cells by this path instead of giving them.
    """
    storage, sampler, writer = buffer.parts
    with buffer.at_rest() as prefetched:
        ring = isinstance(storage, RingStorage)
        generator = buffer.generator
        return {
            "schema_version": STATE_VERSION,
            "storage": storage.state_dict(copy=copy, in_place=in_place) if ring else storage.state_dict(),
            "writer": writer.state_dict(),
            "sampler_kind": type(sampler).__name__,
            "sampler": dict(sampler.state_dict()),
            "transform": dict(buffer.transform.state_dict()),
            "generator": {"device": str(generator.device), "state": generator.get_state()},
            "prefetched": [_pack(batch, info) for batch, info in prefetched],
        }


def restore_state(buffer: ExperienceBuffer, state: Mapping[str, Any], *, cells: Tree | None = None) -> None:
    """Restore a state exactly; a state that does not fit changes nothing.

    Args:
        buffer: takes it.
        state: what :func:`gather_state` gave.
        cells: the memory-mapped cells that the state refers to, if the buffer shall go on in them.

    Raises:
        ValueError: another version, capacity, number of environments, sampler, or other keys, shapes or dtypes.
    """
    storage, sampler, writer = buffer.parts
    check_version(state, "buffer")
    require(state, "storage writer sampler_kind sampler transform generator prefetched", "buffer")
    require(state["generator"], "device state", "generator")
    if state["sampler_kind"] != type(sampler).__name__:
        raise ValueError(
            f"The state is of a {state['sampler_kind']}, this buffer has a {type(sampler).__name__}; "
            "build it with the same sampler."
        )
    if isinstance(storage, RingStorage):
        storage.check_state(state["storage"])
    if isinstance(writer, RingWriter):
        writer.check_state(state["writer"])
    batches = [_unpack(packed) for packed in state["prefetched"]]
    with buffer.at_rest():
        buffer.put_prefetched(batches)
        sampler.load_state_dict(state["sampler"])
        if cells is not None and not storage.tree:
            storage.adopt(cells)
        storage.load_state_dict(state["storage"])
        if isinstance(writer, RingWriter):
            writer.load_state_dict(state["writer"], in_place=cells is not None)
        else:
            writer.load_state_dict(state["writer"])
        buffer.transform.load_state_dict(state["transform"])
        buffer.restore_generator(state["generator"])


def place_of(storage: RingStorage, folder: Path, copy: bool | None) -> str | None:
    """Path from ``folder`` to memory-mapped cells that need no copy there; None if they do.

    Args:
        storage: whose cells.
        folder: where a state is about to be written.
        copy: True always copies, False never; None only what does not lie in ``folder`` already.

    Raises:
        ValueError: ``copy=False`` and the cells are not memory-mapped.
    """
    if storage.scratch_dir is None or not storage.tree:
        if copy is False and storage.tree:
            raise ValueError("Cells in memory have to be copied; give the storage a scratch_dir, or drop copy=False.")
        return None
    scratch, folder = storage.scratch_dir.resolve(), folder.resolve()
    if copy or (copy is None and folder != scratch and folder not in scratch.parents):
        return None
    return os.path.relpath(scratch, folder)


def find_cells(storage: RingStorage, folder: Path, state: dict[str, Any], copy: bool | None) -> Tree | None:
    """Memory-mapped cells that a state refers to, to go on in them; None if they are copied, or part of the state.

    Raises:
        ValueError: the cells are missing or damaged, do not fit the storage, or ``copy=False`` cannot be done.
    """
    require(state.get("storage"), "files count cells data", "storage")
    files = state["storage"]["files"]
    if files is None:
        if copy is False and state["storage"]["data"] is not None:
            raise ValueError("The state holds its cells itself, so that they have to be copied; drop copy=False.")
        return None
    there = (folder / str(files)).resolve()
    same = storage.scratch_dir is not None and storage.scratch_dir.resolve() == there
    if copy is False and not same:
        raise ValueError(
            f"The cells lie in {there}, the storage has scratch_dir={storage.scratch_dir}; "
            f"build it with scratch_dir={str(there)!r}, or drop copy=False."
        )
    cells, rows = map_files(there)
    if rows != storage.max_size:
        raise ValueError(f"The state has max_size={rows}, this storage has max_size={storage.max_size}.")
    if same and not copy:
        return cells
    count, where = state["storage"]["count"], state["storage"]["cells"]
    state["storage"]["data"] = map_leaves(lambda leaf: leaf[:count] if where is None else leaf[where], cells)
    return None


def _pack(batch: TensorDictBase, info: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        "batch": tree_of(batch),
        "batch_size": list(batch.batch_size),
        "names": list(batch.names) if any(batch.names) else None,
        "info": [[list(key) if isinstance(key, tuple) else key, value] for key, value in info.items()],
    }


def _unpack(packed: Mapping[str, Any]) -> tuple[TensorDictBase, dict[Any, Any]]:
    size = torch.Size(packed["batch_size"])

    def build(tree: Tree) -> TensorDictBase:
        entries = {key: build(leaf) if isinstance(leaf, dict) else leaf.clone() for key, leaf in tree.items()}
        return new_tensordict(entries, size, packed["names"])

    if any(leaf.shape[: len(size)] != size for _, leaf in leaves_of(packed["batch"])):
        raise ValueError(f"A prefetched batch of the state does not have the batch size {list(size)}.")
    return build(packed["batch"]), {tuple(k) if isinstance(k, list) else k: v for k, v in packed["info"]}
