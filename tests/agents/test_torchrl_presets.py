"""Each preset of a TorchRL loss learns, updates its targets, acts, and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import IQLLoss

from kit.fake_data import FakeReplay
from kit.runs import SaveAt, trainer
from kit.specs import BOX, DISCRETE
from kit.store import composed_run
from kit.transitions import transitions
from torchrl_lightning import LossModuleAgent, RecurrentNetwork
from torchrl_lightning.deploy.weights import check_weights

CONTINUOUS = ("iql", "cql", "td3_bc", "bc", "redq", "crossq", "tqc")
CHOICES = ("discrete_iql", "discrete_cql", "discrete_sac", "c51")
TINY = ("model.network.hidden_sizes=[8]",)


def preset(name: str, *settings: str) -> Any:
    return instantiate(composed_run("~experiment", f"model={name}", *TINY, *settings).model)


def state(module: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def run(module: Any, specs: Any, *, resumed: Path | None = None, **settings: Any) -> Any:
    run = trainer(**settings)
    data = FakeReplay(specs=specs, batches=2, edit=of_two_steps)
    run.fit(module, datamodule=data, ckpt_path=resumed, weights_only=True)
    return run


def of_two_steps(batch: TensorDict) -> None:
    """Set ``steps_to_next_obs`` to two, as a buffer does."""
    batch["steps_to_next_obs"] = torch.full(batch.shape, 2)


@pytest.mark.parametrize("name", [*CONTINUOUS, *CHOICES])
def test_preset_learns_acts_and_resumes(name: str, tmp_path: Path) -> None:
    specs = BOX if name in CONTINUOUS else DISCRETE
    soon = ["model.target_updater.value_network_update_interval=1"] if name == "c51" else []
    torch.manual_seed(0)
    first, second = (preset(name, *soon).build(specs) for _ in range(2))
    before = state(first)
    run(first, specs, callbacks=[SaveAt(tmp_path / "at.ckpt", "on_train_epoch_end", then="go on")])
    after, names = state(first), [f"loss.{key}" for key, _ in first.loss.named_parameters()]
    targets = [key for key in after if ".target_" in key and key.endswith("weight")]
    assert bool(targets) == (name not in ("bc", "crossq"))
    assert names
    assert all(not torch.equal(before[key], after[key]) for key in names + targets)

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        assert specs.action.is_in(first.policy(transitions(specs, 50))["action"])
    assert first.gamma == (None if name == "bc" else 0.99)

    run(second, specs, resumed=tmp_path / "at.ckpt")
    assert all(torch.equal(value, after[key]) for key, value in state(second).items())
    check_weights(lambda: preset(name).build(specs), {"state_dict": after})


@pytest.mark.parametrize(
    ("name", "specs", "remedy"), [("bc", DISCRETE, "DQN .* model=.*temperature=0"), ("c51", BOX, "SAC or TD3")]
)
def test_unsupported_action_space_is_refused_in_one_line(name: str, specs: Any, remedy: str) -> None:
    with pytest.raises(TypeError, match=rf"^\w+Loss.*{remedy}") as error:
        preset(name).build(specs)
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match=r"network.*MLPNetwork"):
        LossModuleAgent(IQLLoss, networks={}, network=RecurrentNetwork())


def test_cql_critics_have_their_own_rate_and_the_actor_clones_if_configured() -> None:
    module = preset("cql", "model.minimised=[loss_actor_bc]")
    fitted = run(module, BOX, max_epochs=1)
    assert [optimizer.param_groups[0]["lr"] for optimizer in fitted.optimizers] == [1e-4, 3e-4]
    assert {key for key in module.last_epoch_metrics if "loss" in key} == {"train/loss_actor_bc"}
    with pytest.raises(ValueError, match=r"minimised=\['loss_bc'\].*CQLLoss"):
        preset("cql", "model.minimised=[loss_bc]").build(BOX)
