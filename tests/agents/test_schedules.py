from __future__ import annotations

import pytest
import torch

from kit.runs import SaveAt, trainer
from torchrl_lightning import OnPolicyDataModule
from torchrl_lightning.agents import CosineSchedule, LinearSchedule, MLPNetwork, PPOModule

ROLLOUT, UPDATES = 32, 4


class Recorder(PPOModule):
    """Record the learning rate and the entropy coefficient of each update."""

    def __init__(self, **kwargs):
        super().__init__(MLPNetwork([4]), entropy_coeff=1.0, **{"schedule": "linear", **kwargs})
        self.used = []

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.used.append((self.optimizers().param_groups[0]["lr"], float(self.entropy_coeff)))


def data(**kwargs):
    sizes = {"num_envs": 2, "frames_per_batch": ROLLOUT, "num_mini_batch": 2, "num_epochs": UPDATES // 2}
    return OnPolicyDataModule("CartPole-v1", eval_episodes=1, seed=0, **sizes, **kwargs)


def fit(module, source, ckpt_path=None, **kwargs):
    trainer(**{"max_epochs": -1, "limit_val_batches": 1, **kwargs}).fit(module, datamodule=source, ckpt_path=ckpt_path)


@pytest.mark.parametrize("limit", [{"max_epochs": 0}, {"max_steps": 0}])
def test_run_without_epochs_or_steps_has_a_known_length(limit):
    module = Recorder()
    fit(module, data(), **limit)
    assert module.used == []


@pytest.mark.parametrize(
    ("frames", "end"), [(4 * ROLLOUT, {}), (-1, {"max_epochs": 4}), (-1, {"max_steps": 4 * UPDATES})]
)
def test_schedule_decreases_until_the_end_of_the_frames_or_of_the_trainer(frames, end):
    module = Recorder(entropy_schedule="linear")
    fit(module, data(total_frames=frames), **end)
    left = [1 - epoch / 4 for epoch in range(4) for _ in range(UPDATES)]
    rates, coefficients = zip(*module.used, strict=True)
    assert rates == pytest.approx([3e-4 * share for share in left])
    assert coefficients == pytest.approx(left)


@pytest.mark.parametrize("name", ["schedule", "entropy_schedule", "clip_schedule"])
def test_schedule_of_a_run_without_an_end_is_refused(name):
    module, source = Recorder(**{"schedule": "constant", name: "cosine"}), data()
    with pytest.raises(ValueError, match=r"schedule.*total_frames.*max_epochs"):
        fit(module, source, max_time="00:00:00:02")
    assert source.frames == 0


def test_stopped_epoch_stays_stopped_after_a_resume(tmp_path):
    class Stopping(Recorder):
        stops = True

        def should_stop(self, terms):
            return self.stops and len(self.used) == 1

    def run(ckpt_path=None, stops=True, **kwargs):
        torch.manual_seed(0)
        module = Stopping()
        module.stops = stops
        fit(module, data(total_frames=2 * ROLLOUT, reset_at_each_batch=True), ckpt_path, **kwargs)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    uninterrupted = run()
    save = SaveAt(tmp_path / "at.ckpt", "on_train_batch_end", 3, then="fail")
    with pytest.raises(RuntimeError, match="stopped"):
        run(callbacks=[save])
    assert torch.equal(run(save.path, stops=False), uninterrupted)


@pytest.mark.parametrize("kind", [LinearSchedule, CosineSchedule])
def test_schedule_stays_at_its_ends(kind):
    schedule = kind(0.25)
    assert [schedule(progress) for progress in (-0.5, 0.0, 1.0, 1.5)] == pytest.approx([1.0, 1.0, 0.25, 0.25])
