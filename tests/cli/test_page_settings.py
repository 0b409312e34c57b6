"""The settings and commands inside sentences of README and guide can be composed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache

import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

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


def bases_for(words: list[str]) -> list[tuple[str, ...]]:
    """Return the beginnings of command lines that may accept the settings."""
    holders = next((held for begin, held in HOLDERS.items() if any(word.startswith(begin) for word in words)), [])
    group = "model" if any(word.startswith("model.") for word in words) else "data"
    more = (tuple(each.split()) if "=" in each else ("~experiment", f"{group}={each}") for each in holders)
    return [(), ("~experiment",), *more]


def accepts(base: tuple[str, ...], words: list[str]) -> bool:
    """Return whether a command line with this beginning accepts the settings."""
    try:
        composed("train", *base, *words, hydra=True)
    except HydraException:
        return False
    return True


@cache
def base_with(paths: tuple[str, ...], bases: tuple[tuple[str, ...], ...]) -> tuple[str, ...] | None:
    """Return the first beginning of a command line whose config has all settings."""
    return next((base for base in bases if all(_has(base, path) for path in paths)), None)


@cache
def _has(base: tuple[str, ...], path: str) -> bool:
    parent, _, name = path.rpartition(".")
    found = OmegaConf.select(composed("train", *base, hydra=True), parent)
    return isinstance(found, DictConfig) and name in found


def plain_paths(words: list[str]) -> tuple[str, ...]:
    """Return the names of settings; nothing if a word chooses a group or adds or removes a setting."""
    paths = tuple(word.partition("=")[0] for word in words)
    return paths if all(re.fullmatch(r"[a-z_]+(?:\.\w+)+", path) for path in paths) else ()


def base_of(words: list[str]) -> tuple[str, ...] | None:
    paths = plain_paths(words)
    return base_with(paths, tuple(bases_for(words))) if paths else None


@cache
def accepts_all(base: tuple[str, ...]) -> bool:
    """Return whether a command line accepts the settings of all sentences that it has, one after another."""
    found = [words for words in map(words_of, SPANS) if base_of(words) == base]
    return accepts(base, [word for words in found for word in words])


def words_of(text: str) -> list[str]:
    """Return the settings of a span, with one value instead of a sweep."""
    words = [word for word in shlex.split(text) if word != "--multirun" and not word.startswith("torchrl-lightning-")]
    sweeps = [word for word in words if re.search(r"=(interval|choice|range)\(", word)]
    keys = [word.partition("=")[0] for word in sweeps]
    return [word for word in words if word not in sweeps] + [f"{key}=0.5" for key in keys]


SPANS = list(dict.fromkeys(text for _, text in spans()))


def test_settings_are_found_in_the_sentences_of_most_pages():
    assert len(SPANS) >= 80
    assert len({name for name, _ in spans()}) >= 20


@pytest.mark.parametrize("text", SPANS)
def test_settings_in_a_sentence_compose(text):
    words = words_of(text)
    base = base_of(words)
    # One command line for all sentences with the same beginning: composing it takes the time of one.
    composes = (base is not None and accepts_all(base)) or any(accepts(each, words) for each in bases_for(words))
    assert composes, f"no command has {text}"
