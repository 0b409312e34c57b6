"""Split a rollout into mini-batches: batch sizes, selected entries, and the sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._compat import SamplerBase, new_tensordict
from torchrl_lightning.entries import Tree, next_key
from torchrl_lightning.keys import REPLAYED
from torchrl_lightning.ranges import Checked, boolean, integer, one_of, optional
from torchrl_lightning.state import GENERATOR, Attribute, Stated, flag, tensor, whole

NAMES = (None, "time")


def split_epoch(
    units: int, num_mini_batch: int | None, mini_batch_size: int | None, drop_last: bool, *, whole: bool
) -> tuple[int | None, int | None]:
    """Return ``(number, size)`` of an epoch's mini-batches; ``size=None`` makes their sizes as even as possible.

    Raises:
        ValueError: a number is not positive, exceeds the stored data, or does not divide the number of environments.
    """
    unit = "environments" if whole else "steps"
    for name, value in (("num_mini_batch", num_mini_batch), ("mini_batch_size", mini_batch_size)):
        if value is not None and integer(value, name) > units:
            raise ValueError(f"{name}={value} is more than the {units} stored {unit}.")
    if num_mini_batch is None and mini_batch_size is None:
        raise ValueError("Give num_mini_batch or mini_batch_size (or an algorithm that has them).")
    if num_mini_batch is not None and mini_batch_size is not None:
        if num_mini_batch * mini_batch_size > units:
            raise ValueError(
                f"num_mini_batch={num_mini_batch} times mini_batch_size={mini_batch_size} is "
                f"{num_mini_batch * mini_batch_size}, but only {units} {unit} are stored."
            )
        return num_mini_batch, mini_batch_size
    if num_mini_batch is None:
        return None, mini_batch_size
    if whole and units % num_mini_batch:
        raise ValueError(
            f"num_mini_batch={num_mini_batch} does not divide the {units} environments; a recurrent mini-batch "
            f"holds whole environments. Use one of {[n for n in range(1, units + 1) if units % n == 0]}."
        )
    return num_mini_batch, units // num_mini_batch if drop_last else None


def pruned(
    rollout: TensorDictBase, keys: Collection[NestedKey] | None, hidden: Collection[NestedKey], *, flat: bool
) -> Tree:
    """Return the entries ``keys``, or all but ``hidden``, as a nested dict ``[T, N]``; ``flat`` makes it ``[T * N]``.

    Raises:
        KeyError: the rollout lacks one of ``keys``.
    """
    if keys is not None:
        absent = [key for key in keys if key not in rollout.keys(include_nested=True)]
        if absent:
            have = sorted(map(str, rollout.keys(include_nested=True, leaves_only=True)))
            raise KeyError(f"batch_keys {absent} are not in the rollout; it has {have}.")
        # A loss needs this mark to distinguish replayed steps from the policy's steps.
        marks = [REPLAYED] if rollout.get(REPLAYED, None) is not None else []
        rollout = rollout.select(*keys, *marks)
        hidden = ()
    skip = {(key,) if isinstance(key, str) else key for key in hidden}

    def walk(node: TensorDictBase, prefix: tuple[str, ...]) -> Tree:
        tree: Tree = {}
        for key, value in node.items():
            here = (*prefix, key)
            if here not in skip:
                if isinstance(value, TensorDictBase):
                    tree[key] = walk(value, here)
                else:
                    tree[key] = value.flatten(0, 1) if flat else value
        return tree

    return walk(rollout, ())


def sequences(
    rollout: TensorDictBase, envs: Tensor | None = None, recurrent_keys: Collection[NestedKey] = ("recurrent_state",)
) -> TensorDict:
    """Return the environments ``envs`` of ``[T, N]`` as sequences ``[B, T]`` named ``(None, "time")``.

    The recurrent state of the first step is expanded over ``T``, with zeros at episode starts: TorchRL's ``GRUModule``
    and ``LSTMModule`` split a row at ``is_init`` and read the state at each split.

    Args:
        rollout: time-major ``[T, N]``.
        envs: environment indices ``[B]``; ``None`` selects all.
        recurrent_keys: root keys of recurrent states.
    """
    envs = torch.arange(rollout.shape[1], device=device_in(rollout)) if envs is None else envs
    batch = torch.Size([envs.shape[0], rollout.shape[0]])

    present = [key for key in recurrent_keys if key in rollout.keys(include_nested=True)]
    kept = rollout.exclude(*present, *(next_key(key) for key in present)) if present else rollout
    out = viewed(kept, lambda value: value.transpose(0, 1).index_select(0, envs), batch, NAMES)
    start = out.get("is_init", None)

    def first(value: Tensor) -> Tensor:
        state = value[0].index_select(0, envs).unsqueeze(1).expand(batch[0], batch[1], *value.shape[2:])
        if start is None or not bool(start.any()):
            return state
        return state.masked_fill(start.reshape(*batch, *[1] * (value.ndim - 2)), 0)

    for key in present:
        value = rollout.get(key)
        out.set(key, first(value) if isinstance(value, Tensor) else viewed(value, first, batch, NAMES))
    return out


def viewed(
    data: TensorDictBase, view: Callable[[Any], Any], batch: torch.Size, names: Sequence[str | None] | None = None
) -> TensorDict:
    """Apply a view to every leaf; TensorDict's methods take four times as long, and every write needs this."""
    entries = {
        key: viewed(value, view, batch, names)
        if isinstance(value, TensorDictBase) and not is_non_tensor(value)
        else view(value)
        for key, value in data.items()
    }
    return new_tensordict(entries, batch, names)


def device_in(data: TensorDictBase) -> torch.device | None:
    """Return the device of the first leaf, or None without leaves."""
    for value in data.values(include_nested=True, leaves_only=True):
        return torch.device(value.device)
    return None


UNITS = ("steps", "environments")


class MinibatchSampler(Stated, SamplerBase):
    """Visit every sample of a rollout exactly once per epoch, shuffled or in order.

    With ``by="steps"`` a batch is ``[B]`` steps. With ``by="environments"`` a batch is ``[B, T]`` whole environments
    for recurrent policies, and the batch size counts environments. A write starts a new epoch.

    Args:
        drop_last: drop the last batch of an epoch if it is smaller than the batch size.
        shuffle: draw a new order for each epoch; False visits the steps in time-major order.
        by: ``"steps"`` or ``"environments"``.
        generator: random generator; ``None`` seeds a new one from torch's global generator.

    Raises:
        ValueError: ``by`` is unknown.

    Examples:
        >>> sampler = MinibatchSampler(shuffle=False)
        >>> [batch.tolist() for batch in sampler.epoch(5, 2)]
        [[0, 1], [2, 3], [4]]
    """

    OWNER, VERSION = "mini-batch sampler", 1
    STATE = {
        "len_storage": Attribute(whole()),
        "remaining": Attribute(optional(tensor(torch.int64, None, low=0, anywhere=True))),
        "drop_last": Attribute(flag),
        "shuffle": Attribute(flag),
        "by": Attribute(),
        "ran_out": Attribute(flag),
        "generator": GENERATOR,
    }

    drop_last = Checked(boolean)
    shuffle = Checked(boolean)

    def __init__(
        self,
        drop_last: bool = False,
        shuffle: bool = True,
        *,
        by: str = "steps",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(drop_last=drop_last, shuffle=shuffle)
        self.by = one_of(by, "by", UNITS)
        self._own_rng = generator

    def order(self, count: int, shuffle: bool | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the indices ``0 .. count - 1`` of one epoch, permuted if ``shuffle`` is set."""
        if not (self.shuffle if shuffle is None else shuffle):
            return torch.arange(count, device=device)
        rng = self.generator
        return torch.randperm(count, generator=rng, device=rng.device).to(device)

    def epoch(
        self,
        count: int,
        batch_size: int | None,
        *,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        num_batches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Iterator[Tensor]:
        """Yield the index batches of one epoch over ``count`` units.

        Args:
            count: number of units (steps or environments).
            batch_size: units per batch; None splits the epoch into ``num_batches`` of nearly equal size.
            shuffle: overrides the sampler's option.
            drop_last: overrides the sampler's option.
            num_batches: maximum number of batches.
            device: device of the indices.

        Raises:
            ValueError: the batch size is not positive.
        """
        if batch_size is None:
            yield from self.order(count, shuffle, device).tensor_split(num_batches or 1)
            return
        batch_size = integer(batch_size, "batch_size")
        drop = self.drop_last if drop_last is None else drop_last
        for number, batch in enumerate(self.order(count, shuffle, device).split(batch_size)):
            if (drop and batch.shape[0] < batch_size) or (num_batches is not None and number >= num_batches):
                return
            yield batch

    def _check_together(self, values: Mapping[str, Any]) -> None:
        remaining, count = values["remaining"], values["len_storage"]
        if remaining is not None:
            tensor(torch.int64, None, high=count - 1, anywhere=True)(remaining, "'remaining'")

    def sample(self, storage: Storage, batch_size: int) -> tuple[tuple[Tensor, ...] | Tensor, dict[str, Any]]:
        """Return the coordinates ``(t, n)`` of the next batch of this epoch, in the format of TorchRL's buffers.

        Raises:
            RuntimeError: the storage is empty.
            ValueError: an epoch has no full batch and ``drop_last`` is set, or the batch size is not positive.
        """
        batch_size = integer(batch_size, "batch_size")
        if not len(storage):
            raise RuntimeError("The storage is empty: there is nothing to sample; extend the buffer first.")
        whole = self.by == "environments"
        if whole and storage.ndim != 2:
            raise ValueError(f'by="environments" needs a [T, N] storage, this one has ndim={storage.ndim}.')
        steps, count = storage.shape if whole else (1, len(storage))
        if self.drop_last and batch_size > count:
            raise ValueError(f"A batch of {batch_size} does not fit into {count} {self.by}, and drop_last is set.")
        device = getattr(storage, "device", "cpu")
        if self.remaining is None or self.len_storage != count:
            self.remaining = self.order(count, device=device)
            self.len_storage = count
        index, rest = self.remaining[:batch_size], self.remaining[batch_size:]
        left = rest.shape[0] // batch_size if self.drop_last else -(rest.shape[0] // -batch_size)
        self.ran_out = left == 0
        self.remaining = rest if left else None
        self.remaining_batches = left
        if storage.ndim == 1:
            return index, {}
        if not whole:
            return torch.unravel_index(index, storage.shape), {}
        time = torch.arange(steps, device=device).expand(index.shape[0], -1)
        return (time, index.unsqueeze(1).expand_as(time)), {}

    def extend(self, index: Any) -> None:
        """Start a new epoch after a write."""
        self.clear()

    add = extend

    def __repr__(self) -> str:
        return f"{type(self).__name__}(by={self.by!r}, shuffle={self.shuffle}, drop_last={self.drop_last})"
