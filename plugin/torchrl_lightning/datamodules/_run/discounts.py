"""The discount of a run: if the learner has a discount, the buffer is built with the same one."""

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
from torchrl_lightning._core.torchrl_compat import attached_entities
from torchrl_lightning._core.validators import fraction

B = TypeVar("B")


def learner_discounts(learner: Any) -> dict[str, float]:
    """Return the discounts of a learner by name; an empty dict if only the buffer has a discount.

    Raises:
        ValueError: A discount is not between 0 and 1.

    Examples:
        >>> from torchrl_lightning import DQNModule, PPOModule
        >>> learner_discounts(DQNModule(gamma=0.9)), learner_discounts(PPOModule())
        ({'gamma': 0.9}, {})
    """
    api = LearnerApi.of(learner)
    discounts = {"gamma": api.gamma, "gamma_intrinsic": api.gamma_intrinsic}
    return {
        name: float(fraction(value, f"{type(learner).__name__}.{name}"))
        for name, value in discounts.items()
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def build_buffer(make: Callable[..., B], learner: Any, *, trial: bool = False, **sizes: int) -> B:
    """Call a buffer factory with sizes and, if it accepts them, the learner's discounts.

    Args:
        make: the factory. Arguments that a partial or LightningCLI binds are settings of the buffer.
        learner: the LightningModule, or None. Without a learner's discount, the factory's discount is used.
        trial: build a temporary buffer from a copy of the factory, because a storage or sampler that a partial binds
            serves only one buffer.
        sizes: further arguments of the DataModule.

    Raises:
        ValueError: The buffer's discount differs from the learner's.
    """
    # The signature of a partial with a wrong argument cannot be read, so read the signature of its function.
    function, bound = (make.func, make.keywords) if isinstance(make, partial) else (make, dict[str, Any]())
    parameters, arguments = {*inspect.signature(function).parameters, *bound}, dict[str, Any](sizes)
    for name, discount in learner_discounts(learner).items():
        if bound.get(name) is not None:
            _check_equal(name, fraction(bound[name], name), discount, learner)
        if name in parameters:
            arguments[name] = discount
    buffer = (copy.deepcopy(make) if trial else make)(**arguments)
    check_discount(buffer, learner)
    return buffer


def check_discount(source: Any, learner: Any) -> None:
    """Raise a ValueError if a buffer, or a buffer of a source, has another discount than the learner."""
    discount = learner_discounts(learner).get("gamma")
    if discount is None:
        return
    buffers = SourceApi.of(source).buffers
    for buffer in [source] if buffers is None else buffers:
        for buffer_discount in _discounts_in_use(buffer):
            _check_equal("gamma", buffer_discount, discount, learner)


def discount_of(learner: Any, buffer: Any) -> float:
    """Return the discount of a run: the learner's, else the buffer's."""
    discount: float = learner_discounts(learner).get("gamma", buffer.gamma)
    return discount


def _discounts_in_use(buffer: Any) -> list[float]:
    """Return the discounts that affect batches; batches of single steps do not depend on a discount."""
    storage = getattr(buffer, "storage", None)
    parts = [buffer] if getattr(buffer, "n_steps", 2) > 1 else []
    parts += [part for part in (attached_entities(storage) if storage is not None else ()) if part is not buffer]
    return [part.gamma for part in parts if getattr(part, "gamma", None) is not None]


def _check_equal(name: str, buffer_discount: float, discount: float | None, learner: Any) -> None:
    if discount is not None and not math.isclose(buffer_discount, discount, rel_tol=1e-6):
        kind = type(learner).__name__
        raise ValueError(
            f"{name}={buffer_discount:g} of the buffer differs from {name}={discount:g} of {kind}, which determines "
            f"the discount. Leave the buffer's {name} out: a buffer factory with a parameter {name} receives the "
            f"learner's. For the buffer's discount, set {kind}({name}={buffer_discount:g}) or "
            f"model.{name}={buffer_discount:g}."
        )
