"""End a rank that Lightning has started if the first rank ends before the ranks are connected."""

from __future__ import annotations

import os

from torchrl_lightning._core.processes import end_with_parent

_FIRST_RANK = "TORCHRL_LIGHTNING_FIRST_RANK"  # a variable with the process id of the first rank on this machine
_GRACE = 30.0  # seconds in which a connected rank notices and reports the failure without help


def end_with_first_rank() -> None:
    """Watch the first rank if Lightning's launcher has started this process; otherwise become the first rank.

    Ranks that are connected notice the end of another rank. Before that, this rank would wait for half an hour.
    """
    from hydra.core.hydra_config import HydraConfig

    is_launched = HydraConfig.initialized() and "_ddp_process_" in HydraConfig.get().job.name  # the launcher's name
    if not is_launched:
        os.environ[_FIRST_RANK] = str(os.getpid())
    elif first_rank := os.environ.get(_FIRST_RANK):
        message = "error: the first rank has ended, and this rank ends as well.\n"
        end_with_parent(int(first_rank), by_signal=False, grace=_GRACE, message=message)
