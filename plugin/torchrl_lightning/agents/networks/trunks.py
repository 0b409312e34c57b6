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
        """Return the features ``[*B, H]`` and the next recurrent states (or none) without writing them."""
        return self.encoder(*[tensordict.get(key) for key in self.in_keys]), ()

    def encode(self, tensordict: TensorDictBase) -> Tensor:
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

    Single steps (the default) start from the state of each row, or from zero if ``is_init``:
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
            raise ValueError(f"cell must be 'gru' or 'lstm', got {cell!r}.")
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

    def _read_states(self, tensordict: TensorDictBase, is_init: Tensor) -> list[Tensor]:
        """Return the recurrent states ``[*B, L, H]``, zero if ``is_init``."""
        mask = is_init.unsqueeze(-1)  # [*B, 1, 1]
        states = []
        for key in self.state_keys:
            state = tensordict.get(key, None)
            if state is None:
                raise KeyError(
                    f"the input of a recurrent policy must contain {key!r}. Add the transform "
                    "`torchrl.modules.utils.get_primers_from_module(policy)` to the environment."
                )
            states.append(state.masked_fill(mask, 0.0))
        return states

    def step(self, tensordict: TensorDictBase) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return features ``[*B, H]`` and the next states without writing them."""
        encoded = self.encoder(*[tensordict.get(key) for key in self.observation_keys])
        is_init = tensordict.get("is_init")
        states = self._read_states(tensordict, is_init)
        if not recurrent_mode() or not tensordict.ndim:
            return self._advance(encoded, states)
        sequence = TensorDict({"encoded": encoded, "is_init": is_init}, tensordict.batch_size)
        for key, state in zip(self.state_keys, states, strict=True):
            sequence.set(key, state)
        sequence = self.memory(sequence)
        return sequence.get(FEATURES), tuple(sequence.get(next_key(key)) for key in self.state_keys)

    def _advance(self, encoded: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        batch = encoded.shape[:-1]
        inputs = encoded.reshape(-1, 1, encoded.shape[-1])
        hidden = self._to_hidden([state.reshape(-1, *state.shape[-2:]) for state in states])
        output, next_hidden = self._cells(inputs, hidden)
        next_hidden = (next_hidden,) if isinstance(next_hidden, Tensor) else next_hidden
        return output.reshape(*batch, -1), tuple(
            state.transpose(0, 1).reshape(*batch, *state.shape[::2]) for state in next_hidden
        )

    @staticmethod
    def _to_hidden(states: Sequence[Tensor]) -> Any:
        """Return states ``[B, L, H]`` in the layout of torch's cells, ``[L, B, H]``."""
        transposed = tuple(state.transpose(0, 1).contiguous() for state in states)
        return transposed[0] if len(transposed) == 1 else transposed

    def encode_sequences(self, entries: Sequence[Tensor], is_init: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Return the features ``[B, T, H]`` of sequences; the state is zero at each step with ``is_init``.

        Each entry is ``[B, T, *F]``, ``is_init`` is ``[B, T]``, and each state before the first steps is ``[B, L, H]``.
        """
        encoded, (rows, length) = self.encoder(*entries), is_init.shape
        states = [state.masked_fill(is_init[:, 0].reshape(-1, 1, 1), 0.0) for state in states]
        if not bool(is_init[:, 1:].any()):
            return self._cells(encoded, self._to_hidden(states))[0]
        # Each episode becomes a separate row, padded at the end.
        is_start = is_init.clone()
        is_start[:, 0] = True
        is_start = is_start.flatten()
        episode, starts = is_start.cumsum(0) - 1, is_start.nonzero().squeeze(-1)
        offset = torch.arange(rows * length, device=is_init.device) - starts[episode]
        episodes, max_length = len(starts), int(offset.max()) + 1
        index = episode * max_length + offset
        padded = encoded.new_zeros(episodes * max_length, encoded.shape[-1])
        padded = padded.index_copy(0, index, encoded.flatten(0, 1))
        first = episode[::length]
        states = [state.new_zeros(episodes, *state.shape[1:]).index_copy(0, first, state) for state in states]
        features = self._cells(padded.unflatten(0, (episodes, max_length)), self._to_hidden(states))[0]
        return features.flatten(0, 1).index_select(0, index).unflatten(0, (rows, length))

    @torch.no_grad()
    def unroll(
        self, entries: Sequence[Tensor], is_init: Tensor, states: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states ``[B, T, L, H]`` before and after each step of sequences, without a gradient.

        The states are computed step by step, because torch's cells return only the state after the last step. The
        arguments are the same as in ``encode_sequences``.
        """
        encoded, mask = self.encoder(*entries), is_init.reshape(*is_init.shape, 1, 1)
        before: list[Sequence[Tensor]] = []
        after: list[Sequence[Tensor]] = []
        for t in range(encoded.shape[1]):
            before.append([state.masked_fill(mask[:, t], 0.0) for state in states])
            states = self._advance(encoded[:, t], before[-1])[1]
            after.append(states)
        stacked = [[torch.stack(steps, 1) for steps in zip(*states, strict=True)] for states in (before, after)]
        return stacked[0], stacked[1]
