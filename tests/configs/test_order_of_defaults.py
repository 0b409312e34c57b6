"""The order of ``defaults`` decides between an app's values and an option's values, for TorchRL's options and ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

OPTIONS = {
    "theirs, sampler": ("sampler", "prioritized", "alpha", 0.9),
    "ours, sampler": ("sampler", "torchrl_lightning_prioritized", "alpha", 0.9),
    "theirs, storage": ("storage", "lazy_tensor", "max_size", 9),
    "ours, storage": ("storage", "torchrl_lightning_ring", "max_size", 9),
    "theirs, replay buffer": ("replay_buffer", "base", "batch_size", 9),
    "ours, replay buffer": ("replay_buffer", "torchrl_lightning_experience", "batch_size", 9),
}


def composed_in(folder: Path, option: str, *, first: bool) -> DictConfig:
    """Compose an app that chooses an option and sets one of its values, with ``_self_`` first or last."""
    group, name, key, value = OPTIONS[option]
    entries = ["_self_", f"{group}@part: {name}"]
    lines = "".join(f"  - {entry}\n" for entry in (entries if first else reversed(entries)))
    (folder / "app.yaml").write_text(f"defaults:\n{lines}part:\n  {key}: {value}\n")
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose("app")


@pytest.mark.parametrize("option", OPTIONS)
def test_self_last_keeps_the_values_of_an_app(option, tmp_path):
    _, _, key, value = OPTIONS[option]
    assert composed_in(tmp_path, option, first=False).part[key] == value


@pytest.mark.parametrize("option", OPTIONS)
def test_self_first_replaces_the_values_of_an_app_by_the_arguments_of_the_option(option, tmp_path):
    _, _, key, value = OPTIONS[option]
    part = composed_in(tmp_path, option, first=True).part
    assert key in part
    assert OmegaConf.is_missing(part, key) or part[key] != value
