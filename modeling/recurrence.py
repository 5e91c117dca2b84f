"""SSRU: a recurrence of constant size in place of the decoder's self-attention."""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from .configuration_metaphrase import MetaphraseConfig, StackSizes
from .operators import acceleration, cast_for_autocast


class MetaphraseSSRU(nn.Module):
    """Simpler simple recurrent unit: each token forgets a part of the state, and adds its own input.

    With f = sigmoid(W_f x + b), the state is c_t = f c_{t-1} + (1 - f) W x, and the output relu(c). A decoding step costs the
    same at any length. Training computes all tokens at once.

    Source: Kim et al. 2019, section 3.1, https://aclanthology.org/D19-5632.
    """

    is_merged = False

    def __init__(self, config: MetaphraseConfig, sizes: StackSizes, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.input_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False)
        self.forget_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        packing: Any = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Return the output `(batch, length, hidden)`, and None in place of attention weights.

        Args:
            hidden_states: Input, `(batch, length, hidden)`.
            attention_mask: 1 for a token, 0 for padding, `(batch, past + length)`. Padding leaves the state as it is.
            past_key_values: Its cache for self-attention holds the states of all tokens in place of keys, so that searches can
                reorder and shorten them: `(batch, 1, past, hidden)`.
            packing: The sequences of packed rows. Each sequence begins with an empty state.
        """
        cache = None if past_key_values is None else past_key_values.self_attention_cache
        kinds = {type(layer) for layer in ([] if cache is None else cache.layers)} - {DynamicLayer}
        if kinds:
            raise ValueError(
                f"The cache must be dynamic with `decoder_self_attention` ssru, got a {kinds.pop().__name__}. "
                "Remove `cache_implementation`."
            )
        if self.training:
            hidden_states = cast_for_autocast(hidden_states)
        forget = torch.sigmoid(acceleration.linear(self.forget_proj, hidden_states).float())
        inputs = (1 - forget) * acceleration.linear(self.input_proj, hidden_states)
        length = longest = hidden_states.shape[1]
        if packing is not None:
            longest = packing.queries.longest
            forget = forget.index_fill(1, packing.queries.starts, 0.0)
        if attention_mask is not None:
            is_padding = (attention_mask[:, -length:] == 0)[:, :, None]
            forget, inputs = forget.masked_fill(is_padding, 1.0), inputs.masked_fill(is_padding, 0.0)
        if cache is not None and cache.get_seq_length(self.layer_idx):
            inputs[:, 0] += forget[:, 0] * cache.layers[self.layer_idx].keys[:, 0, -1]
        states = scan(forget, inputs, longest)
        if cache is not None:
            cache.update(states[:, None], states[:, None, :, :0], self.layer_idx)
        return torch.relu(states).to(hidden_states.dtype), None


def scan(factors: torch.Tensor, inputs: torch.Tensor, longest: int) -> torch.Tensor:
    """Return c_t = a_t c_{t-1} + b_t of factors a and inputs b along the second axis, `(batch, length, hidden)`.

    A sequence has at most `longest` tokens: a factor of 0 begins each other one. The number of operations grows with the
    logarithm of `longest`.

    Source: Hillis and Steele 1986, https://doi.org/10.1145/7902.7903.
    """
    return inputs if longest == 1 else _Scan.apply(factors, inputs, longest)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, factors: torch.Tensor, inputs: torch.Tensor, longest: int) -> torch.Tensor:
        states = _run_scan(factors, inputs, longest)
        ctx.save_for_backward(factors, states)
        ctx.longest = longest
        return states

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        factors, states = ctx.saved_tensors
        # A state is read by its output and by the next state: g_t = gradient_t + a_{t+1} g_{t+1}.
        next_factors = nn.functional.pad(factors[:, 1:], (0, 0, 0, 1))
        of_inputs = _run_scan(next_factors.flip(1), gradient.flip(1), ctx.longest).flip(1)
        return of_inputs * nn.functional.pad(states[:, :-1], (0, 0, 1, 0)), of_inputs, None


def _run_scan(factors: torch.Tensor, inputs: torch.Tensor, longest: int) -> torch.Tensor:
    factors, states, distance = factors.clone(), inputs.clone(), 1
    while distance < longest:
        # Each state holds the inputs of the last `distance` tokens, and its factor leads back to the state before them.
        states[:, distance:] += factors[:, distance:] * states[:, :-distance]
        factors[:, distance:] = factors[:, distance:] * factors[:, :-distance]
        distance *= 2
    return states
