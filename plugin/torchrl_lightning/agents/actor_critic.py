"""The base LightningModule of on-policy agents: networks, updates, schedules, metrics and evaluation."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.modules import set_recurrent_mode

from torchrl_lightning._core.keys import COLLECTOR, INTRINSIC_TARGET, INTRINSIC_VALUE, MASK, TARGET, VALUE
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.settings import Boolean, Finite, FinitePositive, NonNegative, Positive, setting
from torchrl_lightning._core.update_batches import UpdateBatches, updates_of
from torchrl_lightning._core.validators import check_defaults
from torchrl_lightning.agents.base import LossTermsModule, OptimizerFactory
from torchrl_lightning.agents.dry_run import ROWS
from torchrl_lightning.agents.loss_functions import Distance, critic_loss, standardized
from torchrl_lightning.agents.metrics import train_names
from torchrl_lightning.agents.networks.actors import Actor, ActorWithValues, Critic, build_actor, build_critic
from torchrl_lightning.agents.networks.encoders import MLPNetwork
from torchrl_lightning.agents.networks.network_protocol import Network, network_check
from torchrl_lightning.agents.rnd import RandomNetworkDistillation
from torchrl_lightning.agents.schedules import Schedule, as_schedule
from torchrl_lightning.agents.transitions import missing_entry

logger = logging.getLogger(__name__)

STATE = "on_policy"
_TARGETS = {VALUE: TARGET, INTRINSIC_VALUE: INTRINSIC_TARGET}
_MASKS = ((COLLECTOR, MASK), "shifted_valid")  # TorchRL's losses exclude steps by these entries


class ActorCriticModule(LossTermsModule):
    """An actor and a critic that learn from the mini-batches of an on-policy DataModule.

    ``configure_model`` builds the networks from ``trainer.datamodule.specs``. Without a trainer, call ``build(specs)``.
    Subclasses compute their loss in ``losses``, from the functions in :mod:`torchrl_lightning.agents.loss_functions`.

    Args:
        network: Network in front of the heads; ``MLPNetwork()`` by default.
        critic_coeff: Weight of the critic's loss.
        loss_critic_type: ``"l2"``, ``"smooth_l1"`` or ``"l1"``.
        clip_value: Maximum change of a value prediction; larger changes are clipped. None does not clip.
        normalize_advantage: True standardises the advantage within each mini-batch, even if the buffer has
            standardised it over the rollout. None does so only if the buffer has not.
        extrinsic_coeff: Weight of the advantage of the environment's reward.
        intrinsic_coeff: Weight of the intrinsic advantage; requires ``intrinsic``.
        distribution: Distribution of continuous actions: ``"normal"`` (clipped; the default) or ``"tanh_normal"``.
        initial_std: Initial standard deviation of continuous actions, in units of half the action range. Actions
            without bounds have their own units. ``TanhNormal`` applies it before the tanh.
        critics: The names of the critics if several critics learn the same reward. The value keys are ``("state_value",
            name)``.
        separate_critics: Give each critic head its own trunk.
        intrinsic: Source of intrinsic rewards, trained together with the agent. It adds an ``intrinsic_state_value``
            head.
        critic_optimizer: A separate optimizer for the critic's own parameters; optional.
        compile: Compile the loss with ``torch.compile``. On one CPU core this multiplied PPO's time by 0.83.
        learning_rate: As in :class:`AgentModule`, like all arguments that are not listed here.
    """

    CONFIG_NAME: ClassVar[str | None] = None

    adam_eps: ClassVar[float] = 1e-5
    build_method = "build"
    batch_shapes = ((ROWS,), (1, ROWS))  # mini-batches, and time-major rollouts for value estimation
    supports_action_masks = True
    stream_kind = "rollouts"
    training_metrics = (
        *LossTermsModule.training_metrics,
        *train_names("explained_variance", "loss_critic", "loss_intrinsic_critic", "loss_intrinsic_predictor"),
    )
    loops_over_updates = True
    suggested_data = "data=gae (OnPolicyDataModule)"

    network: Annotated[Network, network_check(MLPNetwork)] = setting(default=None, kw_only=False)
    critic_coeff: NonNegative = 0.5
    loss_critic_type: Distance = "l2"
    clip_value: Positive | None = None
    normalize_advantage: Boolean | None = False
    extrinsic_coeff: Finite = 1.0
    intrinsic_coeff: Finite = 1.0
    distribution: str = "auto"
    initial_std: FinitePositive = 1.0
    critics: Sequence[str] | None = None
    separate_critics: bool = False
    intrinsic: RandomNetworkDistillation | None = None
    critic_optimizer: OptimizerFactory | None = None
    max_grad_norm: Positive | None = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critics is not None and not len(self.critics):
            raise ValueError("critics must name at least one critic, got []. Leave it out for a single critic.")
        self.require_effect("intrinsic_coeff", self.intrinsic is not None, "intrinsic")
        self.require_effect("separate_critics", len(self.value_keys) > 1, "several critics")
        self._standardizes_advantages = (
            self.normalize_advantage is not False
        )  # setup() replaces this value if the setting is None
        self.actor_network: Actor | None = None
        self.critic_network: Critic | None = None
        self._coefficients: dict[str, tuple[float, Schedule]] = {}
        self._stopped = False

    @abstractmethod
    def losses(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the loss terms (``loss_...``) and diagnostics of a mini-batch; all are scalars."""

    def setup(self, stage: str) -> None:
        """Validate the DataModule, and decide whether this module standardises advantages."""
        super().setup(stage)
        if stage != "fit":
            return
        data = DataApi.of(self._data)
        standardized_by = data.advantages_standardized_by
        if self.normalize_advantage is None:
            self._standardizes_advantages = standardized_by is None
        frames, batches = data.frames_per_batch, data.num_mini_batch
        if self._standardizes_advantages and frames is not None and frames == batches:
            raise ValueError(
                f"num_mini_batch must be below frames_per_batch={frames} if advantages are standardised within each "
                f"mini-batch, got {batches}: a single sample would become 0. Lower it, or set "
                "normalize_advantage=False."
            )
        if self._standardizes_advantages:
            self._check_advantage_weights()
        if self.normalize_advantage and standardized_by is not None:
            logger.warning(
                "normalize_advantage=True standardises advantages that %s has already standardised over the rollout. "
                "Set standardize_advantages=False in the buffer, or leave normalize_advantage at None.",
                standardized_by,
            )

    def _check_advantage_weights(self) -> None:
        """Validate the advantage weights; a positive weight has no effect on a single standardised advantage."""
        weights = {"extrinsic_coeff": self.extrinsic_coeff}
        if self.intrinsic is not None:
            weights["intrinsic_coeff"] = self.intrinsic_coeff
        names = [name for name, weight in weights.items() if weight]
        if len(names) == 1 and weights[names[0]] > 0:
            condition = (
                "a second advantage, because standardising in each mini-batch divides by the weight of a single one"
            )
            remedy = "set normalize_advantage=False, or set intrinsic and both coefficients"
            check_defaults(f"without {condition}", remedy, **{names[0]: (weights[names[0]], 1.0)})

    # -- networks ---------------------------------------------------------------------------------------------------

    @property
    def value_keys(self) -> list[NestedKey]:
        """The value keys of the critic; the key of the intrinsic value is the last."""
        keys: list[NestedKey] = [("state_value", name) for name in self.critics or ()] or ["state_value"]
        return [*keys, "intrinsic_state_value"] if self.intrinsic is not None else keys

    @property
    def is_built(self) -> bool:
        """True once the networks exist."""
        return self.actor_network is not None

    def build(self, specs: Any) -> Self:
        """Build the networks for an environment's specs and return the module; a second call does nothing."""
        if self.actor_network is None:
            actor = build_actor(specs, self.network, distribution=self.distribution, initial_std=self.initial_std)
            critic = build_critic(
                specs, self.network, out_keys=self.value_keys, actor=actor, separate=self.separate_critics
            )
            if self.intrinsic is not None:
                self.intrinsic.build(specs)
            self.actor_network, self.critic_network = actor, critic
        return self

    @property
    def policy(self) -> Actor:
        """The actor."""
        return self.require_built(self.actor_network)

    @property
    def critic(self) -> Critic:
        """The critic."""
        return self.require_built(self.critic_network)

    def network_outputs(self, step: TensorDictBase) -> list[Tensor]:
        """Return log-probabilities, entropies and values; empty if a subclass replaces policy or critic."""
        if self.policy is not self.actor_network or self.critic is not self.critic_network:
            return []
        log_prob, entropy, values = ActorCriticModule.evaluate(self, self.policy(step))
        return [log_prob, entropy, *values]

    @property
    def collection_policy(self) -> Actor | ActorWithValues:
        """The policy for collection; it also writes values to avoid a second pass through a costly shared trunk."""
        policy, critic = self.policy, self.critic
        saves_trunk_pass = critic.is_shared and getattr(self.network, "costly", False) and policy is self.actor_network
        return ActorWithValues(policy, critic) if saves_trunk_pass else policy

    def annotate(self, rollout: TensorDictBase) -> None:
        """Add ``("next", "intrinsic_reward")`` to a time-major rollout if ``intrinsic`` is set."""
        if self.intrinsic is not None:
            self.intrinsic.annotate(rollout)

    # -- optimizers and schedules -----------------------------------------------------------------------------------

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer; if ``critic_optimizer`` is set, add an optimizer of the critic's own parameters."""
        actor, critic = list(self.policy.parameters()), list(self.critic.parameters())
        if self.intrinsic is not None:
            actor += self.intrinsic.predictor_parameters()
        # Each update changes all parameters, so a single optimizer takes all parameters as one list.
        parameter_lists = (actor, critic) if self.critic_optimizer else (actor + critic, [])
        return self.build_optimizers(*parameter_lists, self.critic_optimizer)

    def add_coefficient(self, name: str, value: float, schedule: str | Schedule) -> None:
        """Register a scheduled loss coefficient as a buffer, so that checkpoints contain it.

        The buffer replaces the setting of the same name and holds the scheduled value.
        """
        vars(self).pop(name, None)
        self.register_buffer(name, torch.tensor(float(value), dtype=torch.float32))
        self._coefficients[name] = (value, as_schedule(schedule))

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules of the learning rates and the loss coefficients."""
        return [*super().schedules, *(schedule for _, schedule in self._coefficients.values())]

    def on_train_epoch_start(self) -> None:
        """Apply the schedules, and allow updates again after an early stop."""
        self._stopped = False
        super().on_train_epoch_start()

    def apply_schedules(self) -> None:
        """Set learning rates and coefficients from the frame count, so that a resumed run uses the same values."""
        super().apply_schedules()
        for name, (value, schedule) in self._coefficients.items():
            getattr(self, name).fill_(value * schedule(self.progress))

    # -- state ------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the flag that skips the rest of the epoch."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[STATE] = {"stopped": self._stopped}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Validate the checkpoint, and restore the flag that skips the rest of the epoch."""
        super().on_load_checkpoint(checkpoint)
        self._stopped = bool(checkpoint.get(STATE, {}).get("stopped", False))

    # -- learning ---------------------------------------------------------------------------------------------------

    def evaluate(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return log-probabilities and entropies of the stored actions ``[*B]``, and each head's values ``[*B, 1]``.

        A shared trunk runs once. A mask raises a ValueError, because the losses average over all steps and would
        ignore it.
        """
        for key in _MASKS:
            if batch.get(key, None) is not None:
                raise ValueError(
                    f"The batch must not contain the mask {key!r}, because the losses average over all steps. Pass "
                    "unpadded steps, or remove the mask with batch_keys of the buffer."
                )
        actor, critic = self.policy, self.critic
        with set_recurrent_mode(batch.ndim > 1) if actor.trunk.recurrent else nullcontext():
            features = actor.trunk.encode(batch)
            values = critic.values_of(features) if critic.is_shared else critic.values(batch)
        return *actor.head.evaluate(
            actor.apply_mask(actor.head.sampling_parameters(features), batch), batch.get("action")
        ), values

    def advantage(self, batch: TensorDictBase) -> Tensor:
        r"""Return the combined advantage ``[*B]``, \(c_e A + c_i A^{int}\), with \(A\) averaged over the critics."""
        advantage = required_entry(batch, "advantage")
        if isinstance(advantage, TensorDictBase):
            advantage = torch.stack(list(advantage.values(True, True))).mean(0)
        if self.extrinsic_coeff != 1.0:
            advantage = self.extrinsic_coeff * advantage
        if self.intrinsic is not None and self.intrinsic_coeff:
            advantage = advantage + self.intrinsic_coeff * required_entry(batch, "intrinsic_advantage")
        advantage = advantage.squeeze(-1)
        return standardized(advantage) if self._standardizes_advantages else advantage

    def critic_terms(self, batch: TensorDictBase, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the weighted loss of all extrinsic critics (a sum) and the weighted loss of the intrinsic critic."""
        terms: dict[str, Tensor] = {}
        for key, value in zip(self.critic.out_keys, values, strict=True):
            name = "loss_intrinsic_critic" if key == "intrinsic_state_value" else "loss_critic"
            loss = self.critic_coeff * critic_loss(
                value,
                required_entry(batch, target_key(key)),
                self.loss_critic_type,
                old_value=None if self.clip_value is None else required_entry(batch, key),
                clip_value=self.clip_value,
            )
            terms[name] = terms[name] + loss if name in terms else loss
        return terms

    def training_step(self, batch: TensorDictBase | UpdateBatches, batch_idx: int) -> None:
        """Update on each mini-batch of this step until ``should_stop`` returns True."""
        for number, minibatch in enumerate(updates_of(batch)):
            if not self._stopped:  # iterate to the end, because the last batch ends the rollout
                self._learn(minibatch, inner=number > 0)

    def _learn(self, batch: TensorDictBase, *, inner: bool) -> None:
        terms = self._analytic_update(batch) or self.compute(batch)
        if self.intrinsic is not None:
            terms["loss_intrinsic_predictor"] = self.intrinsic.loss(batch)
        if self.should_stop(terms):
            self._stopped = True
            return
        self.minimise(terms, inner=inner)
        key = self.critic.out_keys[0]
        value, target = batch.get(key, None), batch.get(target_key(key), None)
        if value is not None and target is not None:
            self.metric_sums.add_prediction(value, target)

    def should_stop(self, terms: Mapping[str, Tensor]) -> bool:
        """Return True to skip this update and the rest of the epoch."""
        return False


def required_entry(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """Return an entry written by the buffer; raise KeyError with a hint if it is missing."""
    value = batch.get(key, None)
    if value is None:
        hint = (
            "the buffer's before_gradients() writes values, targets and advantages. Check that it ran, and that buffer "
            "and module use the same names of critics"
        )
        raise missing_entry(batch, key, hint)
    return value


def target_key(value_key: NestedKey) -> NestedKey:
    """Return the key of the regression target for a value key."""
    if isinstance(value_key, str):
        return _TARGETS[value_key]
    return (_TARGETS[value_key[0]], *value_key[1:])
