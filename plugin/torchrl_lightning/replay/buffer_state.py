"""Gathering, checking and restoring the state of a whole buffer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.entries import Tree, tree_of
from torchrl_lightning.replay.checks import STATE_VERSION, check_transform, check_tree
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.rings import Rings
from torchrl_lightning.replay.storage import RingStorage
from torchrl_lightning.replay.writer import RingWriter
from torchrl_lightning.state import (
    check_state,
    described,
    generator,
    mapping,
    optional,
    same,
    sequence,
    tensor,
    whole,
    wrong,
)

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
        rng = buffer.generator
        return {
            "schema_version": STATE_VERSION,
            "storage": storage.state_dict(copy=copy) if ring else storage.state_dict(),
            "writer": writer.state_dict(),
            "sampler_kind": type(sampler).__name__,
            "sampler": dict(sampler.state_dict()),
            "transform": dict(buffer.transform.state_dict()),
            "generator": {"device": str(rng.device), "state": rng.get_state()},
            "prefetched": [_pack(batch, info) for batch, info in prefetched],
        }


def restore_state(buffer: ExperienceBuffer, state: Mapping[str, Any]) -> None:
    """Restore a state exactly; a state that does not fit changes nothing.

    Args:
        buffer: receives the state.
        state: what :func:`gather_state` returned.

    Raises:
        ValueError: another version, capacity, number of environments, sampler, or other keys, shapes or dtypes.
    """
    storage, sampler, writer = buffer.parts
    schema = {
        **dict.fromkeys(("storage", "writer", "sampler", "transform"), mapping),
        "sampler_kind": same(type(sampler).__name__, "buffer", "sampler"),
        "generator": _generator,
        "prefetched": sequence,
    }
    check_state(state, schema, "buffer", STATE_VERSION)
    parts = {"storage": storage, "sampler": sampler, "writer": writer}
    for name, part in parts.items():
        if hasattr(part, "check_state"):
            part.check_state(state[name])
        else:
            cells = None if part is storage else storage.max_size
            _check_like(state[name], part.state_dict(), cells, type(part).__name__)
            whole(0, storage.max_size)(state[name].get("_len", 0), "the storage's '_len'")
    _check_agreement(storage, sampler, writer, state)
    check_transform(buffer.transform, state["transform"])
    batches = [_unpack(packed) for packed in state["prefetched"]]
    with buffer.at_rest():
        buffer.put_prefetched(batches)
        for name, part in sorted(parts.items(), key=lambda item: hasattr(item[1], "check_state")):
            _load(part, state[name])
        buffer.transform.load_state_dict(state["transform"])
        buffer.restore_generator(state["generator"])


def _load(part: Any, state: Mapping[str, Any]) -> None:
    if hasattr(part, "check_state"):
        part.load_state_dict(state)
        return
    before = copy.deepcopy(part.state_dict())
    try:
        part.load_state_dict(state)
    except Exception as error:
        part.load_state_dict(before)
        raise ValueError(f"{type(part).__name__} does not take its state: {error}") from error


def _generator(value: Any, name: str) -> None:
    mapping(value, name)
    device = value.get("device")
    if not isinstance(device, str):
        raise wrong(device, "the generator's 'device'", "the name of a device")
    generator(device)(value.get("state"), "the generator's 'state'")


def _check_like(state: Any, own: Any, cells: int | None, owner: str) -> None:
    # TorchRL's parts accept any state, and fail later, when they are used.
    if isinstance(own, Mapping):
        if not isinstance(state, Mapping) or (set(state) != set(own) and own):
            found = sorted(map(str, state)) if isinstance(state, Mapping) else described(state)
            raise ValueError(f"The {owner} state is foreign: it is {found}, expected {sorted(map(str, own))}.")
        for key, value in own.items():
            _check_like(state[key], value, cells, f"{owner}'s {key}")
    elif cells is None and isinstance(own, Tensor):
        tensor(own.dtype, *own.shape, anywhere=True)(state, owner)
    elif isinstance(own, Tensor | None) and (isinstance(state, Tensor) or (state is None and cells is not None)):
        if state is not None:  # indices, of which there may be any number, or flags or counts of cells
            unset = torch.bool if state.dtype == torch.bool else torch.int64
            tensor(unset if own is None else own.dtype, None, anywhere=True)(state, owner)
            if state.dtype == torch.int64 and cells is not None and not owner.endswith("count"):
                tensor(torch.int64, None, low=0, high=cells - 1, anywhere=True)(state, owner)
    elif isinstance(own, int) and not isinstance(own, bool):
        whole(min(own, 0))(state, owner)
    elif type(state) is not type(own):
        raise wrong(state, owner, described(own))


def _check_agreement(storage: Any, sampler: Any, writer: Any, state: Mapping[str, Any]) -> None:
    if not isinstance(storage, RingStorage) or not isinstance(writer, RingWriter):
        return
    held, positions = state["storage"], state["writer"]["positions"]
    rings = Rings.at(writer.length, positions, state["writer"]["oldest"])
    filled, listed = rings.filled_cells(), held["cells"]
    if held["count"] != len(filled) or (listed is None) != rings.is_even or not (rings.is_even or listed.equal(filled)):
        raise ValueError(f"The state is foreign: its storage holds {held['count']} cells, its writer {len(filled)}.")
    if isinstance(sampler, PrioritizedSampler):
        drawn = (state["sampler"]["priorities"] >= 0).nonzero().squeeze(1).cpu()
        if not torch.isin(drawn, filled).all():
            raise ValueError("The state is foreign: it holds priorities of cells that hold nothing.")


def _pack(batch: TensorDictBase, info: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        "batch": tree_of(batch),
        "batch_size": list(batch.batch_size),
        "names": list(batch.names) if any(batch.names) else None,
        "info": [[list(key) if isinstance(key, tuple) else key, value] for key, value in info.items()],
    }


def _unpack(packed: Any) -> tuple[TensorDictBase, dict[Any, Any]]:
    schema = {"batch": mapping, "batch_size": sequence, "names": optional(sequence), "info": sequence}
    check_state(packed, schema, "prefetched batch")
    sizes, names = packed["batch_size"], packed["names"]
    for number in sizes:
        whole()(number, "a size of a prefetched batch")
    size = torch.Size(sizes)
    check_tree(packed["batch"], size, "prefetched batch")
    if names is not None and (len(names) != len(size) or any(not isinstance(name, str | None) for name in names)):
        raise ValueError(f"The state names the dimensions {list(size)} of a prefetched batch {names}.")
    info: dict[Any, Any] = {}
    for pair in packed["info"]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise wrong(pair, "an entry of a prefetched batch", "a key and its value")
        key, value = tuple(pair[0]) if isinstance(pair[0], list) else pair[0], pair[1]
        if any(not isinstance(part, str) for part in (key if isinstance(key, tuple) else (key,))):
            raise wrong(key, "a key of a prefetched batch", "a name")
        info[key] = value

    def build(tree: Tree) -> TensorDictBase:
        entries = {key: build(leaf) if isinstance(leaf, dict) else leaf.clone() for key, leaf in tree.items()}
        return new_tensordict(entries, size, names)

    return build(packed["batch"]), info
