"""Sample counts and ages equal a plain loop over all samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_lightning import ExperienceBuffer, RingStorage
from torchrl_lightning.inspection.sample_counts import AGE_BINS, SampleCounter


@pytest.mark.parametrize("uneven", [False, True])
def test_counts_and_ages_match_the_sampled_steps(uneven):
    buffer, counter = ExperienceBuffer(storage=RingStorage(20), num_envs=2), SampleCounter(10, 2)
    positions, counted, ages = [0, 0], {}, []
    for round_ in range(40):
        envs = [1] if uneven and round_ % 3 == 0 else [0, 1]
        steps = torch.tensor([[positions[env]] for env in envs])
        buffer.extend(TensorDict({"step": steps, "env": torch.tensor(envs)[:, None]}, [len(envs)]), torch.tensor(envs))
        for env in envs:
            positions[env] += 1
        batch = buffer.sample(6)
        counter.update(batch["index"], batch["write_position"])
        for env, step in zip(batch["env"].ravel().tolist(), batch["step"].ravel().tolist(), strict=True):
            counted[env, step] = counted.get((env, step), 0) + 1
            ages.append(positions[env] - 1 - step)
    stored = zip(*(buffer[:][key].ravel().tolist() for key in ("env", "step")), strict=True)
    expected = {cell: counted.get(step, 0) for cell, step in enumerate(stored)}
    sampled_cells = [cell for cell in expected if counter.counts[cell] and expected[cell]]
    assert [counter.counts[cell] for cell in sampled_cells] == [expected[cell] for cell in sampled_cells]
    assert {cell for cell, count in expected.items() if count} == set(sampled_cells)
    assert counter.num_samples == len(ages) == 240
    assert counter.mean_age == np.mean(ages)
    assert counter.ages.tolist() == np.bincount(np.array(ages) * AGE_BINS // 10, minlength=AGE_BINS).tolist()
