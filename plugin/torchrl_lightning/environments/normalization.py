"""Standardise observations by running moments; a wrapper does this for the inputs of a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded

from torchrl_lightning._core.keys import ACTION_MASK
from torchrl_lightning._core.moments import Moments, precision_of
from torchrl_lightning._core.protocols import PolicyApi
from torchrl_lightning._core.state import check_state, number, same, sequence
from torchrl_lightning._core.torchrl_compat import buffers_of, forward_hooks, new_tensordict, set_entry
from torchrl_lightning._core.tree import nested_key, path_of, raw_items
from torchrl_lightning._core.validators import Checked, non_negative, positive
from torchrl_lightning.environments.policy_calls import Outputs, Policy, bound_call, fast_call, policy_outputs
from torchrl_lightning.environments.specs import EnvironmentSpecs
from torchrl_lightning.kernels.compiled import jitted
from torchrl_lightning.kernels.scan import EXAMPLE_ARRAYS
from torchrl_lightning.kernels.scan_rows import floats_at

EPSILON = 1e-8
"""Added to variances by default, so that a constant column becomes 0."""


class ObservationNormalizer(nn.Module):
    r"""Standardise entries of observations, \(\mathrm{clip}((x - \bar x) / \sqrt{\mathrm{Var}[x] + \epsilon})\).

    Only :meth:`advance` changes the moments. Before its first call, observations are only clipped. Other entries are
    not changed.

    Args:
        specs: Specs of the environment.
        keys: Entries to normalise; True for all except the action mask.
        clip: Largest absolute value of the result.
        epsilon: Added to variances.

    Raises:
        ValueError: An entry is missing, or its values are categorical or boolean.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> normalizer = ObservationNormalizer(environment_specs(make_vector_env("CartPole-v1", 1)), True, 10.0)
        >>> observations = torch.tensor([[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]])
        >>> normalizer.advance({"observation": Moments.from_samples(observations)})
        >>> normalizer.normalize("observation", torch.tensor([2.0, 3.0, 3.0, 1.0]))
        tensor([ 1.,  1.,  0., -3.])
    """

    clip = Checked(positive)
    epsilon = Checked(non_negative)

    def __init__(
        self, specs: EnvironmentSpecs, keys: bool | Sequence[NestedKey], clip: float, epsilon: float = EPSILON
    ) -> None:
        super().__init__()
        self.clip, self.epsilon = clip, epsilon
        selected = [key for key in specs.keys if key != ACTION_MASK] if keys is True else keys or ()
        self.keys: list[NestedKey] = [nested_key(key) for key in selected]
        observation = specs.observation.clone()
        self._moments: dict[NestedKey, Moments] = {}
        for index, key in enumerate(self.keys):
            spec = _normalizable_spec(observation, key, keys is True)
            # Use buffers, because they are sent to policies in other processes.
            self.register_buffer(f"mean_{index}", torch.zeros(spec.shape, dtype=torch.float64))
            self.register_buffer(f"factor_{index}", torch.ones(spec.shape, dtype=torch.float64))
            self._moments[key] = Moments.empty(*spec.shape)
            observation[key] = Bounded(-clip, clip, spec.shape, dtype=torch.float32)
        self.specs = replace(specs, observation=observation)
        self._indices = {key: index for index, key in enumerate(self.keys)}
        self.is_flat = all(isinstance(key, str) for key in self.keys)

    @property
    def moments(self) -> Mapping[NestedKey, Moments]:
        """The moments of each entry."""
        return self._moments

    def advance(self, moments: Mapping[NestedKey, Moments]) -> None:
        """Merge the moments of new samples into the statistics of each entry."""
        self._set({key: self._moments[key].merged(more) for key, more in moments.items()})

    def _set(self, moments: Mapping[NestedKey, Moments]) -> None:
        for key, entry_moments in moments.items():
            self._moments[key] = entry_moments
            if entry_moments.count:
                mean, factor = self._constants(key)
                mean.copy_(entry_moments.mean)
                factor.copy_((entry_moments.variance + self.epsilon).rsqrt())

    def constants(self, key: NestedKey) -> tuple[Tensor, Tensor] | None:
        """Return the mean and the inverse deviation of an entry, float64 ``[*F]``; None without normalisation."""
        return self._constants(key) if key in self._indices else None

    def _constants(self, key: NestedKey) -> tuple[Tensor, Tensor]:
        index = self._indices[key]
        buffers = buffers_of(self)
        return buffers[f"mean_{index}"], buffers[f"factor_{index}"]

    def _constants_on(self, device: torch.device, key: NestedKey) -> tuple[Tensor, Tensor]:
        if self._constants(key)[0].device != device:
            self.to(device)
        return self._constants(key)

    def normalize(self, key: NestedKey, value: Tensor) -> Tensor:
        """Return the normalised entry ``[*B, *F]``, float32."""
        return standardize(value, *self._constants_on(value.device, key), self.clip)

    def bind_value(self, key: NestedKey, value: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return an output tensor for a CPU value, and a function that writes the normalised value into it.

        For a few rows the function takes half the time of :meth:`normalize`; the results are bit-equal.
        """
        out = torch.empty_like(value, dtype=torch.float32)

        def refresh() -> None:
            _scale_into(out, value, *self._constants_on(value.device, key), self.clip)

        return out, refresh

    def normalize_(self, data: TensorDictBase) -> None:
        """Replace raw entries ``[*B, *F]`` of ``data`` and ``next`` by normalised entries; keep the other entries."""
        parts = [data, data.get("next", None)]
        for part in parts if parts[1] is not None else parts[:1]:
            entries = raw_items(part)
            for key in self.keys:
                value = entries.get(key) if isinstance(key, str) else part.get(key, None)
                if value is not None and isinstance(key, str):
                    set_entry(part, key, self.normalize(key, value))
                elif value is not None:
                    part.set(key, self.normalize(key, value))

    def moments_state(self) -> dict[str, Any]:
        """Return clip, epsilon and the moments as tensors and scalars."""
        entries = [
            {"key": list(path_of(key)), "moments": moments.state_dict()} for key, moments in self._moments.items()
        ]
        return {"clip": self.clip, "epsilon": self.epsilon, "entries": entries}

    def load_moments(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`moments_state` returned.

        Raises:
            ValueError: The state has other entries or shapes; nothing is changed then.
        """
        schema = {
            "clip": same(self.clip, "normaliser"),
            "epsilon": same(self.epsilon, "normaliser"),
            "entries": sequence,
        }
        check_state(state, schema, "normaliser")
        stored = {nested_key(entry["key"]): entry["moments"] for entry in state["entries"]}
        if set(stored) != set(self.keys):
            raise ValueError(
                f"normalize_observation must be {sorted(map(str, stored))}, as when the state was saved, got "
                f"{sorted(map(str, self.keys))}."
            )
        self._set(
            {
                key: self._moments[key].restored(entry_state, f"moments of {key!r}")
                for key, entry_state in stored.items()
            }
        )

    @classmethod
    def from_state(cls, specs: EnvironmentSpecs, state: Mapping[str, Any]) -> ObservationNormalizer:
        """Build a normaliser from the result of :meth:`moments_state`, for the same environment."""
        check_state(state, {"clip": number(0.0), "epsilon": number(0.0), "entries": sequence}, "normaliser")
        keys = [nested_key(entry["key"]) for entry in state["entries"]]
        normalizer = cls(specs, keys, state["clip"], state["epsilon"])
        normalizer.load_moments(state)
        return normalizer


def standardize(value: Tensor, mean: Tensor, factor: Tensor, clip: float) -> Tensor:
    r"""Return \(\mathrm{clip}((x - \bar x) f)\) of values ``[*B, *F]``, float32.

    Compute in the precision of the values (see :func:`~torchrl_lightning._core.moments.precision_of`), then round the
    result.

    Args:
        value: The values.
        mean: The subtracted mean, float64 ``[*F]``.
        factor: The factor of the difference, float64 ``[*F]``.
        clip: The largest absolute value.
    """
    out = torch.empty_like(value, dtype=torch.float32)
    _scale_into(out, value, mean, factor, clip)
    return out


def _scale_into(out: Tensor, value: Tensor, mean: Tensor, factor: Tensor, clip: float) -> None:
    # Both branches apply the same operations to each element, so the results are bit-equal.
    if value.dtype in EXAMPLE_ARRAYS and value.is_cpu and value.is_contiguous() and not value.requires_grad:
        width = mean.numel()
        rows = value.numel() // width if width else 0
        addresses = value.data_ptr(), out.data_ptr(), mean.data_ptr(), factor.data_ptr()
        jitted(_scale_rows)(
            *addresses,
            rows,
            width,
            EXAMPLE_ARRAYS[value.dtype],
            EXAMPLE_ARRAYS[torch.float32],
            EXAMPLE_ARRAYS[torch.float64],
            clip,
        )
    else:
        out.copy_(standardize_traceable(value, mean, factor, clip))


def standardize_traceable(value: Tensor, mean: Tensor, factor: Tensor, clip: float) -> Tensor:
    """Return the result of :func:`standardize`, computed by traceable operations."""
    dtype = precision_of(value.dtype)
    return torch.sub(value, mean.to(dtype)).mul_(factor.to(dtype)).clamp_(-clip, clip).to(torch.float32)


def _scale_rows(
    source: int,
    target: int,
    mean: int,
    factor: int,
    rows: int,
    width: int,
    input_like: Any,
    output_like: Any,
    constant_like: Any,
    clip: float,
) -> None:
    cast = input_like.dtype.type
    limit = cast(clip)
    m, f = floats_at(mean, 0, width, constant_like), floats_at(factor, 0, width, constant_like)
    for row in range(rows):
        x = floats_at(source, row * width, (row + 1) * width, input_like)
        y = floats_at(target, row * width, (row + 1) * width, output_like)
        for i in range(width):
            y[i] = min(max((x[i] - cast(m[i])) * cast(f[i]), -limit), limit)


def _normalizable_spec(observation: Composite, key: NestedKey, all_keys: bool) -> TensorSpec:
    leaves = dict(observation.items(True, True))
    spec = leaves.get(key)
    if spec is None:
        raise ValueError(f"normalize_observation must name observations, {sorted(map(str, leaves))}, got {key!r}.")
    if not isinstance(spec, Bounded | Unbounded) or spec.dtype is torch.bool:
        numeric = [k for k, s in leaves.items() if isinstance(s, Bounded | Unbounded) and s.dtype is not torch.bool]
        remedy = f"Set normalize_observation={numeric}." if numeric else "Remove it."
        setting = "True" if all_keys else f"[{key!r}]"
        raise ValueError(
            f"normalize_observation={setting} cannot normalise {key!r}, because its values are categorical or boolean "
            f"({type(spec).__name__}, {spec.dtype}). {remedy}"
        )
    return spec


class NormalizedPolicy(TensorDictModuleBase):
    """A policy that reads raw observations, normalises them, and passes them to an inner policy.

    Attributes:
        policy: The inner policy, which reads normalised observations.
        normalizer: The normaliser; its owner updates the moments.
    """

    def __init__(self, policy: Policy, normalizer: ObservationNormalizer) -> None:
        super().__init__()
        self.policy, self.normalizer = policy, normalizer
        api = PolicyApi.of(policy)
        self.in_keys, self.out_keys = list(api.in_keys), list(api.out_keys or ())

    def compute_step(self, step: TensorDictBase) -> Outputs:
        """Return the policy's outputs for a step ``[N]``, and write nothing."""
        # Read from _modules, because nn.Module's attribute access takes a microsecond.
        policy, normalized = self._modules.get("policy") or self.policy, self._normalized(step)
        call = fast_call(policy)
        return policy_outputs(policy, normalized) if call is None else call(normalized)

    def bind_inputs(self, step: TensorDictBase) -> Callable[[], Outputs]:
        """Return a function that calls :meth:`compute_step` with one step ``[N]`` of CPU tensors.

        The caller overwrites the tensors of the step before each call.
        """
        normalizer = self.normalizer
        if not normalizer.is_flat:
            return lambda: self.compute_step(step)
        policy, entries = self.policy, dict(raw_items(step))
        hooks = forward_hooks(policy) if isinstance(policy, nn.Module) else ()
        refreshers = []
        for key in normalizer.keys:
            entries[key], refresh = normalizer.bind_value(key, entries[key])
            refreshers.append(refresh)
        normalized = new_tensordict(entries, step.batch_size)
        call = bound_call(policy, normalized)

        def act() -> Outputs:
            for refresh in refreshers:
                refresh()
            if call is None or any(hooks):
                return policy_outputs(policy, normalized.copy())
            return call()

        return act

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Return the policy's action distribution for a TensorDict ``[N]`` with raw observations."""
        distribution: Distribution = self.policy.get_dist(self._normalized(tensordict))  # type: ignore[attr-defined]
        return distribution

    def _normalized(self, step: TensorDictBase) -> TensorDictBase:
        normalizer: Any = self._modules["normalizer"]
        if not normalizer.is_flat:
            normalized = step.copy()
            normalizer.normalize_(normalized)
            return normalized
        entries = dict(raw_items(step))
        for key in normalizer.keys:
            entries[key] = normalizer.normalize(key, entries[key])
        return new_tensordict(entries, step.batch_size)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the policy's outputs into a TensorDict ``[N]``; its observations stay raw."""
        for key, value in self.compute_step(tensordict).items():
            tensordict.set(key, value)
        return tensordict


def normalizes(policy: object) -> bool:
    """Return whether a policy reads raw observations and normalises them itself."""
    return isinstance(policy, nn.Module) and any(isinstance(part, NormalizedPolicy) for part in policy.modules())
