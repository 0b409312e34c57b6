"""Packages of extras: tests that need one are skipped without it."""

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
    "ppo_minigrid_fourrooms": ("minigrid",),  # whose wrapper is looked up
    "ray": ("ray",),
    "robotics": ("gymnasium_robotics",),
    "video": ("moviepy", "pygame"),
}


def need_extra(option: str) -> None:
    """Skip the test if a package is missing that an option of a group of configs needs."""
    for package in PACKAGES.get(option, ()):
        with warnings.catch_warnings():
            # SWIG's modules end the process where one of their warnings is an error.
            warnings.simplefilter("ignore")
            pytest.importorskip(package)
