"""The videos that a run writes at its evaluations."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torchrl.envs import GymEnv

from kit.actor_critic import TinyActorCritic, fit, rollouts
from torchrl_lightning import EpisodeVideo
from torchrl_lightning._core.errors import UserError

pytest.importorskip("moviepy")
pytest.importorskip("pygame")
EVALUATED = {"limit_val_batches": 1, "check_val_every_n_epoch": 1}


def test_video_of_each_nth_evaluation_leaves_the_run_unchanged(tmp_path):
    weights = []
    for callbacks in ([], [EpisodeVideo(tmp_path / "videos", every_n_evaluations=2)]):
        module, _ = fit(tmp_path, max_epochs=3, callbacks=callbacks, **EVALUATED)
        weights.append(torch.cat([weight.flatten() for weight in module.parameters()]))
    assert torch.equal(*weights)
    films = sorted((tmp_path / "videos").iterdir())
    assert [film.name for film in films] == ["frames_000000064.mp4", "frames_000000192.mp4"]
    assert all(b"ftyp" in film.read_bytes()[:12] for film in films)


def test_environment_without_video_is_refused_before_training(tmp_path):
    module = TinyActorCritic()
    data = rollouts(env=partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))
    with pytest.raises(UserError, match="got TorchRL's"):
        fit(tmp_path, data, module, max_epochs=1, callbacks=[EpisodeVideo(tmp_path / "videos")], **EVALUATED)
    assert module.updates == 0
    assert not (tmp_path / "videos").exists()


def test_full_disk_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "videos").write_text("no folder")
    module, _ = fit(tmp_path, max_epochs=1, callbacks=[EpisodeVideo(tmp_path / "videos")], **EVALUATED)
    assert module.updates == 4
    assert "is not written" in caplog.text
