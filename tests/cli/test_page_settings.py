"""The settings and commands inside sentences of README and guide can be composed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache

import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig

from cli.test_pages import PAGES
from kit.store import composed

WORD = r"--multirun|torchrl-lightning-train|~?[a-z][\w./@]*(?:=\S+)?"
# prefix of a setting that the default run lacks: options that may have the setting
HOLDERS = {
    "callbacks.report.": ["hparams_search=optuna"],
    "hydra.sweeper.": ["hparams_search=optuna"],
    "callbacks.": ["callbacks=video", "callbacks=stop_at_score", "callbacks=inspect"],
    "data.env.": ["env=recipe", "env=minigrid"],
    "data.collector.": ["collector=process", "collector=ray"],
    "data.source.": ["~experiment data=uniform source=service"],
    "source=": ["~experiment data=uniform"],
    "data.buffer.": ["ppod", "hindsight", "recurrent", "sequence", "prioritized", "uniform"],
    "data.": ["uniform", "offline", "model_based", "hindsight"],
    "model.": ["sac", "dqn", "td3", "bc", "pets", "dqn_recurrent", "ppo_rnd", "iql", "mbpo"],
    "model=": ["offline", "uniform", "model_based", "prioritized", "sequence"],
    "experiment=": [],
}


def spans() -> Iterator[tuple[str, str]]:
    """Yield the page and the text of each inline code that consists of settings for the train command."""
    for name, page in PAGES.items():
        sentences = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
        for text in dict.fromkeys(re.findall(r"`([^`\n]+)`", sentences)):
            words = shlex.split(text) if text.count("'") % 2 == 0 else []
            settings = [word for word in words if "=" in word]
            if settings and all(re.fullmatch(WORD, word) for word in words) and all(map(_is_ours, settings)):
                yield name, text


def _is_ours(word: str) -> bool:
    key, _, value = word.partition("=")
    top = key.lstrip("~").partition(".")[0].partition("/")[0]
    return bool(value) and top in _top_level()


@cache
def _top_level() -> frozenset[str]:
    return frozenset(map(str, composed("train"))) | {
        "collector",
        "env",
        "experiment",
        "hparams_search",
        "hydra",
        "source",
    }


def compose_with_a_base(words: list[str]) -> DictConfig | None:
    """Return the config of the first command line that accepts the settings, or None."""
    holders = next((held for begin, held in HOLDERS.items() if any(word.startswith(begin) for word in words)), [])
    bases: list[list[str]] = [[], ["~experiment"]]
    for holder in holders:
        group = "model" if any(word.startswith("model.") for word in words) else "data"
        bases.append(holder.split() if "=" in holder else ["~experiment", f"{group}={holder}"])
    for base in bases:
        try:
            return composed("train", *base, *words, hydra=True)
        except HydraException:
            continue
    return None


SPANS = list(dict.fromkeys(text for _, text in spans()))


def test_settings_are_found_in_the_sentences_of_most_pages():
    assert len(SPANS) >= 80
    assert len({name for name, _ in spans()}) >= 20


@pytest.mark.parametrize("text", SPANS)
def test_settings_in_a_sentence_compose(text):
    words = [word for word in shlex.split(text) if word != "--multirun" and not word.startswith("torchrl-lightning-")]
    sweeps = [word for word in words if re.search(r"=(interval|choice|range)\(", word)]
    keys = [word.partition("=")[0] for word in sweeps]
    single = [word for word in words if word not in sweeps] + [f"{key}=0.5" for key in keys]
    assert compose_with_a_base(single) is not None, f"no command has {text}"
