"""Model card of a published policy: description, score, settings and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from torchrl_lightning._core.run_metadata import COMMAND
from torchrl_lightning.agents.networks.action_heads import action_name

# These overrides describe the machine or the run, not the policy.
_RUN_OVERRIDES = re.compile(r"[+~]*(hydra|paths|logger|callbacks|ckpt_path|trusted|task_name|hparams_search)\b")

_TEMPLATE = """---
{head}---

# {title}

A policy of `{learner}` for `{environment}`, trained with torchrl-lightning.

| | |
| --- | --- |
| mean return | {score} |
| trained for | {frames} frames |
| observation | {observation} |
| action | {action} |

## Play it

```python
from torchrl_lightning import from_pretrained

policy = from_pretrained("{source}"{comma_trusted})
env = policy.recipe({trusted})()  # as in training
observation, _ = env.reset(seed=0)
total, ended = 0.0, False
while not ended:
    observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
    total, ended = total + reward, terminated or truncated
print(total)
```

## Train it again, or continue the training

```bash
{train_command}
{continue_command}
```

## Settings

```yaml
{settings}```
"""


def render_model_card(
    source: str,
    stored: Mapping[str, Any],
    policy: Any,
    *,
    frames: int,
    score: float | None,
    settings: Mapping[str, Any],
    trusted: bool,
) -> str:
    """Return the model card of a policy, with the metadata header for a hub.

    Args:
        source: The name for :func:`from_pretrained`: ``owner/name``, or a folder.
        stored: The checkpoint.
        policy: The policy loaded from the checkpoint.
        frames: Number of environment frames of the training.
        score: Mean return of the evaluation after training; None if unknown.
        settings: The settings on the card, by group.
        trusted: True if users must load the policy with ``trusted=True``, because loading imports classes of other
            packages.
    """
    recipe = policy.environment
    environment = str(recipe.get("id") if isinstance(recipe, Mapping) else recipe)
    learner = str(settings.get("model", {}).get("_target_", "")).rpartition(".")[2]
    command = stored.get(COMMAND)
    overrides = command.get("overrides") if isinstance(command, Mapping) else None
    lines = overrides if isinstance(overrides, list) else []
    policy_overrides = [line for line in lines if isinstance(line, str) and not _RUN_OVERRIDES.match(line)]
    scratch_overrides = [line for line in policy_overrides if not line.startswith("init_from=")]
    episodes = stored["config"].get("eval_episodes")
    head = {
        "library_name": "torchrl-lightning",
        "tags": ["reinforcement-learning", "torchrl", learner, environment],
        "model-index": [{"name": source.rpartition("/")[2], "results": _results(environment, score)}],
    }
    return _TEMPLATE.format(
        head=OmegaConf.to_yaml(OmegaConf.create(head)),
        title=source.rpartition("/")[2],
        learner=learner,
        environment=environment,
        score="unknown" if score is None else f"{score:g} over {episodes} episodes, after training",
        frames=frames,
        observation=", ".join(f"{key} {list(spec.shape)}" for key, spec in policy.specs.observation.items(True, True)),
        action=action_name(policy.specs.action),
        source=source,
        comma_trusted=", trusted=True" if trusted else "",
        trusted="trusted=True" if trusted else "",
        train_command=shlex.join(["torchrl-lightning-train", *policy_overrides]),
        continue_command=shlex.join(["torchrl-lightning-train", *scratch_overrides, f"init_from={source}"]),
        settings=OmegaConf.to_yaml(OmegaConf.create(dict(settings))),
    )


def _results(environment: str, score: float | None) -> list[dict[str, Any]]:
    """Return the score in the format of a hub's ``model-index``."""
    if score is None:
        return []
    return [
        {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"type": environment, "name": environment},
            "metrics": [{"type": "mean_reward", "name": "mean return", "value": score}],
        }
    ]
