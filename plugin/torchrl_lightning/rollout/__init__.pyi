"""The exported names. This list is the only one: ``lazy_exports`` and type checkers read it."""

from .advantages import DiscountedReturns as DiscountedReturns
from .advantages import GeneralizedAdvantages as GeneralizedAdvantages
from .advantages import VTraceAdvantages as VTraceAdvantages
from .estimates import GAE as GAE
from .estimates import MonteCarlo as MonteCarlo
from .estimates import VTrace as VTrace
from .gae import GAEBuffer as GAEBuffer
from .intrinsic import IntrinsicReturns as IntrinsicReturns
from .minibatches import MinibatchSampler as MinibatchSampler
from .rollout_buffer import RolloutBuffer as RolloutBuffer
from .rollout_storage import RolloutStorage as RolloutStorage
from .rollout_writer import RolloutWriter as RolloutWriter
from .vanilla import VanillaOnPolicyBuffer as VanillaOnPolicyBuffer
from .vtrace import VTraceBuffer as VTraceBuffer
