"""LightningModules that learn from batches of experience, and the losses that they minimise.

The networks, the model-based agents and the updates without autograd are in subfolders. Loading and exporting trained
policies belongs in ``deploy``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
