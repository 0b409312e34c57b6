"""Silences what says nothing to a person who watches a run."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Hides TorchRL's storage chatter, Lightning's tips, and warnings about things that we do on purpose."""
    for name in ("torchrl", "lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        # Environments are stepped in this process: data loader workers would act with stale weights.
        ".*does not have many workers.*",
        # Lightning reads a name that torch has deprecated.
        ".*LeafSpec.*",
        # The folder of a resumed run is not empty, as it should be.
        ".*Checkpoint directory .* exists and is not empty.*",
        # The compiled extension of TorchRL is not needed.
        ".*Failed to import.*torchrl.*",
        # Hydra copies nothing of Lightning's sanity checks.
        ".*GPU available but not used.*",
    ):
        warnings.filterwarnings("ignore", message=message)
