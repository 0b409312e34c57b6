"""Packages of the optional extras. Tests that need a missing package are skipped."""

from __future__ import annotations

import warnings

import pytest

PACKAGES = {
    "atari": ("ale_py", "cv2"),
    "envpool": ("envpool",),
    "lunarlander": ("Box2D", "pygame"),
    "minigrid": ("minigrid",),
    "mujoco": ("mujoco", "imageio"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "ppo_minigrid_fourrooms": ("minigrid",),  # the config looks up its wrapper
    "ray": ("ray",),
    "robotics": ("gymnasium_robotics",),
    "video": ("moviepy", "pygame"),
}


def need_extra(option: str) -> None:
    """Skip the test if a package that a config option needs is missing."""
    for package in PACKAGES.get(option, ()):
        with warnings.catch_warnings():
            # An import of SWIG's modules ends the process if one of their warnings is an error.
            warnings.simplefilter("ignore")
            pytest.importorskip(package)
