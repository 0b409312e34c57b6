"""Pure functions on time-major tensors: returns, advantages, normalisation. Time is dimension 0."""

from __future__ import annotations

from torchrl_lightning.estimators.gae import gae
from torchrl_lightning.estimators.intrinsic import IntrinsicRewardNormalizer
from torchrl_lightning.estimators.returns import discount_cumsum, discounted_returns
from torchrl_lightning.estimators.standardize import standardize
from torchrl_lightning.estimators.vtrace import vtrace

__all__ = ["IntrinsicRewardNormalizer", "discount_cumsum", "discounted_returns", "gae", "standardize", "vtrace"]
