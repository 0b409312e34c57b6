"""Configs that share loaded files are independent, and a config that was kept belongs to its own request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from cli.commands import unchanged_process
from kit.store import only_our_schemas
from torchrl_lightning._hydra.compat import initialized
from torchrl_lightning._hydra.paths import CONF_DIR
from torchrl_lightning.cli.config.compose import CommandLoader


@pytest.fixture
def loader() -> Iterator[CommandLoader]:
    with only_our_schemas(), unchanged_process(), initialized(str(CONF_DIR), "train", None) as hydra:
        yield CommandLoader(hydra.config_loader, resumes=True)


def run_config(loader: CommandLoader, *overrides: str) -> DictConfig:
    return loader.load_configuration("train", list(overrides), RunMode.RUN)


def test_later_configs_do_not_see_changes_of_an_earlier_one(loader: CommandLoader) -> None:
    first = run_config(loader, "experiment=sac_pendulum")
    expected = OmegaConf.to_yaml(first)
    with open_dict(first.hydra):
        first.model.gamma = 0.5
        first.data.batch_size = 1
        first.hydra.job.name = "changed"
    assert OmegaConf.to_yaml(run_config(loader, "experiment=sac_pendulum")) == expected


def test_store_of_schemas_is_not_changed_by_a_config(loader: CommandLoader) -> None:
    node = ConfigStore.instance().load("torchrl_lightning/schema/buffer/experience.yaml").node
    expected = OmegaConf.to_yaml(node)
    node.n_steps = 7
    again = ConfigStore.instance().load("torchrl_lightning/schema/buffer/experience.yaml").node
    assert OmegaConf.to_yaml(again) == expected


def test_kept_config_is_returned_once_and_only_for_its_overrides(loader: CommandLoader) -> None:
    assert loader.mode("train", ["seed=1"]) == RunMode.RUN
    kept = run_config(loader, "seed=1")
    assert kept.seed == 1
    assert run_config(loader, "seed=1") is not kept
    loader.mode("train", ["seed=1"])
    assert run_config(loader, "seed=2").seed == 2
    assert run_config(loader, "seed=1") is not kept


@pytest.mark.parametrize("is_next", [True, False])
def test_checked_job_is_composed_again_unless_it_runs_next(is_next: bool, loader: CommandLoader) -> None:
    sweep = loader.load_configuration("train", ["seed=1,2", "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
    loader.check_sweep_config(sweep, ["seed=2"], is_next)
    composed: list[list[str]] = []
    compose = loader._compose
    loader._compose = lambda lines, request: composed.append(lines) or compose(lines, request)  # type: ignore
    assert [loader.load_sweep_config(sweep, ["seed=2"]).seed for _ in range(2)] == [2, 2]
    assert len(composed) == (1 if is_next else 2)
