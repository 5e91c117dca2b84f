"""Positions: where a token stands, and what the network is told of it.

Added to the embeddings: `SinusoidalPositionEmbedding`, `LearnedPositionEmbedding`. Turning queries and keys:
`RotaryPositionEmbedding`. Added to the attention scores: `RelativePositionBias`, `AlibiPositionBias`.
"""

import copy
import math

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .compat import Float32Buffers
from .configuration_metaphrase import MetaphraseConfig

_MAX_WAVELENGTH = 10_000.0


def positions_from_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Numbers the tokens of each row from 0, skipping padding, on whichever side it stands.

    Args:
        attention_mask: 1 for a token, 0 for padding, `(batch, length)`.

    Returns:
        Positions `(batch, length)`; padding gets the position of the token before it, or 0.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def sinusoidal_table(length: int, hidden_size: int, layout: str, device: torch.device | None = None) -> torch.Tensor:
    """Sines and cosines of geometrically growing wavelengths, in float32.

    Source: Vaswani et al. 2017, section 3.5, arXiv 1706.03762.

    Args:
        length: Number of positions.
        hidden_size: Width. Where it is odd there is a cosine less than sines, and for `fairseq` a zero at the end.
        layout: `interleaved` (sine and cosine in turn), `half_split` (all sines, then all cosines) or `fairseq` (likewise, with
            the longest wavelength among them, as in the code of tensor2tensor and fairseq).
        device: Where to make the table.

    Returns:
        The table `(length, hidden)`.
    """
    if layout == "fairseq":
        # In float32, in which those models were trained.
        half = hidden_size // 2
        step = math.log(_MAX_WAVELENGTH) / (half - 1)
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device=device) * -step)
        angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
        return nn.functional.pad(torch.cat((angles.sin(), angles.cos()), dim=-1), (0, hidden_size % 2))
    # The angle of a late position in float32 is wrong by more than a sine's last places.
    is_precise = device is None or torch.device(device).type != "mps"
    dtype = torch.float64 if is_precise else torch.float32
    exponents = torch.arange(0, hidden_size, 2, dtype=dtype, device=device) / hidden_size
    # (length, 1) * (hidden / 2) -> (length, hidden / 2)
    angles = torch.arange(length, dtype=dtype, device=device)[:, None] * _MAX_WAVELENGTH**-exponents
    sines, cosines = angles.sin().float(), angles.cos().float()
    if layout == "half_split":
        return torch.cat((sines, cosines[:, : hidden_size // 2]), dim=-1)
    # (length, hidden / 2, 2) -> (length, hidden)
    return torch.stack((sines, cosines), dim=-1).flatten(start_dim=1)[:, :hidden_size].contiguous()


class SinusoidalPositionEmbedding(nn.Module):
    """A table of sinusoids, made once and made longer when a longer sequence comes."""

    def __init__(self, config: MetaphraseConfig):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.layout = config.sinusoidal_layout
        self.offset = config.position_offset
        self.register_buffer("table", self.make_table(config.max_position_embeddings + self.offset), persistent=False)

    def make_table(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        return sinusoidal_table(length, self.hidden_size, self.layout, device)

    def forward(self, position_ids: torch.Tensor, length: int) -> torch.Tensor:
        """Looks positions up.

        Args:
            position_ids: `(batch, query)`.
            length: A bound of the positions: no id reaches it.

        Returns:
            `(batch, query, hidden)` in float32.
        """
        table, length = self.table, length + self.offset
        if length > table.shape[0]:
            table = self.make_table(max(length, 2 * table.shape[0]), device=table.device)
            if not torch.compiler.is_compiling():
                self.table = table
        return nn.functional.embedding(position_ids + self.offset, table).float()


class LearnedPositionEmbedding(nn.Embedding):
    """A trained vector per position, up to `max_position_embeddings` of them."""

    is_of_positions = True

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config.max_position_embeddings + config.position_offset, config.hidden_size)
        self.offset = config.position_offset

    def forward(self, position_ids: torch.Tensor, length: int) -> torch.Tensor:
        """Looks positions up.

        Args:
            position_ids: `(batch, query)`.
            length: A bound of the positions: no id reaches it.

        Returns:
            `(batch, query, hidden)`.

        Raises:
            ValueError: If a position lies past the table.
        """
        # Padding counts in the bound but takes no position, so the ids themselves decide.
        count = self.num_embeddings - self.offset
        if length > count and (torch.compiler.is_compiling() or int(position_ids.max()) >= count):
            raise ValueError(
                f"A sequence must not be longer than `max_position_embeddings` with learned positions, "
                f"got {length} tokens and {count} positions."
            )
        return super().forward(position_ids + self.offset)


class RotaryPositionEmbedding(Float32Buffers):
    """Angles by which queries and keys are turned, so that their product depends on the distance alone.

    Source: Su et al. 2021, section 3, arXiv 2104.09864. The scaled variants are transformers' own.
    """

    def __init__(self, config: MetaphraseConfig, heads: int | None = None):
        super().__init__()
        # transformers' functions read the width of a head from the configuration, where the two stacks may differ.
        self.config = copy.copy(config)
        self.config.head_dim = config.get_head_dim(config.num_attention_heads if heads is None else heads)
        self.rope_type = config.rope_parameters.get("rope_type", "default")
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        inverse_frequencies, self.attention_scaling = self.make_frequencies()
        self.register_buffer("inv_freq", inverse_frequencies, persistent=False)
        self.register_buffer("original_inv_freq", inverse_frequencies.clone(), persistent=False)

    def make_frequencies(self, device: torch.device | None = None) -> tuple[torch.Tensor, float]:
        """The frequencies `(rotated / 2)` and the factor on cosine and sine."""
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, device)
        parameters = self.config.rope_parameters
        rotated = int(self.config.head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
        return parameters["rope_theta"] ** -exponents, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine for each position.

        Args:
            hidden_states: Gives device and dtype.
            position_ids: `(batch, length)`.

        Returns:
            Two tensors `(batch, length, rotated)`.
        """
        angles = position_ids[:, :, None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        cosine, sine = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cosine.to(hidden_states.dtype), sine.to(hidden_states.dtype)


def rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turns each pair (i, i + rotated / 2) of the leading `rotated` entries of a head.

    Args:
        states: Queries or keys `(batch, heads, length, head_dim)`.
        cosine: `(batch, 1, length, rotated)`.
        sine: `(batch, 1, length, rotated)`.

    Returns:
        Turned states, in the shape and dtype of `states`.
    """
    rotated = cosine.shape[-1]
    turned, kept = states[..., :rotated], states[..., rotated:]
    first, second = turned.chunk(2, dim=-1)
    if states.dtype == torch.float16:  # a turn can make an entry longer than the longest float16
        turned, first, second = turned.float(), first.float(), second.float()
    turned = turned * cosine + torch.cat((-second, first), dim=-1) * sine
    if states.dtype == torch.float16:
        largest = torch.finfo(torch.float16).max
        turned = turned.clamp(min=-largest, max=largest)
    # Under autocast the angles are more precise than the states.
    turned = turned.to(states.dtype)
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


class RelativePositionBias(nn.Module):
    """T5's bias: one learned number for each head and each bucket of distances.

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
        """Puts distances, key position minus query position, into buckets.

        Half of the buckets hold one distance each, the other half logarithmically growing ranges up to `max_distance`.
        A bidirectional bias gives the keys ahead buckets of their own; otherwise they share bucket 0.
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
        # The quotient is kept above 0 where the logarithm is not used anyway.
        growth = torch.log(distance.clamp(min=1).float() / num_exact) / math.log(self.max_distance / num_exact)
        ranged = (num_exact + (growth * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
        return offset + torch.where(distance < num_exact, distance, ranged)

    def forward(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """The bias `(1 or batch, heads, query, key)` for positions `(1 or batch, query)` and `(1 or batch, key)`."""
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        # (batch, query, key, heads) -> (batch, heads, query, key)
        return self.embedding(self.bucket(distance)).permute(0, 3, 1, 2)


def alibi_slopes(heads: int) -> torch.Tensor:
    """One slope for each head: a geometric series that starts at its own ratio.

    Source: Press et al. 2022, section 3, arXiv 2108.12409. For a number of heads that is no power of two, the series of the
    next smaller power is filled up with every second slope of the next larger one, as in the authors' code.
    """
    power = 2 ** math.floor(math.log2(heads))

    def series(count: int) -> list[float]:
        return [2 ** (-8 * (index + 1) / count) for index in range(count)]

    return torch.tensor(series(power) + series(2 * power)[0::2][: heads - power], dtype=torch.float32)


class AlibiPositionBias(nn.Module):
    """A penalty that grows linearly with the distance, to both sides alike where both sides are seen."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads
        self.register_buffer("slopes", alibi_slopes(heads), persistent=False)

    def forward(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """The bias `(1 or batch, heads, query, key)` for positions `(1 or batch, query)` and `(1 or batch, key)`."""
        distance = (key_positions[:, None, None, :] - query_positions[:, None, :, None]).abs()
        return -distance * self.slopes.float()[:, None, None]
