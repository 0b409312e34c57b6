"""The error for unusable demonstrations."""

from __future__ import annotations

from torchrl_lightning._core.errors import Fault


class DemonstrationFault(Fault):
    """Demonstrations cannot be used; the message is one line with the responsible setting and the remedy."""
