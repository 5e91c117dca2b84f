"""Positions: added to the embeddings, applied to queries and keys, or added to the attention scores."""

import math

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .configuration_metaphrase import MetaphraseConfig, StackSizes
from .operators import clamp_float16

_MAX_WAVELENGTH = 10_000.0
# The frequencies of these rotations depend on the length of the sequence so far.
_CHANGING_ROTATIONS = ("dynamic", "longrope")


def positions_from_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number the tokens of each row of a mask `(batch, length)` from 0. Padding has the position of the token before, or 0."""
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def sinusoids(positions: torch.Tensor, hidden_size: int, layout: str) -> torch.Tensor:
    """Return sines and cosines of geometrically growing wavelengths, in float32: `(...) -> (..., hidden)`.

    An odd width has one cosine less than sines, or a zero at the end for `fairseq`.

    Source: Vaswani et al. 2017, section 3.5, arXiv 1706.03762.
    """
    device = positions.device
    if layout == "fairseq":
        # fairseq computes the table in float32.
        half = hidden_size // 2
        step = math.log(_MAX_WAVELENGTH) / (half - 1)
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device=device) * -step)
        angles = positions[..., None].float() * frequencies
        return nn.functional.pad(torch.cat((angles.sin(), angles.cos()), dim=-1), (0, hidden_size % 2))
    # In float32, the angles of late positions are too inexact for float32 sines. MPS has no float64.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    exponents = torch.arange(0, hidden_size, 2, dtype=dtype, device=device) / hidden_size
    # (..., 1) * (hidden / 2) -> (..., hidden / 2)
    angles = positions[..., None].to(dtype) * _MAX_WAVELENGTH**-exponents
    sines, cosines = angles.sin().float(), angles.cos().float()
    if layout == "half_split":
        return torch.cat((sines, cosines[..., : hidden_size // 2]), dim=-1)
    # (..., hidden / 2, 2) -> (..., hidden)
    return torch.stack((sines, cosines), dim=-1).flatten(start_dim=-2)[..., :hidden_size].contiguous()


class SinusoidalPositionEmbedding(nn.Module):
    """Fixed sinusoids, computed in each call."""

    def __init__(self, config: MetaphraseConfig, hidden_size: int):
        super().__init__()
        self.hidden_size, self.layout, self.offset = hidden_size, config.sinusoidal_layout, config.position_offset

    def forward(self, position_ids: torch.Tensor, length: int | None) -> torch.Tensor:
        """Return the vectors of positions `(batch, query)` below `length`, `(batch, query, hidden)` in float32."""
        if length is None or position_ids.numel() <= length:
            return sinusoids(position_ids + self.offset, self.hidden_size, self.layout)
        # A vector for each position takes less time than one for each token.
        table = sinusoids(torch.arange(length, device=position_ids.device) + self.offset, self.hidden_size, self.layout)
        return nn.functional.embedding(position_ids, table)


class LearnedPositionEmbedding(nn.Embedding):
    """Learned vectors for `max_position_embeddings` positions, plus the vector of the first token type."""

    is_of_positions = True

    def __init__(self, config: MetaphraseConfig, sizes: StackSizes):
        super().__init__(sizes.max_position_embeddings + config.position_offset, sizes.hidden_size)
        self.offset, self.token_types = config.position_offset, None
        if config.type_vocab_size is not None:
            self.token_types = nn.Embedding(config.type_vocab_size, sizes.hidden_size)
            self.token_types.is_of_positions = True

    def forward(self, position_ids: torch.Tensor, length: int | None) -> torch.Tensor:
        # `length` counts padding, too, which has no positions. So the ids decide. Reading them would wait for an accelerator.
        count = self.num_embeddings - self.offset
        is_long = length is not None and length > count
        if is_long and (torch.compiler.is_compiling() or int(position_ids.max()) >= count):
            raise ValueError(
                f"A sequence must not be longer than `max_position_embeddings` with learned positions, "
                f"got {length} tokens and {count} positions."
            )
        embeddings = super().forward(position_ids + self.offset)
        return embeddings if self.token_types is None else embeddings + self.token_types(torch.zeros_like(position_ids))


class RotaryPositionEmbedding(nn.Module):
    """Rotary position embedding of queries and keys.

    Source: Su et al. 2021, section 3, arXiv 2104.09864. transformers computes the scaled variants.
    """

    def __init__(self, config: MetaphraseConfig):
        super().__init__()
        self.config, self.rope_type = config, config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        inverse_frequencies, self.attention_scaling = self.make_frequencies()
        self.register_buffer("inv_freq", inverse_frequencies, persistent=False)
        self.register_buffer("original_inv_freq", inverse_frequencies.clone(), persistent=False)

    def _apply(self, fn, recurse=True):
        """Keep the buffers in float32 when the model is cast, as when it is loaded in another dtype."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != before[name].dtype:
                setattr(self, name, before[name].to(buffer.device))
        return self

    def make_frequencies(self) -> tuple[torch.Tensor, float]:
        """Return the frequencies `(rotated / 2)`, and the factor of cosine and sine."""
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](self.config)
        parameters = self.config.rope_parameters
        head_dim = self.config.head_dim or self.config.hidden_size // self.config.num_attention_heads
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        return parameters["rope_theta"] ** -exponents, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of positions `(batch, length)`, `(batch, length, rotated)` in the dtype of the states."""
        angles = position_ids[:, :, None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        cosine, sine = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cosine.to(hidden_states.dtype), sine.to(hidden_states.dtype)


def has_changing_rotation(config: MetaphraseConfig) -> bool:
    """Return True for rotary positions whose frequencies change with the length of the sequence so far."""
    is_rotary = config.position_embedding_type == "rotary"
    return is_rotary and config.rope_parameters["rope_type"] in _CHANGING_ROTATIONS


def rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + rotated / 2) of the first `rotated` entries of heads `(batch, heads, length, head_dim)`.

    Cosine and sine are `(batch, 1, length, rotated)`.
    """
    num_rotated = cosine.shape[-1]
    rotated, rest = states[..., :num_rotated], states[..., num_rotated:]
    first, second = rotated.chunk(2, dim=-1)
    if states.dtype == torch.float16:  # a rotated entry may exceed the largest float16
        rotated, first, second = rotated.float(), first.float(), second.float()
    # Under autocast, cosine and sine may have a higher precision than the states.
    rotated = clamp_float16((rotated * cosine + torch.cat((-second, first), dim=-1) * sine).to(states.dtype))
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class RelativePositionBias(nn.Module):
    """T5's position bias, a learned number for each head and bucket of distances.

    Source: Raffel et al. 2020, section 2.1, arXiv 1910.10683.
    """

    def __init__(self, config: MetaphraseConfig, heads: int, is_bidirectional: bool):
        super().__init__()
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.is_bidirectional = is_bidirectional
        self.embedding = nn.Embedding(self.num_buckets, heads)
        self.embedding.is_of_positions = True

    def bucket(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the bucket of each distance, key position minus query position.

        The first half of the buckets hold a single distance. The ranges of the second half grow logarithmically up to
        `max_distance`. Later keys have separate buckets in a bidirectional bias, and share bucket 0 otherwise.
        """
        num_buckets = self.num_buckets
        offset = torch.zeros_like(distance)
        if self.is_bidirectional:
            num_buckets //= 2
            offset = (distance > 0).long() * num_buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        num_exact = num_buckets // 2
        # A distance of 0 has no logarithm. Its value is not used.
        growth = torch.log(distance.clamp(min=1).float() / num_exact) / math.log(self.max_distance / num_exact)
        ranged = (num_exact + (growth * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
        return offset + torch.where(distance < num_exact, distance, ranged)

    def forward(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Return the bias: `(1 or batch, query), (1 or batch, key) -> (1 or batch, heads, query, key)`."""
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        # (batch, query, key, heads) -> (batch, heads, query, key)
        return self.embedding(self.bucket(distance)).permute(0, 3, 1, 2)


class AlibiPositionBias(nn.Module):
    """ALiBi, a penalty that grows linearly with the distance in either direction, with a slope for each head.

    The slopes are a geometric series that starts with its ratio. The series of the next smaller power of two is completed by
    every second slope of the next larger, as in the authors' code.

    Source: Press et al. 2022, arXiv 2108.12409.
    """

    def __init__(self, heads: int):
        super().__init__()
        power = 2 ** math.floor(math.log2(heads))
        exponents = [step / power for step in range(1, power + 1)]
        exponents += [step / (2 * power) for step in range(1, 2 * power, 2)][: heads - power]
        self.slopes = [2.0 ** (-8 * exponent) for exponent in exponents]

    def forward(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Return the bias: `(1 or batch, query), (1 or batch, key) -> (1 or batch, heads, query, key)`."""
        distance = (key_positions[:, None, None, :] - query_positions[:, None, :, None]).abs()
        return -distance * torch.tensor(self.slopes, device=distance.device)[:, None, None]
