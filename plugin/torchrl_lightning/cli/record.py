"""``torchrl-lightning-record``: record demonstrations, list a directory's demonstrations, or convert them to Minari."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lightning._core.import_stubs import import_libraries
from torchrl_lightning._core.return_threshold import reaches
from torchrl_lightning._core.untrusted import printable
from torchrl_lightning.cli.command import cleanup, limit_threads, run_command, silence_libraries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omegaconf import DictConfig

    from torchrl_lightning.demonstrations import Demonstration
    from torchrl_lightning.environments import EnvironmentRecipe, EnvironmentSpecs
    from torchrl_lightning.environments.policy_calls import Policy


def main() -> None:
    """Run the command."""
    run_command("record", record)


@cleanup
def record(cfg: DictConfig) -> float:
    """Record episodes into a directory, print the table of a directory, or convert demonstrations."""
    import_libraries()
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations import record_demonstrations

    sources = [name for name in ("ckpt_path", "policy", "keyboard", "table", "convert") if cfg[name]]
    if len(sources) != 1:
        raise UsageError(
            f"{' and '.join(sources) or 'nothing'} given; set either ckpt_path=RUN, or "
            "policy=MODULE:FUNCTION and env=NAME, or keyboard=true and env=NAME, or table=DIRECTORY, or convert=PATH, "
            "dataset=minari:ID and env=NAME."
        )
    if not isinstance(cfg.clip_actions, bool):
        raise UsageError(f"clip_actions={cfg.clip_actions}: expected true or false.")
    if cfg.clip_actions and (cfg.table or cfg.convert):
        raise UsageError(f"clip_actions=true has no effect with {sources[0]}=, which plays no episode; remove it.")
    silence_libraries()
    limit_threads(1)
    if cfg.table:
        return show_table(Path(cfg.table), _build_environment(cfg))
    if cfg.convert:
        return _convert(cfg, _build_environment(cfg))
    if not isinstance(cfg.episodes, int) or cfg.episodes < 1:
        raise UsageError(f"episodes={cfg.episodes}: expected a positive whole number.")
    is_number = isinstance(cfg.min_return, int | float) and not math.isnan(cfg.min_return)
    if cfg.min_return is not None and not is_number:
        raise UsageError(f"min_return={cfg.min_return}: expected a number or null.")
    if cfg.ckpt_path:
        if "data" in cfg:
            raise UsageError("ckpt_path= plays in the environment of its run; remove env=.")
        env, policy = _load_checkpoint_policy(cfg)
    else:
        env = _build_environment(cfg)
        if env is None:
            source = f"{sources[0]}={cfg[sources[0]]}"
            raise UsageError(f"{source} needs an environment; select one with env=NAME, see --help.")
        if cfg.keyboard:
            return _save_demonstrations(cfg, _play_keyboard(cfg, env))
        policy = scripted_policy(cfg.policy, env, clip_actions=cfg.clip_actions)
    options = {"seed": cfg.seed, "clip_actions": cfg.clip_actions}
    return _save_demonstrations(cfg, record_demonstrations(env, policy, cfg.episodes, **options))


def _play_keyboard(cfg: DictConfig, env: Any) -> Iterable[Demonstration]:
    from omegaconf import OmegaConf

    from torchrl_lightning.cli.config.instantiate import SETTING_ERRORS
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations import play_demonstrations

    settings: Any = OmegaConf.to_container(cfg)
    if not isinstance(settings["keys"], dict | None):
        raise UsageError(f"keys={settings['keys']}: expected an action for each key, such as 'keys={{a: 0, d: 1}}'.")
    try:
        options = {name: settings[name] for name in ("keys", "noop", "seed", "clip_actions")}
        return list(play_demonstrations(env, cfg.episodes, **options))
    except SETTING_ERRORS as error:
        raise UsageError(f"keyboard=true: {error}") from error


def _convert(cfg: DictConfig, env: Any) -> float:
    """Write demonstrations as a Minari data set, read it again, and return the mean return."""
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations import read_dataset, write_dataset

    if env is None or not cfg.dataset:
        raise UsageError(f"convert={cfg.convert} needs dataset=minari:ID and its environment, env=NAME.")
    write_dataset(cfg.dataset, cfg.convert, env)
    returns = [demonstration.total_reward for demonstration in read_dataset(cfg.dataset, env)]
    mean = sum(returns) / len(returns)
    print(f"{cfg.dataset}: {len(returns)} episodes, mean return {mean:.1f}")
    return mean


def _build_environment(cfg: DictConfig) -> Any:
    """Return the selected environment recipe after a test that builds the environment; None without a selection."""
    from omegaconf import OmegaConf

    from torchrl_lightning.cli.config.instantiate import build_part, setting_errors
    from torchrl_lightning.demonstrations.io.recording import demonstration_specs

    if "data" not in cfg:
        return None
    env = build_part(cfg, "data.env") if OmegaConf.is_dict(cfg.data.env) else cfg.data.env
    with setting_errors(cfg, "data.env"):
        demonstration_specs(env)
    return env


def _load_checkpoint_policy(cfg: DictConfig) -> tuple[Any, Policy]:
    from torchrl_lightning.cli.evaluate import build_policy, load_run, rebuild_part

    checkpoint, stored, run = load_run(cfg)
    policy = build_policy(cfg, stored, rebuild_part(checkpoint, run, "model"))
    return _build_environment(run), policy


def scripted_policy(path: str, env: Any, *, clip_actions: bool = False) -> Policy:
    """Import ``module:function``, a function from observation to action, as a policy for one environment.

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
    environment = make_environment(env, 1, vectorization="sync", own_number=True)
    specs = environment_specs(environment)
    action_format = specs.action_format
    space = getattr(environment, "single_action_space", specs.action)
    close_environment(environment)

    def act(step: Any) -> Any:
        actions = []
        for row in step.select(*specs.keys).unbind(0):
            tree = map_leaves(lambda leaf: leaf.numpy(force=True).copy(), tree_of(row))
            actions.append(validate_action(function(tree["observation"] if list(tree) == ["observation"] else tree)))
        return step.set("action", torch.stack(actions))

    def validate_action(result: Any) -> Any:
        try:
            action = torch.as_tensor(result).reshape(action_format.shape)
            counted_action = torch.from_numpy(action_format.from_environment(action.numpy(force=True)[None]))[0]
            action_in_dtype = counted_action.to(specs.action.dtype)
            fits = action_in_dtype.is_floating_point() or bool((action_in_dtype == counted_action).all())
            fits = (
                fits
                and bool(action_in_dtype.isfinite().all())
                and (clip_actions or action_error(action_in_dtype[None], specs) is None)
            )
        except (TypeError, ValueError, RuntimeError):
            fits = False
        if not fits:
            hint = "; clip_actions=true clips it" if action_format.is_box and not clip_actions else ""
            raise UsageError(f"policy={path} returned {result!r}, which is not an action of {space}{hint}.")
        return action_in_dtype

    return act


def _save_demonstrations(cfg: DictConfig, demonstrations: Iterable[Demonstration]) -> float:
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations import write_demonstration

    folder = Path(cfg.directory)
    folder.mkdir(parents=True, exist_ok=True)
    returns, best, failures = [], -float("inf"), 0
    for demonstration in demonstrations:
        best = max(best, demonstration.total_reward)
        is_failure = _is_failure(demonstration)
        failures += is_failure
        if is_failure if cfg.min_return is None else not reaches(demonstration.total_reward, cfg.min_return):
            continue
        path = _free_path(folder)
        write_demonstration(path, demonstration)
        returns.append(demonstration.total_reward)
        print(f"{path}: {demonstration.length} steps, return {demonstration.total_reward:g}")
    if best == -float("inf"):
        raise UsageError("no episode was completed.")
    if not returns:
        if cfg.min_return is None:
            raise UsageError(
                f"all {failures} episodes failed, {_FAILURE_RULE}; the best had a return of {best:g}. "
                "min_return=NUMBER records episodes by their return, min_return=-inf records all."
            )
        raise UsageError(
            f"none of {cfg.episodes} episodes had a return of at least min_return={cfg.min_return:g}; the best had "
            f"{best:g}."
        )
    mean = sum(returns) / len(returns)
    failure_note = f"; {failures} failed, {_FAILURE_RULE}" if failures else ""
    print(f"{len(returns)} of {cfg.episodes} episodes recorded, mean return {mean:.1f}{failure_note}")
    return mean


_FAILURE_RULE = "because the environment's info has no success or, without that entry, no reward is positive"


def _is_failure(demonstration: Demonstration) -> bool:
    success = demonstration.metadata.get("success")
    return not (bool((demonstration.rewards > 0).any()) if success is None else success)


def _free_path(folder: Path) -> Path:
    used_names = {path.name for path in folder.iterdir()}
    names = (f"demonstration_{number:03d}.safetensors" for number in range(len(used_names) + 1))
    return folder / next(name for name in names if name not in used_names)


def show_table(folder: Path, env: Any) -> float:
    """Print a table of the demonstrations in a directory with their errors, and return the mean return."""
    from torchrl_lightning.cli.error_messages import UsageError
    from torchrl_lightning.demonstrations.io.recording import demonstration_specs
    from torchrl_lightning.demonstrations.io.safetensors_files import SUFFIXES
    from torchrl_lightning.demonstrations.task_check import known_recipe

    paths = sorted(path for path in folder.glob("[!.]*") if path.suffix in SUFFIXES)
    if not paths:
        raise UsageError(
            f"table={folder}: the directory contains no demonstrations; it must contain a {' or '.join(SUFFIXES)} file."
        )
    env_fields = (None, 1, None) if env is None else (*demonstration_specs(env), known_recipe(env))
    lines: list[tuple[str, ...]] = [("file", "length", "return", "by", "environment", "recipe", "check")]
    returns = []
    for path in paths:
        columns, episode_return = _table_row(path, *env_fields)
        lines.append((path.name, *columns))
        returns += [] if episode_return is None else [episode_return]
    lines = [tuple(map(printable, line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
    return sum(returns) / len(returns) if returns else float("nan")


def _table_row(
    path: Path, specs: EnvironmentSpecs | None, frame_skip: int, recipe: EnvironmentRecipe | None
) -> tuple[tuple[str, ...], float | None]:
    from torchrl_lightning.demonstrations import read_demonstration
    from torchrl_lightning.demonstrations.task_check import recorded_recipe

    try:
        demonstration = read_demonstration(path)
    except (OSError, ValueError, TypeError) as error:
        return ("", "", "", "", "", str(error)), None
    check = "whole" if specs is None else "fits"
    if specs is not None:
        try:
            read_demonstration(path, specs).fits(specs, frame_skip, recipe)
        except ValueError as error:
            check = str(error)
    by = "human" if demonstration.is_human else "agent"
    environment = str(demonstration.metadata.get("environment", "unknown"))
    known_recipe = recorded_recipe(demonstration.metadata)
    settings = (
        []
        if known_recipe is None
        else [f"{name}={json.dumps(value)}" for name, value in known_recipe.items() if name != "id"]
    )
    recipe_text = "unknown" if known_recipe is None else ", ".join(settings) or "id"
    return (
        str(demonstration.length),
        f"{demonstration.total_reward:g}",
        by,
        environment,
        recipe_text,
        check,
    ), demonstration.total_reward


if __name__ == "__main__":
    main()
