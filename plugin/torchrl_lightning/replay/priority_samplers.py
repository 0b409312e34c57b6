"""Which samplers of buffers keep priorities."""

from __future__ import annotations

from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_lightning.replay.prioritized import PrioritizedSampler


def prioritized_in(sampler: Sampler) -> PrioritizedSampler | None:
    """Return the one of our samplers that keeps priorities: this one, or the one that it holds as ``prioritized``."""
    found = getattr(sampler, "prioritized", sampler)
    return found if isinstance(found, PrioritizedSampler) else None


def takes_priorities(sampler: Sampler) -> bool:
    """Return whether a sampler, ours or one of TorchRL's, draws by priorities."""
    keeper = getattr(sampler, "prioritized", sampler)
    return keeper is not None and type(keeper).update_priority is not Sampler.update_priority


def hold_priorities(sampler: Sampler | None, max_size: int) -> None:
    """Let a sampler with priorities keep them for so many cells, unless it was built with a ``max_capacity``."""
    found = None if sampler is None else prioritized_in(sampler)
    if found is not None and "table" not in vars(found):
        found.table = found.make_table(max_size)
