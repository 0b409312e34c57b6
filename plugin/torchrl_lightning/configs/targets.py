"""What the ``_target_`` of a config names where the component takes keys: its constructor, fed from YAML.

Each has the name, the signature and the documentation of the component that it makes.
"""

from __future__ import annotations

from torchrl_lightning import rollout
from torchrl_lightning.configs.keys import with_keys

RolloutWriter = with_keys(rollout.RolloutWriter)

DiscountedReturns = with_keys(rollout.DiscountedReturns)
GeneralizedAdvantages = with_keys(rollout.GeneralizedAdvantages)
VTraceAdvantages = with_keys(rollout.VTraceAdvantages)
IntrinsicReturns = with_keys(rollout.IntrinsicReturns)

VanillaOnPolicyBuffer = with_keys(rollout.VanillaOnPolicyBuffer)
GAEBuffer = with_keys(rollout.GAEBuffer)
VTraceBuffer = with_keys(rollout.VTraceBuffer)
