"""A stored optimizer state is checked against the run's optimizers before a checkpoint is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from kit.runs import parameters, trainer
from torchrl_lightning import OnPolicyDataModule
from torchrl_lightning.agents import MLPNetwork, PPOModule
from torchrl_lightning.agents.analytic import FusedAdam
from torchrl_lightning.agents.optimizer_states import check_optimizer_states, copy_optimizer

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "our Adam": FusedAdam,
    "Adam": optim.Adam,
    "Adam fused": partial(optim.Adam, fused=True),
    "Adam amsgrad": partial(optim.Adam, amsgrad=True),
    "AdamW": optim.AdamW,
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "SGD": optim.SGD,
    "SGD momentum": partial(optim.SGD, momentum=0.9),
    "RMSprop": optim.RMSprop,
    "RMSprop centred": partial(optim.RMSprop, momentum=0.9, centered=True),
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
    "Adafactor": optim.Adafactor,
    "LBFGS": optim.LBFGS,
}
SHAPES = ((4, 3), (4,), (2, 4, 3), ())


def make_optimizer(name: str, seed: int = 0) -> optim.Optimizer:
    generator = torch.Generator().manual_seed(seed)
    return OPTIMIZERS[name]([nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES])


def stepped(name: str, steps: int = 3, *, idle: bool = False) -> optim.Optimizer:
    optimizer = make_optimizer(name)
    for step in range(steps):

        def closure(step: int = step) -> float:
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                parameter.grad = None if idle and number == 1 else parameter.detach() / (number + 1) + 0.1 * step
            return 1.0

        closure()
        optimizer.step(closure)
    return optimizer


def state_of(name: str) -> dict[str, Any]:
    return copy.deepcopy(stepped(name).state_dict())


def check(name: str, state: Any) -> None:
    check_optimizer_states([make_optimizer(name, seed=1)], [state])


def moments(state: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the entries and the key of each state tensor with at least one dimension."""
    return [
        (entries, key)
        for entries in state["state"].values()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor) and value.ndim
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("idle", [False, True])
def test_own_states_are_accepted(name: str, idle: bool) -> None:
    if name == "LBFGS" and idle:
        idle = False  # it reads all gradients as one vector
    optimizer = stepped(name, idle=idle)
    state = copy.deepcopy(optimizer.state_dict())
    check(name, state)
    check_optimizer_states([copy_optimizer(optimizer)], [state])
    resumed = make_optimizer(name)
    resumed.load_state_dict(state)
    check(name, resumed.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fresh_and_once_stepped_states_are_accepted(name: str) -> None:
    check(name, make_optimizer(name).state_dict())
    check(name, copy.deepcopy(stepped(name, 1).state_dict()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_check_changes_neither_the_optimizer_nor_its_parameters(name: str) -> None:
    optimizer = stepped(name)
    group = optimizer.param_groups[0]
    before = copy.deepcopy(([each.detach() for each in group["params"]], optimizer.state_dict()))
    rng_state = torch.get_rng_state()
    check_optimizer_states([copy_optimizer(optimizer)], [state_of(name)])
    after = [each.detach() for each in group["params"]], optimizer.state_dict()
    assert str(after) == str(before)
    assert torch.equal(torch.get_rng_state(), rng_state)


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "shorter": lambda value: value.reshape(-1)[:1].clone(),
    "longer": lambda value: torch.zeros(*value.shape[:-1], value.shape[-1] + 1),
    "expanded": lambda value: torch.zeros(1).expand(value.shape),
    "expanded beyond": lambda _: torch.zeros(1).expand(10**6, 10**5),
    "of another precision": lambda value: value.double(),
    "of integers": lambda value: value.long(),
    "not contiguous": lambda value: torch.zeros(*value.shape, 2)[..., 0],
    "transposed": lambda value: (
        torch.zeros(value.shape[::-1]).permute(*reversed(range(value.ndim)))
        if value.ndim > 1
        else torch.zeros(2 * len(value))[::2]
    ),
    "sparse": lambda value: value.to_sparse(),
    "without memory": lambda value: value.to("meta"),
    "a number": lambda _: 0.5,
    "a list": lambda value: value.tolist(),
    "nothing": lambda _: None,
    "a scalar": lambda _: torch.zeros(()),
}
WITH_MOMENTS = [name for name in OPTIMIZERS if moments(state_of(name))]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_wrong_moments_are_refused(name: str, wrong: str) -> None:
    for number in range(len(moments(state_of(name)))):
        state = state_of(name)
        entries, key = moments(state)[number]
        entries[key] = WRONG[wrong](entries[key])
        if wrong in ("not contiguous", "transposed") and entries[key].is_contiguous():
            continue  # a row or a column, which has the same layout either way
        with pytest.raises(ValueError, match=r"optimizer_states\[0\]\['state'\]") as raised:
            check(name, state)
        assert "\n" not in str(raised.value)


STEPS = [-1.0, 1e30, float("nan"), float("inf"), 0.5, True, "1", None, [1]]


@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if "step" in next(iter(state_of(name)["state"].values()), {})]
)
def test_wrong_steps_are_refused(name: str) -> None:
    for step in (*STEPS, *(torch.tensor(step) for step in STEPS[:5]), torch.ones(3), torch.ones(1)):
        state = state_of(name)
        state["state"][0]["step"] = step
        with pytest.raises(ValueError, match="'step'"):
            check(name, state)


@pytest.mark.parametrize("name", ["our Adam", "SGD momentum", "Adafactor"])
def test_moments_that_share_memory_are_refused(name: str) -> None:
    state = state_of(name)
    (first, one), *others = moments(state)
    same = [each for each in others if each[0][each[1]].shape == first[one].shape]
    if same:
        second, two = same[0]
        second[two] = first[one]
    else:  # a vector of another parameter
        second, two = others[0]
        second[two] = first[one].reshape(-1).as_strided(second[two].shape, second[two].stride())
    with pytest.raises(ValueError, match="share memory"):
        check(name, state)


def without(state: Any, *keys: Any) -> Any:
    changed = copy.deepcopy(state)
    node = changed
    for key in keys[:-1]:
        node = node[key]
    del node[keys[-1]]
    return changed


def with_(state: Any, *keys: Any) -> Any:
    *path, last, value = keys
    changed = copy.deepcopy(state)
    node = changed
    for key in path:
        node = node[key]
    node[last] = value
    return changed


def broken(state: dict[str, Any]) -> dict[str, Any]:
    group = ("param_groups", 0)
    return {
        "no dict": [1],
        "no state": without(state, "state"),
        "no groups": without(state, "param_groups"),
        "a state that is a list": with_(state, "state", []),
        "groups that are none": with_(state, "param_groups", {}),
        "a group too many": with_(state, "param_groups", state["param_groups"] * 2),
        "no group": with_(state, "param_groups", []),
        "a parameter too few": with_(state, *group, "params", [0, 1, 2]),
        "a parameter too many": with_(state, *group, "params", [0, 1, 2, 3, 4]),
        "a parameter twice": with_(state, *group, "params", [0, 1, 2, 2]),
        "parameters that are no numbers": with_(state, *group, "params", ["0", "1", "2", "3"]),
        "parameters that are a tensor": with_(state, *group, "params", torch.arange(4)),
        "a foreign parameter": with_(state, "state", 7, state["state"][0]),
        "a foreign name": with_(state, "state", "x", {}),
        "a foreign setting": with_(state, *group, "zzz", 1),
        "an entry that is no dict": with_(state, "state", 0, [1]),
        "a foreign entry": with_(state, "state", 0, "zzz", torch.zeros(3)),
        "an entry too few": without(state, "state", 0, next(iter(state["state"][0]))),
        "a rate that is a list": with_(state, *group, "lr", [0.1]),
        "a rate that is a tensor": with_(state, *group, "lr", torch.zeros(3)),
        "a rate that is no number": with_(state, *group, "lr", float("nan")),
        "a rate that is a text": with_(state, *group, "lr", "0.1"),
        "a setting that is nested": with_(state, *group, "weight_decay", [[0.0]]),
    }


@pytest.mark.parametrize("name", ["our Adam", "Adam", "RMSprop", "Adafactor"])
@pytest.mark.parametrize("what", broken(state_of("Adam")))
def test_broken_states_are_refused(name: str, what: str) -> None:
    with pytest.raises(ValueError, match="optimizer_states"):
        check(name, broken(state_of(name))[what])


@pytest.mark.parametrize("settings", [{"amsgrad": True}, {"betas": (0.9,)}, {"betas": (1.0, 2.0)}])
def test_settings_that_do_not_fit_the_state_are_refused(settings: dict[str, Any]) -> None:
    for name in ("Adam", "our Adam"):
        state = state_of(name)
        state["param_groups"][0].update(settings)
        with pytest.raises(ValueError, match="optimizer_states"):
            check(name, state)


@pytest.mark.parametrize("settings", [{"max_iter": 10**12}, {"history_size": 10**9}])
def test_huge_histories_are_refused(settings: dict[str, Any]) -> None:
    state = state_of("LBFGS")
    state["param_groups"][0].update(settings)
    with pytest.raises(ValueError, match=next(iter(settings))):
        check("LBFGS", state)


def test_history_of_other_sizes_is_refused() -> None:
    for key, wrong in (("old_dirs", torch.zeros(3)), ("ro", torch.zeros(3)), ("al", "x"), ("old_stps", 1.0)):
        state = state_of("LBFGS")
        assert state["state"][0][key]
        state["state"][0][key][0] = wrong
        with pytest.raises(ValueError, match=key):
            check("LBFGS", state)


@pytest.mark.parametrize("count", [0, 2])
def test_different_number_of_optimizers_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="must be 1 states"):
        check_optimizer_states([make_optimizer("Adam")], [state_of("Adam")] * count)


@pytest.mark.parametrize("wrong", WRONG)
def test_fused_adam_refuses_wrong_moments_and_stays_unchanged(wrong: str) -> None:
    optimizer = stepped("our Adam")
    before = str(optimizer.state_dict())
    state = state_of("our Adam")
    entries, key = moments(state)[2]
    entries[key] = WRONG[wrong](entries[key])
    with pytest.raises(ValueError, match="FusedAdam"):
        optimizer.load_state_dict(state)
    assert str(optimizer.state_dict()) == before


# -- through a trainer -----------------------------------------------------------------------------------------------
def data() -> OnPolicyDataModule:
    return OnPolicyDataModule("CartPole-v1", num_envs=2, frames_per_batch=16, num_mini_batch=1, num_epochs=1, seed=0)


class OwnOptimizers(PPOModule):
    """A module of a user with its own optimizer and schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": optim.lr_scheduler.StepLR(optimizer, 1)}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = sum(parameter.sum() for parameter in self.parameters())
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


MODULES: dict[str, Callable[[], PPOModule]] = {
    **{
        name: partial(PPOModule, MLPNetwork([4]), optimizer=OPTIMIZERS[name])
        for name in ("our Adam", "SGD momentum", "Adafactor", "Adam amsgrad")
    },
    "two": partial(PPOModule, MLPNetwork([4]), critic_optimizer=optim.AdamW),
    "configured by a subclass": partial(OwnOptimizers, MLPNetwork([4])),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, module in MODULES.items():
        run = trainer(max_epochs=1, limit_val_batches=0)
        run.fit(module(), datamodule=data())
        paths[name] = tmp_path_factory.mktemp("stored") / "a.ckpt"
        run.save_checkpoint(paths[name])
    return paths


@pytest.mark.parametrize("name", MODULES)
def test_run_resumes_with_its_own_states(name: str, stored: dict[str, Path]) -> None:
    run = trainer(max_epochs=2, limit_val_batches=0)
    run.fit(MODULES[name](), datamodule=data(), ckpt_path=stored[name])
    assert run.current_epoch == 2


@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("name", MODULES)
def test_trainer_refuses_wrong_moments_before_it_loads(
    name: str, number: int, stored: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint = torch.load(stored[name], weights_only=True)
    checkpoint.pop("checksums")  # an attacker would also remove the checksums
    entries, key = moments(checkpoint["optimizer_states"][number])[0]
    entries[key] = torch.zeros(1)
    torch.save(checkpoint, tmp_path / "evil.ckpt")
    module, source = MODULES[name](), data()
    source.setup("fit")
    module.build(source.specs)
    before = parameters(module)
    with pytest.raises(ValueError, match=r"optimizer_states\[\d\]\['state'\]") as raised:
        trainer(max_epochs=2, limit_val_batches=0).fit(module, datamodule=source, ckpt_path=tmp_path / "evil.ckpt")
    assert "\n" not in str(raised.value)
    if not isinstance(module, OwnOptimizers):
        assert torch.equal(parameters(module), before)
