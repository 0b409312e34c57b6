from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from torchrl_lightning.moments import Moments

samples = arrays(np.float64, st.tuples(st.integers(1, 40), st.just(3)), elements=st.floats(-1e3, 1e3, width=32))


@given(samples, st.lists(st.integers(0, 40), max_size=4))
def test_merged_in_parts_they_are_those_of_all_samples(values, cuts):
    cuts = sorted(min(cut, len(values)) for cut in cuts)
    moments = Moments.none(3)
    for part in np.split(values, cuts):
        if len(part):
            moments = moments.merged(Moments.of(torch.from_numpy(part)))
    assert moments.count == len(values)
    np.testing.assert_allclose(moments.mean, values.mean(0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(moments.variance, values.var(0), rtol=1e-9, atol=1e-9)


def test_merging_keeps_what_single_precision_would_lose():
    values = torch.arange(20_000, dtype=torch.float64)[:, None] % 2 + 1e6
    moments = Moments.none(1)
    for part in values.float().split(7):
        moments = moments.merged(Moments.of(part))
    assert moments.variance.item() == pytest.approx(0.25, rel=1e-9)
