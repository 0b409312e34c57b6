"""The error for unusable demonstrations."""

from __future__ import annotations

from torchrl_lightning._core.errors import UserError


class DemonstrationFault(UserError):
    """Demonstrations cannot be used. The message is one line with the responsible setting and the remedy."""
