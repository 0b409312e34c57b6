"""Compute inputs and targets of dynamics models from transitions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, TensorSpec
from torchrl.envs.transforms import Transform

from torchrl_lightning._core.keys import INPUTS, IS_INIT, NEXT, TARGETS
from torchrl_lightning._core.moments import precision_of
from torchrl_lightning._core.tree import cast_rounded, entry_of, nested_key, nested_keys, next_key, path_of
from torchrl_lightning._core.validators import boolean, check_defaults
from torchrl_lightning.dynamics.scaler import StandardScaler, check_finite

IS_RESET = (NEXT, IS_INIT)


class DynamicsTargets(Transform):
    r"""Compute inputs \([s, a]\) and targets \([s' - s, r]\) of transitions and standardise each column.

    Use it as ``transform=`` of an :class:`ExperienceBuffer`; it changes sampled batches only. It adds ``inputs``
    ``[*B, D_in]`` and ``targets`` ``[*B, D_out]`` to a batch ``[*B]``. With ``terminated=True``, it also adds
    ``terminated`` ``[*B, 1]``, which is 0 or 1 and not standardised. The specs determine the columns: first all
    observations, each flattened, then the action. Discrete actions become one-hot over all options of the spec,
    regardless of their stored format. Before the first :meth:`fit`, values stay unscaled. Float64 and integer
    observations are float64 until their mean is subtracted. Inputs and targets have the dtype of
    ``torch.get_default_dtype``, usually float32.

    A row is unusable if its next observation is the first observation of another episode. Our collectors and TorchRL's
    collectors store the last observation of the episode instead, so all rows are usable. Other data must mark unusable
    rows with an entry ``("next", "is_init")``; see :meth:`usable`. :class:`MBReplayBuffer` writes this entry.

    Args:
        observation_spec: Composite with the spec of each observation, without batch dimensions.
        action_spec: spec of an action, without batch dimensions.
        observation_keys: keys of the observations, in the order of the columns; None uses all keys of the spec.
        action_key: key of the action.
        reward_key: key of the reward.
        terminated_key: key of the termination flag.
        reward: an analytic reward, ``reward(observation, action, next_observation)`` with arguments ``[..., D]`` in
            column format; if given, the reward is not a target column.
        terminated: also add ``terminated`` to batches.

    Raises:
        TypeError: ``observation_spec`` is not a Composite.
        KeyError: the spec lacks an observation. Reading transitions raises this error if they lack an entry.
        ValueError: ``observation_keys`` is empty or repeats an observation, or both ``reward_key`` and ``reward`` are
            given. Reading transitions raises this error if a discrete action is outside the spec, or an entry has
            another size.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Unbounded
        >>> targets = DynamicsTargets(Composite(observation=Unbounded(2)), Categorical(3))
        >>> targets.input_columns, targets.target_columns
        (('observation[0]', 'observation[1]', 'action[0]', 'action[1]', 'action[2]'),
         ('observation[0]', 'observation[1]', 'reward'))
        >>> after = {"observation": torch.tensor([[1.0, 3.0]]), "reward": torch.ones(1, 1)}
        >>> rows = TensorDict({"observation": torch.ones(1, 2), "action": torch.tensor([2]), "next": after}, [1])
        >>> batch = targets(rows)
        >>> batch["inputs"].tolist(), batch["targets"].tolist()
        ([[1.0, 1.0, 0.0, 0.0, 1.0]], [[0.0, 2.0, 1.0]])
    """

    def __init__(
        self,
        observation_spec: TensorSpec,
        action_spec: TensorSpec,
        *,
        observation_keys: Sequence[NestedKey] | None = None,
        action_key: NestedKey = "action",
        reward_key: NestedKey = ("next", "reward"),
        terminated_key: NestedKey = ("next", "terminated"),
        reward: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        terminated: bool = False,
    ) -> None:
        super().__init__(in_keys=[], out_keys=[])
        if not isinstance(observation_spec, Composite):
            raise TypeError(
                "observation_spec must be a Composite with one spec for each key, such as Composite(observation=spec), "
                f"got a {type(observation_spec).__name__}."
            )
        spec_keys = list(observation_spec.keys(include_nested=True, leaves_only=True))
        self.observation_keys = nested_keys(spec_keys if observation_keys is None else observation_keys)
        if missing := [key for key in self.observation_keys if path_of(key) not in map(path_of, spec_keys)]:
            raise KeyError(f"observation_keys must be in the spec {spec_keys}, got {missing}.")
        if len({path_of(key) for key in self.observation_keys}) < max(1, len(self.observation_keys)):
            requirement = "name each observation once" if self.observation_keys else "name at least one observation"
            raise ValueError(
                f"observation_keys must {requirement}, got {self.observation_keys}. The spec has {spec_keys}."
            )
        if reward is not None:
            remedy = "leave reward out"
            check_defaults("beside reward=", remedy, reward_key=(nested_key(reward_key), ("next", "reward")))
        self.action_key, self.reward_key = nested_key(action_key), nested_key(reward_key)
        self.terminated_key = nested_key(terminated_key)
        self.action_spec = action_spec
        self.reward = reward
        self.has_terminated = boolean(terminated, "terminated")
        self._specs = [observation_spec[key] for key in self.observation_keys]
        self._shapes = [spec.shape for spec in self._specs]
        self.observation_columns = tuple(
            name
            for key, shape in zip(self.observation_keys, self._shapes, strict=True)
            for name in _column_names(key, shape)
        )
        actions = _column_names(self.action_key, torch.Size([_action_width(action_spec)]))
        self.input_columns = (*self.observation_columns, *actions)
        self.target_columns = (*self.observation_columns, *(() if reward is not None else ("reward",)))
        self.input_scaler = StandardScaler(self.input_columns)
        self.target_scaler = StandardScaler(self.target_columns)

    # ------------------------------------------------------------------ reading transitions

    @property
    def column_dtype(self) -> torch.dtype:
        """Dtype that :meth:`observation` returns for rows with the dtypes of the specs."""
        dtypes = [_column_dtype(spec.dtype) for spec in self._specs]
        return functools.reduce(torch.promote_types, dtypes, torch.get_default_dtype())

    def usable(self, rows: TensorDictBase) -> Tensor:
        """Return a mask ``[*B]`` of the rows to learn from: False if the next observation comes from a reset."""
        is_reset = entry_of(rows, IS_RESET)
        if is_reset is None:
            return torch.ones(rows.shape, dtype=torch.bool, device=rows.device)
        return ~is_reset.reshape(rows.shape)

    def observation(self, rows: TensorDictBase) -> Tensor:
        """Return observations as columns ``[*B, D]``; pass ``rows["next"]`` for the next observations."""
        return self._observations(rows, self.observation_keys)

    def action(self, action: Tensor, batch_size: torch.Size) -> Tensor:
        """Return actions ``[*batch_size, ...]`` as columns, one-hot if they are discrete.

        Raises:
            ValueError: a discrete action is outside the spec, or the actions have another size.
        """
        spec, num_choices = self.action_spec, _num_choices(self.action_spec)
        flat = _flat(action, batch_size)
        if num_choices and isinstance(spec, Categorical):
            _check_width(flat, len(num_choices), self.action_key)
            index = flat.long()
            high = torch.tensor(num_choices, device=flat.device)
            _check_actions(flat, (index < 0) | (index >= high) | (index != flat), spec)
            flat = torch.cat([one_hot(index[:, column], count) for column, count in enumerate(num_choices)], 1)
        else:
            _check_width(flat, _action_width(spec), self.action_key)
            if num_choices or isinstance(spec, Binary):
                _check_actions(flat, (flat != 0) & (flat != 1), spec)
            if num_choices:
                num_selected = [selected.sum(1, keepdim=True) for selected in flat.split(num_choices, 1)]
                _check_actions(flat, torch.cat(num_selected, 1) != 1, spec)
        return flat.to(torch.get_default_dtype()).reshape(*batch_size, flat.shape[1])

    def raw_inputs(self, rows: TensorDictBase) -> Tensor:
        """Return the unscaled inputs ``[*B, D_in]`` of rows with the batch shape ``[*B]``: observations and actions."""
        action = self.action(_entry(rows, self.action_key), rows.shape)
        return torch.cat([self.observation(rows), action], -1)

    def raw_targets(self, rows: TensorDictBase) -> Tensor:
        """Return the unscaled targets ``[*B, D_out]`` of rows with the batch shape ``[*B]``."""
        next_observation = self._observations(rows, [next_key(key) for key in self.observation_keys])
        change = next_observation - self.observation(rows)
        if self.reward is not None:
            return change
        return torch.cat([change, _to_columns(rows, self.reward_key, 1)], -1)

    def terminated(self, rows: TensorDictBase) -> Tensor:
        """Return the termination flags of ``rows`` ``[*B]`` as numbers ``[*B, 1]``."""
        return _to_columns(rows, self.terminated_key, 1).to(torch.get_default_dtype())

    def fit(self, rows: TensorDictBase) -> Self:
        """Fit both scalers to the usable rows of ``rows`` ``[*B]``; return the transform.

        Raises:
            ValueError: no row is usable, or a number is NaN or infinite; the message names its column.
        """
        rows = rows[self.usable(rows)]
        inputs, targets = self.raw_inputs(rows), self.raw_targets(rows)
        # Check all columns before a scaler changes. If only a target is not finite, the cause is in the next step.
        check_finite(inputs, self.input_columns)
        check_finite(targets, [f"next {name}" if name != "reward" else name for name in self.target_columns])
        self.input_scaler.fit(inputs)
        self.target_scaler.fit(targets)
        return self

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add ``inputs``, ``targets`` and, if configured, ``terminated`` to a batch."""
        tensordict.set(INPUTS, self.inputs(tensordict))
        targets = self.target_scaler(self.raw_targets(tensordict))
        tensordict.set(TARGETS, targets.to(torch.get_default_dtype()))
        if self.has_terminated:
            tensordict.set("terminated", self.terminated(tensordict))
        return tensordict

    # ------------------------------------------------------------------ predicting

    def inputs(self, rows: TensorDictBase) -> Tensor:
        """Return the standardised model inputs ``[*B, D_in]``; entries under ``"next"`` are not needed."""
        return self.input_scaler(self.raw_inputs(rows)).to(torch.get_default_dtype())

    def inverse(self, observation: Tensor, prediction: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""Return next observations and rewards from standardised predictions \(f\): \(s + \sigma f + \mu\).

        Args:
            observation: observations as columns, ``[..., D]`` (see :meth:`observation`).
            prediction: predicted targets, ``[..., D_out]``.

        Returns:
            Next observations ``[..., D]`` and rewards ``[..., 1]``. The rewards are None if ``reward`` is given.
        """
        change = self.target_scaler.inverse(prediction)
        width = len(self.observation_columns)
        return observation + change[..., :width], change[..., width:] if self.reward is None else None

    def split(self, columns: Tensor) -> dict[NestedKey, Tensor]:
        """Split columns ``[..., D]`` into observations with their keys and original shapes.

        Examples:
            >>> from torchrl.data import Unbounded
            >>> targets = DynamicsTargets(Composite(near=Unbounded(1), far=Unbounded((1, 2))), Categorical(2))
            >>> {key: value.tolist() for key, value in targets.split(torch.arange(3.0)).items()}
            {'near': [0.0], 'far': [[1.0, 2.0]]}
        """
        parts = columns.split([shape.numel() for shape in self._shapes], -1)
        return {
            key: part.reshape(columns.shape[:-1] + shape)
            for key, part, shape in zip(self.observation_keys, parts, self._shapes, strict=True)
        }

    def observed(self, columns: Tensor) -> dict[NestedKey, Tensor]:
        """Split columns ``[..., D]`` like :meth:`split`, and cast each observation to the dtype of its spec.

        Examples:
            >>> from torchrl.data import Unbounded
            >>> targets = DynamicsTargets(Composite(grey=Unbounded(3, dtype=torch.uint8)), Categorical(2))
            >>> targets.observed(torch.tensor([-3.0, 7.6, 300.0]))["grey"]
            tensor([  0,   8, 255], dtype=torch.uint8)
        """
        entries = zip(self.split(columns).items(), self._specs, strict=True)
        return {key: cast_rounded(value, spec.dtype) for (key, value), spec in entries}

    def check_function(self, function: Callable[[Tensor, Tensor, Tensor], Any], name: str) -> None:
        """Validate that a function returns a number or flag for each of three rows of columns.

        Args:
            function: A function of observations, actions and next observations.
            name: Name of the function in the error message.

        Raises:
            ValueError: The function fails or returns another result.
        """
        rows, actions = 3, len(self.input_columns) - len(self.observation_columns)
        observation = torch.zeros(rows, len(self.observation_columns), dtype=self.column_dtype)
        try:
            result = function(observation, torch.zeros(rows, actions), observation.clone())
        except Exception as error:
            if "same device" in str(error):  # the function uses tensors on the model's device
                return
            failure = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            if isinstance(result, Tensor) and result.numel() == rows:
                return
            failure = f"a tensor of the shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise ValueError(
            f"{name} must return a tensor of one value for each row of observations [R, {observation.shape[1]}], "
            f"actions [R, {actions}] and next observations, got {failure}."
        )

    def incompatibility(self) -> str | None:
        """Return an error message if an observation is categorical or ``reward`` fails, else None."""
        if self.reward is not None:
            try:
                self.check_function(self.reward, "reward")
            except ValueError as error:
                return str(error)
        for key, spec in zip(self.observation_keys, self._specs, strict=True):
            if isinstance(spec, Categorical) and not isinstance(spec, Binary):
                return (
                    f"a world model predicts changes of numbers, but the observation {key!r} is discrete. Make it "
                    "one-hot with gymnasium.wrappers.FlattenObservation, or remove an entry of a Dict with "
                    "EnvironmentRecipe(drop=[...])."
                )
        return None

    def _observations(self, rows: TensorDictBase, keys: Sequence[NestedKey]) -> Tensor:
        shaped = zip(keys, self._shapes, strict=True)
        return torch.cat([_to_columns(rows, key, shape.numel()) for key, shape in shaped], -1)


def _entry(rows: TensorDictBase, key: NestedKey) -> Tensor:
    entry = entry_of(rows, key)
    if not isinstance(entry, Tensor):
        raise KeyError(f"A transition must have the entry {key!r}, got {sorted(map(str, rows.keys(True, True)))}.")
    return entry


def _flat(entry: Tensor, batch_size: torch.Size) -> Tensor:
    return entry.reshape(batch_size.numel(), entry.shape[len(batch_size) :].numel())


def _to_columns(rows: TensorDictBase, key: NestedKey, width: int) -> Tensor:
    """Return an entry of rows ``[*B]`` as columns ``[*B, width]``."""
    flat = _flat(_entry(rows, key), rows.shape)
    _check_width(flat, width, key)
    return flat.to(_column_dtype(flat.dtype)).reshape(*rows.shape, width)


def _column_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the column dtype of an entry: float64 if the default dtype cannot represent its values."""
    wide = torch.get_default_dtype() if dtype is torch.bool else precision_of(dtype)
    return torch.promote_types(wide, torch.get_default_dtype())


def _check_actions(flat: Tensor, invalid: Tensor, spec: TensorSpec) -> None:
    if invalid.any():
        raise ValueError(f"Actions must be in the spec {_describe_spec(spec)}, got {flat[invalid.any(1)][0].tolist()}.")


def _check_width(flat: Tensor, width: int, key: Any) -> None:
    if flat.shape[1] != width:
        raise ValueError(f"The entry {key!r} must have {width} numbers per row, got {flat.shape[1]}.")


def _column_names(key: NestedKey, shape: torch.Size) -> list[str]:
    name = ".".join(path_of(key))
    return [f"{name}[{number}]" for number in range(shape.numel())] if shape else [name]


def _num_choices(spec: TensorSpec) -> list[int]:
    """Return the number of options of each discrete part of an action; empty for other actions."""
    if isinstance(spec, MultiCategorical):
        return [int(count) for count in spec.nvec]
    if isinstance(spec, MultiOneHot):
        return [int(box.n) for box in spec.space]
    if isinstance(spec, OneHot):
        return [int(spec.space.n)] * (spec.shape.numel() // int(spec.space.n))
    if isinstance(spec, Categorical) and not isinstance(spec, Binary):
        return [int(spec.space.n)] * spec.shape.numel()
    return []


def _action_width(spec: TensorSpec) -> int:
    return sum(_num_choices(spec)) or spec.shape.numel()


def _describe_spec(spec: TensorSpec) -> str:
    return f"{type(spec).__name__} of {' and '.join(map(str, _num_choices(spec) or [2]))}"
