"""Number and size of the mini-batches of an epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.entries import Tree, path_of
from torchrl_lightning.ranges import integer
from torchrl_lightning.rollout.minibatches import MinibatchSampler


def split_epoch(
    units: int, num_mini_batch: int | None, mini_batch_size: int | None, drop_last: bool, *, whole: bool
) -> tuple[int | None, int | None]:
    """Decide ``(number, size)`` of an epoch's mini-batches; ``size=None`` means as even as possible.

    Args:
        units: steps, or environments when ``whole``.
        num_mini_batch: wanted number.
        mini_batch_size: wanted size in units.
        drop_last: drop the remainder.
        whole: whether units are environments; then their number must divide evenly.

    Raises:
        ValueError: the numbers are not positive, ask for more than there is, or do not divide where they must.

    Example:
        >>> split_epoch(10, 3, None, True, whole=False)
        (3, 3)
    """
    unit = "environments" if whole else "steps"
    for name, value in (("num_mini_batch", num_mini_batch), ("mini_batch_size", mini_batch_size)):
        if value is not None:
            integer(value, name)
    if num_mini_batch is None and mini_batch_size is None:
        raise ValueError("Give num_mini_batch or mini_batch_size (or an algorithm that has them).")
    if num_mini_batch is not None and mini_batch_size is not None:
        if num_mini_batch * mini_batch_size > units:
            raise ValueError(
                f"num_mini_batch={num_mini_batch} times mini_batch_size={mini_batch_size} is "
                f"{num_mini_batch * mini_batch_size}, but only {units} {unit} are stored."
            )
        return num_mini_batch, mini_batch_size
    if num_mini_batch is not None:
        if num_mini_batch > units:
            raise ValueError(f"num_mini_batch={num_mini_batch} is more than the {units} stored {unit}.")
        if whole and units % num_mini_batch:
            raise ValueError(
                f"num_mini_batch={num_mini_batch} does not divide the {units} environments; a recurrent mini-batch "
                f"holds whole environments. Use one of {[n for n in range(1, units + 1) if units % n == 0]}."
            )
        return num_mini_batch, units // num_mini_batch if drop_last else None
    if mini_batch_size is not None and mini_batch_size > units:
        raise ValueError(f"mini_batch_size={mini_batch_size} is more than the {units} stored {unit}.")
    return None, mini_batch_size


def index_batches(
    sampler: MinibatchSampler,
    units: int,
    number: int | None,
    size: int | None,
    *,
    shuffle: bool,
    drop_last: bool,
    device: object,
) -> Iterator[Tensor]:
    """Yield the index batches of one epoch as :func:`split_epoch` decided."""
    if size is None:
        yield from sampler.order(units, shuffle, str(device)).tensor_split(number or 1)
    else:
        yield from sampler.epoch(
            units, size, shuffle=shuffle, drop_last=drop_last, num_batches=number, device=str(device)
        )


def pruned(
    rollout: TensorDictBase, keys: Collection[NestedKey] | None, hidden: Collection[NestedKey], *, flat: bool
) -> Tree:
    """Return the entries of a mini-batch as a nested dict.

    Args:
        rollout: ``[T, N]``.
        keys: entries to keep; ``None`` keeps all but ``hidden``.
        hidden: entries dropped by default.
        flat: as flat ``[T * N, ...]`` views.

    Raises:
        KeyError: one of ``keys`` is not there.
    """
    if keys is not None:
        absent = [key for key in keys if key not in rollout.keys(include_nested=True)]
        if absent:
            have = sorted(map(str, rollout.keys(include_nested=True, leaves_only=True)))
            raise KeyError(f"batch_keys {absent} are not in the rollout; it has {have}.")
        rollout = rollout.select(*keys)
        hidden = ()
    skip = {path_of(key) for key in hidden}

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
