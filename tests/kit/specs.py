"""Specs of environments for building learners."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded

from torchrl_lightning import EnvironmentSpecs


def specs_of(action: Any, **observation: Any) -> EnvironmentSpecs:
    """Build the specs of two environments. The default observation is a vector of four numbers."""
    return EnvironmentSpecs(Composite(observation or {"observation": Unbounded(4)}), action, 2)


TWO_CHOICES = specs_of(Categorical(2))
DISCRETE = specs_of(Categorical(3))
ONE_HOT = specs_of(OneHot(3))
BOX = specs_of(Bounded(torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])))
