"""Collectors: gather rollouts of a policy in environments.

Names are imported at first access, so a process that only steps an environment does not import torch.
"""

from __future__ import annotations

from torchrl_lightning._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
