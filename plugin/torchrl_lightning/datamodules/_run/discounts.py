"""The discount of a run: the learner owns it if it has one, and the buffer is built with it."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any, TypeVar

from torch import Tensor

from torchrl_lightning._core.protocols import LearnerApi, SourceApi
from torchrl_lightning._core.torchrl_compat import attached
from torchrl_lightning._core.validators import fraction

B = TypeVar("B")


def learner_discounts(learner: Any) -> dict[str, float]:
    """Return the discounts of a learner by name; an empty dict if the learner leaves them to its buffer.

    Raises:
        ValueError: A discount is not between 0 and 1.

    Examples:
        >>> from torchrl_lightning import DQNModule, PPOModule
        >>> learner_discounts(DQNModule(gamma=0.9)), learner_discounts(PPOModule())
        ({'gamma': 0.9}, {})
    """
    abilities = LearnerApi.of(learner)
    found = {"gamma": abilities.gamma, "gamma_intrinsic": abilities.gamma_intrinsic}
    return {
        name: float(fraction(value, f"{type(learner).__name__}.{name}"))
        for name, value in found.items()
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def build_buffer(make: Callable[..., B], learner: Any, *, trial: bool = False, **sizes: int) -> B:
    """Call a buffer factory with sizes and, if it accepts them, the learner's discounts.

    Args:
        make: the factory; arguments bound by a partial or by LightningCLI are the buffer's own.
        learner: the LightningModule; if it is None or has no discounts, the factory sets them.
        trial: the buffer is temporary: build it from a copy, because storage and sampler of a partial serve one buffer.
        sizes: further arguments of the DataModule.

    Raises:
        ValueError: The buffer's own discount differs from the learner's.
    """
    # A partial with a wrong argument has no readable signature, so the signature of its function is read.
    called, bound = (make.func, make.keywords) if isinstance(make, partial) else (make, dict[str, Any]())
    taken, handed = {*inspect.signature(called).parameters, *bound}, dict[str, Any](sizes)
    for name, discount in learner_discounts(learner).items():
        if bound.get(name) is not None:
            _check(name, fraction(bound[name], name), discount, learner)
        if name in taken:
            handed[name] = discount
    buffer = (copy.deepcopy(make) if trial else make)(**handed)
    check_discount(buffer, learner)
    return buffer


def check_discount(source: Any, learner: Any) -> None:
    """Raise a ValueError if a buffer, or a buffer of a source, has another discount than the learner."""
    discount = learner_discounts(learner).get("gamma")
    if discount is None:
        return
    buffers = SourceApi.of(source).buffers
    for buffer in [source] if buffers is None else buffers:
        for own in _applied(buffer):
            _check("gamma", own, discount, learner)


def discount_of(learner: Any, buffer: Any) -> float:
    """Return the discount of a run: the learner's, else the buffer's."""
    discount: float = learner_discounts(learner).get("gamma", buffer.gamma)
    return discount


def _applied(buffer: Any) -> list[float]:
    """Return the discounts that affect batches; single steps do not depend on one."""
    storage = getattr(buffer, "storage", None)
    parts = [buffer] if getattr(buffer, "n_steps", 2) > 1 else []
    parts += [part for part in (attached(storage) if storage is not None else ()) if part is not buffer]
    return [part.gamma for part in parts if getattr(part, "gamma", None) is not None]


def _check(name: str, own: float, discount: float | None, learner: Any) -> None:
    if discount is not None and not math.isclose(own, discount, rel_tol=1e-6):
        kind = type(learner).__name__
        raise ValueError(
            f"{name}={own:g} of the buffer differs from {name}={discount:g} of {kind}, which owns the discount. Leave "
            f"the buffer's out, and say {kind}({name}={own:g}) or model.{name}={own:g} if that is meant; a callable "
            f"that builds the buffer is handed the learner's if it takes {name}."
        )
