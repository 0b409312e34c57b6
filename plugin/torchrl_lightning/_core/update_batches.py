"""The batches of several updates in one Lightning step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class UpdateBatches:
    """The batches of all updates in one Lightning step.

    A module reads them with :func:`updates_of`. The object is not iterable: Lightning would search an iterable for the
    batch size of a logged metric, and thereby draw batches.

    Args:
        batches: The batches; the work between two batches is done when the second batch is requested.

    Examples:
        >>> UpdateBatches(iter([]))["observation"]
        Traceback (most recent call last):
        TypeError: this step holds several updates; learn from each: for batch in updates_of(batch): ...
    """

    def __init__(self, batches: Iterator[TensorDictBase]) -> None:
        self.batches = batches

    def watch(self, callback: Callable[[TensorDictBase], None]) -> None:
        """Call a function with each batch when it is drawn."""
        self.batches = _with_callback(self.batches, callback)

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError("this step holds several updates; learn from each: for batch in updates_of(batch): ...")


def _with_callback(
    batches: Iterator[TensorDictBase], callback: Callable[[TensorDictBase], None]
) -> Iterator[TensorDictBase]:
    for batch in batches:
        callback(batch)
        yield batch


def updates_of(batch: TensorDictBase | UpdateBatches) -> Iterator[TensorDictBase]:
    """Iterate over the batches of one Lightning step, one for each update.

    With ``ReplayDataModule(updates_per_step=1)`` this is the batch itself. Otherwise, a request for the next batch
    first steps the environments and then samples the batch. At that time the update with the previous batch is
    complete, and its loss has written the priorities.

    Args:
        batch: The argument of ``training_step``.

    Examples:
        >>> from tensordict import TensorDict
        >>> one = TensorDict({"reward": [1.0]}, [1])
        >>> len(list(updates_of(one))), len(list(updates_of(UpdateBatches(iter([one, one])))))
        (1, 2)
    """
    return batch.batches if isinstance(batch, UpdateBatches) else iter((batch,))
