"""Collectors: gather rollouts of a policy in environments.

A collector steps environments and yields batches of experience. Environments themselves are in ``environments``.
"""

from __future__ import annotations

from torchrl_lightning._core.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
