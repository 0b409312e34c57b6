"""MBPO: fits of its world model, imagined branches, and state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Binary, Bounded, Unbounded

from kit.ranks import of_rank
from kit.replay import fit, replay_data
from kit.specs import specs_of
from kit.world_models import POINT, pushed, walled
from torchrl_lightning.agents import CNNNetwork, MBPOModule, MLPNetwork, OutsideBox, WorldModelFit


def dynamics(**kwargs: Any) -> WorldModelFit:
    settings = {"num_members": 3, "num_elites": 2, "learning_rate": 0.03, "batch_size": 32, "max_epochs": 8}
    return WorldModelFit([16], sample=False, **(settings | kwargs))


def built(**kwargs: Any) -> MBPOModule:
    torch.manual_seed(0)
    return MBPOModule(MLPNetwork([8], "relu"), dynamics=dynamics(**kwargs)).build(POINT)


def test_successive_fits_lower_the_validation_error() -> None:
    module = built(max_epochs=1)
    module.fit_dynamics(pushed(200, 0), pushed(50, 1))
    first = module.errors.clone()
    for _ in range(15):
        module.fit_dynamics(pushed(200, 0), pushed(50, 1))
    assert (module.errors < 0.5 * first).all()


def test_fit_ends_without_improvement_and_keeps_the_best_members() -> None:
    module = built(max_epochs=50, patience=2, min_improvement=0.99)  # only the first epoch can improve that much
    module.fit_dynamics(pushed(64, 0), pushed(20, 1))
    assert module.epochs_of_fit == 3
    model = module.world_model
    validation = model.targets(pushed(20, 1))
    errors = model.ensemble.errors(validation["inputs"], validation["targets"]) / 20
    torch.testing.assert_close(errors[model.elites], module.errors)
    assert errors[model.elites].max() <= errors.max()


def test_fit_ends_after_max_epochs() -> None:
    module = built(max_epochs=3, patience=100)
    module.fit_dynamics(pushed(64, 0), pushed(20, 1))
    assert module.epochs_of_fit == 3


def test_world_model_is_not_trained_by_the_agent() -> None:
    module = built()
    trained = {parameter for group in module.parameter_groups().values() for parameter in group}
    assert trained.isdisjoint(module.world_model.parameters())
    before = [parameter.clone() for parameter in trained]
    module.fit_dynamics(pushed(64, 0), pushed(20, 1))
    assert all(torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    assert not any(parameter.requires_grad for parameter in module.world_model.parameters())


def test_branches_equal_steps_of_the_world_model() -> None:
    module = built(num_elites=1)
    module.fit_dynamics(pushed(200, 0), pushed(50, 1))
    start = pushed(7, 2)
    imagined = module.imagine(start, 3)
    assert imagined.shape == (21,)
    assert not imagined.requires_grad
    steps = imagined.view(3, 7)
    assert torch.equal(steps["observation"][0], start["observation"])
    assert torch.equal(steps["observation"][1:], steps["next", "observation"][:-1])
    assert (steps["action"].abs() <= 1).all()
    assert len(steps["action"].unique()) > 7  # the policy explores
    next_observation, reward, _ = module.world_model.step(imagined["observation"], imagined["action"])
    torch.testing.assert_close(imagined["next", "observation"], next_observation)
    torch.testing.assert_close(imagined["next", "reward"].squeeze(1), reward)
    # Branches are cut off, not terminated: values bootstrap.
    assert not any(imagined["next", name].any() for name in ("terminated", "truncated", "done"))


def test_imagined_observations_have_shapes_and_dtypes_of_real_ones() -> None:
    entries = {
        "image": Unbounded((3, 8, 8), dtype=torch.uint8),
        "height": Unbounded(()),
        "position": Unbounded(2, dtype=torch.float64),
        "ticks": Unbounded((), dtype=torch.int64),
        "bits": Binary(3, dtype=torch.int8),
        "is_lit": Bounded(0, 1, (2,), dtype=torch.bool),
    }
    torch.manual_seed(0)
    specs = specs_of(Bounded(-1.0, 1.0, (1,)), **entries)
    network = CNNNetwork([4], [4], [4], [8])
    module = MBPOModule(network, dynamics=dynamics(num_members=2)).build(specs)
    start = specs.observation.rand([6])
    start["ticks"] = torch.arange(6)
    imagined = module.imagine(start, 2)
    for key, spec in entries.items():
        before, after = imagined[key], imagined["next", key]
        assert before.shape == after.shape == (12, *spec.shape)
        assert before.dtype is after.dtype is spec.dtype
        torch.testing.assert_close(before[:6], start[key])
        assert torch.equal(before[6:], after[:6])
    moved = (imagined["next", "image"].int() - imagined["image"].int()).abs()
    assert moved.max() < 128  # no value wraps around


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
def test_branch_ends_where_the_episode_terminates(propagation: str) -> None:
    module = built(terminated=OutsideBox([0.0, None], [None, None]), propagation=propagation)
    module.fit_dynamics(pushed(200, 0), pushed(50, 1))
    start = TensorDict({"observation": torch.tensor([[1e-3, -1.0], [5.0, 0.0], [-1.0, 0.0]])}, [3])
    imagined = module.imagine(start, 4)
    ended = imagined["next", "terminated"].squeeze(1)
    assert torch.equal(ended, imagined["next", "observation"][:, 0] < 0)
    assert ended.tolist() == [True, False, True, False, False, False]
    assert torch.equal(imagined["next", "terminated"], imagined["next", "done"])
    assert module.imagine(start[[0, 2]], 4).shape == (2,)


def all_but_the_highest(observation: Tensor, action: Tensor, next_observation: Tensor) -> Tensor:
    """Terminate all branches except the highest; fail for an empty batch, like many functions."""
    return (
        next_observation[:, 0] < next_observation[:, 0].max()
        if len(next_observation) > 1
        else next_observation[:, 0] <= next_observation[:, 0].max()
    )


def test_imagination_stops_after_all_branches_have_ended() -> None:
    module = built(terminated=all_but_the_highest)
    module.fit_dynamics(pushed(200, 0), pushed(50, 1))
    imagined = module.imagine(pushed(6, 2), 5)
    # Five branches end at the first step and the last one at the second.
    ended = imagined["next", "terminated"].flatten()
    assert len(ended) == 7
    assert int(ended[:6].sum()) == 5
    assert bool(ended[6])


@pytest.mark.parametrize("probabilistic", [True, False])
def test_learnt_terminations_end_branches(probabilistic: bool) -> None:
    module = built(num_elites=1, learn_terminated=True, probabilistic=probabilistic, max_epochs=25, patience=25)
    training, validation = walled(400, 0), walled(200, 1)
    module.fit_dynamics(training, validation)  # 25 epochs of 13 batches
    world = module.world_model
    predicted = world.step(validation["observation"], validation["action"])[2]
    stored = validation["next", "terminated"].squeeze(1)
    assert 40 < int(stored.sum()) < 100
    assert (predicted == stored).float().mean() > 0.95
    imagined = module.imagine(walled(30, 2), 3)
    ends = imagined["next", "terminated"].squeeze(1)
    assert torch.equal(ends, world.step(imagined["observation"], imagined["action"])[2])
    assert torch.equal(imagined["next", "done"], imagined["next", "terminated"])
    begin, alive = 0, 30
    for _ in range(3):
        begin, alive = begin + alive, alive - int(ends[begin : begin + alive].sum())
    assert (begin, alive) == (len(imagined), 30 - int(ends.sum()))
    assert 0 < alive < 30


@pytest.mark.parametrize("learns_terminated", [False, True])
def test_state_dict_contains_the_world_model(learns_terminated: bool) -> None:
    module, other = built(learn_terminated=learns_terminated), built(learn_terminated=learns_terminated)
    module.fit_dynamics(walled(64, 0), walled(20, 1))
    other.load_state_dict(module.state_dict())
    torch.manual_seed(1)
    expected = module.imagine(pushed(5, 2), 2)
    torch.manual_seed(1)
    assert (other.imagine(pushed(5, 2), 2) == expected).all()
    assert torch.equal(other.errors, module.errors)


def test_fit_ignores_rows_before_a_reset() -> None:
    module, rows = built(), pushed(64, 0)
    rows["next", "is_init"] = torch.zeros(64, 1, dtype=torch.bool)
    rows["next", "is_init"][::2] = True
    rows["next", "observation"][::2] = torch.nan
    module.fit_dynamics(rows, pushed(20, 1))
    assert int(module.world_model.targets.input_scaler.count) == 32


def test_nonfinite_column_is_named() -> None:
    for key, name in ((("next", "reward"), "reward"), ("observation", r"observation\[0\]")):
        for side in range(2):
            parts = [pushed(64, 0), pushed(20, 1)]
            parts[side][key][3] = torch.nan
            with pytest.raises(ValueError, match=rf"{name}.*1"):
                built().fit_dynamics(*parts)


def test_diverging_fit_or_branch_raises() -> None:
    with pytest.raises(RuntimeError, match=r"diverged.*learning_rate"):
        built(learning_rate=1e30).fit_dynamics(pushed(64, 0), pushed(20, 1))
    module = built()
    module.world_model.ensemble.biases[-1].fill_(torch.inf)
    with pytest.raises(RuntimeError, match=r"world model.*step 1 of 3"):
        module.imagine(pushed(5, 0), 3)


def test_several_ranks_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"devices of the trainer must be 1 .* got 2.*devices=1"):
        fit(tmp_path, replay_data(env="Pendulum-v1"), built(), strategy=of_rank(0, 2))


@pytest.mark.parametrize(("dtype", "origin"), [(torch.float64, 1700000037.0), (torch.int64, 1_700_000_037)])
@pytest.mark.parametrize("learns_terminated", [False, True])
def test_fit_does_not_depend_on_the_origin_of_observations(
    dtype: torch.dtype, origin: float, learns_terminated: bool
) -> None:
    errors, starts = [], []
    for kind, shift in ((torch.float32, 0.0), (dtype, origin)):
        torch.manual_seed(0)
        specs = specs_of(Bounded(-1.0, 1.0, (1,)), observation=Unbounded(2, dtype=kind))
        module = MBPOModule(MLPNetwork([8], "relu"), dynamics=dynamics(learn_terminated=learns_terminated)).build(specs)
        rows = [walled(count, seed) for count, seed in ((200, 0), (50, 1), (7, 2))]
        for part in [part for row in rows for part in (row, row["next"])]:
            part["observation"] = (part["observation"].mul(100).round().to(torch.int64) + int(shift)).to(kind)
        module.fit_dynamics(rows[0], rows[1])
        imagined = module.imagine(rows[2], 3)
        assert imagined["observation"].dtype is imagined["next", "observation"].dtype is kind
        assert imagined["next", "reward"].dtype is torch.float32
        errors.append(module.errors.clone())
        starts.append((imagined["next", "observation"][:7].double() - imagined["observation"][:7].double()).abs())
    torch.testing.assert_close(errors[1], errors[0], atol=1e-3, rtol=0.02)
    assert starts[1].max() < 2 * starts[0].max() + 1.0
    assert starts[1].max() > 0.0
