"""Counts of what is drawn, beside a walk through all steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_lightning import ExperienceBuffer, RingStorage
from torchrl_lightning.inspection.sample_counts import PARTS, SampleCounter


@pytest.mark.parametrize("uneven", [False, True])
def test_counts_and_ages_are_those_of_the_steps_that_were_drawn(uneven):
    buffer, draws = ExperienceBuffer(storage=RingStorage(20), num_envs=2), SampleCounter(10, 2)
    written, counted, ages = [0, 0], {}, []
    for round_ in range(40):
        envs = [1] if uneven and round_ % 3 == 0 else [0, 1]
        steps = torch.tensor([[written[env]] for env in envs])
        buffer.extend(TensorDict({"step": steps, "env": torch.tensor(envs)[:, None]}, [len(envs)]), torch.tensor(envs))
        for env in envs:
            written[env] += 1
        batch = buffer.sample(6)
        draws.note(batch["index"], batch["write_position"])
        for env, step in zip(batch["env"].ravel().tolist(), batch["step"].ravel().tolist(), strict=True):
            counted[env, step] = counted.get((env, step), 0) + 1
            ages.append(written[env] - 1 - step)
    kept = zip(*(buffer[:][key].ravel().tolist() for key in ("env", "step")), strict=True)
    here = {cell: counted.get(step, 0) for cell, step in enumerate(kept)}
    seen = [cell for cell in here if draws.counts[cell] and here[cell]]
    assert [draws.counts[cell] for cell in seen] == [here[cell] for cell in seen]
    assert {cell for cell, count in here.items() if count} == set(seen)
    assert draws.number == len(ages) == 240
    assert draws.mean_age == np.mean(ages)
    assert draws.ages.tolist() == np.bincount(np.array(ages) * PARTS // 10, minlength=PARTS).tolist()
