"""Environments: how to build, wrap, check and step them, and which policies act in them.

Names are imported at first use, so that a process that only steps an environment does not import torch.
"""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
