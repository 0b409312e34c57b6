"""Configs of our components for TorchRL's groups, derived from their constructors.

A key may be written as a string or as a list of strings, a dtype as its name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchrl.trainers.algorithms.configs.data import (
    ReplayBufferBaseConfig,
    SamplerConfig,
    StorageConfig,
    WriterConfig,
)
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

import torchrl_lightning
from torchrl_lightning._fields import config_fields
from torchrl_lightning.configs import targets


def config_of(name: str, base: type[Any]) -> type[Any]:
    """Make the config of a public class: a dataclass with a field for each argument of its constructor.

    Args:
        name: the name of the class.
        base: TorchRL's config of such components.

    Example:
        >>> config = config_of("MinibatchSampler", SamplerConfig)
        >>> config.__name__, config(shuffle=False)._target_
        ('MinibatchSamplerConfig', 'torchrl_lightning.MinibatchSampler')
    """
    # Constructors that take keys or dtypes are wrapped, because YAML has neither.
    home = targets.__name__ if hasattr(targets, name) else torchrl_lightning.__name__
    settings: list[tuple[str, Any, Any]] = [
        ("_target_", str, f"{home}.{name}"),
        ("_convert_", str, "all"),
        ("_partial_", bool, False),
        *config_fields(getattr(torchrl_lightning, name)),
    ]
    return dataclasses.make_dataclass(
        f"{name}Config",
        [(key, kind, _field(default)) for key, kind, default in settings],
        bases=(base,),
        namespace={"__doc__": f"Config of :class:`torchrl_lightning.{name}`.", "__module__": __name__},
    )


def _field(default: Any) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy)
    return dataclasses.field(default=default)


RingStorageConfig = config_of("RingStorage", StorageConfig)
RolloutStorageConfig = config_of("RolloutStorage", StorageConfig)

RingWriterConfig = config_of("RingWriter", WriterConfig)
RolloutWriterConfig = config_of("RolloutWriter", WriterConfig)

MinibatchSamplerConfig = config_of("MinibatchSampler", SamplerConfig)
PrioritizedSamplerConfig = config_of("PrioritizedSampler", SamplerConfig)
SequenceSamplerConfig = config_of("SequenceSampler", SamplerConfig)
UniformSamplerConfig = config_of("UniformSampler", SamplerConfig)

DiscountedReturnsConfig = config_of("DiscountedReturns", TransformConfig)
GeneralizedAdvantagesConfig = config_of("GeneralizedAdvantages", TransformConfig)
IntrinsicReturnsConfig = config_of("IntrinsicReturns", TransformConfig)
VTraceAdvantagesConfig = config_of("VTraceAdvantages", TransformConfig)

ExperienceBufferConfig = config_of("ExperienceBuffer", ReplayBufferBaseConfig)
GAEBufferConfig = config_of("GAEBuffer", ReplayBufferBaseConfig)
PPOBufferConfig = config_of("PPOBuffer", ReplayBufferBaseConfig)
RecurrentReplayBufferConfig = config_of("RecurrentReplayBuffer", ReplayBufferBaseConfig)
SimpleReplayBufferConfig = config_of("SimpleReplayBuffer", ReplayBufferBaseConfig)
VTraceBufferConfig = config_of("VTraceBuffer", ReplayBufferBaseConfig)
VanillaOnPolicyBufferConfig = config_of("VanillaOnPolicyBuffer", ReplayBufferBaseConfig)
