"""Encoding of a padded batch on a CPU as one packed row, without its padding."""

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from metaphrase.modeling.encoder_decoder import MetaphraseEncoder
from metaphrase.modeling.packing import Segments
from metaphrase.modeling.stacks import is_padding_mask

# With less padding, or in a smaller model, moving the tokens takes as long as computing the padding.
LEAST_PADDING, LEAST_HIDDEN_SIZE = 0.1, 256


def encode_without_padding(
    encoder: MetaphraseEncoder, embeddings: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs
) -> BaseModelOutput | None:
    """Encode the tokens of a padded batch as one packed row.

    Args:
        encoder: The encoder.
        embeddings: Embeddings (B, S, D).
        attention_mask: 1 for a token, 0 for padding, (B, S).
        **kwargs: Arguments of the layers.

    Returns:
        Output whose `last_hidden_state` (B, S, D) is 0 for padding. None if packing would not be faster, or if hooks of the
        layers would see the packed row.
    """
    if not _can_skip_padding(encoder, embeddings, attention_mask):
        return None
    rows, length, _ = embeddings.shape
    is_token = attention_mask != 0
    indices = is_token.flatten().nonzero()[:, 0]
    segments = Segments(is_token.sum(dim=1), len(indices))
    packed = encoder.encode_packed(embeddings.flatten(0, 1).index_select(0, indices)[None], segments, **kwargs)
    tokens = packed.last_hidden_state[0]
    output = tokens.new_zeros(rows * length, tokens.shape[-1]).index_copy_(0, indices, tokens)
    return BaseModelOutput(last_hidden_state=output.view(rows, length, -1))


def _can_skip_padding(
    encoder: MetaphraseEncoder, embeddings: torch.Tensor, attention_mask: torch.Tensor | None
) -> bool:
    if encoder.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    # In float16, only the padded kernels keep large scores finite.
    is_supported = embeddings.dtype in (torch.float32, torch.bfloat16) and encoder.config._attn_implementation == "sdpa"
    if embeddings.device.type != "cpu" or not is_supported or embeddings.shape[2] < LEAST_HIDDEN_SIZE:
        return False
    if not is_padding_mask(attention_mask) or attention_mask.shape != embeddings.shape[:2]:
        return False
    is_token = attention_mask != 0
    if is_token.sum() > (1 - LEAST_PADDING) * is_token.numel():
        return False
    # Each row must have one stretch of tokens: a hole would change distances, and a segment must not be empty.
    starts = nn.functional.pad(is_token, (1, 0)).int().diff() > 0
    return bool((starts.sum(dim=1) == 1).all()) and not any(
        module._forward_hooks or module._forward_pre_hooks for module in encoder.layers.modules()
    )
