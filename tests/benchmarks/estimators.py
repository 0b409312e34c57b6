"""Compare advantage estimators and the scan with their peers, interleaved on one thread.

    python tests/benchmarks/estimators.py [--json timings.json] [--repetitions 11] [--check]

Each peer gets its inputs in its fastest layout and type, prepared before the clock starts. The time of ours includes
the checks and the allocation of the public function. All results are compared before the timing. Missing peers are
reported as absent. ``--check`` exits with 1 if a budget is missed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import numpy as np
import torch
from torch import Tensor
from torchrl.objectives.value import functional as torchrl

from torchrl_lightning import discounted_scan, gae, vtrace

GAMMA, LMBDA = 0.99, 0.95
SHAPES = ((128, 1), (128, 8), (2048, 1), (128, 64), (2048, 16), (16, 4096), (1024, 1024))
FACTOR = 30.0  # required ratio to TorchRL's faster implementation at FACTOR_SHAPES
FACTOR_SHAPES = ((128, 64), (2048, 16))
OURS = "torchrl-lightning"
BARE = "Tianshou, its bare loop"
SMALL = 4096  # the bare loop has a budget only above this number of steps

Result = Callable[[], np.ndarray]  # returns the advantages as [T, N]


class Problem:
    """One rollout with terminated episodes only, because all peers support termination."""

    def __init__(self, steps: int, envs: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.steps, self.envs = steps, envs
        self.reward, self.log_pi, self.log_mu = (torch.randn(steps, envs, generator=generator) for _ in range(3))
        self.log_pi, self.log_mu = self.log_pi * 0.3, self.log_mu * 0.3
        self.values = torch.randn(steps + 1, envs, generator=generator)
        self.value, self.next_value = self.values[:-1].clone(), self.values[1:].clone()
        self.done = torch.rand(steps, envs, generator=generator) < 0.01

    def torchrl(self, *names: str) -> list[Tensor]:
        return [getattr(self, name).t().contiguous().unsqueeze(-1) for name in names]


def gae_contenders(problem: Problem) -> dict[str, tuple[Contender, Result]]:
    p = problem
    contenders: dict[str, tuple[Contender, Result]] = {}

    def add(name: str, run: Callable[[], object], result: Callable[[object], np.ndarray]) -> None:
        contenders[name] = (run, lambda: result(run()))

    add(
        OURS,
        lambda: gae(p.reward, p.value, p.next_value, p.done, p.done, GAMMA, LMBDA),
        lambda out: out[0].numpy(),
    )
    inputs = p.torchrl("value", "next_value", "reward", "done", "done")
    for name, function in (
        ("TorchRL loop", torchrl.generalized_advantage_estimate),
        ("TorchRL vectorised", torchrl.vec_generalized_advantage_estimate),
    ):
        add(name, lambda function=function: function(GAMMA, LMBDA, *inputs), lambda out: out[0][..., 0].t().numpy())
    _add_rlax_gae(p, add)
    _add_tianshou(p, add)
    _add_sb3(p, add)
    return contenders


def _add_rlax_gae(p: Problem, add: Callable[..., None]) -> None:
    try:
        import jax
        import jax.numpy as jnp
        import rlax
    except ImportError:
        return absent("rlax")

    def one(reward: object, values: object, done: object) -> object:
        discount = GAMMA * (1.0 - done)
        advantage = rlax.truncated_generalized_advantage_estimation(reward, discount, LMBDA, values)
        return advantage, advantage + values[:-1]

    for axis, layout in ((1, "[T, N]"), (0, "[N, T]")):
        function = jax.jit(jax.vmap(one, in_axes=axis, out_axes=axis))
        tensors = (p.reward, p.values, p.done.float())
        inputs = [jnp.asarray((x if axis else x.t().contiguous()).numpy()) for x in tensors]
        add(
            f"rlax {layout}",
            lambda function=function, inputs=inputs: jax.block_until_ready(function(*inputs)),
            lambda out, axis=axis: np.asarray(out[0] if axis else out[0].T),
        )
    return None


def _add_tianshou(p: Problem, add: Callable[..., None]) -> None:
    try:
        from tianshou.algorithm.algorithm_base import Algorithm
        from tianshou.algorithm.algorithm_base import _gae as bare_loop
        from tianshou.data import ReplayBuffer
    except ImportError:
        return absent("Tianshou")
    ends = p.done.clone()
    ends[-1] = True  # one array concatenates all environments
    value, following, reward, terminated, done = (
        x.t().contiguous().view(-1) for x in (p.value, p.next_value, p.reward, p.done, ends)
    )
    names = {"rew": reward, "terminated": terminated, "truncated": done & ~terminated, "done": done}
    blank = np.zeros(len(reward), np.int8)
    buffer = ReplayBuffer.from_data(blank, blank, *(x.numpy() for x in names.values()), blank)
    indices = np.arange(len(reward))
    batch = buffer[indices]

    def whole() -> object:
        return Algorithm.compute_episodic_return(batch, buffer, indices, following, value, GAMMA, LMBDA)

    inputs = [x.numpy() for x in (value, following * ~terminated, reward, done)]
    add("Tianshou", whole, lambda out: out[1].reshape(p.envs, p.steps).T)
    add(BARE, lambda: bare_loop(*inputs, GAMMA, LMBDA), lambda out: out.reshape(p.envs, p.steps).T)
    return None


def _add_sb3(p: Problem, add: Callable[..., None]) -> None:
    try:
        from gymnasium.spaces import Box, Discrete
        from stable_baselines3.common.buffers import RolloutBuffer
    except ImportError:
        return absent("Stable-Baselines3")
    box = Box(-1.0, 1.0, (1,), np.float32)
    buffer = RolloutBuffer(p.steps, box, Discrete(2), gamma=GAMMA, gae_lambda=LMBDA, n_envs=p.envs)
    buffer.rewards[:], buffer.values[:] = p.reward.numpy(), p.value.numpy()
    buffer.episode_starts[1:] = p.done[:-1].numpy()
    last = p.values[-1], p.done[-1].numpy()
    add(
        "Stable-Baselines3",
        lambda: buffer.compute_returns_and_advantage(*last),
        lambda _: buffer.advantages.copy(),
    )
    return None


def vtrace_contenders(problem: Problem) -> dict[str, tuple[Contender, Result]]:
    p = problem

    def ours() -> tuple[Tensor, Tensor]:
        return vtrace(p.log_pi, p.log_mu, p.reward, p.value, p.next_value, p.done, p.done, GAMMA)

    inputs = p.torchrl("log_pi", "log_mu", "value", "next_value", "reward", "done", "done")

    def theirs() -> tuple[Tensor, Tensor]:
        return torchrl.vtrace_advantage_estimate(GAMMA, *inputs)

    contenders: dict[str, tuple[Contender, Result]] = {
        OURS: (ours, lambda: ours()[0].numpy()),
        "TorchRL": (theirs, lambda: theirs()[0][..., 0].t().numpy()),
    }
    try:
        import jax
        import jax.numpy as jnp
        import rlax
    except ImportError:
        absent("rlax")
        return contenders

    def one(log_pi: object, log_mu: object, reward: object, values: object, done: object) -> object:
        ratio, discount = jnp.exp(log_pi - log_mu), GAMMA * (1.0 - done)
        out = rlax.vtrace_td_error_and_advantage(values[:-1], values[1:], reward, discount, ratio)
        return out.pg_advantage, out.errors + values[:-1]

    for axis, layout in ((1, "[T, N]"), (0, "[N, T]")):
        function = jax.jit(jax.vmap(one, in_axes=axis, out_axes=axis))
        tensors = (p.log_pi, p.log_mu, p.reward, p.values, p.done.float())
        arrays = [jnp.asarray((x if axis else x.t().contiguous()).numpy()) for x in tensors]

        def run(function: Callable[..., object] = function, arrays: list[object] = arrays) -> object:
            return jax.block_until_ready(function(*arrays))

        contenders[f"rlax {layout}"] = (run, lambda run=run, axis=axis: np.asarray(run()[0] if axis else run()[0].T))
    return contenders


def scan_contenders(problem: Problem) -> dict[str, tuple[Contender, Result]]:
    contenders: dict[str, tuple[Contender, Result]] = {}
    for backend in ("numba", "torch"):
        for kind, factor in (("number", GAMMA), ("tensor", torch.full_like(problem.reward, GAMMA))):

            def run(backend: str = backend, factor: float | Tensor = factor) -> Tensor:
                return discounted_scan(problem.reward, factor, backend=backend)

            contenders[f"{backend}, discount a {kind}"] = (run, lambda run=run: run().numpy())
    return contenders


_ABSENT: set[str] = set()


def absent(name: str) -> None:
    """Print once that a peer is not installed."""
    if name not in _ABSENT:
        _ABSENT.add(name)
        say(f"{name}: absent, not installed here")


def agree(contenders: dict[str, tuple[Contender, Result]]) -> None:
    """Raise SystemExit if a contender computes other values than the first contender."""
    reference, *_ = contenders
    expected = contenders[reference][1]()
    for name, (_, result) in contenders.items():
        error = float(np.abs(result() - expected).max())
        if not error < 1e-3:
            raise SystemExit(f"{name} differs from {reference} by {error}: not the same computation")


def misses(estimator: str, shape: tuple[int, int], timings: list[Timing]) -> list[str]:
    """Return the missed budgets of these timings."""
    medians = {timing.name: timing.median for timing in timings}
    ours = medians.pop(OURS)
    if shape[0] * shape[1] <= SMALL:
        medians.pop(BARE, None)
    missed = [f"{estimator} {shape}: slower than {name}" for name, theirs in medians.items() if ours >= theirs]
    best = min(theirs for name, theirs in medians.items() if name.startswith("TorchRL"))
    if shape in FACTOR_SHAPES and best < FACTOR * ours:
        missed.append(f"{estimator} {shape}: {best / ours:.1f}x TorchRL, asked {FACTOR:.0f}x")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the timings to this file")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a budget is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[Timing]] = {}
    missed: list[str] = []
    for name, build in (("GAE", gae_contenders), ("V-trace", vtrace_contenders), ("discounted_scan", scan_contenders)):
        for shape in SHAPES:
            contenders = build(Problem(*shape))
            agree(contenders)
            timings = compare({key: run for key, (run, _) in contenders.items()}, repetitions=options.repetitions)
            title = f"{name}, T={shape[0]}, N={shape[1]}"
            results[title] = timings
            say(table(title, timings, next(iter(contenders))) + "\n")
            if name != "discounted_scan":
                missed += misses(name, shape, timings)
    say("budgets: " + ("all met" if not missed else "; ".join(missed)))
    if options.json:
        write_json(options.json, results)
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
