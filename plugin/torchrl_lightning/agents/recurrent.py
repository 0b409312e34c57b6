"""Recurrent memory of off-policy losses: compute features before and after each transition of stored sequences."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torchrl_lightning.agents.networks.trunks import RecurrentTrunk
from torchrl_lightning.agents.transitions import Entries, Transitions


def successor_layout(boundary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arrange the steps and successors of windows as one sequence for a recurrent network.

    Usually the successor of a step is the next step. If ``boundary`` ``[B, T]`` is set for a step, another episode
    follows. The successor of this step, and of the last step, is then inserted after the step. An inserted successor
    does not affect later steps, because an episode start follows. Return the positions of the steps ``[B, T]``, the
    positions of their successors ``[B, T]``, and the source of each position ``[B, L]``: ``t`` for step t, ``T + t``
    for its successor.
    """
    batch, length = boundary.shape
    ends = boundary.clone()
    ends[:, -1] = True
    time = torch.arange(length, device=boundary.device).expand(batch, length)
    steps = time + ends.cumsum(1) - ends.long()
    successors = steps + 1
    source = torch.zeros(batch, int(successors.max()) + 1, dtype=torch.long, device=boundary.device)
    source.scatter_(1, steps, time)
    rows, columns = ends.nonzero(as_tuple=True)
    source[rows, successors[rows, columns]] = columns + length
    return steps, successors, source


def encode_sequence(batch: Transitions, online: RecurrentTrunk, target: RecurrentTrunk) -> Transitions:
    """Replace the observations of sequences ``[B, T]`` by the features of a memory.

    The memory starts from the state stored before the first step (Kapturowski et al., 2019) and is reset at each
    episode start. The features of a successor include the memory of all steps before it, also at the end of an episode.
    An n-step transition is masked if its successor is beyond the window, because the steps between are unknown. Only
    the ``online`` features of the steps have a gradient.

    Raises:
        ValueError: The batch does not contain sequences, or they are too short to contain successors.
    """
    if batch.reward.ndim != 2:
        raise ValueError(
            f"The batch must contain sequences [B, T] for a recurrent network, got {list(batch.reward.shape)}. Sample "
            "it with a SequenceSampler."
        )
    assert batch.is_init is not None
    assert batch.done is not None
    assert batch.states is not None
    length = batch.reward.shape[1]
    boundary = batch.done.clone()
    if batch.steps is not None:
        boundary &= batch.steps == 1  # with n-step transitions, `done` belongs to a later step
    boundary[:, :-1] |= batch.is_init[:, 1:]
    if batch.mask is not None:
        boundary[:, :-1] |= batch.mask[:, :-1] & ~batch.mask[:, 1:]  # padding follows
    has_inner_boundary = batch.steps is not None or bool(boundary[:, :-1].any())
    mask = batch.mask
    if has_inner_boundary:
        steps, successors, source = successor_layout(boundary)
        if batch.steps is not None:
            last, mask = _last_steps(boundary, batch.steps, mask)
            successors = successors.gather(1, last)
        entries = [_gather(torch.cat([a, b], 1), source) for a, b in zip(batch.now, batch.after, strict=True)]
        is_init = torch.cat([batch.is_init, torch.zeros_like(batch.is_init)], 1).gather(1, source)
    else:
        entries = [torch.cat([a, b[:, -1:]], 1) for a, b in zip(batch.now, batch.after, strict=True)]
        is_init = torch.cat([batch.is_init, torch.zeros_like(batch.is_init[:, -1:])], 1)
    initial_states = [state[:, 0] for state in batch.states]
    features = online.encode_sequences(entries, is_init, initial_states)
    with torch.no_grad():
        target_features = target.encode_sequences(entries, is_init, initial_states)
    if has_inner_boundary:
        now, after = _gather(features, steps), _gather(features.detach(), successors)
        after_target = _gather(target_features, successors)
    else:
        now, after, after_target = features[:, :length], features[:, 1:].detach(), target_features[:, 1:]
    return replace(batch, now=[now], after=[after], after_target=[after_target], mask=mask)


def _last_steps(boundary: Tensor, steps: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the last step of each transition, and the mask of transitions with a known successor, both ``[B, T]``."""
    length, max_steps = steps.shape[1], int(steps.max())
    burn_in = 0 if mask is None else int(mask.any(0).long().argmax())
    if burn_in + max_steps >= length:
        # Otherwise, only transitions at the ends of episodes would remain.
        raise ValueError(
            f"Sequences must be longer than {burn_in} burn-in steps and {max_steps} steps to a successor, got {length} "
            "steps. Raise batch_length of the SequenceSampler, or lower n_steps."
        )
    segments = boundary.cumsum(1) - boundary.long()
    ends = boundary.clone()
    ends[:, -1] = True
    last = torch.arange(length, device=steps.device) + steps - 1
    is_known = last < length
    last = last.clamp(max=length - 1)
    # The entry after the end of a segment is the stored successor of one step. It is valid only for one-step
    # transitions.
    is_known &= (segments.gather(1, last) == segments) & (~ends | (steps == 1)).gather(1, last)
    return last, is_known if mask is None else mask & is_known


def recompute_states(batch: Transitions, memory: RecurrentTrunk) -> tuple[Entries, Entries]:
    """Return the states before and after each step, recomputed with the current memory.

    Stored states become stale as the memory learns, and each window starts with a stored state (Kapturowski et al.,
    2019, section 3). The state before the first step is not recomputed, because this would need earlier steps.
    """
    assert batch.is_init is not None
    assert batch.states is not None
    before, after = memory.unroll(batch.now, batch.is_init, [state[:, 0] for state in batch.states])
    for state, stored in zip(before, batch.states, strict=True):
        state[:, 0] = stored[:, 0]
    return before, after


def _gather(values: Tensor, index: Tensor) -> Tensor:
    batch, length = values.shape[:2]
    flat = index + torch.arange(batch, device=index.device).unsqueeze(1) * length
    return values.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, index.shape)
