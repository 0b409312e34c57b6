"""Configs of our components for TorchRL's groups, derived from their constructors.

A key may be written as a string or as a list of strings, a dtype as its name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

# Also for its side effect: it stores TorchRL's own options of the groups below.
import torchrl.trainers.algorithms.configs  # noqa: F401
from hydra.core.config_store import ConfigStore
from torchrl.trainers.algorithms.configs.data import ReplayBufferBaseConfig, SamplerConfig, StorageConfig, WriterConfig
from torchrl.trainers.algorithms.configs.transforms import TransformConfig

import torchrl_lightning
from torchrl_lightning._fields import config_fields

PREFIX = "torchrl_lightning_"
PROVIDER = "torchrl-lightning"


def config_of(name: str, base: type[Any]) -> type[Any]:
    """Make the config of a public class, of TorchRL's kind ``base``: a field for each argument of its constructor."""
    settings: list[tuple[str, Any, Any]] = [
        ("_target_", str, f"{torchrl_lightning.__name__}.{name}"),
        ("_convert_", str, "all"),
        ("_partial_", bool, False),
        *config_fields(getattr(torchrl_lightning, name)),
    ]
    return dataclasses.make_dataclass(
        f"{name}Config",
        [
            (key, kind, dataclasses.field(default_factory=default.copy) if isinstance(default, list) else default)
            for key, kind, default in settings
        ],
        bases=(base,),
        namespace={"__doc__": f"Config of :class:`torchrl_lightning.{name}`.", "__module__": __name__},
    )


def _group(base: type[Any], **components: str) -> dict[str, type[Any]]:
    return {name: config_of(component, base) for name, component in components.items()}


# Each is a transform, and also the module of TorchRL's ModuleTransform, which the group ``value`` is for.
_ESTIMATORS = _group(
    TransformConfig,
    discounted_returns="DiscountedReturns",
    generalized_advantages="GeneralizedAdvantages",
    vtrace_advantages="VTraceAdvantages",
    intrinsic_returns="IntrinsicReturns",
)

COMPONENTS: dict[str, dict[str, type[Any]]] = {
    "storage": _group(StorageConfig, rollout="RolloutStorage", ring="RingStorage", frame="FrameStorage"),
    "writer": _group(WriterConfig, rollout="RolloutWriter", ring="RingWriter"),
    "sampler": _group(
        SamplerConfig,
        minibatch="MinibatchSampler",
        uniform="UniformSampler",
        prioritized="PrioritizedSampler",
        sequence="SequenceSampler",
        recent="RecentSampler",
    ),
    "transform": {
        **_ESTIMATORS,
        **_group(
            TransformConfig,
            frame_stack="FrameStackTransform",
            hindsight_relabel="HindsightRelabel",
            dynamics_targets="DynamicsTargets",
        ),
    },
    "value": _ESTIMATORS,
    "replay_buffer": _group(
        ReplayBufferBaseConfig,
        vanilla="VanillaOnPolicyBuffer",
        gae="GAEBuffer",
        vtrace="VTraceBuffer",
        ppod="PPODBuffer",
        ppo="PPOBuffer",
        experience="ExperienceBuffer",
        episodic="EpisodicReplayBuffer",
        recurrent="RecurrentReplayBuffer",
        simple="SimpleReplayBuffer",
        model_based="MBReplayBuffer",
    ),
}


def register_configs() -> None:
    """Store every component under ``torchrl_lightning_NAME`` in its group; storing twice changes nothing.

    Example:
        >>> register_configs()
        >>> node = ConfigStore.instance().load("sampler/torchrl_lightning_minibatch.yaml")
        >>> node.provider, node.node._target_
        ('torchrl-lightning', 'torchrl_lightning.MinibatchSampler')
    """
    store = ConfigStore.instance()
    for group, nodes in COMPONENTS.items():
        for name, node in nodes.items():
            store.store(group=group, name=PREFIX + name, node=node, provider=PROVIDER)
