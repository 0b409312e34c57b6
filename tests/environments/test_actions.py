"""Actions become what the environment takes, the same from arrays and from tensors."""

from __future__ import annotations

import io
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import Bounded, Categorical, OneHot, Unbounded

from torchrl_lightning.environments.actions import ActionFormat, half_bounded_sampler
from torchrl_lightning.environments.specs import space_to_spec

INF = np.inf
BOXES = {
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "one": spaces.Box(-1, 1, (1,), np.float32),
    "matrix": spaces.Box(-1, 1, (2, 3), np.float32),
    "float16": spaces.Box(-2, 3, (2,), np.float16),
    "float16 of 0.1": spaces.Box(np.float16(-0.1), np.float16(0.1), (2,), np.float16),
    "float16 without bounds": spaces.Box(-INF, INF, (2,), np.float16),
    "float64 of 0.1": spaces.Box(0.1, 0.3, (2,), np.float64),
    "scalar of float64": spaces.Box(0.1, 0.3, (), np.float64),
    "one side": spaces.Box(np.array([-INF, 0.1]), np.array([0.3, INF]), dtype=np.float64),
    "uneven": spaces.Box(np.array([1000.1, -0.7], np.float32), np.array([1000.3, 0.0], np.float32)),
    "near the limit": spaces.Box(-3e38, 3.4e38, (2,), np.float32),
}
WHOLE = {
    **{dtype: spaces.Box(0, 100, (2,), np.dtype(dtype).type) for dtype in ("int8", "int16", "int32", "int64", "uint8")},
    "scalar of int32": spaces.Box(-5, 5, (), np.int32),
    "Discrete": spaces.Discrete(3),
    "Discrete int8": spaces.Discrete(3, start=-2, dtype=np.int8),
    "Discrete int32": spaces.Discrete(3, start=5, dtype=np.int32),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2], dtype=np.int32, start=[1, 5]),
    "MultiBinary": spaces.MultiBinary(3),
    "MultiBinary of a shape": spaces.MultiBinary((2, 2)),
}


def contained(space: Any, actions: Any) -> bool:
    """Return whether a space has each action, in the type that it samples."""
    form = ActionFormat.from_space(space)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return all(space.contains(form.single(actions[i : i + 1])) for i in range(len(actions)))


def both(space: Any, actions: Any, clip: bool = False) -> Any:
    """Convert an array and a tensor, which give the same in other memory."""
    form = ActionFormat.from_space(space)
    result, twin = form.to_environment(actions, clip), form.to_environment(torch.from_numpy(actions), clip)
    assert isinstance(result, np.ndarray)
    assert not np.shares_memory(result, actions)
    np.testing.assert_array_equal(result, twin.numpy())
    assert result.dtype == twin.numpy().dtype == space.dtype
    assert result.shape[1:] == (space.shape or ())
    return result


DTYPES = [(name, dtype) for name in BOXES for dtype in (np.float32, np.float64, np.float16)]
for fine in ("uneven", "near the limit"):  # 16 bits do not tell these bounds apart
    DTYPES.remove((fine, np.float16))


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_actions_clamped_to_the_bounds_are_in_the_box(name: str, dtype: Any) -> None:
    space = BOXES[name]
    spec: Any = space_to_spec(space, "action").to(torch.float32)
    samples = torch.randn(64, *spec.shape, generator=torch.Generator().manual_seed(0)) * 1e3
    clamped = samples.clamp(spec.space.low, spec.space.high) if isinstance(spec, Bounded) else samples
    actions = clamped.numpy().astype(dtype)
    result = both(space, actions)
    assert contained(space, result)
    np.testing.assert_allclose(result.reshape(actions.shape), actions, rtol=2e-2 if dtype is np.float16 else 1e-3)


@pytest.mark.parametrize("name", [name for name in BOXES if name not in ("float16 without bounds", "near the limit")])
def test_actions_beyond_a_bound_by_rounding_are_clipped(name: str) -> None:
    space = BOXES[name]
    form = ActionFormat.from_space(space)
    for bound, away in ((space.low, -INF), (space.high, INF)):
        edge = bound.astype(np.float32)
        beyond = edge
        for _ in range(4):
            beyond = np.nextafter(beyond, np.float32(away))
        finite = np.isfinite(bound)
        result = both(space, np.where(finite, beyond, np.float32(0.2)).reshape(1, *form.spec_shape))
        assert contained(space, result)
        np.testing.assert_array_equal(result.reshape(bound.shape)[finite], bound[finite])
        far = (edge + np.float32(np.sign(away) * 0.5)).astype(np.float32)
        far = np.where(finite, far, np.float32(0.2)).reshape(1, *form.spec_shape)
        assert not contained(space, both(space, far))
        assert form.outside(torch.from_numpy(far)).reshape(finite.shape)[finite].all()
        clipped = both(space, far, clip=True)
        assert contained(space, clipped)
        np.testing.assert_array_equal(clipped.reshape(bound.shape)[finite], bound[finite])


def test_numbers_that_are_not_finite_stay_what_they_are() -> None:
    result = both(BOXES["one"], np.array([[np.nan], [INF], [-INF]], np.float32))
    np.testing.assert_array_equal(result, [[np.nan], [INF], [-INF]])
    assert ActionFormat.from_space(BOXES["one"]).outside(torch.tensor([[np.nan], [INF], [0.5]])).tolist() == [
        [True],
        [True],
        [False],
    ]


def test_actions_beyond_16_bits_become_the_largest_number() -> None:
    space = BOXES["float16 without bounds"]
    result = both(space, np.array([[1e6, -1e30]], np.float32))
    assert result.tolist() == [[65504.0, -65504.0]]
    assert contained(space, result)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.uint8])
def test_whole_numbers_become_those_of_the_space(name: str, dtype: Any) -> None:
    space = WHOLE[name]
    form = ActionFormat.from_space(space)
    actions = np.zeros((3, *form.spec_shape), dtype)
    actions[1], actions[2] = 1, 1
    result = both(space, actions)
    assert contained(space, result)
    start = np.asarray(form.start)
    np.testing.assert_array_equal(result.astype(int) - start, actions.reshape(result.shape).astype(int))
    back = form.from_environment(result)
    assert back.shape == actions.shape
    np.testing.assert_array_equal(back, actions)


def test_whole_numbers_are_rounded_and_never_wrap_around() -> None:
    assert both(WHOLE["int32"], np.array([[1.9999998, 2.4]], np.float32)).tolist() == [[2, 2]]
    assert both(WHOLE["uint8"], np.array([[300, -4]], np.int64)).tolist() == [[255, 0]]
    assert both(WHOLE["int8"], np.array([[1e30, -1e30]], np.float32)).tolist() == [[127, -128]]
    assert both(WHOLE["uint8"], np.array([[300, -4]], np.int64), clip=True).tolist() == [[100, 0]]
    assert not contained(WHOLE["Discrete int8"], both(WHOLE["Discrete int8"], np.array([259])))


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=2).map(sorted),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
    st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_numbers_of_the_box_and_its_bounds_are_inside(bounds: list[float], values: list[float], dtype: Any) -> None:
    with np.errstate(over="ignore"):
        low, high = (np.array([bound]).astype(dtype) for bound in bounds)
    if not np.isfinite([low, high]).all():
        return
    space = spaces.Box(low, high, dtype=dtype)
    actions = np.array(values, np.float32)[:, None]
    result, clipped = both(space, actions), both(space, actions, clip=True)
    assert contained(space, clipped)
    room = 1e-5 * max(abs(float(low[0])), abs(float(high[0])))
    for action, taken in zip(actions[:, 0].astype(float), result[:, 0].astype(float), strict=True):
        if float(low[0]) - room / 2 <= action <= float(high[0]) + room / 2:
            assert low[0] <= taken <= high[0]
        elif dtype is np.float32:
            assert action == taken or low[0] <= taken <= high[0]


@pytest.mark.parametrize("space", [*BOXES.values(), *WHOLE.values()], ids=str)
def test_format_comes_back_from_plain_data(space: Any) -> None:
    form, file = ActionFormat.from_space(space), io.BytesIO()
    spec = space_to_spec(space, "action") if not form.start else None
    if spec is None:
        spec = space_to_spec(WHOLE["Discrete" if not form.shape else "MultiDiscrete"], "action")
    torch.save(form.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    restored = ActionFormat.from_state(state, spec)
    for name in ("shape", "dtype", "start", "spec_shape"):
        assert getattr(restored, name) == getattr(form, name)
    for name in ("low", "high"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(form, name))
    with pytest.raises(ValueError, match="actions must fit"):
        ActionFormat.from_state({**state, "shape": [7]}, spec)


@pytest.mark.parametrize(
    ("spec", "action", "expected"),
    [
        (Bounded(0.1, 0.3, (2,), dtype=torch.float64), torch.tensor([[0.1, 0.3]]), [[0.1, 0.3]]),
        (Unbounded((1,), dtype=torch.float16), torch.tensor([[1e6]]), [[65504.0]]),
        (Categorical(3, dtype=torch.int32), torch.tensor([2]), [2]),
        (OneHot(3), torch.tensor([[0, 1, 0]]), [[False, True, False]]),
    ],
)
def test_spec_is_a_format_too(spec: Any, action: Any, expected: Any) -> None:
    form = ActionFormat.from_spec(spec)
    result = form.to_environment(action)
    assert result.dtype == spec.dtype
    torch.testing.assert_close(result, torch.tensor(expected, dtype=spec.dtype))
    assert spec.expand(1, *spec.shape).is_in(result)


def test_actions_of_16_bits_have_a_larger_tolerance() -> None:
    space = BOXES["float64 of 0.1"]
    form = ActionFormat.from_space(space)
    for dtype in (torch.bfloat16, torch.float16):
        result = form.to_environment(torch.tensor([[0.1, 0.3]], dtype=dtype)).numpy()
        assert contained(space, result)


def test_box_with_one_bound_is_drawn_as_gymnasium_draws_it() -> None:
    space = BOXES["one side"]
    draw = half_bounded_sampler(space_to_spec(space, "action").to(torch.float32), [5000])
    assert draw is not None
    torch.manual_seed(0)
    drawn = draw().double()
    expected = np.stack([space.sample() for _ in range(5000)])
    assert drawn.isfinite().all()
    assert contained(space, ActionFormat.from_space(space).to_environment(drawn.float().numpy()))
    np.testing.assert_allclose(drawn.mean(0), expected.mean(0), atol=0.1)
    np.testing.assert_allclose(drawn.std(0), expected.std(0), atol=0.1)
    for whole in ("scalar", "matrix", "float16 without bounds"):
        assert half_bounded_sampler(space_to_spec(BOXES[whole], "action"), [2]) is None


def test_scalar_box_gets_the_arrays_that_it_contains() -> None:
    form = ActionFormat.from_space(BOXES["scalar"])
    single = form.single(form.to_environment(np.zeros((1, 1), np.float32)))
    assert isinstance(single, np.ndarray)
    assert single.shape == ()
    choice = ActionFormat.from_space(WHOLE["Discrete int32"])
    assert type(choice.single(choice.to_environment(np.zeros(1, int)))) is np.int32
    assert gymnasium.spaces.Discrete(9, dtype=np.int32).contains(choice.single(choice.to_environment(np.zeros(1, int))))
