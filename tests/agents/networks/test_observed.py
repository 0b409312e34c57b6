from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import Composite

from torchrl_lightning.deploy.loading import observed_entries
from torchrl_lightning.environments.specs import space_to_spec


def specs_of(space):
    spec = space_to_spec(space, "observation")
    return spec if isinstance(spec, Composite) else Composite(observation=spec)


BOX, NUMBER, CHOICE = spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, ()), spaces.Discrete(4)
NEST = spaces.Dict(seen=BOX, inner=spaces.Dict(choice=CHOICE))


@pytest.mark.parametrize(
    ("space", "one", "shapes"),
    [
        (BOX, np.zeros(3, np.float32), {"observation": (3,)}),
        (BOX, [0.0, 1.0, 2.0], {"observation": (3,)}),
        (BOX, torch.zeros(3), {"observation": (3,)}),
        (NUMBER, np.float32(0.5), {"observation": (1,)}),
        (CHOICE, 3, {"observation": ()}),
        (NEST, {"seen": np.zeros(3), "inner": {"choice": 1}}, {"seen": (3,), ("inner", "choice"): ()}),
        (spaces.Dict(state=BOX), {"state": np.zeros(3)}, {"observation": (3,)}),
        (
            spaces.Dict(state=BOX, observation=BOX),
            {"state": np.zeros(3), "observation": np.zeros(3)},
            {"state": (3,), "observation": (3,)},
        ),
    ],
)
def test_single_observation_and_batch_are_distinguished(space, one, shapes):
    def batched(tree):
        return {key: batched(value) for key, value in tree.items()} if isinstance(tree, dict) else np.stack([tree] * 2)

    specs = specs_of(space)
    entries, count = observed_entries(specs, one)
    assert count is None
    assert {key: value.shape for key, value in entries.items()} == {key: (1, *shape) for key, shape in shapes.items()}
    assert all(value.dtype == specs[key].dtype for key, value in entries.items())
    entries, count = observed_entries(specs, batched(one))
    assert count == 2
    assert {key: value.shape for key, value in entries.items()} == {key: (2, *shape) for key, shape in shapes.items()}


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (BOX, np.zeros(4), r"'observation' has shape \[4\], expected \[3\], or \[N, 3\] of N environments"),
        (CHOICE, 0.5, "'observation' has dtype torch.float64, expected torch.int64"),
        (NEST, {"seen": np.zeros(3)}, r"no entry \('inner', 'choice'\)"),
        (NEST, np.zeros(3), "no entry 'seen'"),
        (NEST, {"seen": np.zeros((2, 3)), "inner": {"choice": 1}}, "same batch size"),
    ],
)
def test_observation_unlike_the_specs_raises(space, observation, message):
    with pytest.raises(ValueError, match=message):
        observed_entries(specs_of(space), observation)


@pytest.mark.parametrize("number", [np.zeros(1, np.float32), np.zeros((1, 1), np.float32)])
def test_number_beside_a_vector_is_read_in_a_batch_of_one_environment(number):
    specs = specs_of(spaces.Dict(number=NUMBER, seen=BOX))
    entries, count = observed_entries(specs, {"number": number, "seen": np.zeros((1, 3), np.float32)})
    assert count == 1
    assert {key: value.shape for key, value in entries.items()} == {"number": (1, 1), "seen": (1, 3)}
    entries, count = observed_entries(specs, {"number": np.zeros(1, np.float32), "seen": np.zeros(3, np.float32)})
    assert count is None
    with pytest.raises(ValueError, match="same batch size"):
        observed_entries(specs, {"number": np.float32(0), "seen": np.zeros((1, 3), np.float32)})
