"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .gae import gae as gae
from .intrinsic import IntrinsicRewardNormalizer as IntrinsicRewardNormalizer
from .returns import discount_cumsum as discount_cumsum
from .returns import discounted_returns as discounted_returns
from .standardize import standardize as standardize
from .vtrace import vtrace as vtrace
