"""TorchRL experience buffers as Lightning DataModules, configured by Hydra.

* Core, the documented buffers and their DataModules: ``rollout``, ``demonstrations``, ``dynamics``, ``episodic``,
  ``velora`` and ``l2r`` over ``replay``, ``estimators`` and ``kernels``; ``datamodules`` and ``configs``.
* Environments and collectors: ``environments``, ``collectors`` and ``ray``.
* Agents: ``agents``.
* Running and deploying: ``cli``, ``callbacks``, ``plotting``, ``inspection`` and ``deploy``.

``_core`` and ``_hydra`` hold helpers. All public names are exported from this module and imported on first use
(PEP 562), so that importing it does not import torch, and shell completion and other Hydra applications stay fast.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
__all__.append("__version__")
