"""All parts that keep a state: a new one enters every contract by its row."""

from __future__ import annotations

from contracts import collectors, demonstrations, families, replay, rollouts, small
from contracts.part import Part

PARTS: dict[str, Part] = {
    **{f"ExperienceBuffer: {name}": part for name, part in replay.BUFFERS.items()},
    **replay.SAMPLERS,
    **small.SMALL,
    **rollouts.ROLLOUTS,
    **families.FAMILIES,
    **demonstrations.DEMONSTRATIONS,
    **collectors.COLLECTORS,
}
