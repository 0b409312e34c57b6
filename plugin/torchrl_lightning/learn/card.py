"""The card of a published policy: what it is, its score, its settings, and how it is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from torchrl_lightning.learn.action_heads import action_name
from torchrl_lightning.records import COMMAND

# Of the machine that it was trained on, not of what was trained.
_LEFT_OUT = re.compile(r"[+~]*(hydra|paths|logger|callbacks|ckpt_path|trusted|task_name|hparams_search)\b")

_TEXT = """---
{head}---

# {title}

A policy of `{learner}` for `{environment}`, trained with torchrl-lightning.

| | |
| --- | --- |
| mean return | {score} |
| trained for | {frames} frames |
| observes | {observation} |
| acts | {action} |

## Play it

```python
from torchrl_lightning import from_pretrained

policy = from_pretrained("{source}"{trust})
env = policy.recipe({words})()  # as in training
observation, _ = env.reset(seed=0)
total, ended = 0.0, False
while not ended:
    observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
    total, ended = total + reward, terminated or truncated
print(total)
```

## Train it again, or go on

```bash
{again}
{further}
```

## Settings

```yaml
{settings}```
"""


def written_card(
    source: str,
    stored: Mapping[str, Any],
    policy: Any,
    *,
    frames: int,
    score: float | None,
    settings: Mapping[str, Any],
    trusted: bool,
) -> str:
    """Return the card of a policy, with the head that a hub reads.

    Args:
        source: How others call it: ``owner/name``, or a folder.
        stored: The checkpoint.
        policy: What is loaded from it.
        frames: For how many frames of the environment it was trained.
        score: The mean return of the evaluation after training; None where nobody knows.
        settings: The settings to be shown, by groups.
        trusted: Whether loading it takes the word that its classes may be imported.
    """
    known = policy.environment
    environment = str(known.get("id") if isinstance(known, Mapping) else known)
    learner = str(settings.get("model", {}).get("_target_", "")).rpartition(".")[2]
    command = stored.get(COMMAND)
    overrides = command.get("overrides") if isinstance(command, Mapping) else None
    lines = overrides if isinstance(overrides, list) else []
    told = [line for line in lines if isinstance(line, str) and not _LEFT_OUT.match(line)]
    began = [line for line in told if not line.startswith("init_from=")]
    episodes = stored["config"].get("eval_episodes")
    head = {
        "library_name": "torchrl-lightning",
        "tags": ["reinforcement-learning", "torchrl", learner, environment],
        "model-index": [{"name": source.rpartition("/")[2], "results": _results(environment, score)}],
    }
    return _TEXT.format(
        head=OmegaConf.to_yaml(OmegaConf.create(head)),
        title=source.rpartition("/")[2],
        learner=learner,
        environment=environment,
        score="not known" if score is None else f"{score:g} over {episodes} episodes, after training",
        frames=frames,
        observation=", ".join(f"{key} {list(spec.shape)}" for key, spec in policy.specs.observation.items(True, True)),
        action=action_name(policy.specs.action),
        source=source,
        trust=", trusted=True" if trusted else "",
        words="trusted=True" if trusted else "",
        again=shlex.join(["torchrl-lightning-train", *told]),
        further=shlex.join(["torchrl-lightning-train", *began, f"init_from={source}"]),
        settings=OmegaConf.to_yaml(OmegaConf.create(dict(settings))),
    )


def _results(environment: str, score: float | None) -> list[dict[str, Any]]:
    """Return the score as a hub reads it."""
    if score is None:
        return []
    return [
        {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"type": environment, "name": environment},
            "metrics": [{"type": "mean_reward", "name": "mean return", "value": score}],
        }
    ]
