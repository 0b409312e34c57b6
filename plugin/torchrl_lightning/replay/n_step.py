"""N-step returns in a buffer over several rings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs import Compose, MultiStepTransform, Transform

from torchrl_lightning._compat import restore_waiting, waiting_steps

Inverse = Callable[[TensorDictBase], TensorDictBase | None]


def multi_steps(transform: Transform) -> list[MultiStepTransform]:
    """List the n-step transforms in a chain.

    Example:
        >>> len(multi_steps(Compose(MultiStepTransform(3, 0.9))))
        1
    """
    if isinstance(transform, Compose):
        return [found for part in transform for found in multi_steps(part)]
    return [transform] if isinstance(transform, MultiStepTransform) else []


@contextmanager
def unharmed(transforms: list[MultiStepTransform]) -> Iterator[None]:
    """Forget the steps of a write that fails."""
    before = [waiting_steps(transform) for transform in transforms]
    try:
        yield
    except BaseException:
        for transform, waiting in zip(transforms, before, strict=True):
            restore_waiting(transform, waiting)
        raise


def fold(inverse: Inverse, transforms: list[MultiStepTransform], data: TensorDictBase) -> TensorDictBase | None:
    """Fold a rollout ``[N, T]`` into n-step transitions; None while too few steps came.

    ``("next", "terminated")`` becomes that of the last step that was folded in, whose observation is the next one: what
    bootstraps from a terminal state is wrong. ``done`` and ``truncated`` still say where the episode ends.

    Args:
        inverse: all transforms.
        transforms: the n-step ones among them.
        data: the rollout; left as it is.

    Raises:
        ValueError: it has another number of environments than the steps that wait for their successors.
    """
    for transform in transforms:
        waiting = waiting_steps(transform)
        if waiting is not None and waiting.shape[0] != data.shape[0]:
            raise ValueError(
                f"Got steps of {data.shape[0]} environments, but those of {waiting.shape[0]} wait for their n-step "
                "successors; write n-step returns for all environments at once, without env_ids."
            )
        transform.done_keys = [key for key in transform.done_keys if _name(key) != "terminated"]
    data = data.copy()
    data.names = None
    folded = inverse(data)
    if folded is None:
        return None
    folded.names = [None, "time"]
    return folded


def nothing() -> torch.Tensor:
    """Return an index of no cells."""
    return torch.zeros(0, dtype=torch.int64)


def _name(key: NestedKey) -> str:
    return key if isinstance(key, str) else str(key[-1])
