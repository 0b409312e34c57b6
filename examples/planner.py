"""Solve fully visible MiniGrid tasks with the shortest plan, found by breadth-first search.

python examples/planner.py --env MiniGrid-UnlockPickup-v0 --seed 0     (pip install "torchrl-lightning[minigrid]")
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium as gym

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))
FIXED = ("wall", "goal", "open")
Cell = tuple[int, int]


class Thing(NamedTuple):
    kind: str  # wall, goal, open, closed, locked, key, ball, box, or target (the object to pick up)
    color: str
    content: Thing | None = None  # content of a box


class State(NamedTuple):
    cell: Cell
    direction: int
    carried: Thing | None
    things: frozenset[tuple[Cell, Thing]]  # obstacles that an action can remove


def shortest_plan(env: Any) -> list[int]:
    """Return the shortest list of actions that solves an unwrapped MiniGrid environment from its current state."""
    target = getattr(env, "obj", None)
    cells = [(x, y) for x in range(env.width) for y in range(env.height)]
    found = {cell: thing for cell in cells if (thing := thing_of(env.grid.get(*cell), target))}
    places = {cell: thing.kind for cell, thing in found.items() if thing.kind in (*FIXED, "closed", "locked")}
    things = frozenset((cell, thing) for cell, thing in found.items() if thing.kind not in FIXED)
    start = State((int(env.agent_pos[0]), int(env.agent_pos[1])), int(env.agent_dir), None, things)
    queue: deque[tuple[State, list[int]]] = deque([(start, [])])
    seen = {start}
    while queue:
        state, plan = queue.popleft()
        for action, after in moves(state, places):
            if after is None:
                return [*plan, action]
            if after not in seen:
                seen.add(after)
                queue.append((after, [*plan, action]))
    raise ValueError(f"{env} cannot be solved from here.")


def thing_of(tile: Any, target: Any) -> Thing | None:
    if tile is None:
        return None
    kind = "target" if tile is target else tile.type
    if kind == "door":
        kind = "open" if tile.is_open else "locked" if tile.is_locked else "closed"
    return Thing(kind, tile.color, thing_of(getattr(tile, "contains", None), target))


def moves(state: State, places: dict[Cell, str]) -> Iterator[tuple[int, State | None]]:
    """Yield each useful action with the next state, or with None if the action reaches the goal.

    The search never closes a door, never carries a box and never drops a key before its door is open.
    """
    (x, y), direction, carried, things = state
    yield LEFT, state._replace(direction=(direction - 1) % 4)
    yield RIGHT, state._replace(direction=(direction + 1) % 4)
    ahead = x + AHEAD[direction][0], y + AHEAD[direction][1]
    place, thing = places.get(ahead), dict(things).get(ahead)
    if place == "wall":
        return
    if thing is None:
        yield FORWARD, None if place == "goal" else state._replace(cell=ahead)
        needed = [Thing("key", each.color) for _, each in things if each.kind == "locked"]
        if carried and place is None and carried not in needed:
            yield DROP, state._replace(carried=None, things=things | {(ahead, carried)})
        return
    rest = things - {(ahead, thing)}
    if thing.kind == "closed" or (thing.kind == "locked" and carried == Thing("key", thing.color)):
        yield TOGGLE, state._replace(things=rest)
    elif thing.kind == "box":
        yield TOGGLE, state._replace(things=rest | ({(ahead, thing.content)} if thing.content else set()))
    elif carried is None and thing.kind in ("key", "ball", "target"):
        yield PICKUP, None if thing.kind == "target" else state._replace(carried=thing, things=rest)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="MiniGrid-UnlockPickup-v0")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    (env := gym.make(f"minigrid:{args.env}")).reset(seed=args.seed)
    plan = shortest_plan(env.unwrapped)
    print(*(env.unwrapped.actions(action).name for action in plan))
    print(f"reward after {len(plan)} steps: {[env.step(action)[1] for action in plan][-1]:.3f}")
