from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded

from torchrl_lightning import EnvironmentSpecs, GymnasiumCollector
from torchrl_lightning._core.moments import Moments
from torchrl_lightning.environments.normalization import (
    NormalizedPolicy,
    ObservationNormalizer,
    normalizes,
    standardize_traceable,
)

SPECS = EnvironmentSpecs(
    Composite(
        position=Unbounded(3),
        image=Bounded(0, 255, (2, 2), dtype=torch.uint8),
        goal=Categorical(4),
        inner=Composite(speed=Unbounded(2)),
    ),
    Categorical(2),
    2,
)


def advanced(keys, rows):
    normalizer = ObservationNormalizer(SPECS, keys, 5.0)
    normalizer.advance({key: Moments.from_samples(value) for key, value in rows.items()})
    return normalizer


def test_entries_are_standardised_and_clipped():
    rows = torch.randn(100, 3) * torch.tensor([1.0, 10.0, 0.0]) + 4
    normalizer = advanced(["position"], {"position": rows})
    out = normalizer.normalize("position", rows)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out[:, :2].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(out[:, :2].std(0, correction=0), torch.ones(2))
    assert (out[:, 2] == 0).all()  # a constant
    assert normalizer.normalize("position", torch.tensor([1e9, -1e9, 5.0])).tolist() == [5.0, -5.0, 5.0]


OFFSETS = {
    torch.float64: [0.0, 1700000037.0, 5412345.678, -1e12, 1e15],
    torch.int64: [0, 1_700_000_037, 2**52],
    torch.int32: [0, 1_700_000_037, -(2**30)],
    torch.uint8: [7, 240],
    torch.float32: [0.0, 4096.0],
    torch.float16: [0.0, 64.0],
}


def of_type(dtype, shape=(1,), samples=None):
    """Specs of one entry, and a normaliser of it that has seen some values."""
    spec = Unbounded(shape, dtype=dtype) if dtype.is_floating_point else Bounded(-1, 1, shape, dtype=dtype)
    normalizer = ObservationNormalizer(EnvironmentSpecs(Composite(clock=spec), Categorical(2), 1), True, 10.0)
    if samples is not None:
        normalizer.advance({"clock": Moments.from_samples(samples)})
    return normalizer


@pytest.mark.parametrize(("dtype", "offset"), [(dtype, each) for dtype, several in OFFSETS.items() for each in several])
def test_small_differences_at_a_large_offset_are_kept(dtype, offset):
    steps = torch.arange(60).remainder(5).sub(2)[:, None]
    values = (steps.double() * (1 if not dtype.is_floating_point else 0.5)).add(offset).to(dtype)
    if dtype is torch.int64:
        values = (steps + offset).to(dtype)
    normalizer = of_type(dtype, samples=values)
    expected = steps / steps.double().std(correction=0)
    for seen in (values, values.t().contiguous().t(), values.expand(60, 3)[:, ::3]):  # by the kernel, or by torch
        result = normalizer.normalize("clock", seen)
        assert result.dtype is torch.float32
        torch.testing.assert_close(result.double(), expected.double(), atol=1e-4, rtol=0)
    result, refresh = normalizer.bind_value("clock", values)
    refresh()
    assert torch.equal(result, normalizer.normalize("clock", values))
    program = standardize_traceable(values, *normalizer.constants("clock"), 10.0)
    assert torch.equal(program, normalizer.normalize("clock", values))


@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -123456.789, 1700000037.25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_constant_becomes_exactly_zero(dtype, value):
    constant = torch.full((100, 1), value, dtype=torch.float64)
    constant = (constant.clamp(-6e4, 6e4) if dtype is torch.float16 else constant).to(dtype)
    normalizer = of_type(dtype)
    for part in constant.split([1, 3, 7, 89]):
        normalizer.advance({"clock": Moments.from_samples(part)})
        assert (normalizer.normalize("clock", constant) == 0).all()
    again = ObservationNormalizer.from_state(
        EnvironmentSpecs(Composite(clock=Unbounded(1, dtype=dtype)), Categorical(2), 1), normalizer.moments_state()
    )
    assert (again.normalize("clock", constant) == 0).all()


def test_type_of_the_values_counts_and_not_that_of_the_spec():
    steps = torch.arange(9).remainder(3).sub(1)[:, None]
    wide = steps.double() + 1700000037
    normalizer = of_type(torch.float32, samples=wide)
    for values in (wide, steps + 1700000037):
        assert normalizer.normalize("clock", values).unique().numel() == 3


def test_single_precision_is_scaled_in_single_precision():
    rows = torch.randn(200, 3) * torch.tensor([1.0, 10.0, 0.01]) + torch.tensor([4.0, -1e3, 7e4])
    normalizer = of_type(torch.float32, (3,), rows)
    moments = normalizer.moments["clock"]
    mean, factor = moments.mean.float(), (moments.variance + normalizer.epsilon).rsqrt().float()
    expected = ((rows - mean) * factor).clamp(-10.0, 10.0)
    assert torch.equal(normalizer.normalize("clock", rows), expected)
    assert torch.equal(standardize_traceable(rows, *normalizer.constants("clock"), 10.0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinite_values_are_clipped_at_a_large_offset(dtype):
    normalizer = of_type(dtype, samples=torch.tensor([[1e9], [1e9 + 512]], dtype=dtype))
    for offset in (0, 1):  # aligned for the kernel, or not contiguous
        values = torch.tensor([[torch.inf, 0], [-torch.inf, 0], [1e9 + 256, 0]], dtype=dtype)[:, : 1 + offset][:, :1]
        assert normalizer.normalize("clock", values).flatten().tolist() == [10.0, -10.0, 0.0]


def test_default_type_does_not_change_the_bits():
    rows = torch.randn(50, 3)
    expected = of_type(torch.float32, (3,), rows).normalize("clock", rows)
    torch.set_default_dtype(torch.float64)
    try:
        result = of_type(torch.float32, (3,), rows).normalize("clock", rows)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(result, expected)


def test_epsilon_bounds_how_much_what_hardly_varies_is_enlarged():
    rows = {"position": torch.tensor([1.0, 2.0, 3.0]).repeat(4, 1)}
    given = ObservationNormalizer(SPECS, ["position"], 5.0, 1e-4)
    given.advance({key: Moments.from_samples(value) for key, value in rows.items()})
    near = torch.tensor([1.0, 2.02, 2.99])
    torch.testing.assert_close(given.normalize("position", near), torch.tensor([0.0, 2.0, -1.0]), atol=1e-4, rtol=0)
    assert advanced(["position"], rows).normalize("position", near).tolist() == [0.0, 5.0, -5.0]
    again = ObservationNormalizer.from_state(SPECS, given.moments_state())
    assert torch.equal(again.normalize("position", near), given.normalize("position", near))


def test_observations_are_only_clipped_before_the_first_sample():
    normalizer = ObservationNormalizer(SPECS, ["position"], 5.0)
    assert normalizer.normalize("position", torch.tensor([1.0, 9.0, -2.0])).tolist() == [1.0, 5.0, -2.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.int64])
def test_output_is_single_precision_for_all_inputs(dtype):
    normalizer = advanced(["position"], {"position": torch.rand(9, 3)})
    assert normalizer.normalize("position", torch.ones(3, dtype=dtype)).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_row_and_a_rollout_come_out_in_the_same_bits(dtype):
    normalizer = advanced(["position"], {"position": torch.randn(50, 3) * 100})
    rollout = (torch.randn(6, 5, 3, dtype=torch.float64) * 300).to(dtype)
    whole = normalizer.normalize("position", rollout.transpose(0, 1))
    rows = torch.stack([normalizer.normalize("position", rows) for rows in rollout], 1)
    assert torch.equal(whole, rows)
    assert whole.abs().max() == 5.0


def test_specs_show_what_a_learner_sees():
    specs = ObservationNormalizer(SPECS, ["image", ("inner", "speed")], 5.0).specs
    assert specs.observation["image"] == Bounded(-5.0, 5.0, (2, 2), dtype=torch.float32)
    assert specs.observation["inner", "speed"] == Bounded(-5.0, 5.0, (2,), dtype=torch.float32)
    assert specs.observation["position"] == SPECS.observation["position"]
    assert SPECS.observation["image"].dtype is torch.uint8


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (True, r"normalize_observation=True cannot normalise 'goal'.*normalize_observation=\['position', 'image'"),
        (["goal"], r"normalize_observation=\['goal'\] cannot normalise 'goal'"),
        (["positon"], r"normalize_observation must name .*, got 'positon'"),
    ],
)
def test_categorical_or_missing_observation_is_rejected(keys, message):
    with pytest.raises(ValueError, match=message):
        ObservationNormalizer(SPECS, keys, 5.0)


def test_state_and_specs_make_the_same_normaliser():
    normalizer = advanced(["position", ("inner", "speed")], {"position": torch.rand(9, 3)})
    again = ObservationNormalizer.from_state(SPECS, normalizer.moments_state())
    assert again.specs.observation == normalizer.specs.observation
    value = torch.rand(4, 3)
    assert torch.equal(again.normalize("position", value), normalizer.normalize("position", value))
    with pytest.raises(ValueError, match="normalize_observation"):
        ObservationNormalizer(SPECS, ["position"], 5.0).load_moments(normalizer.moments_state())


class Echo(nn.Module):
    """Writes what it sees as its action, without a way to act on a step."""

    def forward(self, tensordict):
        tensordict["seen"] = tensordict["position"].clone()
        return tensordict


def test_policy_sees_normalised_entries_and_the_environments_stay_raw():
    normalizer = advanced(["position"], {"position": torch.rand(9, 3)})
    policy = NormalizedPolicy(Echo(), normalizer)
    raw = torch.rand(2, 3)
    data = TensorDict({"position": raw.clone(), "goal": torch.zeros(2)}, [2])
    policy(data)
    assert torch.equal(data["position"], raw)
    assert torch.equal(data["seen"], normalizer.normalize("position", raw))
    assert normalizes(policy)
    assert normalizes(nn.Sequential(policy))
    assert not normalizes(Echo())


class Watching(TensorDictModule):
    """Keeps what it sees, and goes left."""

    def __init__(self):
        super().__init__(
            lambda seen: (seen.clone(), seen[..., 0].long() * 0), in_keys=["observation"], out_keys=["seen", "action"]
        )


class Bare(Watching):
    """Acts on a step without writing into it."""

    def compute_step(self, step):
        return {"seen": step["observation"].clone(), "action": step["observation"][..., 0].long() * 0}


def test_hook_that_comes_later_sees_each_step():
    collector = GymnasiumCollector("CartPole-v1", num_envs=2, frames_per_batch=4, seed=0)
    policy, seen = Bare(), []
    collector.policy = NormalizedPolicy(policy, ObservationNormalizer(collector.specs, True, 10.0))
    collector.rollout()
    policy.register_forward_hook(lambda module, args, output: seen.append(args))
    collector.rollout()
    collector.shutdown()
    assert len(seen) == 2


@pytest.mark.parametrize("kind", [Watching, Bare])
def test_rollouts_of_a_normalized_policy_are_raw_and_equal_the_learners_inputs(kind):
    collector = GymnasiumCollector("CartPole-v1", num_envs=2, frames_per_batch=40, seed=0)
    normalizer = ObservationNormalizer(collector.specs, True, 10.0)
    normalizer.advance({"observation": Moments.from_samples(torch.rand(50, 4))})
    collector.policy = NormalizedPolicy(kind(), normalizer)
    batch = collector.rollout()
    collector.shutdown()
    seen = batch.copy()
    normalizer.normalize_(seen)
    assert not torch.equal(seen["observation"], batch["observation"])
    assert torch.equal(seen["observation"], batch["seen"])
    assert torch.equal(seen["next", "observation"][:, 0], batch["seen"][:, 1])
    assert (batch["observation"][:, 0].abs() < 0.1).all()


def test_statistics_travel_with_the_weights():
    normalizer = advanced(["position"], {"position": torch.rand(9, 3)})
    policy, copy = (
        NormalizedPolicy(Echo(), each) for each in (normalizer, ObservationNormalizer(SPECS, ["position"], 5.0))
    )
    copy.load_state_dict(policy.state_dict())  # as a worker takes them
    raw = TensorDict({"position": torch.rand(2, 3)}, [2])
    assert torch.equal(copy(raw.clone())["seen"], policy(raw.clone())["seen"])
