"""TorchRL experience buffers as Lightning DataModules, configured by Hydra.

All public names are exported lazily (PEP 562): importing the package does not import torch, so that shell completion
and other Hydra applications stay fast.
"""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
__all__.append("__version__")
