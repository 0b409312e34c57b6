"""Gathering, checking and restoring the state of a whole buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.replay.checks import STATE_VERSION, check_version, require
from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.tree import Tree, leaves_of, tree_of
from torchrl_lightning.replay.writer import RingWriter

if TYPE_CHECKING:
    from torchrl_lightning.replay.buffer import ExperienceBuffer


def gather_state(buffer: ExperienceBuffer, *, copy: bool = True) -> dict[str, Any]:
    """Gather everything that decides what the buffer samples next: tensors and scalars only.

    Args:
        buffer: the buffer.
        copy: copy the stored cells; otherwise return views, which are to be written out at once.
    """
    storage, sampler, writer = buffer.parts
    with buffer.at_rest() as prefetched:
        ring = isinstance(storage, RingStorage)
        generator = buffer.generator
        return {
            "schema_version": STATE_VERSION,
            "storage": storage.state_dict(copy=copy) if ring else storage.state_dict(),
            "writer": writer.state_dict(),
            "sampler_kind": type(sampler).__name__,
            "sampler": dict(sampler.state_dict()),
            "transform": dict(buffer.transform.state_dict()),
            "generator": {"device": str(generator.device), "state": generator.get_state()},
            "prefetched": [_pack(batch, info) for batch, info in prefetched],
        }


def restore_state(buffer: ExperienceBuffer, state: Mapping[str, Any]) -> None:
    """Restore a state exactly; a state that does not fit changes nothing.

    Args:
        buffer: takes it.
        state: what :func:`gather_state` gave.

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
        storage.load_state_dict(state["storage"])
        writer.load_state_dict(state["writer"])
        buffer.transform.load_state_dict(state["transform"])
        buffer.restore_generator(state["generator"])


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
