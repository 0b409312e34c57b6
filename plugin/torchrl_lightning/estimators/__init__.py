"""Pure functions on time-major tensors: returns, advantages, normalisation. Time is dimension 0."""

from torchrl_lightning.estimators.gae import gae as gae
from torchrl_lightning.estimators.intrinsic import IntrinsicRewardNormalizer as IntrinsicRewardNormalizer
from torchrl_lightning.estimators.returns import discount_cumsum as discount_cumsum
from torchrl_lightning.estimators.returns import discounted_returns as discounted_returns
from torchrl_lightning.estimators.standardize import standardize as standardize
from torchrl_lightning.estimators.vtrace import vtrace as vtrace
