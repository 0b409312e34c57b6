"""Trunks: TensorDict modules that map observations to features for heads."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule, recurrent_mode

from torchrl_lightning._core.keys import FEATURES
from torchrl_lightning._core.tree import next_key


def feature_count(encoder: nn.Module) -> int:
    """Return the width of an encoder's features; raise TypeError if its attribute ``features`` is not an integer."""
    features = getattr(encoder, "features", None)
    if isinstance(features, bool) or not isinstance(features, Integral) or features < 1:
        raise TypeError(
            f"features of {type(encoder).__name__} must be a positive integer, got {features!r:.40}. Set it in the "
            "encoder to the last dimension of the tensor that its forward returns."
        )
    return int(features)


class Trunk(TensorDictModuleBase):
    """An encoder of observation entries as a TensorDict module; the encoder has an integer attribute ``features``."""

    recurrent = False
    state_keys: Sequence[NestedKey] = ()

    def __init__(self, encoder: nn.Module, keys: Sequence[NestedKey]) -> None:
        super().__init__()
        self.encoder = encoder
        self.features = feature_count(encoder)
        self.in_keys = list(keys)
        self.out_keys: list[NestedKey] = [FEATURES]

    def step(self, tensordict: TensorDictBase) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the features ``[*B, H]`` and the next recurrent states, if any, without writing them."""
        return self.encoder(*[tensordict.get(key) for key in self.in_keys]), ()

    def read(self, tensordict: TensorDictBase) -> Tensor:
        """Return the features ``[*B, H]`` without writing them."""
        return self.step(tensordict)[0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the features and the next recurrent states."""
        features, states = self.step(tensordict)
        tensordict.set(FEATURES, features)
        for key, state in zip(self.state_keys, states, strict=True):
            tensordict.set(next_key(key), state)
        return tensordict


class RecurrentTrunk(Trunk):
    r"""An encoder followed by TorchRL's ``GRUModule`` or ``LSTMModule``.

    Single steps (the default) take each row's own state, zeroed if ``is_init``:
    \(h_{t+1}, y_t = \mathrm{cell}(x_t, (1 - \mathrm{init}_t) h_t)\).
    Sequences ``[B, T]`` (inside ``torchrl.modules.set_recurrent_mode``) start from the first state of each row, and
    from zero at each step with ``is_init``. The state of a GRU is a tensor ``[*B, L, H]``. The state of an LSTM is a
    nested TensorDict with ``h`` and ``c``.
    """

    recurrent = True

    def __init__(
        self, encoder: nn.Module, keys: Sequence[NestedKey], cell: str, hidden_size: int, num_layers: int
    ) -> None:
        if cell not in ("gru", "lstm"):
            raise ValueError(f"cell must be 'gru' or 'lstm', got {cell!r}")
        super().__init__(encoder, keys)
        self.cell, self.features, self.observation_keys = cell, hidden_size, self.in_keys
        self.state_keys = ["recurrent_state"] if cell == "gru" else [("recurrent_state", "h"), ("recurrent_state", "c")]
        self.in_keys = [*self.observation_keys, *self.state_keys, "is_init"]
        self.out_keys = [FEATURES, *(next_key(key) for key in self.state_keys)]
        module = GRUModule if cell == "gru" else LSTMModule
        self.memory = module(
            input_size=feature_count(encoder),
            hidden_size=hidden_size,
            num_layers=num_layers,
            in_keys=["encoded", *self.state_keys, "is_init"],
            out_keys=list(self.out_keys),
        )
        for name, parameter in self._cells.named_parameters():
            (nn.init.orthogonal_ if name.startswith("weight") else nn.init.zeros_)(parameter)

    @property
    def _cells(self) -> nn.RNNBase:
        return self.memory.gru if self.cell == "gru" else self.memory.lstm

    def _states(self, tensordict: TensorDictBase, is_init: Tensor) -> list[Tensor]:
        fresh = is_init.unsqueeze(-1)  # [*B, 1, 1] against [*B, L, H]
        states = []
        for key in self.state_keys:
            state = tensordict.get(key, None)
            if state is None:
                raise KeyError(
                    f"a recurrent policy needs {key!r} in its input; add "
                    "`torchrl.modules.utils.get_primers_from_module(policy)` to the environment"
                )
            states.append(state.masked_fill(fresh, 0.0))
        return states

    def step(self, tensordict: TensorDictBase) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return features ``[*B, H]`` and the next states without writing them."""
        encoded = self.encoder(*[tensordict.get(key) for key in self.observation_keys])
        is_init = tensordict.get("is_init")
        states = self._states(tensordict, is_init)
        if not recurrent_mode() or not tensordict.ndim:
            return self._advance(encoded, states)
        work = TensorDict({"encoded": encoded, "is_init": is_init}, tensordict.batch_size)
        for key, state in zip(self.state_keys, states, strict=True):
            work.set(key, state)
        work = self.memory(work)
        return work.get(FEATURES), tuple(work.get(next_key(key)) for key in self.state_keys)

    def _advance(self, encoded: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        batch = encoded.shape[:-1]
        inputs = encoded.reshape(-1, 1, encoded.shape[-1])
        output, after = self._cells(inputs, self._hidden([state.reshape(-1, *state.shape[-2:]) for state in states]))
        after = (after,) if isinstance(after, Tensor) else after
        return output.reshape(*batch, -1), tuple(
            state.transpose(0, 1).reshape(*batch, *state.shape[::2]) for state in after
        )

    @staticmethod
    def _hidden(states: Sequence[Tensor]) -> Any:
        """Return states ``[B, L, H]`` in the layout of torch's cells, ``[L, B, H]``."""
        turned = tuple(state.transpose(0, 1).contiguous() for state in states)
        return turned[0] if len(turned) == 1 else turned

    def run(self, entries: Sequence[Tensor], is_init: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Return the features ``[B, T, H]`` of sequences; the state is zero at each step with ``is_init``.

        Each entry is ``[B, T, *F]``, ``is_init`` is ``[B, T]``, and each state before the first steps is ``[B, L, H]``.
        """
        encoded, (rows, length) = self.encoder(*entries), is_init.shape
        states = [state.masked_fill(is_init[:, 0].reshape(-1, 1, 1), 0.0) for state in states]
        if not bool(is_init[:, 1:].any()):
            return self._cells(encoded, self._hidden(states))[0]
        # Each episode becomes a row of its own, padded at the end.
        starts = is_init.clone()
        starts[:, 0] = True
        starts = starts.flatten()
        episode, begins = starts.cumsum(0) - 1, starts.nonzero().squeeze(-1)
        offset = torch.arange(rows * length, device=is_init.device) - begins[episode]
        longest = int(offset.max()) + 1
        place = episode * longest + offset
        padded = encoded.new_zeros(len(begins) * longest, encoded.shape[-1]).index_copy(0, place, encoded.flatten(0, 1))
        first = episode[::length]
        states = [state.new_zeros(len(begins), *state.shape[1:]).index_copy(0, first, state) for state in states]
        features = self._cells(padded.unflatten(0, (len(begins), longest)), self._hidden(states))[0]
        return features.flatten(0, 1).index_select(0, place).unflatten(0, (rows, length))

    @torch.no_grad()
    def unroll(
        self, entries: Sequence[Tensor], is_init: Tensor, states: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states ``[B, T, L, H]`` before and after each step of sequences, without a gradient.

        The states are computed step by step, because torch's cells return only the state after the last step. Arguments
        as in ``run``.
        """
        encoded, fresh = self.encoder(*entries), is_init.reshape(*is_init.shape, 1, 1)
        before: list[Sequence[Tensor]] = []
        after: list[Sequence[Tensor]] = []
        for t in range(encoded.shape[1]):
            before.append([state.masked_fill(fresh[:, t], 0.0) for state in states])
            states = self._advance(encoded[:, t], before[-1])[1]
            after.append(states)
        stacked = [[torch.stack(steps, 1) for steps in zip(*ends, strict=True)] for ends in (before, after)]
        return stacked[0], stacked[1]
