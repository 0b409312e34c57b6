"""TorchRL experience buffers as Lightning DataModules, configured by Hydra.

Every public name is exported here, lazily (PEP 562): importing the package costs no torch import, so that shell
completion and other people's Hydra applications stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_ROOMS = {
    "callbacks": ["BestCheckpoint", "ExperienceLog", "FramesProgressBar", "SaveOnException"],
    "collectors": [
        "AsynchronousCollector",
        "EnvironmentFactory",
        "EnvironmentSpecs",
        "GymnasiumCollector",
        "SelectObservation",
        "environment_specs",
        "make_vector_env",
        "play_episodes",
    ],
    "datamodules": ["ExperienceDataModule", "OnPolicyDataModule", "ReplayDataModule"],
    "estimators": [
        "IntrinsicRewardNormalizer",
        "discount_cumsum",
        "discounted_returns",
        "gae",
        "standardize",
        "vtrace",
    ],
    "learn": [
        "A2CModule",
        "ActorCriticModule",
        "DQNModule",
        "CNNNetwork",
        "MLPNetwork",
        "PPOModule",
        "RandomNetworkDistillation",
        "RecurrentNetwork",
        "ReinforceModule",
        "VTraceModule",
        "OffPolicyModule",
        "SACModule",
        "TD3Module",
        "build_actor",
        "build_critic",
    ],
    "replay": [
        "BatchExperience",
        "BufferBase",
        "EpisodeIndex",
        "ExperienceBuffer",
        "PrioritizedSampler",
        "RecurrentReplayBuffer",
        "RingStorage",
        "RingWriter",
        "SequenceSampler",
        "SimpleReplayBuffer",
        "UniformSampler",
    ],
    "rollout": [
        "DiscountedReturns",
        "GAEBuffer",
        "GeneralizedAdvantages",
        "IntrinsicReturns",
        "MinibatchSampler",
        "PPOBuffer",
        "RolloutStorage",
        "RolloutWriter",
        "VTraceAdvantages",
        "VTraceBuffer",
        "VanillaOnPolicyBuffer",
    ],
    "scan": ["discounted_scan"],
    "segment_tree": ["MaxSegmentTree", "MinSegmentTree", "SegmentTree", "SumSegmentTree"],
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = ["__version__", *sorted(_ROOM_OF)]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
