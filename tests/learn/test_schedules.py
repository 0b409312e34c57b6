from __future__ import annotations

import pytest
import torch

from kit.runs import SaveAt, trainer
from torchrl_lightning import OnPolicyDataModule
from torchrl_lightning.learn import MLPNetwork, PPOModule

ROLLOUT, UPDATES = 32, 4


class Recorder(PPOModule):
    """Notes what each update was made with."""

    def __init__(self, **kwargs):
        super().__init__(MLPNetwork([4]), entropy_coeff=1.0, schedule="linear", **kwargs)
        self.used = []

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.used.append((self.optimizers().param_groups[0]["lr"], float(self.entropy_coeff)))


def data(**kwargs):
    sizes = {"num_envs": 2, "frames_per_batch": ROLLOUT, "num_mini_batch": 2, "num_epochs": UPDATES // 2}
    return OnPolicyDataModule("CartPole-v1", eval_episodes=1, seed=0, **sizes, **kwargs)


def fit(module, source, ckpt_path=None, **kwargs):
    trainer(**{"max_epochs": -1, "limit_val_batches": 1, **kwargs}).fit(module, datamodule=source, ckpt_path=ckpt_path)


def falling(epochs):
    rates = [3e-4 * (1 - epoch / epochs) for epoch in range(epochs)]
    return pytest.approx([rate for rate in rates for _ in range(UPDATES)])


@pytest.mark.parametrize(
    ("hook", "count", "made"),
    [
        ("on_train_batch_end", 2 * UPDATES, 8),  # behind an epoch's last batch
        ("on_validation_end", 2, 8),
        ("on_train_epoch_end", 2, 8),
        ("on_train_batch_end", 2 * UPDATES - 1, 7),
        ("on_train_batch_start", UPDATES + 1, 4),  # before the first update of a rollout
    ],
)
@pytest.mark.parametrize("end", ["frames", "epochs"])
def test_schedules_go_on_where_a_checkpoint_was_written(hook, count, made, end, tmp_path):
    frames, epochs = (4 * ROLLOUT, -1) if end == "frames" else (-1, 4)
    save = SaveAt(tmp_path / "at.ckpt", hook, count, then="fail")
    with pytest.raises(RuntimeError, match="stopped"):
        fit(Recorder(entropy_schedule="linear"), data(total_frames=frames), callbacks=[save], max_epochs=epochs)
    module = Recorder(entropy_schedule="linear")
    fit(module, data(total_frames=frames), save.path, max_epochs=epochs)
    rates, coefficients = zip(*module.used, strict=True)
    assert [*falling(4).expected[:made], *rates] == falling(4)
    assert [coefficient * 3e-4 for coefficient in coefficients] == pytest.approx(rates)


@pytest.mark.parametrize("end", [{"max_epochs": 4}, {"max_steps": 4 * UPDATES}])
def test_without_total_frames_a_schedule_takes_the_trainers_end(end):
    module = Recorder()
    fit(module, data(), **end)
    assert [rate for rate, _ in module.used] == falling(4)


@pytest.mark.parametrize("schedules", [{}, {"entropy_schedule": "cosine"}, {"clip_schedule": lambda progress: 1.0}])
def test_a_schedule_of_a_run_without_an_end_is_refused(schedules):
    module, source = Recorder(**schedules), data()
    if schedules:
        module.schedule = PPOModule().schedule
    with pytest.raises(ValueError, match=r"a schedule needs the end .* total_frames, or the trainer max_epochs"):
        fit(module, source, max_time="00:00:00:02")
    assert source.frames == 0


def test_what_a_module_leaves_out_of_an_epoch_stays_left_out_after_a_resume(tmp_path):
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

    whole = run()
    save = SaveAt(tmp_path / "at.ckpt", "on_train_batch_end", 3, then="fail")
    with pytest.raises(RuntimeError, match="stopped"):
        run(callbacks=[save])
    assert torch.equal(run(save.path, stops=False), whole)
