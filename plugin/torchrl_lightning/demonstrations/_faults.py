"""The error of demonstrations that cannot be used."""

from __future__ import annotations


class DemonstrationFault(ValueError):
    """Demonstrations cannot be used; the message is one line that names the setting they came by, and the mend."""
