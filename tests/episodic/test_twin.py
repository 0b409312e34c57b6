"""Random streams of uneven environments: index, returns, windows, priorities and stacks equal plain Python lists."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_lightning.episodic import EpisodicReplayBuffer, FrameStackTransform
from torchrl_lightning.episodic.time_steps import FIRST, LAST, MID, TIME_STEPS, TRANSITIONS

DEFAULT, INITIAL, RECENT, STACK, DRAWS = -1000.0, 2.0, 0.4, 3, 24


@dataclass(frozen=True)
class Step:
    frame: int
    begins: bool
    done: bool
    terminated: bool
    reward: float


@dataclass
class Ring:
    """All steps of an environment. Steps below ``oldest`` are dropped."""

    steps: list[Step] = field(default_factory=list)
    begins: set[int] = field(default_factory=lambda: {0})  # first positions of episodes
    oldest: int = 0
    priority: dict[int, float] = field(default_factory=dict)  # of stored steps

    def add(self, step: Step, length: int, priority: float) -> None:
        position = len(self.steps)
        if step.begins or (self.steps and self.steps[-1].done):
            self.begins.add(position)
        self.steps.append(step)
        self.priority[position] = priority
        self.drop(position + 1 - length)

    def drop(self, oldest: int) -> None:
        self.oldest = max(self.oldest, oldest)
        self.priority = {p: value for p, value in self.priority.items() if p >= self.oldest}

    def cut(self) -> None:
        self.begins.add(len(self.steps))

    def begin(self, position: int) -> int:
        return max(begin for begin in self.begins if begin <= position)

    def end(self, position: int) -> int:
        return min([*(begin for begin in self.begins if begin > position), len(self.steps)]) - 1

    def stack(self, position: int) -> list[int]:
        first = max(self.begin(position), self.oldest)
        return [self.steps[max(first, position - back)].frame for back in reversed(range(STACK))]


@dataclass
class Twin:
    """Reference implementation of a buffer with these settings."""

    num_envs: int
    length: int
    ignored: int
    gamma: float
    clip: tuple[float, float] | None
    time_steps: bool
    sampling: str
    cuts: bool  # True if a restored buffer cuts its trajectories

    def __post_init__(self) -> None:
        self.rings = [Ring() for _ in range(self.num_envs)]

    def build(self) -> EpisodicReplayBuffer:
        prioritized = "prioritized" in self.sampling
        return EpisodicReplayBuffer(
            None, self.num_envs, self.length, self.ignored, prioritized, INITIAL if prioritized else 1.0,
            recent_data_steps=1, recent_data_ratio=RECENT if "recent" in self.sampling else 0.0,
            record_episodic_return=True, default_return=DEFAULT, gamma=self.gamma, reward_clip=self.clip,
            enable_checkpoint=self.cuts, layout=TIME_STEPS if self.time_steps else TRANSITIONS,
            generator=torch.Generator().manual_seed(0), transform=FrameStackTransform(STACK),
        )  # fmt: skip

    @property
    def new_priority(self) -> float:
        return max([INITIAL, *(value for ring in self.rings for value in ring.priority.values())])

    def life(self, ring: Ring, position: int) -> int:
        """Return the position after the last terminated step.

        A terminated time step is the next beginning itself.
        """
        shift = int(not self.time_steps)
        first = max(ring.begin(position), ring.oldest)
        ended = [p + shift for p in range(first, position + 1 - shift) if ring.steps[p].terminated]
        return max([ring.begin(position), *ended])

    def discounted(self, ring: Ring, position: int) -> float:
        """Return the discounted rewards up to the first terminated step, or the default before the episode ends."""
        end, total, factor = ring.end(position), 0.0, 1.0
        if not ring.steps[end].done:
            return DEFAULT
        for step in ring.steps[position + self.time_steps : end + 1]:
            total += factor * (step.reward if self.clip is None else min(max(step.reward, self.clip[0]), self.clip[1]))
            factor *= self.gamma
            if step.terminated:
                return total
        return DEFAULT

    def windows(self, steps: int) -> dict[tuple[int, int], float]:
        """Return the priority of each allowed window start."""
        return {
            (env, p): value
            for env, ring in enumerate(self.rings)
            for p, value in ring.priority.items()
            if p >= ring.oldest + self.ignored and p + steps <= len(ring.steps)
        }


def rows_of(steps: list[Step], twin: Twin) -> TensorDict:
    """Return the steps as rows ``[n]``. The steps of each environment keep their order."""
    frames = torch.tensor([step.frame for step in steps]).view(-1, 1, 1)
    reward = torch.tensor([[step.reward] for step in steps])
    if twin.time_steps:
        step_types = [LAST if step.done else FIRST if step.begins else MID for step in steps]
        discount = [float(not step.terminated) for step in steps]
        columns = {"reward": reward, "step_type": torch.tensor(step_types), "discount": torch.tensor(discount)}
        return TensorDict({"observation": frames, **columns}, [len(steps)])
    flags = {name: torch.tensor([[getattr(step, name)] for step in steps]) for name in ("begins", "done", "terminated")}
    init = flags.pop("begins")
    next_data = {"observation": -frames, "reward": reward, **flags}
    return TensorDict({"observation": frames, "is_init": init, "next": next_data}, [len(steps)])


def random_steps(rng: np.random.Generator, count: int, twin: Twin) -> list[Step]:
    steps = []
    for _ in range(count):
        begins, done, terminated = rng.random(3) < (0.15, 0.25, 0.3)
        begins = bool(begins and not (twin.time_steps and done))  # a time step cannot be both first and last
        step = Step(int(rng.integers(1, 1 << 40)), begins, bool(done), bool(terminated), float(rng.integers(-3, 4)))
        steps.append(step)
    return steps


def check(buffer: EpisodicReplayBuffer, twin: Twin, steps: int) -> None:
    """Compare every stored step and a sample of windows with the twin."""
    rings = twin.rings
    stored = [(env, p) for env, ring in enumerate(rings) for p in range(ring.oldest, len(ring.steps))]
    assert buffer.total_size == len(stored)
    if "prioritized" in twin.sampling:
        assert buffer.initial_priority == twin.new_priority
    if stored:
        env, position = torch.tensor(stored).unbind(1)
        ring_positions = [(rings[e], p) for e, p in stored]
        assert buffer.get_field("observation", env, position).flatten().tolist() == [
            r.steps[p].frame for r, p in ring_positions
        ]
        assert buffer.get_episode_begin_position(position, env).tolist() == [r.begin(p) for r, p in ring_positions]
        assert buffer.steps_to_episode_end(position, env).tolist() == [r.end(p) - p for r, p in ring_positions]
        assert buffer.get_disc_0_begin_position(position, env).tolist() == [twin.life(r, p) for r, p in ring_positions]
        returns = buffer.get_field("discounted_return", env, position).flatten().tolist()
        assert returns == pytest.approx([twin.discounted(r, p) for r, p in ring_positions], rel=1e-5, abs=1e-5)
    allowed = twin.windows(steps)
    if not allowed or ("prioritized" in twin.sampling and not any(allowed.values())):
        with pytest.raises((RuntimeError, ValueError), match=r"0 .*are stored|batch_length|priorities are zero"):
            buffer.get_batch(DRAWS, steps)
        return
    batch, info = buffer.get_batch(DRAWS, steps)
    drawn = list(zip(info.env_ids.tolist(), info.positions.tolist(), strict=True))
    beginnings = len(stored) / twin.num_envs - (steps - 1 + twin.ignored)
    check_draws(drawn, info.importance_weights, allowed, beginnings, twin)
    returns = [twin.discounted(rings[e], p) for e, p in drawn]
    assert info.discounted_return.flatten().tolist() == pytest.approx(returns, rel=1e-5, abs=1e-5)
    stacks = [[rings[e].stack(p + step) for step in range(steps)] for e, p in drawn]
    assert batch["observation"].flatten(2).tolist() == stacks
    if not twin.time_steps:
        next_stacks = [[[*stack[1:], -stack[-1]] for stack in window] for window in stacks]
        assert batch["next", "observation"].flatten(2).tolist() == next_stacks


def check_draws(
    drawn: list[tuple[int, int]],
    weights: torch.Tensor | None,
    allowed: dict[tuple[int, int], float],
    num_starts: float,
    twin: Twin,
) -> None:
    """Check how the draws are distributed over environments and priorities.

    Recent windows come first, evenly over the environments. The others are also even, or follow their priorities.
    """
    recent = math.ceil(DRAWS * RECENT) if "recent" in twin.sampling and num_starts * RECENT > 1 else 0
    assert set(drawn[:recent]) <= {max(start for start in allowed if start[0] == env) for env, _ in allowed}
    assert set(drawn[recent:]) <= set(allowed)
    envs, others = sorted({env for env, _ in allowed}), drawn[recent:]
    for draws in (drawn[:recent], [] if "prioritized" in twin.sampling else others):
        counts = [sum(env == drawn_env for drawn_env, _ in draws) for env in envs]
        assert max(counts) - min(counts) <= 1
    if "prioritized" in twin.sampling:
        total, mean = sum(allowed.values()), sum(allowed.values()) / sum(value > 0 for value in allowed.values())
        assert all(abs(others.count(start) - len(others) * value / total) < 2 for start, value in allowed.items())
        assert weights is not None
        assert weights.tolist() == pytest.approx([1.0] * recent + [allowed[start] / mean for start in others], rel=1e-5)


def restored(buffer: EpisodicReplayBuffer, twin: Twin, through_files: bool) -> EpisodicReplayBuffer:
    loaded = twin.build()
    if through_files:
        with tempfile.TemporaryDirectory() as folder:
            buffer.dumps(folder)
            loaded.loads(folder)
    else:
        loaded.load_state_dict(buffer.state_dict())
    if twin.cuts:
        buffer.writer.cut()
        for ring in twin.rings:
            ring.cut()
    if any(twin.windows(1).values()):
        (batch, info), (expected, expected_info) = loaded.get_batch(8, 1), buffer.get_batch(8, 1)
        assert (batch == expected).all()
        assert all(getattr(info, key).equal(getattr(expected_info, key)) for key in ("env_ids", "positions"))
        if expected_info.importance_weights is not None:
            assert info.importance_weights.equal(expected_info.importance_weights)
    return loaded


verbs = st.sampled_from(["add"] * 5 + ["run"] * 3 + ["priorities"] * 2 + ["dequeue", "clear", "cut", "empty"])
saves = st.sampled_from(["restore", "files"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[Twin, list[tuple[str, list[int], int]]]:
    num_envs, length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    twin = Twin(
        num_envs, length, draw(st.integers(0, min(2, length - 1))), draw(st.sampled_from([0.0, 0.9, 1.0])),
        draw(st.sampled_from([None, (-1.0, 2.0)])), draw(st.booleans()),
        draw(st.sampled_from(["uniform", "prioritized", "recent", "recent, prioritized"])), draw(st.booleans()),
    )  # fmt: skip
    ids = st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
    plan = st.lists(st.tuples(st.one_of(verbs, verbs, verbs, saves), ids, st.integers(1, 9)), min_size=1, max_size=16)
    return twin, draw(plan)


@settings(max_examples=80, deadline=None)
@given(streams(), st.integers(0, 1 << 30))
def test_buffer_equals_plain_lists(stream: tuple[Twin, list[tuple[str, list[int], int]]], seed: int) -> None:
    twin, plan = stream
    buffer, rng = twin.build(), np.random.default_rng(seed)
    for verb, ids, count in plan:
        rings, env_ids = [twin.rings[env] for env in ids], torch.tensor(ids)
        if verb in ("add", "run"):
            steps = random_steps(rng, len(ids) * (count if verb == "run" else 1), twin)
            priority, rows = twin.new_priority, rows_of(steps, twin)
            if verb == "run":
                buffer.extend(rows.view(count, len(ids)), env_ids, time_dim=0)
            else:
                buffer.add_batch(rows, env_ids)
            for row, step in enumerate(steps):
                rings[row % len(ids)].add(step, twin.length, priority)
        elif verb == "priorities" and "prioritized" in twin.sampling:
            written = [(env, p) for env in ids for p in range(len(twin.rings[env].steps))]
            steps_to_update = [written[row] for row in rng.permutation(len(written))[:count]]
            values = rng.integers(0, 5, len(steps_to_update)).astype(np.float32)
            env, position = torch.tensor(steps_to_update, dtype=torch.int64).view(-1, 2).unbind(1)
            buffer.update_priority(env, position, torch.from_numpy(values))
            for (ring_env, p), value in zip(steps_to_update, values.tolist(), strict=True):
                twin.rings[ring_env].priority.update({p: value} if p in twin.rings[ring_env].priority else {})
        elif verb == "dequeue":
            count = min(count, *(len(ring.priority) for ring in rings), 9)
            if count:
                removed = buffer.dequeue(env_ids, n=count)["observation"].flatten(1).tolist()
                assert removed == [[r.steps[p].frame for p in range(r.oldest, r.oldest + count)] for r in rings]
                for ring in rings:
                    ring.drop(ring.oldest + count)
        elif verb == "clear":
            buffer.clear(env_ids)
            for ring in rings:
                ring.drop(len(ring.steps))
                ring.cut()
        elif verb == "cut":
            buffer.writer.cut(env_ids)
            for ring in rings:
                ring.cut()
        elif verb == "empty":
            buffer.clear()
            twin.__post_init__()
        elif verb in ("restore", "files"):
            buffer = restored(buffer, twin, verb == "files")
        check(buffer, twin, 1 + count % twin.length)
