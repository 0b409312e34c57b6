"""Inputs and targets of transitions."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)

from kit.dynamics import golden, golden_slice, rows
from torchrl_lightning import DynamicsTargets, ExperienceBuffer, RingStorage
from torchrl_lightning.rollout.pytorchrl_names import from_documented

PLAIN = Composite(observation=Unbounded(3))


def plain(**options):
    return DynamicsTargets(PLAIN, Unbounded(2), **options)


@pytest.mark.parametrize("kind", ["learned", "given", "discrete"])
def test_inputs_and_targets_equal_golden_values(kind):
    discrete = kind == "discrete"
    arrays, data = golden(), from_documented(golden_slice("discrete_action" if discrete else "action"), 2).squeeze(1)
    reward = (lambda s, a, n: s[..., :1]) if kind == "given" else None
    action = Categorical(3) if discrete else Unbounded(2)
    targets = DynamicsTargets(Composite(observation=Unbounded(4)), action, reward=reward).fit(data)
    batch = targets(data)
    torch.testing.assert_close(batch["inputs"], arrays[f"{kind}_inputs"], rtol=1e-5, atol=1e-6)
    if discrete:
        return
    torch.testing.assert_close(batch["targets"], arrays[f"{kind}_targets"], rtol=1e-5, atol=1e-6)
    for scaler, name in ((targets.input_scaler, "input"), (targets.target_scaler, "target")):
        torch.testing.assert_close(scaler.mean.float(), arrays[f"{kind}_{name}_mu"][0])
        torch.testing.assert_close(scaler.std.float(), arrays[f"{kind}_{name}_std"][0])


@pytest.mark.parametrize(
    ("spec", "action", "columns"),
    [
        (Categorical(3), [2, 0], [[0, 0, 1], [1, 0, 0]]),
        (Categorical(3), [[2.0], [0.0]], [[0, 0, 1], [1, 0, 0]]),
        (Categorical(2, shape=(2,)), [[1, 0]], [[0, 1, 1, 0]]),
        (MultiCategorical([2, 3]), [[1, 2]], [[0, 1, 0, 0, 1]]),
        (OneHot(3), [[False, True, False]], [[0, 1, 0]]),
        (MultiOneHot([2, 3]), [[0, 1, 0, 0, 1]], [[0, 1, 0, 0, 1]]),
        (Binary(3), [[1, 1, 0]], [[1, 1, 0]]),
        (Bounded(-1, 1, (2,)), [[0.5, -0.5]], [[0.5, -0.5]]),
        (Bounded(-1, 1, ()), [0.5], [[0.5]]),
    ],
)
def test_actions_are_converted_to_columns_by_their_spec(spec, action, columns):
    targets = DynamicsTargets(PLAIN, spec)
    action = torch.tensor(action)
    assert targets.action(action, action.shape[:1]).tolist() == columns
    assert len(targets.input_columns) == 3 + len(columns[0])


@pytest.mark.parametrize(
    ("spec", "action", "message"),
    [
        (Categorical(3), [1, 3], r"the spec Categorical of 3, got \[3\]"),
        (Categorical(3), [-1], r"the spec .*got \[-1\]"),
        (Categorical(3), [0.5], r"the spec .*got \[0.5\]"),
        (MultiCategorical([2, 3]), [[1, 2], [2, 2]], r"of 2 and 3, got \[2, 2\]"),
        (OneHot(3), [[1, 1, 0]], r"OneHot of 3, got \[1, 1, 0\]"),
        (Binary(2), [[1, 2]], r"the spec .*got \[1, 2\]"),
        (Categorical(3), [[0, 1]], r"'action' must have 1 numbers per row, got 2"),
    ],
)
def test_action_outside_the_spec_is_rejected(spec, action, message):
    action = torch.tensor(action)
    with pytest.raises(ValueError, match=message):
        DynamicsTargets(PLAIN, spec).action(action, action.shape[:1])


def test_observations_are_flattened_in_order_and_restored():
    spec = Composite(b=Unbounded((2, 2)), a=Unbounded(()), nested=Composite(c=Unbounded(1)))
    targets = DynamicsTargets(spec, Categorical(2), observation_keys=["b", ("nested", "c"), "a"])
    names = ("b[0]", "b[1]", "b[2]", "b[3]", "nested.c[0]", "a")
    assert targets.observation_columns == names
    assert targets.input_columns == (*names, "action[0]", "action[1]")
    assert targets.target_columns == (*names, "reward")
    data = {"b": torch.arange(8.0).view(2, 2, 2), "a": torch.tensor([8, 9]), "nested": {"c": torch.ones(2, 1)}}
    columns = targets.observation(TensorDict(data, [2]))
    assert columns[1].tolist() == [4, 5, 6, 7, 1, 9]
    for key, value in targets.split(columns).items():
        assert value.tolist() == TensorDict(data, [2])[key].tolist()
    for key, value in targets.split(columns[1]).items():  # without a batch dimension
        assert torch.equal(value, TensorDict(data, [2])[key][1].float())


@pytest.mark.parametrize(
    ("spec", "reads"),
    [
        (Unbounded(3), [-0.6, 0.5, 300.0]),
        (Unbounded(3, dtype=torch.float64), [-0.6, 0.5, 300.0]),
        (Unbounded(3, dtype=torch.uint8), [0, 0, 255]),
        (Unbounded(3, dtype=torch.int16), [-1, 0, 300]),
        (Binary(3, dtype=torch.bool), [False, False, True]),
    ],
)
def test_columns_are_converted_to_observation_dtypes(spec, reads):
    targets = DynamicsTargets(Composite(a=spec), Unbounded(1))
    observed = targets.observed(torch.tensor([-0.6, 0.5, 300.0]))["a"]
    assert observed.dtype is spec.dtype
    torch.testing.assert_close(observed, torch.tensor(reads, dtype=spec.dtype))


@pytest.mark.parametrize("spec", [Categorical(3), Categorical(2, shape=(2,)), MultiCategorical([2, 3])])
def test_categorical_observations_are_rejected(spec):
    targets = DynamicsTargets(Composite(a=Binary(2), b=OneHot(3), kind=spec), Categorical(2))
    assert "the observation 'kind' is discrete" in targets.incompatibility()
    options = {"observation_keys": ["a", "b"]}
    assert (
        DynamicsTargets(Composite(a=Binary(2), b=OneHot(3), kind=spec), Categorical(2), **options).incompatibility()
        is None
    )


def test_rollout_equals_its_rows():
    data = rows(6)
    targets = plain(terminated=True).fit(data)
    flat, wide = targets(data.clone()), targets(data.reshape(3, 2))
    for key in ("inputs", "targets", "terminated"):
        assert wide[key].shape[:2] == (3, 2)
        assert torch.equal(wide[key].flatten(0, 1), flat[key])


def test_inverse_returns_the_next_observation():
    data = rows(50)
    targets = plain().fit(data)
    observation, reward = targets.inverse(data["observation"], targets(data)["targets"])
    torch.testing.assert_close(observation, data["next", "observation"])
    torch.testing.assert_close(reward, data["next", "reward"])
    analytic = plain(reward=lambda s, a, n: s).fit(data)
    assert analytic.inverse(data["observation"], analytic(data)["targets"])[1] is None


def test_inputs_do_not_read_the_next_step():
    data = rows(5)
    targets = plain().fit(data)
    assert torch.equal(targets.inputs(data.select("observation", "action")), targets(data)["inputs"])


def test_scalers_have_the_statistics_of_the_fitted_rows():
    data = rows(40)
    batch = plain().fit(data[:20])(data)
    torch.testing.assert_close(batch["inputs"][:20].mean(0), torch.zeros(5), atol=1e-6, rtol=0.0)
    assert batch["inputs"][20:].mean(0).abs().max() > 1e-3


def test_rows_before_a_reset_are_not_fitted():
    data = rows(30)
    is_reset = torch.zeros(30, 1, dtype=torch.bool)
    is_reset[7] = True
    marked = data.clone()
    marked["next", "is_init"] = is_reset
    marked["next", "observation"][7] = torch.nan
    targets = plain()
    assert targets.usable(data).all()
    assert targets.usable(marked).logical_not().nonzero().flatten().tolist() == [7]
    targets.fit(marked)
    expected = plain().fit(data[~is_reset.flatten()])
    assert torch.equal(targets.target_scaler.mean, expected.target_scaler.mean)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("observation", r"observation\[1\]"),
        (("next", "observation"), r"next observation\[1\]"),
        ("action", r"action\[1\]"),
        (("next", "reward"), "reward"),
    ],
)
def test_infinite_number_raises_with_its_column(key, name):
    data = rows(10)
    data[key][3, -1 if key == ("next", "reward") else 1] = torch.nan
    with pytest.raises(ValueError, match=rf"{name}.*1.*10"):
        plain().fit(data)


def test_missing_entry_is_rejected_by_name():
    with pytest.raises(KeyError, match=r"the entry .*action"):
        plain()(rows(3).exclude("action"))
    with pytest.raises(KeyError, match=r"the entry .*next"):
        plain()(rows(3).exclude(("next", "observation")))
    with pytest.raises(ValueError, match=r"'observation'.*3.*got 4"):
        plain()(rows(3, width=4))


def test_buffer_transform_writes_targets_and_saves_scalers():
    (buffer, targets), (other, _) = (
        (ExperienceBuffer(storage=RingStorage(20), transform=transform, batch_size=8), transform)
        for transform in (plain(), plain())
    )
    buffer.extend(rows(20))
    targets.fit(rows(20))
    state = buffer.state_dict()
    batch = buffer.sample()
    assert torch.equal(batch["targets"], targets(batch.clone())["targets"])
    other.load_state_dict(state)
    assert torch.equal(other.sample()["inputs"], batch["inputs"])


def moved(data, offset, dtype):
    """Return the same transitions with another dtype and offset of the first observation column."""
    data = data.clone()
    for part in (data, data["next"]):
        part["observation"] = (part["observation"] * 8).round()
        part["near"] = part["observation"][:, :1].to(torch.int64 if not dtype.is_floating_point else dtype) + offset
        part["near"] = part["near"].to(dtype)
        part["far"] = part["observation"][:, 1:]
        del part["observation"]
    return data


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [(torch.float64, 1700000037.0), (torch.int64, 1_700_000_037), (torch.int32, 1_700_000_037), (torch.float64, 0.0)],
)
@pytest.mark.parametrize("spec_has_dtype", [True, False])
def test_inputs_and_targets_do_not_depend_on_the_offset(dtype, offset, spec_has_dtype):
    near = Unbounded(
        1, dtype=dtype if spec_has_dtype else torch.float32
    )  # also for rows with a wider dtype than their spec
    plain, shifted = (moved(rows(60), shift, row_dtype) for shift, row_dtype in ((0.0, torch.float32), (offset, dtype)))
    targets, expected = (
        DynamicsTargets(Composite(near=spec, far=Unbounded(2)), Unbounded(2)).fit(data)
        for spec, data in ((near, shifted), (Unbounded(1), plain))
    )
    for name in ("inputs", "targets"):
        assert targets(shifted.clone())[name].dtype is torch.float32
        torch.testing.assert_close(targets(shifted.clone())[name], expected(plain.clone())[name], atol=1e-5, rtol=1e-5)
    prediction = targets(shifted.clone())["targets"]
    next_observation, reward = targets.inverse(targets.observation(shifted), prediction)
    torch.testing.assert_close(next_observation[:, :1], shifted["next", "near"].double(), atol=1e-5, rtol=0.0)
    if spec_has_dtype:
        assert torch.equal(
            targets.observed(next_observation)["near"].round().double(), shifted["next", "near"].double()
        )
    torch.testing.assert_close(reward, shifted["next", "reward"], atol=1e-5, rtol=0.0)


def test_single_precision_columns_stay_single_precision():
    data = rows(20)
    targets = plain().fit(data)
    assert targets.observation(data).dtype is targets.raw_targets(data).dtype is torch.float32
    assert targets.column_dtype is torch.float32
    mean, std = targets.input_scaler.mean.float(), targets.input_scaler.std.float()
    assert torch.equal(targets(data)["inputs"], (torch.cat([data["observation"], data["action"]], 1) - mean) / std)
