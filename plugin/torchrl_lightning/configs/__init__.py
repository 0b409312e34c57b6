"""Put our components into TorchRL's Hydra groups, beside TorchRL's own: importing this package does it.

TorchRL's groups are those of ``torchrl.trainers.algorithms.configs``, which is imported here: a config then selects,
say, ``sampler@replay_buffer.sampler: torchrl_lightning_minibatch``. Runs of ``torchrl-lightning-train`` do not need it
and never import it, for TorchRL also has groups such as ``logger`` and ``trainer``, which clash with files of those
names.
"""

from __future__ import annotations

from torchrl_lightning.configs.components import COMPONENTS, register_configs

__all__ = ["COMPONENTS", "register_configs"]

register_configs()
