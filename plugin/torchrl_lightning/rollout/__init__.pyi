"""The exported names and the modules that define them. Written by ``tests/wiring.py``."""

from torchrl_lightning.rollout.advantages import DiscountedReturns as DiscountedReturns
from torchrl_lightning.rollout.advantages import GeneralizedAdvantages as GeneralizedAdvantages
from torchrl_lightning.rollout.advantages import VTraceAdvantages as VTraceAdvantages
from torchrl_lightning.rollout.buffer import RolloutBuffer as RolloutBuffer
from torchrl_lightning.rollout.estimates import GAE as GAE
from torchrl_lightning.rollout.estimates import MonteCarlo as MonteCarlo
from torchrl_lightning.rollout.estimates import VTrace as VTrace
from torchrl_lightning.rollout.gae import GAEBuffer as GAEBuffer
from torchrl_lightning.rollout.intrinsic import IntrinsicReturns as IntrinsicReturns
from torchrl_lightning.rollout.minibatches import MinibatchSampler as MinibatchSampler
from torchrl_lightning.rollout.storage import RolloutStorage as RolloutStorage
from torchrl_lightning.rollout.vanilla import VanillaOnPolicyBuffer as VanillaOnPolicyBuffer
from torchrl_lightning.rollout.vtrace import VTraceBuffer as VTraceBuffer
from torchrl_lightning.rollout.writer import RolloutWriter as RolloutWriter
