"""Normalise observations and rewards of a run by running statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import REWARD
from torchrl_lightning._core.moments import Moments
from torchrl_lightning._core.ranks import all_gather
from torchrl_lightning._core.state import (
    Attribute,
    Child,
    Stateful,
    bounded_integer,
    check_state,
    expect,
    list_of,
    mapping,
    sequence,
    state_error,
)
from torchrl_lightning.datamodules._run.collector_stream import RolloutPart
from torchrl_lightning.datamodules._run.reward_scale import RewardScale
from torchrl_lightning.environments import EnvironmentSpecs
from torchrl_lightning.environments.normalization import EPSILON, NormalizedPolicy, ObservationNormalizer, normalizes

_CHUNK = 256  # single rows are reduced to moments in chunks of this size


class Normalization(Stateful):
    """Running moments of observations and of discounted sums of rewards, over all environments and ranks.

    Collected steps are recorded first. :meth:`advance` adds them to the statistics on all ranks together. Evaluation
    does not change the statistics.

    Args:
        observation: True for all entries of the observation, or a list of entries.
        reward: whether rewards are scaled.
        clip: largest absolute value of a normalised entry.
        epsilon: added to variances.
        frozen: True if the statistics never change.
    """

    OWNER = "normalization"
    STATE = {
        "count": Attribute(bounded_integer(), "_pending_frames"),
        "total": Attribute(bounded_integer(), "_total_frames"),
        "rows": Attribute(list_of(expect(torch.is_tensor, "a tensor")), "_saved_rows"),
        "noted": Attribute(check_for=lambda normalization: normalization._read_moments, attribute="_saved_moments"),
        "scale": Child(attribute="_scale"),
    }
    """State entries of the steps that this rank has recorded but not yet added to the statistics."""

    def __init__(
        self,
        observation: bool | Sequence[NestedKey],
        reward: bool,
        clip: float,
        epsilon: float = EPSILON,
        *,
        frozen: bool = False,
    ) -> None:
        self.observation, self.reward, self.frozen = observation, reward, frozen
        self.clip, self.epsilon = float(clip), float(epsilon)
        self.is_on = bool(observation) or reward
        self._normalizer: ObservationNormalizer | None = None
        self._scale = RewardScale(self.clip, self.epsilon)
        self._pending_rows: dict[NestedKey, list[Tensor]] = {}  # recorded observations
        self._num_pending_rows = 0  # number of rows in ``_pending_rows``
        self._pending_moments: dict[NestedKey, Moments] = {}  # moments of earlier observations and of reward sums
        self._pending_frames = 0  # frames recorded since the statistics advanced
        self._total_frames = 0  # frames of this rank in the statistics
        # These attributes hold the last rollout, its observations with their target lists, and its rewards and end
        # flags.
        self._last_rollout: TensorDictBase | None = None
        self._observations: list[tuple[list[Tensor], Tensor]] = []
        self._reward_and_done: list[Tensor] = []

    # ------------------------------------------------------------------ normalised data

    def specs(self, specs: EnvironmentSpecs) -> EnvironmentSpecs:
        """Return the specs with normalised observations.

        Raises:
            ValueError: An entry is missing, or cannot be normalised.
        """
        if not self.observation:
            return specs
        if self._normalizer is None:
            self._normalizer = ObservationNormalizer(specs, self.observation, self.clip, self.epsilon)
        normalized_specs = self._normalizer.specs
        return normalized_specs.with_clipping(specs.action_format.clip)

    def policy(self, policy: Any) -> Any:
        """Wrap a policy of normalised observations, once, so that it accepts raw observations."""
        if self._normalizer is None or normalizes(policy):
            return policy
        return NormalizedPolicy(policy, self._normalizer)

    def normalize_rollout(
        self, rollout: TensorDictBase, parts: Sequence[RolloutPart], env_ids: Tensor | None, *, cut: bool, gamma: float
    ) -> TensorDictBase:
        """Return the normalised rollout ``[N, T]``, and add the parts of the raw rollout to the statistics.

        Observations use the statistics before the rollout, like the policy. Rewards use the statistics after the
        rollout.
        """
        if not self.is_on:
            return rollout
        normalized = rollout.copy()
        if self._normalizer is not None:
            self._normalizer.normalize_(normalized)
        for part in parts:
            if part.cut_env_ids is not None:
                self.forget_unfinished(part.cut_env_ids)
            self.update(part.rollout, env_ids, cut=cut and part.is_last, gamma=gamma)
        self._last_rollout, self._observations, self._reward_and_done = (
            None,
            [],
            [],
        )  # free these entries, because the next rollout has other memory
        self.advance()
        if self.reward:
            self._scale.scale_(normalized)
        return normalized

    def normalize_(self, batch: TensorDictBase) -> None:
        """Normalise observations and rewards of a batch in place."""
        if self._normalizer is not None:
            self._normalizer.normalize_(batch)
        if self.reward:
            self._scale.scale_(batch)

    # ------------------------------------------------------------------ statistics

    def check_frozen(self) -> None:
        """Validate that frozen statistics have moments for each entry; raise ValueError if not."""
        if not self.frozen:
            return
        moments = {} if self._normalizer is None else dict(self._normalizer.moments)
        missing = [f"observation {key!r}" for key, moments in moments.items() if not moments.count]
        if self.reward and not self._scale.moments.count:
            missing.append("rewards")
        if missing:
            raise ValueError(
                "freeze_statistics must be False without the moments of an earlier run, got True, but moments are "
                f"missing for {', '.join(missing)}, which would only be clipped. Pass the statistics of that run to "
                "load_normalization(...), or set freeze_statistics=False."
            )

    def update(self, rollout: TensorDictBase, env_ids: Tensor | None, *, cut: bool, gamma: float) -> None:
        """Record a rollout for the statistics.

        Args:
            rollout: Raw steps ``[N, T]``.
            env_ids: Environment of each row, ``[N]``; None for all environments in order.
            cut: The environments are reset afterwards.
            gamma: The discount of the sums of rewards.
        """
        if self.frozen:
            return
        if rollout is not self._last_rollout:
            # If the collector always delivers the same memory, look up the entries only once.
            keys = [] if self._normalizer is None else self._normalizer.keys
            self._observations = [(self._pending_rows.setdefault(key, []), rollout.get(key)) for key in keys]
            self._reward_and_done = [rollout.get(("next", name)) for name in ("reward", "done")]
            self._last_rollout = rollout
        frames = rollout.numel()
        self._pending_frames += frames
        if self._observations:
            for rows, value in self._observations:
                rows.append(value.clone())
            self._num_pending_rows += frames
            if self._num_pending_rows >= _CHUNK:
                self._reduce_rows()
        if self.reward:
            reward, done = self._reward_and_done
            self._add(REWARD, self._scale.update(reward, done, env_ids, gamma))
            if cut:
                self.forget_unfinished()

    def advance_if_due(self) -> None:
        """Advance the statistics if they are empty, or if 256 rows and 1 % of the number of earlier rows are new."""
        is_due = (
            self._pending_frames >= _CHUNK and self._pending_frames * 100 >= self._total_frames
        ) or not self._total_frames
        if is_due and not self.frozen:
            self.advance()

    def advance(self) -> None:
        """Add the recorded steps of all ranks to the statistics."""
        self._reduce_rows()
        self._add(REWARD, self._scale.pop_moments())
        pending, self._pending_moments = self._pending_moments, {}
        self._total_frames, self._pending_frames = self._total_frames + self._pending_frames, 0
        ranks: list[dict[Any, Moments]] = all_gather(pending)
        merged: dict[NestedKey, Moments] = {}
        for rank in ranks:
            for key, moments in rank.items():
                merged[key] = merged[key].merged(moments) if key in merged else moments
        if REWARD in merged:
            self._scale.load_moments(self._scale.moments.merged(merged.pop(REWARD)))
        if self._normalizer is not None:
            self._normalizer.advance(merged)

    def forget_unfinished(self, env_ids: Tensor | slice = slice(None)) -> None:
        """Begin new reward sums for these environments."""
        self._add(REWARD, self._scale.pop_moments())
        self._scale.reset(env_ids)

    def _reduce_rows(self) -> None:
        self._num_pending_rows = 0
        for key, parts in self._pending_rows.items():
            if parts:
                moments = Moments.from_samples(_flatten(parts))
                parts.clear()
                if not moments.mean.isfinite().all():
                    raise ValueError(
                        f"observation {key!r} must be finite, got NaN or infinity. Correct the environment."
                    )
                self._add(key, moments)

    def _add(self, key: NestedKey, moments: Moments | None) -> None:
        if moments is not None:
            self._pending_moments[key] = (
                self._pending_moments[key].merged(moments) if key in self._pending_moments else moments
            )

    # ------------------------------------------------------------------ state

    def statistics(self) -> dict[str, Any]:
        """Return the statistics that policy and learner use, which are the same on all ranks."""
        observation = {} if self._normalizer is None else self._normalizer.moments_state()
        return {"observation": observation, "reward": self._scale.moments.state_dict()}

    def load_statistics(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`statistics`.

        Raises:
            ValueError: The statistics do not fit the normalised entries of this run. An error changes nothing.
        """
        check_state(state, {"observation": mapping, "reward": mapping}, "normalization")
        scale = Moments.empty().restored(state["reward"], "moments of rewards")
        if self._normalizer is not None:
            self._normalizer.load_moments(state["observation"])
        self._scale.load_moments(scale)

    def load_normalization(self, state: Mapping[str, Any]) -> None:
        """Load the :meth:`statistics` of another run; if they lack reward moments, reward scaling starts without any.

        Raises:
            ValueError: One run normalises observations and the other does not. Or rewards are scaled with frozen
                statistics, but their moments are missing. An error changes nothing.
        """
        check_state(state, {"observation": mapping, "reward": mapping}, "normalization")
        scale = Moments.empty().restored(state["reward"], "moments of rewards")
        if bool(state["observation"]) != (self._normalizer is not None):
            stored_kind, current_kind = ("normalised", "raw") if state["observation"] else ("raw", "normalised")
            keys = [".".join(entry["key"]) for entry in state["observation"].get("entries", [])]
            remedy = f"data.normalize_observation={str(keys == ['observation']).lower()}"
            if keys not in ([], ["observation"]):
                remedy = (
                    f"'data.normalize_observation=[{','.join(keys)}]'"  # quotes, because a shell interprets brackets
                )
            raise ValueError(
                f"normalize_observation must equal the earlier run's: it used {stored_kind} observations, but this run "
                f"uses {current_kind} ones. Set {remedy}."
            )
        if self.frozen and self.reward and not scale.count:
            raise ValueError(
                "normalize_reward must be False with freeze_statistics=True if the earlier run did not scale rewards, "
                "got True. Set data.normalize_reward=false."
            )
        if self._normalizer is not None:
            self._normalizer.load_moments(state["observation"])
        if self.reward and scale.count:
            self._scale.load_moments(scale)

    @property
    def _saved_rows(self) -> list[Tensor]:
        return [_flatten(parts) for parts in self._pending_rows.values() if parts]

    @_saved_rows.setter
    def _saved_rows(self, rows: Sequence[Tensor]) -> None:
        self._pending_rows = {
            key: [entry_rows.unsqueeze(0)] for key, entry_rows in zip(self._shapes(), rows, strict=False)
        }
        self._num_pending_rows = len(rows[0]) if rows else 0
        self._last_rollout = None

    @property
    def _saved_moments(self) -> list[dict[str, Any] | None]:
        return [
            self._pending_moments[key].state_dict() if key in self._pending_moments else None for key in self._shapes()
        ]

    @_saved_moments.setter
    def _saved_moments(self, moments: dict[NestedKey, Moments]) -> None:
        self._pending_moments = moments

    def _read_moments(self, value: Any, name: str) -> dict[NestedKey, Moments]:
        shapes = self._shapes()
        if len(sequence(value, name)) != len(shapes):
            raise state_error(value, name, f"the moments of {len(shapes)} entries")
        return {
            key: Moments.empty(*shape).restored(state, f"moments of {key!r}")
            for (key, shape), state in zip(shapes.items(), value, strict=True)
            if state is not None
        }

    def _shapes(self) -> dict[NestedKey, tuple[int, ...]]:
        """Return the shape of each entry's moments; the reward is last."""
        observed = {} if self._normalizer is None else self._normalizer.moments
        return {**{key: tuple(moments.mean.shape) for key, moments in observed.items()}, REWARD: ()}


def _flatten(parts: Sequence[Tensor]) -> Tensor:
    """Flatten parts ``[N, T, *F]`` into rows ``[B, *F]``."""
    return torch.cat([part.flatten(0, 1) for part in parts])
