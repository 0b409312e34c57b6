"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.estimators.gae import gae as gae
from torchrl_lightning.estimators.intrinsic import IntrinsicRewardNormalizer as IntrinsicRewardNormalizer
from torchrl_lightning.estimators.returns import discount_cumsum as discount_cumsum
from torchrl_lightning.estimators.returns import discounted_returns as discounted_returns
from torchrl_lightning.estimators.standardize import standardize as standardize
from torchrl_lightning.estimators.vtrace import vtrace as vtrace
