"""Configuration of Metaphrase: the fields of the architecture, and their checks."""

import copy
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_POSITIVE = (
    *("vocab_size", "decoder_vocab_size", "hidden_size", "encoder_layers", "decoder_layers", "encoder_ffn_dim"),
    *("decoder_hidden_size", "decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads"),
    *("num_key_value_heads", "decoder_num_key_value_heads", "head_dim", "decoder_window", "sliding_rope_theta"),
    *("max_position_embeddings", "decoder_max_position_embeddings", "relative_attention_max_distance", "norm_eps"),
    *("attention_scale", "logits_scale", "initializer_range"),
    *("attn_logit_softcapping", "final_logit_softcapping", "type_vocab_size"),
)
STACKS = ("encoder", "decoder")
FULL, SLIDING = "full_attention", "sliding_attention"
SSRU = "ssru"
_AUTO_MAP = {
    "AutoConfig": "configuration_metaphrase.MetaphraseConfig",
    "AutoModel": "modeling_metaphrase.MetaphraseModel",
    "AutoModelForSeq2SeqLM": "modeling_metaphrase.MetaphraseForConditionalGeneration",
    "AutoModelForTextEncoding": "modeling_metaphrase.MetaphraseEncoderModel",
    "AutoModelForSequenceClassification": "modeling_metaphrase.MetaphraseForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_metaphrase.MetaphraseForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_metaphrase.MetaphraseForQuestionAnswering",
}
_PIPELINES = {
    task: {"impl": f"pipelines.{name}", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    for task, name in {
        "translation": "TranslationPipeline",
        "summarization": "SummarizationPipeline",
        "text2text-generation": "Text2TextGenerationPipeline",
    }.items()
}


class StackSizes(NamedTuple):
    """Sizes of a stack. In a `SLIDING` layer, a token sees the tokens within `window`, to the left and to the right."""

    hidden_size: int
    layers: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    ffn_dim: int
    layer_types: tuple[str, ...]
    window: tuple[int, ...] | None
    max_position_embeddings: int


@strict
class MetaphraseConfig(PreTrainedConfig):
    """Configuration of a `MetaphraseModel`. The defaults are a small model of our recommended design.

    Args:
        vocab_size, decoder_vocab_size: Sizes of the source and target vocabulary. None for the second means `vocab_size`.
        hidden_size, decoder_hidden_size: Widths of the stacks. None for the decoder means `hidden_size`.
        encoder_layers, decoder_layers, encoder_attention_heads, decoder_attention_heads: Layers and query heads of a stack.
        encoder_ffn_dim, decoder_ffn_dim: Inner width of the feed-forward network in each stack.
        num_key_value_heads, decoder_num_key_value_heads: Key and value heads (grouped-query attention, Ainslie et al. 2023, arXiv
            2305.13245). None means the number of query heads, and for the decoder `num_key_value_heads`.
        head_dim: Width of a head. None means `hidden_size` divided by the query heads of the stack.
        activation_function: Name of the activation in the feed-forward network, from transformers' `ACT2FN`.
        gated_mlp: Multiply the activated projection by a second linear projection (GLU, Shazeer 2020, arXiv 2002.05202).
        position_embedding_type: `sinusoidal` and `learned` are added to the embeddings. `relative` is T5's bias by buckets of
            distances. `rotary` rotates queries and keys (Su et al. 2021, arXiv 2104.09864). `alibi` is a linear bias (Press et
            al. 2022, arXiv 2108.12409), symmetric in the encoder. `none` leaves the order of tokens to the causal mask.
        sinusoidal_layout: `interleaved` has sine and cosine in turn, as in the paper. `half_split` has all sines before all
            cosines, as in Marian. `fairseq` is `half_split` with the slightly longer wavelengths of tensor2tensor and fairseq.
        max_position_embeddings: Longest sequence that texts may have, except for `relative`, which has no limit. Only the table
            of `learned` ends there. The number also is the base of the scaled variants of `rotary`.
        decoder_max_position_embeddings: The same for the decoder's table of `learned`. None means `max_position_embeddings`.
        position_offset: Number of the first position, for `sinusoidal` and `learned`, such as fairseq's padding id plus 1.
        type_vocab_size: Rows of BERT's table of token types, the first of which is added to `learned`. None means no table.
        encoder_layer_types, decoder_layer_types: `full_attention` or `sliding_attention` of each layer. None means the former.
        encoder_window: In sliding attention, a token sees so many tokens to the left and to the right of itself.
        decoder_window: In sliding attention, a token sees so many tokens, itself and those before it.
        rope_parameters: transformers' parameters of a rotary embedding (`rope_type`, `rope_theta`, ...).
        sliding_rope_theta: Base of unscaled frequencies in layers of sliding attention. None means `rope_parameters`.
        merged_attention: A decoder layer attends to its own tokens and to the source in one attention, without a cross-attention
            (Zhang et al. 2025, section 2.2, arXiv 2512.14856).
        decoder_self_attention: `attention`, or `ssru`: a recurrence with a state of constant size (Kim et al. 2019, section 3.1,
            https://aclanthology.org/D19-5632). The recurrence reads no positions, but `sinusoidal` and `learned` still add them.
        relative_attention_num_buckets: Buckets of the relative bias, for both directions together in the encoder.
        relative_attention_max_distance: Distance in tokens from which all distances share the last bucket.
        relative_attention_shared: One bias for all layers of a stack (T5) instead of one for each layer (UMT5).
        norm_type: `layernorm` or `rmsnorm` (Zhang and Sennrich 2019, arXiv 1910.07467).
        norm_position: `pre` normalizes the input of a sublayer, `post` the sum of its input and output. `both` normalizes the
            input, and the output before the sum (Gemma Team 2024, section 2, arXiv 2408.00118).
        norm_plus_one: RMSNorm multiplies by 1 + weight, as in Gemma.
        norm_eps: Added to the variance.
        embedding_norm: Normalize the sum of embeddings and positions (BART).
        embedding_norm_before_positions: In the decoder, normalize unscaled embeddings, then add positions (Blenderbot-small).
        final_norm: Normalize the output of each stack. None means false for `post` and else true.
        qk_norm: RMSNorm of queries and keys in each head, before positions (Henry et al. 2020, arXiv 2010.04245).
        scale_embedding: Multiply token embeddings by the square root of `hidden_size`.
        attention_scale: Factor of the attention scores. None means `head_dim` ** -0.5. T5 uses 1.
        attn_logit_softcapping, final_logit_softcapping: Largest attention score and logit c: s becomes c tanh(s / c).
        attention_bias, mlp_bias: Biases in the projections of attention, and in the feed-forward network.
        head_transform: A linear layer, the activation and a norm before the output projection (BERT, Devlin et al. 2019, arXiv
            1810.04805). `mlp_bias` decides on its bias.
        logits_bias: A bias in the output projection.
        logits_scale: Factor of the decoder's output before the output projection. T5 uses `hidden_size` ** -0.5.
        tie_word_embeddings: The output projection and the target embeddings share a weight.
        share_embeddings: Source and target share their embeddings and their vocabulary.
        train_padding_embedding: Train the embedding of the padding token, with which T5's decoder starts. BART, Marian and
            their relatives do not train it.
        decoder_start_from_labels: In training, start the decoder with the last label of a row, not with
            `decoder_start_token_id`. This label is a language code in mBART.
        dropout, attention_dropout, activation_dropout: Probabilities for the embeddings and the output of each sublayer, for
            the attention weights, and inside the feed-forward network.
        classifier_dropout: Probability in a head that classifies.
        classifier_hidden_layer: A linear layer with tanh before the labels of texts (BART, T5).
        classifier_pooling: Place of the decoder's output that shows the class of a text: `eos`, where the encoder reads the last
            end of sequence, or `last`, where the decoder reads the last token (T5Gemma).
        initializer_range: Standard deviation of all weights. None means a deviation by shape: (2 / (in + out)) ** 0.5 for a
            projection (Glorot and Bengio 2010), `hidden_size` ** -0.5 for learned positions and, divided by `logits_scale`, for
            the output projection and tied token embeddings. Other token embeddings have 1, or `hidden_size` ** -0.5 if scaled.

    Raises:
        ValueError: If a field is out of its range or two fields contradict each other.
    """

    model_type = "metaphrase"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
        "d_model": "hidden_size",
        "intermediate_size": "encoder_ffn_dim",
        "hidden_act": "activation_function",
    }

    vocab_size: int = 32000
    decoder_vocab_size: int | None = None
    hidden_size: int = 512
    decoder_hidden_size: int | None = None
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    encoder_ffn_dim: int = 1408
    decoder_ffn_dim: int = 1408
    num_key_value_heads: int | None = None
    decoder_num_key_value_heads: int | None = None
    head_dim: int | None = None
    activation_function: str = "silu"
    gated_mlp: bool = True
    position_embedding_type: Literal["sinusoidal", "learned", "relative", "rotary", "alibi", "none"] = "rotary"
    sinusoidal_layout: Literal["interleaved", "half_split", "fairseq"] = "interleaved"
    max_position_embeddings: int = 1024
    decoder_max_position_embeddings: int | None = None
    position_offset: int = 0
    type_vocab_size: int | None = None
    encoder_layer_types: list[str] | None = None
    decoder_layer_types: list[str] | None = None
    encoder_window: list[int] | None = None
    decoder_window: int | None = None
    rope_parameters: dict | None = None
    sliding_rope_theta: float | int | None = None
    merged_attention: bool = False
    decoder_self_attention: Literal["attention", "ssru"] = "attention"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    relative_attention_shared: bool = True
    norm_type: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_position: Literal["pre", "post", "both"] = "pre"
    norm_plus_one: bool = False
    norm_eps: float | int = 1e-6
    embedding_norm: bool = False
    embedding_norm_before_positions: bool = False
    final_norm: bool | None = None
    qk_norm: bool = False
    scale_embedding: bool = True
    attention_scale: float | int | None = None
    attn_logit_softcapping: float | int | None = None
    final_logit_softcapping: float | int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    head_transform: bool = False
    logits_bias: bool = False
    logits_scale: float | int = 1.0
    tie_word_embeddings: bool = True
    share_embeddings: bool = True
    train_padding_embedding: bool = True
    decoder_start_from_labels: bool = False
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.0
    classifier_hidden_layer: bool = True
    classifier_pooling: Literal["eos", "last"] = "eos"
    initializer_range: float | int | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1

    # True if `import metaphrase.inference` has registered the pipelines, so that the copies in model folders are not run.
    has_registered_pipelines = False

    def __post_init__(self, **kwargs):
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        if self.final_norm is None:
            self.final_norm = self.norm_position != "post"
        # Saving a model would record only the class of that model.
        self.auto_map = dict(_AUTO_MAP)
        for name in ("auto_map", "custom_pipelines"):
            kwargs.pop(name, None)
        super().__post_init__(**kwargs)
        # Not in a `validate_*` method, since @strict would wrap a ValueError in an exception of another type.
        for field, is_valid, rule in self._rules():
            if not is_valid:
                raise ValueError(f"`{field}` {rule}, got {getattr(self, field)!r}.")
        # A value that changes nothing is None, as for most models.
        for name in ("hidden_size", "max_position_embeddings"):
            if getattr(self, f"decoder_{name}") == getattr(self, name):
                setattr(self, f"decoder_{name}", None)
        for name in (f"{stack}_layer_types" for stack in STACKS):
            if {*(getattr(self, name) or ())} == {FULL}:
                setattr(self, name, None)
        # transformers and peft read the shape of a cache from these fields. Different stacks cannot share a number.
        encoder, decoder = map(self.stack_sizes, STACKS)
        if encoder.attention_heads == decoder.attention_heads:
            if self.decoder_num_key_value_heads is None:
                self.num_key_value_heads = decoder.key_value_heads
            if encoder.head_dim == decoder.head_dim:
                self.head_dim = decoder.head_dim

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict, dict]:
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            # transformers would only warn, and initialize all weights.
            raise ValueError(
                f"`model_type` must be {cls.model_type}, got {model_type!r}. Convert the model: "
                f"`metaphrase convert {pretrained_model_name_or_path} OUTPUT`."
            )
        return config_dict, kwargs

    @property
    def custom_pipelines(self) -> dict[str, dict[str, Any]]:
        """The code of each task in a model's folder, for transformers' `pipeline()`."""
        return {} if self.has_registered_pipelines else copy.deepcopy(_PIPELINES)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"custom_pipelines": copy.deepcopy(_PIPELINES)}

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield the rules: a field, True if its value is valid, and what must hold."""
        positions, is_ssru = self.position_embedding_type, self.decoder_self_attention == SSRU
        for field in _POSITIVE:
            value = getattr(self, field)
            yield field, value is None or value > 0, "must be above 0"
        for field in ("dropout", "attention_dropout", "activation_dropout", "classifier_dropout"):
            yield field, 0 <= getattr(self, field) < 1, "must be a probability in [0, 1)"
        yield "activation_function", self.activation_function in ACT2FN, "must be a key of transformers' ACT2FN"
        for stack in STACKS:
            sizes, window = self.stack_sizes(stack), getattr(self, f"{stack}_window")
            heads, kinds = sizes.attention_heads, sizes.layer_types
            name = "hidden_size" if sizes.hidden_size == self.hidden_size else "decoder_hidden_size"
            is_multiple = self.head_dim is not None or sizes.hidden_size % heads == 0
            yield name, is_multiple, f"must be a multiple of `{stack}_attention_heads`, {heads}, or `head_dim` set"
            name = "num_key_value_heads"
            if stack == "decoder" and self.decoder_num_key_value_heads is not None:
                name = "decoder_num_key_value_heads"
            yield name, heads % sizes.key_value_heads == 0, f"must divide `{stack}_attention_heads`, {heads}"
            can_rotate = positions != "rotary" or sizes.head_dim % 2 == 0
            yield "head_dim", can_rotate, f"must be even for rotary positions, and is {sizes.head_dim} in the {stack}"
            are_known = len(kinds) == sizes.layers and {*kinds} <= {FULL, SLIDING}
            yield f"{stack}_layer_types", are_known, f"must name {FULL} or {SLIDING} for each of {sizes.layers} layers"
            are_two = stack == "decoder" or window is None or (len(window) == 2 and min(window) >= 0)
            yield f"{stack}_window", are_two, "must be two numbers of tokens, from 0 on"
            fits = (window is not None) == (SLIDING in kinds)
            yield f"{stack}_window", fits, f"must be set with {SLIDING} in `{stack}_layer_types`, and only then"
        has_one_width = self.decoder_hidden_size in (None, self.hidden_size)
        if self.share_embeddings:
            has_one_vocabulary = self.decoder_vocab_size == self.vocab_size
            yield "decoder_vocab_size", has_one_vocabulary, "must equal `vocab_size` with `share_embeddings`"
            yield "decoder_hidden_size", has_one_width, "must equal `hidden_size` with `share_embeddings`"
        if self.merged_attention:
            yield "decoder_hidden_size", has_one_width, "must equal `hidden_size` with `merged_attention`"
        if self.merged_attention or is_ssru:
            has_bias = positions in ("relative", "alibi")
            yield "position_embedding_type", not has_bias, "must have no bias with `merged_attention` or ssru"
        if is_ssru:
            for field in ("merged_attention", "decoder_window"):
                yield field, not getattr(self, field), "has no place with `decoder_self_attention` ssru"
        if positions == "relative":
            buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
            yield "relative_attention_num_buckets", buckets >= 4 and buckets % 2 == 0, "must be even, and at least 4"
            yield "relative_attention_max_distance", distance > buckets // 2, "must be above half of the buckets"
        is_padding_known = self.train_padding_embedding or self.pad_token_id is not None
        yield "pad_token_id", is_padding_known, "must be set when `train_padding_embedding` is false"
        # The shift to the right writes both ids into the target.
        smaller = min(self.vocab_size, self.decoder_vocab_size)
        for field, size in (("pad_token_id", smaller), ("decoder_start_token_id", self.decoder_vocab_size)):
            is_known = getattr(self, field) is None or 0 <= getattr(self, field) < size
            yield field, is_known, f"must be an id of the vocabulary, from 0 to {size - 1}"
        if positions == "rotary":
            rope_type, theta = self.rope_parameters["rope_type"], self.rope_parameters["rope_theta"]
            is_known = rope_type in ("default", *ROPE_INIT_FUNCTIONS) and isinstance(theta, int | float) and theta > 0
            yield "rope_parameters", is_known, "must have a `rope_type` of transformers, and a `rope_theta` above 0"

    def validate_rope(self) -> None:
        """Validate rotary positions only: other positions ignore `rope_parameters`."""
        if self.position_embedding_type == "rotary":
            super().validate_rope()

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the configuration of a stack, or of the logits if neither stack is named: this one if its sizes fit, or a copy.

        The logits have the target vocabulary, which transformers reads in beam search and for scores.
        """
        values = {"vocab_size": self.decoder_vocab_size} if decoder or not encoder else {}
        if bool(decoder) != bool(encoder):
            sizes = self.stack_sizes("decoder" if decoder else "encoder")
            values |= {"hidden_size": sizes.hidden_size, "num_hidden_layers": sizes.layers}
            values |= {"num_attention_heads": sizes.attention_heads, "head_dim": sizes.head_dim}
            values["num_key_value_heads"] = sizes.key_value_heads
        # transformers asks in each call of `generate()`, and a comparison of whole configurations takes a millisecond.
        changed = {name: value for name, value in values.items() if getattr(self, name) != value}
        if not changed:
            return self
        config = copy.copy(self)
        for name, value in changed.items():
            setattr(config, name, value)
        return config

    def stack_sizes(self, stack: str) -> StackSizes:
        """Return the sizes of `encoder` or `decoder`."""
        layers, heads, ffn_dim, types = (
            getattr(self, f"{stack}_{name}") for name in ("layers", "attention_heads", "ffn_dim", "layer_types")
        )
        width, key_value_heads, positions = self.hidden_size, self.num_key_value_heads, self.max_position_embeddings
        window = self.encoder_window
        if stack == "decoder":
            width = self.decoder_hidden_size or width
            key_value_heads = self.decoder_num_key_value_heads or key_value_heads
            positions = self.decoder_max_position_embeddings or positions
            window = [self.decoder_window - 1, 0] if self.decoder_window else None
        return StackSizes(
            hidden_size=width,
            layers=layers,
            attention_heads=heads,
            key_value_heads=key_value_heads or heads,
            head_dim=self.head_dim or width // heads,
            ffn_dim=ffn_dim,
            layer_types=tuple(types or [FULL] * layers),
            window=tuple(window) if window else None,
            max_position_embeddings=positions,
        )

    @property
    def position_limit(self) -> int | None:
        """The most tokens of a source, or None without a limit."""
        return None if self.position_embedding_type == "relative" else self.max_position_embeddings

    @property
    def decoder_position_limit(self) -> int | None:
        """The most tokens of a target, or None without a limit."""
        return self.position_limit and (self.decoder_max_position_embeddings or self.position_limit)


MetaphraseConfig.register_for_auto_class()
