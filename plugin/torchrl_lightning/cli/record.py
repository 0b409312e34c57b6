"""``torchrl-lightning-record``: record demonstrations, list a directory of them, or convert them for Minari."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lightning._core.import_stubs import import_libraries
from torchrl_lightning._core.return_threshold import reaches
from torchrl_lightning._core.untrusted import printable
from torchrl_lightning.cli.command import behind, quiet, run_command, use_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omegaconf import DictConfig

    from torchrl_lightning.demonstrations import Demonstration
    from torchrl_lightning.environments import EnvironmentRecipe, EnvironmentSpecs
    from torchrl_lightning.environments.policy_calls import Policy


def main() -> None:
    """Run the command; return the mean return of the demonstrations to a sweeper."""
    run_command("record", record)


@behind
def record(cfg: DictConfig) -> float:
    """Record episodes into a directory, print the table of a directory, or convert demonstrations."""
    import_libraries()
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations import record_demonstrations

    given = [name for name in ("ckpt_path", "policy", "keyboard", "table", "convert") if cfg[name]]
    if len(given) != 1:
        raise UsageError(
            f"{' and '.join(given) or 'nothing'} given; say either ckpt_path=RUN, or "
            "policy=MODULE:FUNCTION and env=NAME, or keyboard=true and env=NAME, or table=DIRECTORY, or convert=PATH, "
            "dataset=minari:ID and env=NAME."
        )
    if not isinstance(cfg.clip_actions, bool):
        raise UsageError(f"clip_actions={cfg.clip_actions}: expected true or false.")
    if cfg.clip_actions and (cfg.table or cfg.convert):
        raise UsageError(f"clip_actions=true has no effect with {given[0]}=, which plays nothing; leave it out.")
    quiet()
    use_threads(1)
    if cfg.table:
        return show_table(Path(cfg.table), _environment(cfg))
    if cfg.convert:
        return _written(cfg, _environment(cfg))
    if not isinstance(cfg.episodes, int) or cfg.episodes < 1:
        raise UsageError(f"episodes={cfg.episodes}: expected a positive whole number.")
    is_number = isinstance(cfg.min_return, int | float) and not math.isnan(cfg.min_return)
    if cfg.min_return is not None and not is_number:
        raise UsageError(f"min_return={cfg.min_return}: expected a number or null.")
    if cfg.ckpt_path:
        if "data" in cfg:
            raise UsageError("ckpt_path= plays in the environment of its run; leave env= out.")
        env, policy = _of_checkpoint(cfg)
    else:
        env = _environment(cfg)
        if env is None:
            way = f"{given[0]}={cfg[given[0]]}"
            raise UsageError(f"{way} needs an environment; choose one as env=NAME, --help lists them.")
        if cfg.keyboard:
            return _save(cfg, _played(cfg, env))
        policy = scripted_policy(cfg.policy, env, clip_actions=cfg.clip_actions)
    options = {"seed": cfg.seed, "clip_actions": cfg.clip_actions}
    return _save(cfg, record_demonstrations(env, policy, cfg.episodes, **options))


def _played(cfg: DictConfig, env: Any) -> Iterable[Demonstration]:
    from omegaconf import OmegaConf

    from torchrl_lightning.cli.config.instantiate import MISTAKES
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations import play_demonstrations

    settings: Any = OmegaConf.to_container(cfg)
    if not isinstance(settings["keys"], dict | None):
        raise UsageError(f"keys={settings['keys']}: expected an action for each key, such as 'keys={{a: 0, d: 1}}'.")
    try:
        options = {name: settings[name] for name in ("keys", "noop", "seed", "clip_actions")}
        return list(play_demonstrations(env, cfg.episodes, **options))
    except MISTAKES as error:
        raise UsageError(f"keyboard=true: {error}") from error


def _written(cfg: DictConfig, env: Any) -> float:
    """Write demonstrations as a Minari data set, read it again, and return the mean return."""
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations import read_dataset, write_dataset

    if env is None or not cfg.dataset:
        raise UsageError(f"convert={cfg.convert} needs dataset=minari:ID and its environment, env=NAME.")
    write_dataset(cfg.dataset, cfg.convert, env)
    returns = [each.total_reward for each in read_dataset(cfg.dataset, env)]
    mean = sum(returns) / len(returns)
    print(f"{cfg.dataset}: {len(returns)} episodes, mean return {mean:.1f}")
    return mean


def _environment(cfg: DictConfig) -> Any:
    """Return the selected environment recipe, after building the environment once; None without a selection."""
    from omegaconf import OmegaConf

    from torchrl_lightning.cli.config.instantiate import build_part, named
    from torchrl_lightning.demonstrations.io.recording import demonstration_specs

    if "data" not in cfg:
        return None
    env = build_part(cfg, "data.env") if OmegaConf.is_dict(cfg.data.env) else cfg.data.env
    with named(cfg, "data.env"):
        demonstration_specs(env)
    return env


def _of_checkpoint(cfg: DictConfig) -> tuple[Any, Policy]:
    from torchrl_lightning.cli.evaluate import policy_of, rebuilt, run_of

    checkpoint, stored, run = run_of(cfg)
    policy = policy_of(cfg, stored, rebuilt(checkpoint, run, "model"))
    return _environment(run), policy


def scripted_policy(path: str, env: Any, *, clip_actions: bool = False) -> Policy:
    """Import ``module:function``, which maps an observation to an action, as a policy of one environment.

    The function receives the observation as a NumPy array or a dict of arrays, and must return a valid action of the
    environment. With ``clip_actions``, the action may exceed the bounds.
    """
    import torch

    from torchrl_lightning._core.tree import map_leaves, tree_of
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations.trajectory import action_error
    from torchrl_lightning.environments import close_environment, environment_specs, make_environment

    module, _, name = path.partition(":")
    try:
        function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"policy={path}: expected MODULE:FUNCTION, such as planner:act; {error}.") from error
    made = make_environment(env, 1, vectorization="sync", own_number=True)
    specs = environment_specs(made)
    form = specs.action_format
    space = getattr(made, "single_action_space", specs.action)
    close_environment(made)

    def act(step: Any) -> Any:
        actions = []
        for row in step.select(*specs.keys).unbind(0):
            tree = map_leaves(lambda leaf: leaf.numpy(force=True).copy(), tree_of(row))
            actions.append(checked(function(tree["observation"] if list(tree) == ["observation"] else tree)))
        return step.set("action", torch.stack(actions))

    def checked(returned: Any) -> Any:
        try:
            action = torch.as_tensor(returned).reshape(form.shape)
            counted = torch.from_numpy(form.from_environment(action.numpy(force=True)[None]))[0]
            cast = counted.to(specs.action.dtype)
            fits = cast.is_floating_point() or bool((cast == counted).all())
            fits = fits and bool(cast.isfinite().all()) and (clip_actions or action_error(cast[None], specs) is None)
        except (TypeError, ValueError, RuntimeError):
            fits = False
        if not fits:
            hint = "; clip_actions=true clips it" if form.is_box and not clip_actions else ""
            raise UsageError(f"policy={path} returned {returned!r}, which is no action of {space}{hint}.")
        return cast

    return act


def _save(cfg: DictConfig, demonstrations: Iterable[Demonstration]) -> float:
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations import write_demonstration

    folder = Path(cfg.directory)
    folder.mkdir(parents=True, exist_ok=True)
    returns, best, failures = [], -float("inf"), 0
    for demonstration in demonstrations:
        best = max(best, demonstration.total_reward)
        failed = _failed(demonstration)
        failures += failed
        if failed if cfg.min_return is None else not reaches(demonstration.total_reward, cfg.min_return):
            continue
        path = _free_path(folder)
        write_demonstration(path, demonstration)
        returns.append(demonstration.total_reward)
        print(f"{path}: {demonstration.length} steps, return {demonstration.total_reward:g}")
    if best == -float("inf"):
        raise UsageError("no episode was played to its end.")
    if not returns:
        if cfg.min_return is None:
            raise UsageError(
                f"all {failures} episodes failed, {_FAILED}; the best had a return of {best:g}. min_return= keeps by "
                "the return alone, min_return=-inf all."
            )
        raise UsageError(
            f"none of {cfg.episodes} episodes had a return of at least min_return={cfg.min_return:g}; the best had "
            f"{best:g}."
        )
    mean = sum(returns) / len(returns)
    told = f"; {failures} failed, {_FAILED}" if failures else ""
    print(f"{len(returns)} of {cfg.episodes} episodes recorded, mean return {mean:.1f}{told}")
    return mean


_FAILED = "as they have no success in the environment's info nor, where that tells nothing, a positive reward"


def _failed(demonstration: Demonstration) -> bool:
    told = demonstration.metadata.get("success")
    return not (bool((demonstration.rewards > 0).any()) if told is None else told)


def _free_path(folder: Path) -> Path:
    taken = {path.name for path in folder.iterdir()}
    names = (f"demonstration_{number:03d}.safetensors" for number in range(len(taken) + 1))
    return folder / next(name for name in names if name not in taken)


def show_table(folder: Path, env: Any) -> float:
    """Print a table of the demonstrations in a directory, with the error of each; return the mean return."""
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations.io.recording import demonstration_specs
    from torchrl_lightning.demonstrations.io.safetensors_files import SUFFIXES
    from torchrl_lightning.demonstrations.task_check import given_recipe

    paths = sorted(path for path in folder.glob("[!.]*") if path.suffix in SUFFIXES)
    if not paths:
        raise UsageError(f"table={folder}: no demonstration is there; it needs a {' or '.join(SUFFIXES)} file.")
    fitting = (None, 1, None) if env is None else (*demonstration_specs(env), given_recipe(env))
    lines: list[tuple[str, ...]] = [("file", "length", "return", "by", "environment", "recipe", "check")]
    returns = []
    for path in paths:
        told, total = _line(path, *fitting)
        lines.append((path.name, *told))
        returns += [] if total is None else [total]
    lines = [tuple(map(printable, line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
    return sum(returns) / len(returns) if returns else float("nan")


def _line(
    path: Path, specs: EnvironmentSpecs | None, frame_skip: int, recipe: EnvironmentRecipe | None
) -> tuple[tuple[str, ...], float | None]:
    from torchrl_lightning.demonstrations import read_demonstration
    from torchrl_lightning.demonstrations.task_check import recorded_recipe

    try:
        found = read_demonstration(path)
    except (OSError, ValueError, TypeError) as error:
        return ("", "", "", "", "", str(error)), None
    check = "whole" if specs is None else "fits"
    if specs is not None:
        try:
            read_demonstration(path, specs).fits(specs, frame_skip, recipe)
        except ValueError as error:
            check = str(error)
    by = "human" if found.is_human else "agent"
    where = str(found.metadata.get("environment", "unknown"))
    known = recorded_recipe(found.metadata)
    others = [] if known is None else [f"{name}={json.dumps(value)}" for name, value in known.items() if name != "id"]
    told = "unknown" if known is None else ", ".join(others) or "id"
    return (str(found.length), f"{found.total_reward:g}", by, where, told, check), found.total_reward
