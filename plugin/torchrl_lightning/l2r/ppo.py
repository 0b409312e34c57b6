"""PPO buffer with l2r-lab's interface: store single steps, finish paths with advantages, sample random batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import ADVANTAGE, DONE, FINISHED, REWARD, TARGET, TERMINATED, TRUNCATED
from torchrl_lightning._core.settings import Fraction, NonNegative, PositiveInt, setting
from torchrl_lightning._core.state import Attribute, bounded_integer, fields, flag
from torchrl_lightning._core.tree import entry_of
from torchrl_lightning._core.validators import Check, fraction
from torchrl_lightning.estimators import discounted_returns
from torchrl_lightning.l2r.schema import Configurable
from torchrl_lightning.l2r.simple import SimpleReplayBufferSchema
from torchrl_lightning.l2r.step_fields import COLUMNS, step_to_row, to_l2r_batch
from torchrl_lightning.replay.conversion import to_row
from torchrl_lightning.rollout.estimates import GAE, Estimator, Steps
from torchrl_lightning.rollout.vanilla import VanillaOnPolicyBuffer

logger = logging.getLogger(__name__)
PATH_STATE = fields("path", {"stored": bounded_integer(), "path_start": bounded_integer(), "told": flag})
"""State of the paths. ``told`` is True if the last step was stored with an entry ``done`` or ``truncated``."""


@dataclass(frozen=True, kw_only=True)
class PathAdvantages(GAE):
    """GAE advantages, with discounted rewards-to-go as value targets; a cut path is bootstrapped.

    Args:
        standardize: Whether to shift advantages to mean 0 and divide them by their population standard deviation.
        lmbda: λ.
        eps: Added to the standard deviation.
    """

    eps: float

    def advantages(self, steps: Steps, gamma: float, rollout: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return GAE advantages, and rewards-to-go as value targets."""
        advantage, _ = super().advantages(steps, gamma, rollout)
        return advantage, discounted_returns(steps.reward, steps.next_value, steps.terminated, steps.done, gamma)

    def standardized(self, advantage: Tensor) -> Tensor:
        """Return the advantages, standardised if ``standardize`` is set."""
        return population_standardize(advantage, self.eps) if self.standardize else advantage


def population_standardize(x: Tensor, eps: float) -> Tensor:
    """Return ``(x - mean) / (std + eps)`` with the population standard deviation; equal entries become 0."""
    mean = x.mean()
    centred = x - (mean + (x - mean).mean())  # correct rounding errors, so that equal entries equal their mean
    deviation = centred.square().mean().sqrt() + eps
    return centred / deviation if float(deviation) else centred


@dataclass
class PPOBufferSchema(SimpleReplayBufferSchema):
    """Documented parameters of :class:`PPOBuffer`."""

    gamma: float = 0.99
    lam: float = 0.95
    eps: float = 1e-3


class PPOBuffer(Configurable, VanillaOnPolicyBuffer):
    """PPO buffer with GAE over paths as in l2r-lab, and with all methods of :class:`GAEBuffer`.

    ``store`` appends one step to the open path. ``finish_path`` writes the advantage ``A[t] = Σ (γλ)^k δ[t+k]`` and
    the reward-to-go ``R[t] = Σ γ^k r[t+k] + γ^n V(s_T)`` of its steps. ``sample_batch`` samples from the finished paths
    and standardises advantages over all steps of these paths: ``(A - mean) / (std + eps)`` (population standard
    deviation). The ``size`` cells are a ring: new steps replace the oldest steps of finished paths. A path may continue
    from the last cell to the first. As an alternative, ``insert_data_slice`` stores a whole rollout, and
    ``before_gradients`` writes its estimates. The value targets of a rollout are also rewards-to-go.

    Args:
        obs_dim: length of an observation; ``None`` takes it from the first step.
        act_dim: length of an action; ``None`` takes it from the first step.
        size: capacity in steps.
        batch_size: steps in a batch of ``sample_batch``.
        gamma: discount γ; 0.99 by default, as in :class:`GAEBuffer`.
        lam: λ.
        eps: added to the standard deviation of the advantages.
        device: device of the steps and batches.
        standardize_advantages: shift to mean 0 and divide by the population standard deviation plus ``eps``.
        actor: this and the following arguments are described in :class:`GAEBuffer`.

    Raises:
        ValueError: a number is out of range.

    Source:
        Schulman et al. 2016, arXiv:1506.02438; https://github.com/learn-to-race/l2r-lab

    Examples:
        >>> from types import SimpleNamespace
        >>> buffer = PPOBuffer(obs_dim=2, act_dim=1, size=4, batch_size=3, gamma=0.5, lam=1.0)
        >>> act = SimpleNamespace(action=torch.zeros(1), value=0.0, logp=-1.0)
        >>> for last in (False, False, True):
        ...     buffer.store({"obs": torch.zeros(2), "act": act, "rew": 1.0, "done": last})
        >>> buffer.finish_path()
        >>> buffer.sample_batch()["ret"].sort().values.tolist()
        [1.0, 1.5, 1.75]
    """

    RUNTIME_ARGUMENTS = tuple({*VanillaOnPolicyBuffer.RUNTIME_ARGUMENTS} - {"batch_size"})
    STATE = {**VanillaOnPolicyBuffer.STATE, "paths": Attribute(PATH_STATE, "_paths")}
    schema: ClassVar[type] = PPOBufferSchema

    obs_dim: PositiveInt | None = setting(default=None, kw_only=False)
    act_dim: PositiveInt | None = setting(default=None, kw_only=False)
    _size: InitVar[PositiveInt] = setting(alias="size", default=1024, kw_only=False)
    batch_size: InitVar[PositiveInt] = setting(default=256, kw_only=False)
    _gamma: Fraction | None = setting(alias="gamma", default=None, kw_only=False)
    gae_lambda: Fraction = setting(alias="lam", default=0.95, kw_only=False)
    eps: NonNegative = setting(default=1e-3, kw_only=False)
    _device: InitVar[torch.device | str] = setting(alias="device", default="cpu")
    actor: Any = None
    algorithm: Any = None
    envs: InitVar[Any] = None

    def __post_init__(self) -> None:  # type: ignore[override]  # init variables are passed to the base's constructor
        super().__post_init__()
        self.weights: Tensor | None = None
        self._stored = self._path_start = 0
        self._last_step: Mapping[str, Any] = {}
        self._finished_steps: tuple[Tensor, Tensor] | None = None

    @classmethod
    def create_factory(cls, size: int, gae_lambda: float = 0.95, **options: Any) -> Callable[..., Self]:
        """Return ``f(device, actor, algorithm, envs)`` that builds a buffer; ``lam`` overrides ``gae_lambda``."""
        return super().create_factory(size, **{"lam": gae_lambda, **options})

    @property
    def lam(self) -> float:
        """λ; l2r-lab's alias of ``gae_lambda``."""
        return self.gae_lambda

    @property
    def _parameters(self) -> Mapping[str, Check]:
        """The settings that :meth:`update_storage_parameter` can change, each with the function that validates it."""
        return {**super()._parameters, "gae_lambda": fraction}

    max_size = VanillaOnPolicyBuffer.size
    """Capacity in steps; l2r-lab's alias of ``size``."""

    @property
    def ptr(self) -> int:
        """Index of the cell for the next step."""
        return self._stored % self.size

    @property
    def path_start_idx(self) -> int:
        """Index of the first cell of the open path."""
        return self._path_start % self.size

    @property
    def path_length(self) -> int:
        """Number of steps in the open path."""
        return self._stored - self._path_start

    # ---- writing ----------------------------------------------------------------------------------------------------

    def store(self, buffer_dict: Mapping[str, Any]) -> None:
        """Append one step to the open path.

        Args:
            buffer_dict: ``obs``; ``act``, an object with ``action``, ``value`` and ``logp``; ``rew``; optionally
                ``done`` (the next state is terminal), ``truncated`` (the episode was cut after the step) and
                ``next_obs``.

        Raises:
            KeyError: ``obs``, ``act`` or ``rew`` is missing.
            TypeError: ``buffer_dict`` is not a mapping, or an entry does not hold numbers.
            ValueError: a size differs from the declared size, or a number is not finite.
            RuntimeError: the open path has ended or fills the whole buffer; call ``finish_path`` first.
        """
        row = self._row(buffer_dict)
        if self.path_length and bool(self._cells(DONE, [self._stored - 1])):
            raise RuntimeError("The last step ended its episode; call finish_path before the next store.")
        if self.path_length == self.size:
            raise RuntimeError(
                f"The open path has {self.size} steps and fills the buffer of size={self.size}; call finish_path with "
                "the action object of the current observation, or build a larger buffer."
            )
        if not self._stored and self.step:
            self.writer.prepare(row.unsqueeze(0), 0, 0)
            self.empty()  # drop a rollout from insert_data_slice
        if self.step < self.size:
            self.writer.add(row)
        else:
            self.writer.overwrite(self.ptr, row)
        self.obs_dim, self.act_dim = row["observation"].shape[1], row["action"].shape[1]
        self._stored += 1
        self._last_step, self._finished_steps = buffer_dict, None

    def _row(self, step: Mapping[str, Any]) -> TensorDict:
        """Convert an l2r-lab step to one row ``[1]`` with this package's keys; advantage and target are zero."""
        required, act_attributes, device = ("obs", "act", "rew"), ("action", "value", "logp"), self.device
        row = step_to_row(step, required, act_attributes, self.obs_dim, self.act_dim, device)
        act, zero = step["act"], torch.zeros(1, 1, dtype=torch.float32, device=device)
        row["action_log_prob"] = to_row(act.logp, "act.logp", 1, device).reshape(1)
        row["state_value"] = to_row(act.value, "act.value", 1, device)
        row["is_init"] = torch.full((1, 1), not self.path_length, device=device)
        row["advantage"], row["value_target"], row[FINISHED] = zero, zero, zero.bool()
        return row

    @property
    def _data(self) -> TensorDictBase:
        assert self.storage.data is not None
        return self.storage.data

    def _cells(self, key: Any, steps: Any) -> Tensor:
        """Return the entry ``key`` of the given steps, ``[n, 1, 1]``."""
        return self._data.get(key)[torch.as_tensor(steps, device=self.device) % self.size]

    def finish_path(self, action_obj: Any = None) -> None:
        """Write the advantages and rewards-to-go of the open path, and close it.

        If the last step was stored with ``done``, the bootstrap value is 0 and ``action_obj`` is ignored. Otherwise the
        path was cut, and ``action_obj`` gives the bootstrap value.

        Args:
            action_obj: the agent's output for the observation *after* the last step (an object with ``value``), or the
                value itself. ``None`` means a terminal state.

        Raises:
            RuntimeError: no path is open.
            ValueError: ``action_obj`` is None although the last step was stored as not terminal, or the value is not
                finite.
        """
        if not self.path_length:
            raise RuntimeError("No path is open: store at least one step before finish_path.")
        steps = torch.arange(self._path_start, self._stored, device=self.device)
        reward, value = self._cells(REWARD, steps), self._cells("state_value", steps)
        last = self._last_value(action_obj, bool(self._cells(TERMINATED, steps[-1:])))
        done = (steps == self._stored - 1).view(-1, 1, 1)
        terminated = done & (last is None)
        next_value = torch.cat((value[1:], value.new_full((1, 1, 1), last or 0.0)))
        path = Steps(reward, value, next_value, terminated, done)
        advantage, target = self.estimator.advantages(path, self.gamma, self._data)
        ends: dict[NestedKey, Tensor] = {DONE: done, TERMINATED: terminated, TRUNCATED: done & ~terminated}
        for key, result in {**ends, ADVANTAGE: advantage, TARGET: target, FINISHED: done | True}.items():
            self._data.get(key)[steps % self.size] = result
        self.storage.finish_write(self.step)
        self._path_start = self._stored
        self._finished_steps = None

    def _last_value(self, action_obj: Any, terminated: bool) -> float | None:
        """Return the bootstrap value, or ``None`` at a terminal state."""
        if terminated:
            return None
        if action_obj is None:
            if "done" in self._last_step or "truncated" in self._last_step:
                raise ValueError(
                    "action_obj must not be None if the last step was stored with done=False. Pass the agent's output "
                    "for the next observation, finish_path(agent.select_action(next_obs)), or finish_path(0.0)."
                )
            return None
        if action_obj is self._last_step.get("act"):
            logger.warning(
                "action_obj is the action object of the last stored step, V(s[T-1]), but a cut path needs the value of "
                "the next observation: finish_path(agent.select_action(next_obs))."
            )
        return float(to_row(getattr(action_obj, "value", action_obj), "action_obj.value", 1, self.device))

    def empty(self, empty_write_count: bool = True) -> None:
        """Discard the stored steps and the open path."""
        self._stored = self._path_start = 0
        self._last_step, self._finished_steps = {}, None
        super().empty(empty_write_count)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def sample_batch(self) -> dict[str, Tensor]:
        """Sample ``batch_size`` steps of finished paths without replacement; set the attribute ``weights`` to 1.

        Sampling does not change the stored steps and advantages.

        Returns:
            ``obs`` ``[B, obs_dim]`` and ``act`` ``[B, act_dim]``. The other entries are ``[B]``: ``rew``, ``ret``
            (reward-to-go), ``adv`` (standardised), ``val`` and ``logp``.

        Raises:
            ValueError: the finished paths have fewer steps than ``batch_size``.
            RuntimeError: the advantages of an inserted rollout need a critic, and none is set.
        """
        cells, advantage = self._finished()
        batch_size = self.batch_size
        if batch_size > len(cells):
            raise ValueError(
                f"batch_size must be at most {len(cells)}, the steps of finished paths ({self.path_length} more are in "
                f"an open path), got {batch_size}. Store more steps first, or lower batch_size."
            )
        rows = torch.randperm(len(cells), generator=self.generator, device=self.generator.device)[:batch_size]
        rows = rows.to(self.device)
        self.weights = torch.ones(batch_size, dtype=torch.float32, device=self.device)
        names = ("obs", "act", "rew", "ret", "adv", "val", "logp")
        return to_l2r_batch(
            {name: advantage[rows] if name == "adv" else self._column(name, cells[rows]) for name in names}
        )

    def _column(self, name: str, cells: Tensor) -> Tensor:
        column = entry_of(self.rollout, COLUMNS[name])
        if column is None:
            hint = "let the policy write it, or call before_gradients()."
            raise RuntimeError(f"The rollout has no {COLUMNS[name]!r}: {hint}")
        return column.flatten(0, 1).index_select(0, cells)

    def _finished(self) -> tuple[Tensor, Tensor]:
        """Return the cells of finished paths and their standardised advantages; cached until the next write."""
        if not self._stored:
            if not self.step:
                return torch.zeros(0, dtype=torch.int64, device=self.device), torch.zeros(0, device=self.device)
            cells = torch.arange(self._ensure_estimated().numel(), device=self.device)
            return cells, self._column("adv", cells).flatten()
        if self._finished_steps is None:
            data = self._data
            cells = data.get(FINISHED)[: self.step].flatten().nonzero().squeeze(1)
            raw = data.get("advantage")[: self.step].flatten()[cells]
            self._finished_steps = cells, population_standardize(raw, self.eps)
        return self._finished_steps

    # ---- estimates --------------------------------------------------------------------------------------------------

    @property
    def estimator(self) -> Estimator:
        """Estimator of GAE and rewards-to-go, with the current settings."""
        return PathAdvantages(standardize=self.standardize_advantages, lmbda=self.gae_lambda, eps=self.eps)

    @property
    def _needs_estimates(self) -> bool:
        """Whether an inserted rollout lacks advantages, a path is open, or stored advantages must be standardised."""
        if not self._stored:
            return super()._needs_estimates
        return self.path_length > 0 or (self.standardize_advantages and "advantage" not in self.storage.added())

    def _write_estimates(
        self, estimator: Estimator | None = None, actor: Any = None, critic: TensorDictModuleBase | None = None
    ) -> None:
        """Write values, advantages and targets to an inserted rollout; standardise the advantages of stored paths.

        Raises:
            RuntimeError: a path is open, nothing is stored, or a required critic is missing.
        """
        if not self._stored:
            super()._write_estimates(estimator, actor, critic)
            return
        if self.path_length:
            raise RuntimeError(f"A path of {self.path_length} steps is open; call finish_path first.")
        _, advantage = self._finished()
        if self.standardize_advantages:
            self.rollout.set("advantage", advantage.view(-1, 1, 1))

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def _paths(self) -> dict[str, Any]:
        end_flags = [name for name in ("done", "truncated") if name in self._last_step]
        return {"stored": self._stored, "path_start": self._path_start, "told": bool(end_flags)}

    @_paths.setter
    def _paths(self, paths: Mapping[str, Any]) -> None:
        self._stored, self._path_start = paths["stored"], paths["path_start"]
        self._last_step, self._finished_steps = {"done": False} if paths["told"] else {}, None

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        (stored, start, _), steps = values["paths"].values(), values["storage"]["num_steps"]
        if not 0 <= stored - start <= self.size or (stored and steps != min(stored, self.size)):
            raise ValueError(
                f"The path state is foreign: {stored} steps stored, the open path begins at {start}, and the rollout "
                f"has {steps} steps of {self.size}."
            )
