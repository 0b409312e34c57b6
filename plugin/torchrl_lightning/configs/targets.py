"""Constructors that take keys and dtypes from YAML; the ``_target_`` of a config names them.

Each has the name, the signature and the documentation of the component that it makes.
"""

from __future__ import annotations

from torchrl_lightning import l2r, replay, rollout, velora
from torchrl_lightning.configs.arguments import with_dtype
from torchrl_lightning.configs.keys import with_keys

RolloutWriter = with_keys(rollout.RolloutWriter)
RingWriter = with_keys(replay.RingWriter)
PrioritizedSampler = with_dtype(with_keys(replay.PrioritizedSampler))
SequenceSampler = with_keys(replay.SequenceSampler)

DiscountedReturns = with_keys(rollout.DiscountedReturns)
GeneralizedAdvantages = with_keys(rollout.GeneralizedAdvantages)
VTraceAdvantages = with_keys(rollout.VTraceAdvantages)
IntrinsicReturns = with_keys(rollout.IntrinsicReturns)

VanillaOnPolicyBuffer = with_keys(rollout.VanillaOnPolicyBuffer)
GAEBuffer = with_keys(rollout.GAEBuffer)
VTraceBuffer = with_keys(rollout.VTraceBuffer)
PPOBuffer = with_keys(l2r.PPOBuffer)

ExperienceBuffer = with_keys(replay.ExperienceBuffer)
RecurrentReplayBuffer = with_keys(velora.RecurrentReplayBuffer)
SimpleReplayBuffer = with_keys(l2r.SimpleReplayBuffer)
