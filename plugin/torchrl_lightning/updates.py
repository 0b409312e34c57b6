"""Several updates in one step of Lightning's, each on a batch that is drawn when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tensordict import TensorDictBase


class UpdateBatches:
    """The batches of the updates that make one step of Lightning's.

    What a module reads them with is :func:`updates_of`. It is no iterable: Lightning looks into an iterable batch for
    the size of a logged metric, which would draw.

    Args:
        batches: The batches; what happens between two of them happens when the second is asked for.

    Examples:
        >>> UpdateBatches(iter([]))["observation"]
        Traceback (most recent call last):
        TypeError: this step holds several updates; learn from each: for batch in updates_of(batch): ...
    """

    def __init__(self, batches: Iterator[TensorDictBase]) -> None:
        self.batches = batches

    def watch(self, note: Callable[[TensorDictBase], None]) -> None:
        """Have each batch noted when it is drawn."""
        self.batches = _noted(self.batches, note)

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError("this step holds several updates; learn from each: for batch in updates_of(batch): ...")


def _noted(batches: Iterator[TensorDictBase], note: Callable[[TensorDictBase], None]) -> Iterator[TensorDictBase]:
    for batch in batches:
        note(batch)
        yield batch


def updates_of(batch: TensorDictBase | UpdateBatches) -> Iterator[TensorDictBase]:
    """Iterate over the batches of one step of Lightning's, one for each update.

    With ``ReplayDataModule(updates_per_step=1)`` that is the batch itself. Otherwise environments are stepped, and the
    next batch is drawn, when it is asked for: the loss of a batch writes priorities before, and the update is made.

    Args:
        batch: What ``training_step`` was given.

    Examples:
        >>> from tensordict import TensorDict
        >>> one = TensorDict({"reward": [1.0]}, [1])
        >>> len(list(updates_of(one))), len(list(updates_of(UpdateBatches(iter([one, one])))))
        (1, 2)
    """
    return batch.batches if isinstance(batch, UpdateBatches) else iter((batch,))
