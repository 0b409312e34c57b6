"""TorchRL experience buffers as Lightning DataModules, configured by Hydra.

Every public name is exported here, lazily (PEP 562): importing the package costs no torch import, so that shell
completion and other people's Hydra applications stay fast.
"""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
__all__.append("__version__")
