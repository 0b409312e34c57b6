"""Hide messages that do not help a person who watches a run."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Hide TorchRL's messages about storages, Lightning's tips, and warnings about what is done on purpose."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        # Hydra's own handler writes each message to the terminal and to the log file already.
        logging.getLogger(name).handlers.clear()
    for name in (
        "torchrl",
        "lightning.pytorch.utilities.rank_zero",
        "lightning.pytorch.trainer.connectors",
        "lightning.fabric.utilities",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        # Environments are stepped in this process: data loader workers would act with stale weights.
        ".*does not have many workers.*",
        # Lightning reads a name that torch has deprecated.
        ".*LeafSpec.*",
        # The folder of a resumed run is not empty, as it should be, and one run's best is not another's.
        ".*directory .* exists and is not empty.*",
        ".*The dirpath has changed from.*",
        # The compiled extension of TorchRL is not needed.
        ".*Failed to import.*torchrl.*",
        # Small networks are faster on the CPU.
        ".*GPU available but not used.*",
    ):
        warnings.filterwarnings("ignore", message=message)
