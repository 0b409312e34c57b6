"""Checks of saved states, made before anything is changed: of rings, storages, samplers, transforms and batches."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.checks import check_tree
from torchrl_lightning.entries import Tree, tree_of
from torchrl_lightning.ranges import optional
from torchrl_lightning.state import (
    Check,
    Here,
    check_state,
    described,
    generator,
    mapping,
    sequence,
    tensor,
    whole,
    wrong,
)
from torchrl_lightning.stated import Entry, Stated, saved


class Samplers(Entry):
    """Keep the state of a sampler, ours or one of TorchRL's, over the ``storage`` of the buffer that has it."""

    def save(self, part: Any, attribute: str, copy: bool) -> dict[str, Any]:
        """Return the state of the sampler."""
        return dict(_stated(part, attribute).state_dict(copy=copy))

    def check(self, part: Any, attribute: str) -> Check:
        """Let ours read its state; compare that of TorchRL's with its own, and let a copy of it load it."""
        sampler = _stated(part, attribute)
        return lambda value, name, here: sampler.read_state(mapping(value, name))

    def put(self, part: Any, attribute: str, value: Any) -> None:
        """Let the sampler load its state."""
        _stated(part, attribute).put_state(value)


def _stated(part: Any, attribute: str) -> Any:
    sampler = getattr(part, attribute)
    return sampler if isinstance(sampler, Stated) else _Foreign(sampler, part.storage.max_size)


class _Foreign:
    """A sampler of TorchRL's over so many cells, with the verbs of ours."""

    def __init__(self, sampler: Any, cells: int) -> None:
        self._sampler, self._cells = sampler, cells

    def state_dict(self, *, copy: bool) -> Any:
        return saved(self._sampler.state_dict(), copy)

    def read_state(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = type(self._sampler).__name__
        _check_like(value, self._sampler.state_dict(), self._cells, kind)
        try:
            deepcopy(self._sampler).load_state_dict(deepcopy(value))
        except Exception as error:
            raise ValueError(f"{kind} does not take its state: {error}") from error
        return value

    def put_state(self, value: Any) -> None:
        self._sampler.load_state_dict(value)


def _check_like(state: Any, own: Any, cells: int, owner: str) -> None:
    if isinstance(own, Mapping):
        if not isinstance(state, Mapping) or (set(state) != set(own) and own):
            found = sorted(map(str, state)) if isinstance(state, Mapping) else described(state)
            raise ValueError(f"The {owner} state is foreign: it is {found}, expected {sorted(map(str, own))}.")
        for key, value in own.items():
            _check_like(state[key], value, cells, f"{owner}'s {key}")
    elif isinstance(own, Tensor | None) and isinstance(state, Tensor | None):
        if state is not None:  # cells, of which there may be any number, or flags of them
            unset = torch.bool if state.dtype == torch.bool else torch.int64
            tensor(unset if own is None else own.dtype, None, anywhere=True)(state, owner)
            if state.dtype == torch.int64:
                tensor(torch.int64, None, low=0, high=cells - 1, anywhere=True)(state, owner)
    elif isinstance(own, int) and not isinstance(own, bool):
        whole(min(own, 0))(state, owner)
    elif type(state) is not type(own):
        raise wrong(state, owner, described(own))


def device_and_state(value: Any, name: str, here: Here) -> Mapping[str, Any]:
    """Expect the state of a buffer's generator, and its device."""
    mapping(value, name)
    device = value.get("device")
    if not isinstance(device, str):
        raise wrong(device, "the generator's 'device'", "the name of a device")
    generator(device)(value.get("state"), "the generator's 'state'")
    return value


def pack_batch(batch: TensorDictBase, info: Mapping[Any, Any]) -> dict[str, Any]:
    """Describe a batch that was drawn ahead, and the entries that come with it, as a state."""
    return {
        "batch": tree_of(batch),
        "batch_size": list(batch.batch_size),
        "names": list(batch.names) if any(batch.names) else None,
        "info": [[list(key) if isinstance(key, tuple) else key, value] for key, value in info.items()],
    }


def unpack_batches(value: Any, name: str, here: Here) -> list[tuple[TensorDictBase, dict[Any, Any]]]:
    """Expect batches that were packed, and build them."""
    return [unpack_batch(packed) for packed in sequence(value, name)]


def unpack_batch(packed: Any) -> tuple[TensorDictBase, dict[Any, Any]]:
    """Build the batch that :func:`pack_batch` described, of copies."""
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
        if key == () or any(not isinstance(part, str) for part in (key if isinstance(key, tuple) else (key,))):
            raise wrong(key, "a key of a prefetched batch", "a name")
        if not isinstance(value, Tensor):
            raise wrong(value, f"{key!r} of a prefetched batch", "a tensor")
        info[key] = value.clone()

    def build(tree: Tree) -> TensorDictBase:
        entries = {key: build(leaf) if isinstance(leaf, dict) else leaf.clone() for key, leaf in tree.items()}
        return new_tensordict(entries, size, names)

    return build(packed["batch"]), info
