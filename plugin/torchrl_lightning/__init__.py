"""TorchRL experience buffers as Lightning DataModules, configured by Hydra.

* Documented buffers: ``rollout``, ``demonstrations``, ``dynamics``, ``episodic``, ``velora`` and ``l2r``.
* Code that the buffers share: ``replay``, ``estimators`` and ``kernels``.
* DataModules of the buffers, and their configs: ``datamodules`` and ``configs``.
* Environments and collectors: ``environments``, ``collectors`` and ``ray``.
* Agents: ``agents``.
* Running and deploying: ``cli``, ``callbacks``, ``plotting``, ``inspection`` and ``deploy``.

``_core`` and ``_hydra`` contain helpers. This module exports all public names and imports each name on first use (PEP
562). An import of the package therefore does not import torch, so shell completion and other Hydra applications stay
fast.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
__all__.append("__version__")
