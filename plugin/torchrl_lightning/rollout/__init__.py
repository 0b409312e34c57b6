"""On-policy experience: one rollout, its advantages, and its mini-batches."""

from __future__ import annotations

from torchrl_lightning.rollout.advantages import DiscountedReturns, GeneralizedAdvantages, VTraceAdvantages
from torchrl_lightning.rollout.gae import GAEBuffer
from torchrl_lightning.rollout.intrinsic import IntrinsicReturns
from torchrl_lightning.rollout.minibatches import MinibatchSampler
from torchrl_lightning.rollout.storage import RolloutStorage
from torchrl_lightning.rollout.vanilla import VanillaOnPolicyBuffer
from torchrl_lightning.rollout.vtrace import VTraceBuffer
from torchrl_lightning.rollout.writer import RolloutWriter

__all__ = [
    "DiscountedReturns",
    "GAEBuffer",
    "GeneralizedAdvantages",
    "IntrinsicReturns",
    "MinibatchSampler",
    "RolloutStorage",
    "RolloutWriter",
    "VTraceAdvantages",
    "VTraceBuffer",
    "VanillaOnPolicyBuffer",
]
