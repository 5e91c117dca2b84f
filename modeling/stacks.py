"""Encoder and decoder: initialization, embeddings, positions, masks, and the way through the layers."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_metaphrase import SLIDING, SSRU, MetaphraseConfig
from .layers import (
    MetaphraseAttention,
    MetaphraseDecoderLayer,
    MetaphraseEncoderLayer,
    PositionEmbeddings,
    combine_bias,
)
from .operators import MetaphraseRMSNorm, acceleration, cast_for_autocast, clamp_float16, make_norm
from .positions import (
    AlibiPositionBias,
    LearnedPositionEmbedding,
    RelativePositionBias,
    RotaryPositionEmbedding,
    SinusoidalPositionEmbedding,
    positions_from_mask,
)

# transformers 5.24 renames the cache in outputs and generation loops. Forward methods take either name.
CACHE_NAMES = ("past_key_values", "cache")
CACHE_NAME = "cache" if hasattr(BaseModelOutputWithPastAndCrossAttentions, "cache") else "past_key_values"
# Tensor parallelism of the sublayers.
_ATTENTION_PLAN = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_MLP_PLAN = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def make_tp_plan(**sublayers: dict[str, str]) -> dict[str, str]:
    return {f"layers.*.{name}.{weight}": style for name, plan in sublayers.items() for weight, style in plan.items()}


class ScaledEmbedding(nn.Embedding):
    """Token embeddings times a constant: `(batch, length) -> (batch, length, hidden)`."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, padding_idx: int | None = None):
        super().__init__(vocab_size, hidden_size, padding_idx)
        self.embed_scale = scale  # peft's adapters read this name

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeddings = super().forward(input_ids)
        return embeddings if self.embed_scale == 1.0 else embeddings * self.embed_scale


class MetaphrasePreTrainedModel(PreTrainedModel):
    """Base class of all Metaphrase models."""

    config_class = MetaphraseConfig
    config: MetaphraseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MetaphraseEncoderLayer", "MetaphraseDecoderLayer"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # True if the model reads packed rows, by `source_lengths` and `target_lengths`: if the package has put its code in place.
    supports_packing = False
    _tied_weights_keys = {}
    # Options of the last load of each name, for the target tokenizer of a pipeline. They are not saved with a model.
    hub_options: dict[str, dict] = {}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        cls.hub_options[str(pretrained_model_name_or_path)] = {name: kwargs.get(name) for name in ("revision", "token")}
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @property
    def _supports_sdpa(self) -> bool:
        # Torch's kernel has no softcap.
        return self.config.attn_logit_softcapping is None

    @property
    def _supports_flash_attn(self) -> bool:
        # Flash attention has one width for both sides of a window, and no bias.
        left, right = self.config.encoder_window or (0, 0)
        return self._has_plain_masks and left == right

    @property
    def _supports_flex_attn(self) -> bool:
        return self._has_plain_masks and self.config.encoder_window is None and self.config.decoder_window is None

    @property
    def _has_plain_masks(self) -> bool:
        return self.config.position_embedding_type not in ("relative", "alibi") and not self.config.merged_attention

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Initialize the parameters and buffers of a module, also after it was on the meta device."""
        super()._init_weights(module)
        config = self.config
        if config.initializer_range is not None:
            std = config.initializer_range
        # By its shape, so that states, scores and logits have a variance of about 1, as in T5.
        elif isinstance(module, nn.Linear) and module is getattr(self, "lm_head", None):
            std = module.in_features**-0.5 / config.logits_scale
        elif isinstance(module, nn.Linear):
            std = getattr(module, "initial_gain", 1.0) * (2 / (module.in_features + module.out_features)) ** 0.5
        elif getattr(module, "is_of_positions", False):
            std = config.hidden_size**-0.5
        elif isinstance(module, nn.Embedding) and config.tie_word_embeddings:
            std = module.embedding_dim**-0.5 / config.logits_scale
        elif isinstance(module, nn.Embedding):
            std = module.embedding_dim**-0.5 if config.scale_embedding else 1.0

        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=std)
        if isinstance(module, nn.Embedding):
            # `init` cannot see that a checkpoint filled the weight, since a row has no mark.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, MetaphraseRMSNorm) and module.plus_one:
            init.zeros_(module.weight)
        elif isinstance(module, RotaryPositionEmbedding):
            frequencies, _ = module.make_frequencies()
            init.copy_(module.inv_freq, frequencies)
            init.copy_(module.original_inv_freq, frequencies)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # With false `tie_word_embeddings`, the parent would also untie the embeddings of source and target.
        # The result is changed, and the class may hold the names for all its models.
        names = dict(self._tied_weights_keys)
        return super().get_expanded_tied_weights_keys(all_submodels=True) if all_submodels else names


class Stack(MetaphrasePreTrainedModel):
    """Base class of encoder and decoder: embeddings, layers and final norm."""

    is_causal: bool
    layer_class: type[nn.Module]
    _tp_plan = make_tp_plan(self_attn=_ATTENTION_PLAN, mlp=_MLP_PLAN)
    _pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    def __init__(self, config: MetaphraseConfig):
        super().__init__(config)
        self.sizes = config.stack_sizes("decoder" if self.is_causal else "encoder")
        width, heads = self.sizes.hidden_size, self.sizes.attention_heads
        vocab_size = config.decoder_vocab_size if self.is_causal else config.vocab_size
        self.norms_first = self.is_causal and config.embedding_norm_before_positions
        scale = width**0.5 if config.scale_embedding and not self.norms_first else 1.0
        padding_idx = None if config.train_padding_embedding else config.pad_token_id
        self.embed_tokens = ScaledEmbedding(vocab_size, width, scale, padding_idx)
        self.embed_positions = self.rotary_emb = self.sliding_rotary_emb = self.position_bias = None
        kind = config.position_embedding_type
        if kind == "sinusoidal":
            self.embed_positions = SinusoidalPositionEmbedding(config, width)
        elif kind == "learned":
            self.embed_positions = LearnedPositionEmbedding(config, self.sizes)
        elif kind == "rotary":
            # Stacks may differ in the width of their heads.
            stack_config = copy.copy(config)
            stack_config.head_dim = self.sizes.head_dim
            self.rotary_emb = RotaryPositionEmbedding(stack_config)
            if config.sliding_rope_theta is not None and SLIDING in self.sizes.layer_types:
                stack_config = copy.copy(stack_config)
                stack_config.rope_parameters = {"rope_type": "default", "rope_theta": config.sliding_rope_theta}
                self.sliding_rotary_emb = RotaryPositionEmbedding(stack_config)
        elif kind == "alibi":
            self.position_bias = AlibiPositionBias(heads)
        elif kind == "relative" and config.relative_attention_shared:
            self.position_bias = RelativePositionBias(config, heads, is_bidirectional=not self.is_causal)
        self.embedding_norm = make_norm(config, width) if config.embedding_norm else nn.Identity()
        self.norm = make_norm(config, width) if config.final_norm else nn.Identity()
        self.gradient_checkpointing = False
        self.layers = nn.ModuleList([self.layer_class(config, index) for index in range(self.sizes.layers)])
        self.post_init()

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Exactly one of `input_ids` and `inputs_embeds` must be given, got both or neither.")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def enter(
        self, embeddings: torch.Tensor, position_ids: torch.Tensor, length: int | None
    ) -> tuple[torch.Tensor, list[PositionEmbeddings]]:
        """Return the input of the first layer, `(batch, query, hidden)`, and the position embeddings of each layer.

        The positions `(1 or batch, query)` are below `length`, which is None if unknown.
        """
        if self.norms_first:
            embeddings = self.embedding_norm(embeddings)
        if self.embed_positions is not None:
            positions = self.embed_positions(position_ids, length)
            embeddings = clamp_float16(embeddings + positions.to(embeddings.dtype))
        hidden_states = embeddings if self.norms_first else self.embedding_norm(embeddings)
        hidden_states = acceleration.dropout(hidden_states, p=self.config.dropout, training=self.training)
        if self.rotary_emb is None:
            return hidden_states, [None] * len(self.layers)
        rotations = {}
        for kind in dict.fromkeys(self.sizes.layer_types):
            has_own = kind == SLIDING and self.sliding_rotary_emb is not None
            cosine, sine = (self.sliding_rotary_emb if has_own else self.rotary_emb)(hidden_states, position_ids)
            # (batch, query, rotated) -> (batch, 1, query, rotated): one rotation for all heads
            rotations[kind] = cosine[:, None], sine[:, None]
        return hidden_states, [rotations[kind] for kind in self.sizes.layer_types]

    def layer_masks(
        self,
        full_mask: torch.Tensor | None,
        hidden_states: torch.Tensor,
        query_positions: torch.Tensor,
        key_positions: torch.Tensor,
    ) -> list[torch.Tensor | None]:
        """Return the mask of each layer: `full_mask`, narrowed to the layer's window, plus its position bias."""
        is_flash = "flash" in self.config._attn_implementation
        masks = {}
        layers = list(zip(self.position_biases(), self.windows(key_positions.shape[1]), strict=True))
        for bias, window in dict.fromkeys(layers):
            mask = full_mask
            # Flash attention reads `sliding_window` of the layer.
            if window is not None and not is_flash:
                distances = (key_positions[:, None, :] - query_positions[:, :, None])[:, None]
                is_near = (distances >= -window[0]) & (distances <= window[1])
                if mask is None or mask.dtype == torch.bool:
                    mask = is_near if mask is None else mask & is_near
                else:
                    mask = torch.where(is_near, mask, torch.finfo(mask.dtype).min)
            if bias is not None:
                scores = bias(query_positions, key_positions).to(hidden_states.dtype)
                mask = combine_bias(scores, mask)
            masks[bias, window] = mask
        return [masks[layer] for layer in layers]

    def windows(self, longest: int) -> list[tuple[int, ...] | None]:
        """Return the window of each layer. A window that all of the `longest` tokens fit into is None."""
        windows = [self.sizes.window if kind == SLIDING else None for kind in self.sizes.layer_types]
        # A graph that is traced is for all lengths.
        is_traced = torch.jit.is_tracing() or torch.compiler.is_exporting()
        if self.sizes.window and not is_traced:
            left, right = self.sizes.window
            if longest <= 1 + (left if self.is_causal else min(left, right)):
                return [None] * len(windows)
        return windows

    def position_biases(self) -> list[nn.Module | None]:
        if self.position_bias is not None:
            return [self.position_bias] * len(self.layers)
        return [getattr(layer.self_attn, "relative_position_bias", None) for layer in self.layers]


class MetaphraseEncoder(Stack):
    """Stack of layers with bidirectional self-attention."""

    is_causal, layer_class = False, MetaphraseEncoderLayer
    _can_record_outputs = {"hidden_states": MetaphraseEncoderLayer, "attentions": MetaphraseAttention}

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """Encode sources, with the arguments of `MetaphraseModel.forward`, or a kernel's mask `(batch, 1, source, source)`."""
        return self.encode(self._embed(input_ids, inputs_embeds), attention_mask, position_ids, **kwargs)

    def encode(
        self, embeddings: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, **kwargs
    ) -> BaseModelOutput:
        """Encode the embeddings of sources. The package replaces this method by faster ones."""
        # Position biases depend on distances, which padding on the left does not change.
        positions = indices(embeddings.shape[1], embeddings) if position_ids is None else position_ids
        position_ids, bound = make_position_ids(position_ids, attention_mask, positions, embeddings.shape[1])
        hidden_states, position_embeddings = self.enter(embeddings, position_ids, bound)
        full_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        masks = self.layer_masks(full_mask, hidden_states, positions, positions)
        for layer, rotation, mask in zip(self.layers, position_embeddings, masks, strict=True):
            hidden_states = layer(hidden_states, rotation, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class MetaphraseDecoder(Stack):
    """Stack of layers with causal self-attention and cross-attention."""

    is_causal, layer_class = True, MetaphraseDecoderLayer
    _can_record_outputs = {
        "hidden_states": MetaphraseDecoderLayer,
        "attentions": OutputRecorder(MetaphraseAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MetaphraseAttention, index=1, layer_name="cross_attn"),
    }
    _tp_plan = make_tp_plan(self_attn=_ATTENTION_PLAN, cross_attn=_ATTENTION_PLAN, mlp=_MLP_PLAN)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode all positions of the targets, or the positions after those in the cache.

        `MetaphraseModel.forward` describes the other arguments.

        Args:
            attention_mask: 1 for a token, 0 for padding, `(batch, past + query)`, or a kernel's mask `(batch, 1, query, key)`.
            encoder_hidden_states: The encoder output `(batch / copies, source, hidden)`. Each source serves `copies` consecutive
                targets, as in beam search.
            encoder_attention_mask: 1 for a token, 0 for padding, `(batch / copies, source)`.
        """
        # Once for all layers.
        encoder_hidden_states = cast_for_autocast(encoder_hidden_states)
        embeddings = self._embed(input_ids, inputs_embeds)
        past_key_values = past_key_values if cache is None else cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        # Gradient checkpointing drops the cache by this name.
        kwargs[CACHE_NAME] = past_key_values
        masks = attention_mask, encoder_attention_mask
        hidden_states = self.decode(embeddings, encoder_hidden_states, *masks, position_ids, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), **{CACHE_NAME: past_key_values}
        )

    def decode(
        self,
        embeddings: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        **kwargs,
    ) -> torch.Tensor:
        """Run the layers over the embeddings of targets, `(batch, query, hidden)`. The package replaces this method."""
        length, cache = embeddings.shape[1], kwargs[CACHE_NAME]
        key_length, offset = length, 0
        if cache is not None:
            cache = cache.self_attention_cache
            offset = cache.get_seq_length()
            # A static cache changes this tensor in place, in its first layer.
            offset = offset.clone() if isinstance(offset, torch.Tensor) else offset
            key_length, _ = cache.get_mask_sizes(length, 0)
        query_positions = indices(length, embeddings, offset)
        key_positions = indices(key_length, embeddings)
        if position_ids is not None and key_length == length:
            query_positions = key_positions = position_ids
        position_ids, bound = make_position_ids(position_ids, attention_mask, query_positions, key_length)
        hidden_states, position_embeddings = self.enter(embeddings, position_ids, bound)

        rows, sources = embeddings.shape[0], encoder_hidden_states.shape[0]
        is_merged = self.config.merged_attention
        encoder_mask = create_bidirectional_mask(
            config=self.config,
            # Only the shape counts: an attention joins the queries of a source.
            inputs_embeds=embeddings.reshape(sources, -1, embeddings.shape[-1]),
            attention_mask=encoder_attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            allow_is_bidirectional_skip=not is_merged,
        )
        if self.config.decoder_self_attention == SSRU:
            masks = [attention_mask] * len(self.layers)
        else:
            full_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                # Torch's kernel can do without a mask, but not with a bias. A merged attention has one mask for both parts.
                allow_is_causal_skip=self.config.attn_logit_softcapping is None and self._has_plain_masks,
                **{CACHE_NAME: cache},
            )
            masks = self.layer_masks(full_mask, hidden_states, query_positions, key_positions)
        if is_merged:
            # One softmax over target and source: (sources, 1, copies * query, source) -> (batch, 1, query, source)
            encoder_mask = encoder_mask.unflatten(2, (-1, length)).flatten(0, 2)[:, None]
            unique = dict.fromkeys(masks)
            merged = {mask: torch.cat((mask.expand(rows, -1, -1, -1), encoder_mask), dim=-1) for mask in unique}
            masks = [merged[mask] for mask in masks]
        for layer, rotation, mask in zip(self.layers, position_embeddings, masks, strict=True):
            hidden_states = layer(hidden_states, rotation, mask, encoder_hidden_states, encoder_mask, **kwargs)
        return hidden_states


def make_position_ids(
    position_ids: torch.Tensor | None, attention_mask: object, query_positions: torch.Tensor, length: int
) -> tuple[torch.Tensor, int | None]:
    """Return the position of each query, `(1 or batch, query)`, and a number above every position, or None if unknown.

    Queries have the indices `query_positions` `(1, query)` among `length` keys. A mask of padding counts tokens only.
    """
    if position_ids is not None:
        return position_ids, None
    if is_padding_mask(attention_mask):
        return positions_from_mask(attention_mask)[:, -query_positions.shape[1] :], length
    return query_positions, length


def indices(length: int, hidden_states: torch.Tensor, offset: int | torch.Tensor = 0) -> torch.Tensor:
    """Return offset, offset + 1, ... as `(1, length)`."""
    return torch.arange(length, device=hidden_states.device)[None, :] + offset


def is_padding_mask(attention_mask: object) -> bool:
    """Return True for a mask `(batch, length)`, False for a kernel's mask."""
    return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
