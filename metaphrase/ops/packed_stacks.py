"""Encoder and decoder over packed rows, and windows of padded batches in blocks. Other batches go to the plain methods."""

import functools

import torch
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput

from metaphrase.errors import MetaphraseError
from metaphrase.modeling import layers as network
from metaphrase.modeling import stacks
from metaphrase.modeling.configuration_metaphrase import SLIDING, SSRU
from metaphrase.modeling.operators import acceleration
from metaphrase.modeling.stacks import MetaphraseDecoder, MetaphraseEncoder, Stack
from metaphrase.ops import linear_and_dropout, packed_rows
from metaphrase.ops.grid_attention import grid_attention
from metaphrase.ops.packed_rows import MergedPacking, PackedSequences, Packing, packed_mask, product_dtype

# Older GPUs have no flash attention.
_LEAST_CAPABILITY = (8, 0)
# Arguments of packed rows.
_LENGTHS = ("source_lengths", "longest_source", "target_lengths", "longest_target", "targets_per_source")
_plain_encode, _plain_decode = MetaphraseEncoder.encode, MetaphraseDecoder.decode


def plug_in() -> None:
    """Put the operators of this package into the network."""
    acceleration.linear = linear_and_dropout.linear
    acceleration.dropout = functools.partial(linear_and_dropout.add_dropout, None)
    acceleration.add_dropout = linear_and_dropout.add_dropout
    acceleration.packed_attention = packed_attention
    MetaphraseEncoder.encode, MetaphraseDecoder.decode = encode, decode
    stacks.MetaphrasePreTrainedModel.supports_packing = True


def encode(encoder, embeddings, attention_mask, position_ids, **kwargs) -> BaseModelOutput:
    """Encode sources as `MetaphraseEncoder.encode` does, and packed rows.

    `source_lengths` `(pairs)` are the tokens of each source in a packed row. Without the largest of them, `longest_source`, the
    code waits for an accelerator.
    """
    lengths, longest, *_ = (kwargs.pop(name, None) for name in _LENGTHS)
    if lengths is not None:
        excluded = {"attention_mask": attention_mask, "position_ids": position_ids}
        sequences = _packed_sequences(lengths, longest, embeddings, **excluded)
        return encode_packed(encoder, embeddings, sequences, **kwargs)
    # A graph is for all lengths.
    is_graph = torch.compiler.is_compiling() or torch.jit.is_tracing()
    has_plain_mask = attention_mask is None or stacks.is_padding_mask(attention_mask)
    is_plain = position_ids is None and has_plain_mask and not is_graph
    if is_plain and SLIDING in encoder.sizes.layer_types and not asks_for_reference(encoder):
        return _encode_in_blocks(encoder, embeddings, attention_mask, **kwargs)
    return _plain_encode(encoder, embeddings, attention_mask, position_ids, **kwargs)


def encode_packed(
    encoder: MetaphraseEncoder, embeddings: torch.Tensor, sequences: PackedSequences, **kwargs
) -> BaseModelOutput:
    """Encode the sources of a packed row: `(1, tokens, hidden) -> (1, tokens, hidden)`."""
    hidden_states, rotations = encoder.enter(embeddings, sequences.positions, sequences.longest)
    layer_masks = _packed_masks(encoder, sequences, hidden_states)
    for layer, rotation, (packing, mask) in zip(encoder.layers, rotations, layer_masks, strict=True):
        hidden_states = layer(hidden_states, rotation, mask, packing=packing, **kwargs)
    return BaseModelOutput(last_hidden_state=encoder.norm(hidden_states))


def _encode_in_blocks(
    encoder: MetaphraseEncoder, embeddings: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs
) -> BaseModelOutput:
    """Encode a padded batch. The windows of its rows, one after the other, are blocks of a packed row."""
    rows, length, _ = embeddings.shape
    sequences = PackedSequences(torch.full((rows,), length, device=embeddings.device), rows * length, length)
    if attention_mask is not None:
        # Padding belongs to no sequence.
        sequences.ids = sequences.ids.masked_fill(attention_mask.flatten() == 0, -1)
    positions = stacks.indices(length, embeddings)
    position_ids = stacks.make_position_ids(None, attention_mask, positions, length)
    hidden_states, rotations = encoder.enter(embeddings, *position_ids)
    windows, made, full_mask = encoder.windows(length), {}, None
    if None in windows:
        full_mask = create_bidirectional_mask(
            config=encoder.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
    layers = list(zip(encoder.position_biases(), windows, strict=True))
    for bias, window in dict.fromkeys(layers):
        if window is not None:
            packing = Packing(sequences, sequences, False, "window", window)
            made[bias, window] = packing, packed_mask(packing, bias, hidden_states)
        elif bias is None:
            made[bias, window] = None, full_mask
        else:
            scores = bias(positions, positions).to(hidden_states.dtype)
            made[bias, window] = None, network.combine_bias(scores, full_mask)
    for layer, rotation, key in zip(encoder.layers, rotations, layers, strict=True):
        packing, mask = made[key]
        hidden_states = layer(hidden_states, rotation, mask, packing=packing, **kwargs)
    return BaseModelOutput(last_hidden_state=encoder.norm(hidden_states))


def decode(
    decoder, embeddings, encoder_hidden_states, attention_mask, encoder_attention_mask, position_ids, **kwargs
) -> torch.Tensor:
    """Decode targets as `MetaphraseDecoder.decode` does, and packed rows. For the lengths see `encode`.

    `targets_per_source` `(sources)` are the numbers of targets of each source, which are neighbours in their row; None is one.
    """
    source_lengths, longest_source, target_lengths, longest_target, counts = (
        kwargs.pop(name, None) for name in _LENGTHS
    )
    if (target_lengths is None) != (source_lengths is None):
        raise MetaphraseError("`source_lengths` and `target_lengths` must be given together, got one of them.")
    if target_lengths is None:
        masks = attention_mask, encoder_attention_mask
        return _plain_decode(decoder, embeddings, encoder_hidden_states, *masks, position_ids, **kwargs)
    excluded = {"decoder_attention_mask": attention_mask, "decoder_position_ids": position_ids}
    excluded |= {"attention_mask": encoder_attention_mask, "past_key_values": kwargs[stacks.CACHE_NAME]}
    targets = _packed_sequences(target_lengths, longest_target, embeddings, **excluded)
    sources = PackedSequences(source_lengths, encoder_hidden_states.shape[1], longest_source)
    hidden_states, rotations = decoder.enter(embeddings, targets.positions, targets.longest)
    cross = cross_mask = None
    if not decoder.config.merged_attention:
        readers = targets
        if counts is not None:
            # Tokens of all targets of a source see the same keys, so that they are one sequence here.
            owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
            lengths = torch.zeros_like(counts).index_add(0, owners, target_lengths)
            readers = PackedSequences(lengths, embeddings.shape[1])
        cross = Packing(readers, sources, False, choose_kernel(decoder, hidden_states, is_plain=True))
        cross_mask = packed_mask(cross, None, hidden_states)
    if decoder.config.decoder_self_attention == SSRU:
        layer_masks = [(Packing(targets, targets, True, "recurrence"), None)] * len(decoder.layers)
    else:
        layer_masks = _packed_masks(decoder, targets, hidden_states, None if cross else sources)
    for layer, rotation, (packing, mask) in zip(decoder.layers, rotations, layer_masks, strict=True):
        packing.cross = cross
        hidden_states = layer(
            hidden_states, rotation, mask, encoder_hidden_states, cross_mask, packing=packing, **kwargs
        )
    return hidden_states


def _packed_sequences(
    lengths: torch.Tensor, longest: int | None, embeddings: torch.Tensor, **excluded
) -> PackedSequences:
    names = [f"`{name}`" for name, value in excluded.items() if value is not None]
    if names or embeddings.shape[0] != 1:
        raise MetaphraseError(
            "Packed sequences must stand in one row, without padding, positions and cache, "
            f"got {embeddings.shape[0]} rows{' and '.join(['', *names])}."
        )
    return PackedSequences(lengths, embeddings.shape[1], longest)


def _packed_masks(
    stack: Stack, sequences: PackedSequences, hidden_states: torch.Tensor, sources: PackedSequences | None = None
) -> list[tuple[Packing, torch.Tensor | None]]:
    """Return the packing and the mask of each layer's self-attention. A merged attention sees the sources, too."""
    packings, made = {}, {}
    layers = list(zip(stack.position_biases(), stack.windows(sequences.longest), strict=True))
    for bias, window in dict.fromkeys(layers):
        if window not in packings:
            kernel = choose_kernel(stack, hidden_states, is_plain=bias is None and sources is None)
            if sources is not None:
                packings[window] = MergedPacking(sequences, sources, kernel, window)
            else:
                kernel = "window" if window is not None and kernel != "reference" else kernel
                packings[window] = Packing(sequences, sequences, stack.is_causal, kernel, window)
        made[bias, window] = packings[window], packed_mask(packings[window], bias, hidden_states)
    return [made[layer] for layer in layers]


def asks_for_reference(stack: Stack) -> bool:
    """Return True if the configuration names another kernel than `sdpa`."""
    # With a softcap, `eager` is the only kernel of the network, and asks for nothing.
    return stack.config._attn_implementation != "sdpa" and stack.config.attn_logit_softcapping is None


def choose_kernel(stack: Stack, states: torch.Tensor, is_plain: bool) -> str:
    """Return the name of the kernel for a packed attention to states. A plain attention has neither bias nor window."""
    config, head_dim, name = stack.config, stack.sizes.head_dim, stack.config._attn_implementation
    if name == "eager" and config.attn_logit_softcapping is None:
        return "reference"
    if name not in ("eager", "sdpa", "flex_attention") and "flash" not in name:
        # A user's own kernel may compute something else.
        raise MetaphraseError(
            f"`attn_implementation` must be a kernel of torch or transformers for packed rows, got {name!r}."
        )
    has_dropout = stack.training and config.attention_dropout > 0
    is_plain = is_plain and not has_dropout and config.attn_logit_softcapping is None
    can_flash = product_dtype(states) in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256
    is_gpu = states.device.type == "cuda" and torch.cuda.get_device_capability(states.device) >= _LEAST_CAPABILITY
    return "varlen" if is_plain and can_flash and is_gpu else "grid"


def packed_attention(
    attention: network.MetaphraseAttention,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None,
    mask: torch.Tensor | None,
    position_embeddings: network.PositionEmbeddings,
    packing: Packing,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Project and attend within packed rows: `(1, query tokens, heads, head_dim)`, and the weights of `reference` or None."""
    if attention.is_cross:
        packing = packing.cross
    query, cap = attention.project_queries(hidden_states, position_embeddings), attention.options.get("softcap")
    inputs = (encoder_hidden_states,) if attention.is_cross else (hidden_states, position_embeddings)
    states = attention.project_keys_and_values(*inputs)
    if attention.is_merged:
        sources = attention.project_keys_and_values(encoder_hidden_states)
        pairs = zip(states, sources, strict=True)
        states = [torch.cat(pair, dim=2).index_select(2, packing.order) for pair in pairs]
    if packing.kernel == "reference":
        return network.eager_attention_forward(attention, query, *states, mask, attention.scaling, dropout, cap)
    states = [query, *(repeat_kv(part, attention.num_key_value_groups) for part in states)]
    if packing.kernel == "varlen":
        return packed_rows.varlen_attention(states, packing, attention.scaling), None
    kernel = packed_rows.window_attention if packing.kernel == "window" else grid_attention
    return kernel(states, mask, packing, attention.scaling, dropout, cap), None
