"""The error of demonstrations that cannot be used."""

from __future__ import annotations

from torchrl_lightning.fitting import Fault


class DemonstrationFault(Fault):
    """Demonstrations cannot be used; the message is one line that names the setting they came by, and the mend."""
