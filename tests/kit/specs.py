"""Specs of environments, as learners are built from them."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded

from torchrl_lightning import EnvironmentSpecs


def specs_of(action: Any, **observation: Any) -> EnvironmentSpecs:
    """Two environments; four numbers are observed, if nothing else is said."""
    return EnvironmentSpecs(Composite(observation or {"observation": Unbounded(4)}), action, 2)


TWO_CHOICES = specs_of(Categorical(2))
DISCRETE = specs_of(Categorical(3))
ONE_HOT = specs_of(OneHot(3))
BOX = specs_of(Bounded(torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])))
