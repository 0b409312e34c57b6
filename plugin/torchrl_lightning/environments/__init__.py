"""Environments: what one is, how it is made, what it may return, and who acts in it.

Names are imported when they are asked for: a process that only steps an environment then needs no torch.
"""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
