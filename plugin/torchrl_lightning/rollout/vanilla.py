"""The basic on-policy buffer: one rollout with Monte-Carlo returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar
from typing import Annotated, Any, cast

import torch
from torch import Tensor

from torchrl_lightning._core.keys import ADVANTAGE, TARGET, VALUE
from torchrl_lightning._core.protocols import EnvsApi
from torchrl_lightning._core.settings import Boolean, computed, setting
from torchrl_lightning._core.tree import Key
from torchrl_lightning._core.validators import Check, integer, optional
from torchrl_lightning.rollout.estimates import Estimator, MonteCarlo, RewardKeys, Steps
from torchrl_lightning.rollout.hooks import RolloutHooks
from torchrl_lightning.rollout.rollout_buffer import RolloutBuffer

Values = Tensor | Mapping[str, Tensor]


class VanillaOnPolicyBuffer(RolloutBuffer):
    """On-policy buffer with Monte-Carlo returns ``R[t] = r[t] + γ R[t+1]`` and advantages ``R - V``, as in PyTorchRL.

    Write a rollout with ``insert_data_slice``, or step by step with ``insert_transition``. Call ``before_gradients`` to
    compute values, ``advantage`` and ``value_target``, and read mini-batches with ``generate_batches``. With TorchRL's
    ``extend`` and ``sample``, the first read after a write computes these entries. All data is time-major.

    Args:
        size: capacity along time.
        device: device of the rollout.
        actor: TensorDict policy; may be assigned later.
        algorithm: any object with ``gamma`` and optionally ``gamma_intrinsic``, ``num_mini_batch`` and
            ``mini_batch_size``. The buffer reads these attributes at each use.
        envs: environments with ``num_envs``, and optionally ``env_kwargs["frame_stack"]``.
        gamma: discount; ``None`` uses the discount of ``algorithm``, or 0.99 if the algorithm does not have one.
        critic: writes ``value_key`` (nested for several critics), and ``intrinsic_state_value`` if the rollout has
            intrinsic rewards; may be assigned later.
        intrinsic_critic: writes ``intrinsic_state_value`` if the critic does not.
        gamma_intrinsic: discount of the intrinsic rewards; ``None`` uses the value of ``algorithm``, or 0.99.
        normalize_intrinsic: divide intrinsic rewards by their running standard deviation.
        intrinsic_direction: ``"forward"`` or ``"backward"``, see :class:`IntrinsicReturns`. PyTorchRL uses the latter.
        standardize_advantages: subtract the mean over the whole rollout and divide by the (unbiased) standard
            deviation + 1e-5.
        recompute_values: run the critic even if the policy wrote values.
        bootstrap: use values when an episode is truncated. If False, the advantages are ``A = R``, without a critic.
        value_key: key of the values, or parent key for several critics.
        advantage_key: key of the advantages.
        value_target_key: key of the value targets.
        frame_stack: number of frames along the channels of an observation; ``None`` uses the number in ``envs``, or 1
            if ``envs`` does not have a number.
        num_envs: number of environments; ``None`` uses the number in ``envs`` or in the first write.
        time_dim: time dimension of a written rollout; ``None`` reads the dimension names.
        recurrent: True for mini-batches of whole environments; ``None`` means True if a recurrent state is stored.
        recurrent_keys: root keys of recurrent states.
        batch_keys: entries of a mini-batch; ``None`` selects all except flags and successor values.
        batch_size: default batch size of ``sample``.
        generator: random generator; ``None`` seeds a new one from torch's global generator.
        transform: a TorchRL transform of mini-batches; a write applies its inverse.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> flag = torch.zeros(2, 3, 1, dtype=torch.bool)
        >>> following = {"reward": torch.ones(2, 3, 1), "done": flag, "terminated": flag}
        >>> rollout = TensorDict({"action": torch.zeros(2, 3), "next": following}, [2, 3], names=[None, "time"])
        >>> buffer = VanillaOnPolicyBuffer(3, gamma=0.5, bootstrap=False, standardize_advantages=False)
        >>> buffer.insert_data_slice(rollout)
        >>> buffer.before_gradients()
        >>> batch = next(buffer.generate_batches(1, shuffle=False))
        >>> batch["value_target"].flatten().tolist()
        [1.75, 1.75, 1.5, 1.5, 1.0, 1.0]
    """

    mutable_settings = (*RolloutBuffer.mutable_settings, "standardize_advantages")

    _device: InitVar[torch.device | str] = setting(alias="device", default="cpu", kw_only=False)
    actor: Any = setting(default=None, kw_only=False)
    algorithm: Any = setting(default=None, kw_only=False)
    envs: InitVar[Any] = setting(default=None, kw_only=False)
    standardize_advantages: Boolean = True
    bootstrap: Boolean = True
    value_key: Key = VALUE
    advantage_key: Key = ADVANTAGE
    value_target_key: Key = TARGET
    frame_stack: Annotated[int, optional(integer)] = setting(default=None)
    _estimator: Estimator = computed()
    stream: RewardKeys = computed()
    hooks: RolloutHooks = computed()

    def __post_init__(self) -> None:  # type: ignore[override]  # init variables go to the base's constructor
        super().__post_init__()
        self.hooks = RolloutHooks()
        self.stream = RewardKeys(
            value=self.value_key, advantage=self.advantage_key, target=self.value_target_key, bootstrap=self.bootstrap
        )
        envs = EnvsApi.of(self.envs)
        stacks = (self.frame_stack, (envs.env_kwargs or {}).get("frame_stack"), envs.frame_stack, 1)
        self.frame_stack = integer(next(value for value in stacks if value is not None), "frame_stack")

    @property
    def _parameters(self) -> Mapping[str, Check]:
        """Validator of each setting that :meth:`update_storage_parameter` can change."""
        return {**super()._parameters, "frame_stack": integer}

    @property
    def estimator(self) -> Estimator:
        """Monte-Carlo estimator with the current settings."""
        return MonteCarlo(standardize=self.standardize_advantages)

    # ---- PyTorchRL methods on tensors -------------------------------------------------------------------------------

    def compute_returns(
        self,
        rewards: Tensor,
        returns: Values | None,
        values: Values,
        dones: Tensor,
        gamma: float,
        truncated: Tensor | None = None,
    ) -> Values:
        """Compute returns from time-major tensors, and write them to ``returns`` in place if it is given.

        Args:
            rewards: ``[T, N, 1]``, or ``[T + 1, N, 1]`` with an unused last row.
            returns: output ``[T, N, 1]`` or ``[T + 1, N, 1]``, or ``None``; a dict for several critics.
            values: ``[T + 1, N, 1]`` with the bootstrap value in the last row; a dict for several critics.
            dones: terminated flags of the steps, ``[T, N, 1]``. In ``[T + 1, N, 1]``, row ``t + 1`` belongs to step
                ``t``.
            gamma: discount.
            truncated: truncated flags, in the same layout as ``dones``.
        """
        if isinstance(values, Mapping):
            targets = cast("Mapping[str, Tensor]", returns or {})
            return {
                name: cast(
                    Tensor, self.compute_returns(rewards, targets.get(name), critic_values, dones, gamma, truncated)
                )
                for name, critic_values in values.items()
            }
        steps = values.shape[0] - 1
        if rewards.shape[0] not in (steps, steps + 1) or steps < 1:
            raise ValueError(f"values has {steps + 1} rows, so rewards needs {steps} rows, got {rewards.shape[0]}.")
        rewards = rewards[:steps].to(values.dtype)
        flags = [
            flag if flag.shape[0] == steps else flag[1:] for flag in (dones, dones if truncated is None else truncated)
        ]
        terminated, cut = (flag.bool().expand_as(rewards) for flag in flags)
        result = self.estimator.returns(Steps(rewards, values[:-1], values[1:], terminated, terminated | cut), gamma)
        if isinstance(returns, Tensor):
            returns[:steps].copy_(result)
            if returns.shape[0] == steps + 1:
                returns[-1].copy_(values[-1])
            return returns
        return result

    def compute_advantages(self, returns: Values, values: Values) -> Values:
        """Compute the advantages ``R - V``, standardised over all steps if ``standardize_advantages`` is set.

        Args:
            returns: ``[T, N, 1]``, or ``[T + 1, N, 1]`` with an unused last row; a dict for several critics.
            values: values in the same layout. If ``values`` has one more row than ``returns``, the last row is unused.
        """
        if isinstance(values, Mapping):
            targets = cast("Mapping[str, Tensor]", returns)
            return {
                name: cast(Tensor, self.compute_advantages(targets[name], critic_values))
                for name, critic_values in values.items()
            }
        returns = cast(Tensor, returns)
        steps = values.shape[0] - 1 if returns.shape[0] == values.shape[0] else returns.shape[0]
        advantage = returns[:steps] - values[:steps]
        return self.estimator.standardized(advantage)
