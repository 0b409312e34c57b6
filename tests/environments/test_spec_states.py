from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import Composite, MultiOneHot, NonTensor

from torchrl_lightning.environments.specs import space_to_spec, spec_from_state, spec_state, spec_to_space

SPACES = [
    spaces.Box(-np.inf, np.inf, (3,), np.float32),
    spaces.Box(np.array([-1.0, -2.0]), np.array([1.0, 3.0]), dtype=np.float64),
    spaces.Box(0, 255, (4, 8, 8), np.uint8),
    spaces.Box(-1.0, 1.0, (), np.float32),
    spaces.Discrete(5),
    spaces.MultiBinary(3),
    spaces.MultiBinary((2, 3)),
    spaces.MultiDiscrete([3, 3]),
    spaces.MultiDiscrete([2, 4, 3]),
    spaces.Dict(goal=spaces.Box(0.0, 1.0, (2,)), seen=spaces.Dict(level=spaces.Discrete(3))),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spec_comes_back_from_plain_data(space):
    spec, file = space_to_spec(space, "observation"), io.BytesIO()
    torch.save(spec_state(spec), file)
    file.seek(0)
    restored = spec_from_state(torch.load(file, weights_only=True))
    assert restored == spec
    assert restored.rand().shape == spec.rand().shape


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_space_comes_back_from_its_spec(space):
    spec = space_to_spec(space, "observation")
    converted = spec_to_space(spec)
    assert space_to_spec(converted, "observation") == spec
    assert converted == space or space.shape == ()  # TorchRL gives scalars a dimension


def test_other_kinds_are_refused():
    with pytest.raises(TypeError, match="NonTensor"):
        spec_to_space(NonTensor())
    with pytest.raises(TypeError, match="MultiOneHot"):
        spec_state(Composite(action=MultiOneHot([3, 2])))
    with pytest.raises(ValueError, match="'Other'"):
        spec_from_state({"kind": "Other", "shape": [], "dtype": "float32"})
