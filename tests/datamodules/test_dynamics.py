"""Fits of a dynamics model to growing experience: epochs, split, protocol, limits and resume."""

from __future__ import annotations

import logging

import lightning as L
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from kit.dynamics import model_data as any_model_data
from kit.files import through_file
from kit.ranks import of_rank
from kit.runs import SaveAt, parameters, trainer
from torchrl_lightning import (
    ExperienceBuffer,
    GymnasiumCollector,
    HoldoutSplit,
    MBReplayBuffer,
    RingStorage,
)


class Steer(nn.Module):
    def forward(self, observation):
        return observation[..., :1].clamp(-1, 1)


class Linear(L.LightningModule):
    """Linear models of Pendulum with a policy, without the optional methods of the protocol."""

    def __init__(self, members=2):
        super().__init__()
        self.weights = nn.Parameter(0.1 * torch.randn(members, 4, 4))
        self.policy = TensorDictModule(Steer(), ["observation"], ["action"])
        self.train_batches, self.val_batches = [], []

    def training_step(self, batch, batch_idx):
        self.train_batches.append((self.current_epoch, batch.clone()))
        return (batch["inputs"] @ self.weights - batch["targets"]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.val_batches.append((self.current_epoch, batch.clone()))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)

    def served(self, epoch, validation=False):
        return [batch for number, batch in (self.val_batches if validation else self.train_batches) if number == epoch]


class Stopping(Linear):
    """A model that ends each fit after its second validation."""

    def __init__(self, members=2):
        super().__init__(members)
        self.fit_is_over, self.validations, self.begun = False, 0, []

    def begin_fit(self, targets):
        self.begun.append((self.trainer.current_epoch, int(targets.input_scaler.count)))
        self.fit_is_over, self.validations = False, 0

    def on_validation_epoch_end(self):
        self.validations += 1
        self.fit_is_over = self.validations == 2


def model_data(**settings):
    """Return data of two environments: fits of three epochs read 60 rows, then 80, and so on."""
    frames = {"num_envs": 2, "warmup_frames": 60, "frames_per_fit": 20, "total_frames": -1}
    return any_model_data(**{"num_members": 2, "max_epochs_per_fit": 3, "eval_episodes": 2, **frames, **settings})


def made(cls=Linear, seed=0):
    torch.manual_seed(seed)
    return cls()


def fit(folder, data, module=None, ckpt_path=None, **kwargs):
    module = made() if module is None else module
    run = trainer(folder, **{"max_epochs": 4, "limit_val_batches": 1.0, **kwargs})
    run.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, run


# ---- passes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_epochs(tmp_path_factory):
    """Train for one fit and one epoch of the next fit; return data and module."""
    data = model_data(terminated=True)
    return data, fit(tmp_path_factory.mktemp("run"), data)[0]


def test_epochs_of_a_fit_pass_over_the_same_rows_in_another_order(four_epochs):
    data, module = four_epochs
    assert (data.frames, data.fits, data.epochs_of_fit) == (80, 2, 1)
    passes = [module.served(epoch) for epoch in range(4)]
    rows = [torch.cat([batch["inputs"] for batch in batches], 1) for batches in passes]
    sizes = [part.shape[1] for part in rows]
    assert sizes[0] == sizes[1] == sizes[2] < sizes[3]
    for batches, size in zip(passes, sizes, strict=True):
        full, rest = divmod(size, 16)
        assert [batch["inputs"].shape for batch in batches] == [(2, 16, 4)] * full + ([(2, rest, 4)] if rest else [])
        assert [batch.shape for batch in batches] == [batch["targets"].shape[:2] for batch in batches]

    def content(member):
        return sorted(map(tuple, member.tolist()))

    for member in range(2):
        assert content(rows[0][member]) == content(rows[1][member]) == content(rows[2][member])
        assert not torch.equal(rows[0][member], rows[1][member])
        assert 1 < len(set(content(rows[0][member]))) < sizes[0]  # with replacement
    assert content(rows[0][0]) != content(rows[0][1])


def test_parts_are_disjoint_keep_their_rows_and_are_standardised_by_the_training_part(four_epochs):
    data, module = four_epochs
    kept = set()
    for epoch in (0, 3):
        validation = torch.cat([batch["inputs"] for batch in module.served(epoch, validation=True)])
        training = torch.cat([batch["inputs"].flatten(0, 1) for batch in module.served(epoch)])
        assert not {tuple(row) for row in validation.tolist()} & {tuple(row) for row in training.tolist()}
        kept.add(len(validation))
    assert len(kept) == 2  # the later fit has more validation rows
    held = data.split.parts(torch.arange(60))[1]
    assert held.equal(data.split.parts(torch.arange(80))[1][: len(held)])
    rows = data.buffer.storage.get(data.split.parts(torch.arange(80))[0])
    scaler = data.targets.input_scaler
    assert int(scaler.count) == len(rows)
    torch.testing.assert_close(scaler.mean[:3], rows["observation"].double().mean(0))
    assert data.metrics()["holdout/size"] == 80 - len(rows)
    assert module.served(3)[0]["terminated"].shape == (2, 16, 1)


def test_warm_up_is_random_and_then_the_policy_acts(four_epochs):
    rows = four_epochs[0].buffer.get_all_buffer_data()
    steered = (rows["action"] == rows["observation"][..., :1].clamp(-1, 1)).all(-1)
    assert not steered[:30].any()
    assert steered[30:].all()


def test_frames_come_before_each_fit_and_returns_are_logged_once(tmp_path):
    rows = []

    class Log(L.Callback):
        def on_train_epoch_end(self, run, module):
            rows.append(run.datamodule.metrics())

    data = model_data(warmup_frames=400, frames_per_fit=400, max_epochs_per_fit=2, batch_size=64)
    fit(tmp_path, data, callbacks=[Log()])
    assert [row["frames"] for row in rows] == [400, 400, 800, 800]
    assert [row["fits"] for row in rows] == [1, 1, 2, 2]
    assert ["train/return" in row for row in rows] == [True, False, True, False]
    assert rows[0]["train/episodes"] == 2
    assert data.clock == (800, "frames")


def test_module_may_end_a_fit_and_the_run_ends_with_the_last_one(tmp_path):
    data, module = model_data(total_frames=100, max_epochs_per_fit=50), made(Stopping)
    _, run = fit(tmp_path, data, module, max_epochs=-1)
    assert [epoch for epoch, _ in module.begun] == [0, 2, 4]
    assert (run.current_epoch, data.frames, data.fits) == (6, 100, 3)
    assert [count for _, count in module.begun] == sorted(count for _, count in module.begun)
    assert len({epoch for epoch, _ in module.train_batches}) == 6


def test_fits_without_validation_have_all_epochs(tmp_path):
    data = model_data(total_frames=80)
    _, run = fit(tmp_path, data, made(Stopping), max_epochs=-1, limit_val_batches=0)
    assert (run.current_epoch, data.fits, data.frames) == (6, 2, 80)


def test_lightning_knows_the_length_of_each_epoch(tmp_path):
    seen = []

    class Lengths(L.Callback):
        def on_train_epoch_end(self, run, module):
            seen.append((run.num_training_batches, run.fit_loop.epoch_loop.batch_progress.current.completed))
            seen.append((run.num_val_batches[0], len(module.served(run.current_epoch, validation=True))))

    data = model_data(max_epochs_per_fit=1, frames_per_fit=60, batch_size=8)
    fit(tmp_path, data, callbacks=[Lengths()], num_sanity_val_steps=2)
    assert all(expected == found for expected, found in seen)
    assert len({length for length, _ in seen[::2]}) == 4
    assert len({length for length, _ in seen[1::2]}) > 1


def test_limits_of_the_trainer_hold(tmp_path):
    module, _ = fit(tmp_path, model_data(), limit_train_batches=2, check_val_every_n_epoch=2)
    assert [len(module.served(epoch)) for epoch in range(4)] == [2] * 4
    assert [bool(module.served(epoch, validation=True)) for epoch in range(4)] == [False, True, False, True]


def test_second_fit_continues_the_run(tmp_path):
    data = model_data()
    module, _ = fit(tmp_path, data, max_epochs=1)
    fit(tmp_path, data, module, max_epochs=1)
    assert (data.fits, data.epochs_of_fit, data.frames) == (1, 2, 60)
    first, second = module.served(0)[:4], module.served(0)[4:]
    assert not torch.equal(first[0]["inputs"], second[0]["inputs"])


def test_replay_buffers_of_all_kinds_are_accepted(tmp_path):
    data = model_data(buffer=lambda num_envs: ExperienceBuffer(storage=RingStorage(200), num_envs=num_envs))
    module, _ = fit(tmp_path, data, max_epochs=1)
    other, _ = fit(tmp_path, model_data(), max_epochs=1)
    assert torch.equal(parameters(module), parameters(other))


def test_evaluations_play_the_policy(tmp_path):
    class Tested(Linear):
        def test_step(self, batch, batch_idx):
            self.returns = batch["episode_return"]

    data, module = model_data(), Tested()
    _, run = fit(tmp_path, data, module, max_epochs=1)
    run.test(module, datamodule=data, verbose=False)
    assert module.returns.shape[0] == 2
    assert data.evaluate(module.policy, 3)["episode_return"].shape[0] == 3


def test_collector_that_ends_ends_the_run(tmp_path, caplog):
    def collector(policy, seed):
        return GymnasiumCollector("Pendulum-v1", policy, num_envs=2, frames_per_batch=20, total_frames=60, seed=seed)

    data = model_data(collector=collector, reset_at_each_batch=False)
    with caplog.at_level(logging.WARNING):
        module, _ = fit(tmp_path, data, max_epochs=9)
    assert "the collector ended after 60 frames" in caplog.text
    assert (data.frames, data.fits, {epoch for epoch, _ in module.train_batches}) == (60, 1, {0, 1, 2})


def test_rows_with_a_reset_as_next_observation_are_not_served(tmp_path):
    class Marks(MBReplayBuffer):
        def extend(self, data, env_ids=None, **options):
            marked = torch.zeros(*data.shape, 1, dtype=torch.bool)
            marked[:, 0] = True
            return super().extend(data.copy().set(("next", "is_init"), marked), env_ids, **options)

    data = model_data(buffer=lambda num_envs: Marks(200, num_envs=num_envs))
    module, _ = fit(tmp_path, data, max_epochs=1)
    assert len(data.buffer) == 60
    served = sum(len(batch["inputs"][0]) for batch in module.served(0))
    held_out = sum(len(batch) for batch in module.served(0, validation=True))
    assert served + held_out == 60 - 2 * 3  # three rollouts of two environments


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 60}, r"batch_size=60 must be at most .* \d+ of 60 stored"),
        ({"validation_fraction": 0.001}, "validation_fraction=0.001 .* leave none of 60 rows for validation"),
    ],
)
def test_split_parts_that_are_too_small_are_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, model_data(**settings))


@pytest.mark.parametrize("side", [0, 1], ids=["training", "validation"])
def test_stored_number_that_is_not_finite_names_its_column(side, tmp_path, monkeypatch):
    data, parts = model_data(batch_size=4), HoldoutSplit.parts

    def spoil(split, numbers):
        found = parts(split, numbers)
        data.buffer.storage.write_entry("observation", found[side][:1], torch.full((1, 3), torch.nan))
        return found

    monkeypatch.setattr(HoldoutSplit, "parts", spoil)
    with pytest.raises(ValueError, match=r"Column observation\[0\] must be finite, got nan in 1 of \d+ rows"):
        fit(tmp_path, data)


def test_several_ranks_are_refused(tmp_path):
    def no_environment():
        raise AssertionError("an environment was made")

    with pytest.raises(ValueError, match=r"devices of the trainer must be 1 .* got 2.*devices=1"):
        fit(tmp_path, model_data(env=no_environment), strategy=of_rank(0, 2))


def test_loader_outside_of_a_fit_has_one_batch():
    data = model_data()
    assert len(data.train_dataloader()) == data.batches_per_epoch == 1
    assert data.frames == 0
    data.close()


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_run_with_max_steps_resumes_where_it_ended(tmp_path):
    whole = model_data(max_epochs_per_fit=2)
    uninterrupted, _ = fit(tmp_path, whole, max_epochs=-1, max_steps=16)
    for steps in (3, 4, 9):
        saving = SaveAt(tmp_path / "at.ckpt", "on_train_end")
        fit(tmp_path, model_data(max_epochs_per_fit=2), max_epochs=-1, max_steps=steps, callbacks=[saving])
        resumed = model_data(max_epochs_per_fit=2)
        module, _ = fit(tmp_path, resumed, made(seed=99), saving.path, max_epochs=-1, max_steps=16)
        assert (resumed.frames, resumed.fits) == (whole.frames, whole.fits)
        assert torch.equal(parameters(module), parameters(uninterrupted))


def test_finished_run_collects_nothing_after_a_resume(tmp_path, caplog):
    data = model_data(total_frames=60)
    _, run = fit(tmp_path, data, max_epochs=-1)
    run.save_checkpoint(tmp_path / "end.ckpt")
    for limits in ({"max_epochs": 3}, {"max_epochs": -1}):
        other = model_data(total_frames=60)
        with caplog.at_level(logging.WARNING):
            module, _ = fit(tmp_path, other, Linear(), tmp_path / "end.ckpt", **limits)
        assert (other.frames, other.fits, module.train_batches) == (60, 1, [])
    assert "all 60 frames are collected" in caplog.text


def test_evaluation_restores_frames_and_scalers(tmp_path):
    data, other = model_data(), model_data()
    fit(tmp_path, data, max_epochs=1)
    state = through_file(data.state_dict())
    other.check_state(state)
    other.load_statistics(state)
    assert torch.equal(other.targets.target_scaler.std, data.targets.target_scaler.std)
    other.close()
