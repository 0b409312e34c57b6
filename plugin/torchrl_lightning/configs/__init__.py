"""Add this package's components to TorchRL's Hydra groups on import.

The import also loads TorchRL's groups from ``torchrl.trainers.algorithms.configs``. A config can then select, for
example, ``sampler@replay_buffer.sampler: torchrl_lightning_minibatch``. ``torchrl-lightning-train`` never imports this
module, because some TorchRL groups, such as ``logger`` and ``trainer``, clash with config files of the same names.
"""

from __future__ import annotations

from torchrl_lightning.configs.components import COMPONENTS, register_configs

__all__ = ["COMPONENTS", "register_configs"]

register_configs()
