"""LightningModules that learn from batches of experience, and the losses that they minimise.

Networks, model-based agents and updates without autograd have folders of their own. Loading and exporting trained
policies belongs in ``deploy``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
