"""The exported names. This list is the only one: ``_lazy`` and type checkers read it."""

from .advantages import DiscountedReturns as DiscountedReturns
from .advantages import GeneralizedAdvantages as GeneralizedAdvantages
from .advantages import VTraceAdvantages as VTraceAdvantages
from .buffer import RolloutBuffer as RolloutBuffer
from .estimates import GAE as GAE
from .estimates import MonteCarlo as MonteCarlo
from .estimates import VTrace as VTrace
from .gae import GAEBuffer as GAEBuffer
from .intrinsic import IntrinsicReturns as IntrinsicReturns
from .minibatches import MinibatchSampler as MinibatchSampler
from .storage import RolloutStorage as RolloutStorage
from .vanilla import VanillaOnPolicyBuffer as VanillaOnPolicyBuffer
from .vtrace import VTraceBuffer as VTraceBuffer
from .writer import RolloutWriter as RolloutWriter
