"""The page that a run writes about its buffer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from kit.actor_critic import fit as fit_on_policy
from kit.replay import dqn, fit, replay_data
from torchrl_lightning import BufferReport, MixedReplay
from torchrl_lightning.callbacks import buffer_report

pytestmark = pytest.mark.filterwarnings("ignore:The number of training batches")


@pytest.mark.parametrize("updates_per_step", [1, 4])
def test_report_shows_the_buffer_and_the_sample_counts(tmp_path, monkeypatch, updates_per_step):
    monkeypatch.setattr(buffer_report, "EVERY", 2)
    page = BufferReport(str(tmp_path / "pages" / "inspect.html"))
    data = replay_data("prioritized", updates_per_step=updates_per_step)
    fit(tmp_path, data, max_epochs=2, limit_val_batches=1, callbacks=[page])
    text = Path(page.path).read_text()
    assert "80 steps counted" in text  # ten of the twenty batches, with eight steps each
    assert "ages when sampled in this run" in text
    assert " of 400 cells" in text


def test_report_counts_only_the_samples_of_its_own_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(buffer_report, "EVERY", 1)
    other = replay_data()
    fit(tmp_path / "other", other, max_epochs=1)
    page = BufferReport(str(tmp_path / "inspect.html"))
    data = replay_data(source=partial(MixedReplay, others=[other.buffer], ratios=[0.5, 0.5]))
    fit(tmp_path, data, max_epochs=2, limit_val_batches=1, callbacks=[page])
    assert "80 steps counted" in Path(page.path).read_text()  # of twenty batches, with four steps of each buffer


def test_run_is_the_same_with_a_report(tmp_path):
    weights = []
    for callbacks in ([], [BufferReport(str(tmp_path / "inspect.html"))]):
        module = dqn()
        fit(tmp_path, replay_data("prioritized"), module, max_epochs=2, limit_val_batches=1, callbacks=callbacks)
        weights.append(torch.cat([weight.flatten() for weight in module.parameters()]))
    assert torch.equal(*weights)


def test_report_of_rollouts_has_no_sample_counts(tmp_path):
    page = BufferReport(str(tmp_path / "inspect.html"))
    fit_on_policy(tmp_path, max_epochs=1, limit_val_batches=1, callbacks=[page])
    text = Path(page.path).read_text()
    assert "rollout" in text
    assert "in this run" not in text
