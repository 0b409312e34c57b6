"""What is filmed, and what is refused."""

from __future__ import annotations

import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv

from torchrl_lightning import EnvironmentRecipe
from torchrl_lightning._core.errors import UserError
from torchrl_lightning.collectors.video import check_renderable, record_video
from torchrl_lightning.environments.env_errors import EnvironmentFault

pytest.importorskip("moviepy")


class Drawn(gymnasium.Env):
    """Five steps long; draws the number of its step, or what it is told to."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}
    observation_space = gymnasium.spaces.Box(0, 9, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, drawn=None):
        self.render_mode, self.drawn, self.step_number = render_mode, drawn, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_number = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.step_number += 1
        return np.zeros(1, np.float32), 1.0, self.step_number == 5, False, {}

    def render(self):
        if isinstance(self.drawn, Exception):
            raise self.drawn
        return np.full((32, 48, 3), 40 * self.step_number, np.uint8) if self.drawn is None else self.drawn


LEFT = TensorDictModule(lambda x: x[..., 0].long() * 0, in_keys=["observation"], out_keys=["action"])


def test_video_has_one_frame_for_each_state_of_an_episode(tmp_path):
    from moviepy import VideoFileClip

    path = tmp_path / "films" / "one.mp4"
    before = torch.random.get_rng_state()
    check_renderable(Drawn)
    record_video(EnvironmentRecipe(Drawn, frame_stack=1), LEFT, path, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [each.name for each in path.parent.iterdir()] == ["one.mp4"]
    with VideoFileClip(str(path)) as clip:
        shades = [int(frame.mean()) for frame in clip.iter_frames()]
        assert (clip.fps, clip.size) == (5, [48, 32])
    assert len(shades) == 6
    assert shades == sorted(shades)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (partial(GymEnv, "CartPole-v1"), "a video needs a Gymnasium environment, got TorchRL's "),
        (partial(Drawn, drawn="text"), "render_mode='rgb_array', got str. Remove the video."),
        (partial(Drawn, drawn=RuntimeError("no\ndisplay")), "failed: no display"),
        (lambda: Drawn(), "failed: .*unexpected keyword argument 'render_mode'"),
        (SyncVectorEnv([Drawn]), "eval_env must be an id or a factory"),
    ],
)
def test_environment_without_images_is_rejected_by_one_line(env, message):
    with pytest.raises(UserError, match=message) as refused:
        check_renderable(env)
    assert "\n" not in str(refused.value)


def test_video_without_its_extra_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", None)
    with pytest.raises(UserError, match=r"'torchrl-lightning\[video\]'"):
        check_renderable("CartPole-v1")


class Torn(Drawn):
    def step(self, action):
        if self.step_number == 2:
            raise RuntimeError("torn")
        return super().step(action)


def test_video_that_fails_leaves_no_file(tmp_path):
    with pytest.raises(EnvironmentFault, match="torn"):
        record_video(Torn, LEFT, tmp_path / "one.mp4", seed=0)
    assert list(tmp_path.iterdir()) == []
