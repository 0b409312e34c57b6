"""Compare exported policies with their original policies, for each family of agents and each space.

    python tests/benchmarks/exports.py [WORD ...] [--formats onnx torch] [--json FILE] [--list]

Each agent has large random weights. The script exports it and compares the outputs of the file and the policy. Batches
have 1, 7 and 1,000 rows. Their values are zeros, bounds, 1e6, the largest and the smallest numbers, infinity and the
extremes of integers, if the space contains them. Recurrent agents take five steps, and each side keeps its own states.

Discrete actions must be equal. If the scores of two actions differ by less than a relative 1e-5, the row counts as a
tie. Continuous actions and states must be within a relative 1e-5 or an absolute 1e-6.

A row counts as an overflow, not as a difference, in two cases: a sum of the policy exceeds float32 (its result in
float64 differs), or the row has both infinite and huge numbers. A row counts as rounded if the error of the file
against float64 is not larger than the float32 error of the policy. WORD selects agents by words in their names.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from benchmarks.harness import one_thread, say  # noqa: E402

if __name__ == "__main__":
    one_thread(pin=False)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from tensordict import TensorDict  # noqa: E402

import torchrl_lightning as tl  # noqa: E402
from kit.exported import FAMILIES, OBSERVATIONS, Agent, agents, build, by_name, entry_name, random_rows  # noqa: E402
from torchrl_lightning.agents.networks.exploration import ExploringPolicy  # noqa: E402
from torchrl_lightning.deploy.export import SUFFIXES  # noqa: E402
from torchrl_lightning.deploy.loading import observed_entries  # noqa: E402
from torchrl_lightning.environments.masks import allowed_values  # noqa: E402
from torchrl_lightning.environments.normalization import NormalizedPolicy  # noqa: E402
from torchrl_lightning.environments.policy_calls import recurrent_states  # noqa: E402

Array = NDArray[Any]
SIZES, STEPS = (1, 7, 1000), 5
MIXED_ROWS = 24
LARGEST, HUGE = float(np.finfo(np.float32).max), 1e30
MIXED = "infinite and huge"  # a product may overflow to the other infinity: then the sum is NaN on one side only


# -- batches --------------------------------------------------------------------------------------------------------


def extreme_rows(space: spaces.Space[Any], limits: Mapping[str, float], prefix: str = "") -> Any:
    """Return all rows ``[N, *F]`` of a space with extreme values. N differs between the entries."""
    if isinstance(space, spaces.Dict):
        names = {name: f"{prefix}.{name}" if prefix else name for name in space}
        return {name: extreme_rows(space[name], limits, path) for name, path in names.items()}
    if isinstance(space, spaces.Box):
        return _extreme_numbers(space, limits.get(prefix or "observation", np.inf))
    first = np.broadcast_to(np.asarray(getattr(space, "start", 0)), space.shape or ())
    counts = 2 if isinstance(space, spaces.MultiBinary) else getattr(space, "nvec", getattr(space, "n", 2))
    last = first + np.broadcast_to(np.asarray(counts), space.shape or ()) - 1
    return np.stack([first, last]).astype(space.dtype)


def _extreme_numbers(space: spaces.Box, limit: float) -> Array:
    dtype: np.dtype[Any] = np.dtype(space.dtype)
    if dtype.kind == "f":
        smallest, largest = float(np.finfo(dtype).smallest_subnormal), min(float(np.finfo(dtype).max), LARGEST)
        sizes = [smallest, 1.2e-38, 1.0, 1e6, largest, limit, np.inf]
    else:
        info = None if dtype.kind == "b" else np.iinfo(dtype)
        sizes = [1, 1e6] if info is None else [1, 10**6, 2**24 + 1, info.max, -info.min]
    values = [0, *sizes, *(-size for size in sizes)]
    wide = np.float64 if dtype.kind == "f" else object
    low, high = np.maximum(space.low.astype(wide), -limit), np.minimum(space.high.astype(wide), limit)
    rows = [np.clip(np.full(space.shape, value, wide), low, high) for value in values] + [low, high]
    draws = np.random.default_rng(0).integers(len(rows), size=(MIXED_ROWS, *space.shape))
    stacked = np.stack(rows)
    mixed = np.take_along_axis(stacked, draws, 0) if space.shape else stacked[draws]
    with np.errstate(over="ignore"):
        return np.concatenate([stacked, mixed]).astype(dtype)


def batches(space: spaces.Space[Any], limits: Mapping[str, float]) -> Iterator[Any]:
    """Yield batches of all sizes. Small batches contain only extreme rows; the large batch contains all of them."""
    extremes = extreme_rows(space, limits)
    count = max(len(rows) for rows in by_name(extremes).values())
    rolled = [_take(extremes, np.arange(count) + shift) for shift in (0, 1)]
    for rows in rolled:
        for size in SIZES[:2]:
            yield from (_take(rows, np.arange(start, start + size)) for start in range(0, count, size))
    largest = random_rows(space, SIZES[-1], 2)
    yield _replace(largest, rolled, count)


def _take(rows: Any, index: Array, shift: int = 0) -> Any:
    """Take rows of each entry cyclically. Each entry starts at another row."""
    if isinstance(rows, Mapping):
        return {name: _take(part, index, shift + number) for number, (name, part) in enumerate(rows.items())}
    return rows[(index * (1 + shift % 2) + shift) % len(rows)]


def _replace(rows: Any, parts: Sequence[Any], count: int) -> Any:
    if isinstance(rows, Mapping):
        return {name: _replace(entry, [part[name] for part in parts], count) for name, entry in rows.items()}
    rows = np.array(rows)
    for number, part in enumerate(parts):
        rows[number * count : (number + 1) * count] = part
    return rows


# -- comparison -----------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """The comparison of one exported file."""

    agent: str
    format: str
    batches: int = 0
    rows: int = 0
    ties: int = 0
    overflows: int = 0
    rounded: int = 0
    differences: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0
    refused: str | None = None

    def line(self) -> str:
        if self.refused is not None:
            return f"{self.agent} | {self.format} | refused: {self.refused}"
        faults = ", ".join(f"{count} {kind}" for kind, count in self.differences.items()) or "equal"
        return (
            f"{self.agent} | {self.format} | {self.batches} batches, {self.rows} rows, {self.ties} ties, "
            f"{self.overflows} overflows, {self.rounded} rounded, largest error {self.largest:.1e} | {faults}"
        )


def open_file(path: Path, form: str) -> Callable[[list[Array]], list[Array]]:
    """Load a file without the package; return a function of its inputs in order."""
    if form == "torch":
        program: Any = torch.export.load(path).module()

        def run(inputs: list[Array]) -> list[Array]:
            outputs = program(*map(torch.as_tensor, inputs))
            return [output.numpy() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]

        return run
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def compare(agent: Agent, form: str, folder: Path) -> Result:
    """Export an agent and compare the file with the policy."""
    result, path = Result(str(agent), form), folder / f"policy{SUFFIXES[form]}"
    try:
        policy = build(agent)
        description = tl.export_policy(policy, path, format=form)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        result.refused = str(error)
        return result
    run = open_file(path, form)
    inputs, space = description["inputs"], OBSERVATIONS[agent.observation]
    limits = {entry_name(key): limit for key, limit in policy._limits.items()}
    double = tl.LoadedPolicy(copy.deepcopy(policy.policy).double(), policy.specs)
    for batch in batches(space, limits):
        entries = by_name(batch)
        rows = len(next(iter(entries.values())))
        kinds, lost = _kinds(entries), np.zeros(rows, bool)
        states = [np.zeros((rows, *inputs[name]["shape"][1:]), inputs[name]["dtype"]) for name in inputs][
            len(entries) :
        ]
        observed = [_as_input(entries[name], inputs[name]) for name in sorted(entries)]
        seen = batch if isinstance(batch, Mapping) else observed[0]  # an array [1] would be one number
        for step in range(STEPS if states else 1):
            before = dict(policy.state) if step else {}
            expected = np.asarray(policy.act(seen, starts=step == 0))
            exact = cache(partial(Exact, policy, double, seen, before))
            action, *states = run([*observed, *states])
            _check(result, "action", action, expected, kinds, lost, exact)
            for key, state in zip(policy.state, states, strict=True):
                _check(result, entry_name(key), state, policy.state[key].numpy(), kinds, lost, exact)
        result.batches += 1
        result.rows += rows
    return result


def _as_input(values: Array, described: Mapping[str, Any]) -> Array:
    values = values.reshape(len(values), *described["shape"][1:])
    if str(values.dtype) != described["dtype"]:
        raise AssertionError(f"{values.dtype} is not {described['dtype']}")
    return values


def _check(
    result: Result, name: str, value: Array, known: Array, kinds: Array, lost: Array, exact: Callable[[], Exact]
) -> None:
    """Count the rows that differ from the output of the policy, except ``lost`` rows after an overflow."""
    if value.dtype != known.dtype or value.shape != known.shape:
        result.differences[f"{name} {value.dtype}{value.shape} for {known.dtype}{known.shape}"] += 1
        return
    if known.dtype.kind == "f":
        rows, tolerance = (len(value), -1), max(1e-5, 2 * float(np.finfo(known.dtype).eps) if known.itemsize < 4 else 0)
        wide, expected = value.astype(np.float64).reshape(rows), known.astype(np.float64).reshape(rows)
        wrong = ~np.isclose(wide, expected, rtol=tolerance, atol=1e-6, equal_nan=True)
        if wrong.any():
            true = np.asarray(exact().values[name], np.float64).reshape(rows)
            rounded = np.abs(wide - true) <= 1e-6 + tolerance * np.abs(true) + 8 * np.abs(expected - true)
            overflow = (wrong & np.isnan(expected) & ~np.isnan(true)).any(1)
            overflow |= (wrong & rounded).any(1) & (kinds != "finite")
            result.rounded += int((wrong & rounded).any(1)[~lost & ~overflow].sum())
            wrong &= ~rounded | overflow[:, None]
        with np.errstate(invalid="ignore"):
            errors = (np.abs(wide - expected) / np.maximum(1.0, np.abs(expected)))[wrong | np.isclose(wide, expected)]
        result.largest = max(result.largest, float(np.max(errors[np.isfinite(errors)], initial=0.0)))
        different = wrong.any(1) & ~lost
    else:
        different = (value != known).reshape(len(value), -1).any(1) & ~lost
        if different.any():
            overflow, tied = exact().excuses(value, known)
            result.ties += int((different & tied & ~overflow).sum())
            different &= ~tied | overflow
    if different.any():
        overflow |= kinds == MIXED
        result.overflows += int((different & overflow).sum())
        lost |= different & overflow
    for row in np.flatnonzero(different & ~lost):
        result.differences[f"{name} for {kinds[row]} inputs"] += 1


def _kinds(entries: Mapping[str, Array]) -> Array:
    """Return the kind of each row of observations by its largest magnitude."""
    sizes = np.concatenate([np.abs(rows.reshape(len(rows), -1).astype(float)) for rows in entries.values()], 1)
    infinite, huge = np.isinf(sizes).any(1), (np.isfinite(sizes) & (sizes > HUGE)).any(1)
    return np.where(infinite & huge, MIXED, np.where(infinite, "infinite", np.where(huge, "huge", "finite")))


class Exact:
    """One step of a policy in float64, for rows beyond the precision of float32.

    Attributes:
        values: The action and the next recurrent states by name.
    """

    def __init__(self, policy: tl.LoadedPolicy, double: tl.LoadedPolicy, observation: Any, states: Mapping[Any, Any]):
        entries, _ = observed_entries(policy.specs.observation, observation)
        rows = len(next(iter(entries.values())))
        single_states = states or recurrent_states(policy.policy, rows)
        double_states = {key: state.double() for key, state in single_states.items()}
        action = double.act(observation, state=double_states)
        self.values = {"action": action, **{entry_name(key): state.numpy() for key, state in double.state.items()}}
        self._start, is_init = np.asarray(policy.specs.action_format.start), torch.zeros(rows, 1, dtype=torch.bool)
        self._steps = [
            (module, TensorDict({**entries, **given, "is_init": is_init}, [rows]))
            for module, given in ((policy.policy, single_states), (double.policy, double_states))
        ]

    def excuses(self, value: Array, known: Array) -> tuple[Array, Array]:
        """Return two masks ``[N]``: rows with an overflow in float32, and rows with equal scores of both actions."""
        overflow, tied = np.zeros(len(value), bool), np.ones(len(value), bool)
        choices = [(actions - self._start).reshape(len(value), -1) for actions in (value, known)]
        for part, (single, double) in enumerate(zip(*(_scores(*step) for step in self._steps), strict=True)):
            overflow |= np.isnan(single).any(1) & ~np.isnan(double).any(1)
            first, second = (np.take_along_axis(double, chosen[:, part, None], 1)[:, 0] for chosen in choices)
            with np.errstate(invalid="ignore"):
                largest = np.max(np.abs(double), 1, initial=1.0, where=np.isfinite(double))
                tied &= (first == second) | (np.abs(first - second) <= 1e-5 * largest)
        return overflow, tied


@torch.no_grad()
def _scores(policy: Any, step: TensorDict) -> list[Array]:
    """Return the logits or values of each discrete choice, each ``[N, A]``."""
    if isinstance(policy, NormalizedPolicy):
        return _scores(policy.policy, policy._normalized(step))
    if isinstance(policy, ExploringPolicy):
        keys = policy.network.trunk.in_keys
        entries = [step.get(key) for key in keys] if policy.memory is None else [policy.memory.step(step)[0]]
        values = policy.network.values(entries)
        return [(allowed_values(values, step.get("action_mask")) if policy._mask_keys else values).numpy()]
    if not hasattr(policy, "get_dist"):
        return [policy(step.copy())["action_value"].numpy()]
    dist = policy.get_dist(step)
    return [part.numpy() for part in getattr(dist, "parts", None) or [dist.logits]]


def _summary(name: str, results: Sequence[Result]) -> str:
    """Return a line with the counts of several comparisons."""
    compared = [result for result in results if result.refused is None]
    number = len({result.agent for result in compared})
    counts = {
        key: sum(getattr(result, key) for result in compared) for key in ("batches", "ties", "overflows", "rounded")
    }
    faults = sum(sum(result.differences.values()) for result in compared)
    listed = ", ".join(f"{count} {key}" for key, count in counts.items())
    return f"{name}: {number} agents, {len(results) - len(compared)} refused files, {listed}, {faults} differences"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--formats", nargs="+", default=["onnx", "torch"], choices=["onnx", "torch"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="print the names only")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [agent for agent in agents() if not arguments.words or any(word in str(agent) for word in arguments.words)]
    if arguments.list:
        say("\n".join(map(str, chosen)))
        return
    results, start = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for agent in chosen:
            for form in arguments.formats:
                results.append(compare(agent, form, Path(folder)))
                say(results[-1].line())
    for family in FAMILIES:
        say(_summary(family, [result for result in results if result.agent.startswith(f"{family},")]))
    say(_summary(f"all, {time.monotonic() - start:.0f} s", results))
    if arguments.json:
        machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
        exports = [{**vars(result), "differences": dict(result.differences)} for result in results]
        arguments.json.write_text(json.dumps({"machine": machine, "exports": exports}, indent=2) + "\n")
    sys.exit(any(result.differences for result in results))


if __name__ == "__main__":
    main()
