import torch
from small_runs import QUIET
from tiny_models import tiny_model
from transformers import Seq2SeqTrainingArguments

from metaphrase.choices.memory import BatchShape, Precision
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.modeling.configuration_metaphrase import FULL, SLIDING

PAIRS, SOURCE, TARGET = 8, 32, 24
FLOAT32, AUTOCAST = Precision(), Precision(compute_bytes=2)

# Dimensions that all differ, so that none can stand for another.
WIDTHS = {"vocab_size": 101, "hidden_size": 64, "encoder_layers": 2, "decoder_layers": 3, "dropout": 0.1}
WIDTHS |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 112, "initializer_range": None}
_CLASSIC = {"norm_type": "layernorm", "norm_position": "post", "gated_mlp": False}
_DROPOUTS = {"attention_dropout": 0.1, "activation_dropout": 0.1}
# More than a block in a packed row, and also layers without windows.
WINDOWS = {"encoder_window": [3, 4], "decoder_window": 6}
WINDOWS |= {"encoder_layer_types": [SLIDING, FULL], "decoder_layer_types": [SLIDING, SLIDING, FULL]}
DESIGNS = {
    "recommended": {},
    "without dropout": {"dropout": 0.0},
    "vaswani": {**_CLASSIC, "position_embedding_type": "sinusoidal", "activation_function": "relu"},
    "bart": {**_CLASSIC, "position_embedding_type": "learned", "activation_function": "gelu", "embedding_norm": True},
    "ends of bert": {**_CLASSIC, "position_embedding_type": "learned", "type_vocab_size": 2, "head_transform": True},
    "t5": {"position_embedding_type": "relative", "gated_mlp": False, "activation_function": "relu"},
    "t5 v1.1": {"position_embedding_type": "relative", "activation_function": "gelu_new", "mlp_bias": False},
    "bias of each layer": {"position_embedding_type": "relative", "relative_attention_shared": False},
    "alibi": {"position_embedding_type": "alibi", "activation_function": "gelu"},
    "grouped and normed": {"num_key_value_heads": 2, "qk_norm": True},
    "every dropout": {**_DROPOUTS, "position_embedding_type": "none"},
    "no final norm": {"final_norm": False, "gated_mlp": False},
    "two vocabularies": {"share_embeddings": False, "decoder_vocab_size": 77, "logits_bias": True},
    "wide": {"encoder_ffn_dim": 512, "decoder_ffn_dim": 384, "head_dim": 32},
    "narrow decoder": {"decoder_hidden_size": 32, "share_embeddings": False, "norm_position": "both"},
    "windows": WINDOWS,
    "windows with a bias": {**WINDOWS, "position_embedding_type": "relative", "relative_attention_shared": False},
    "windows with alibi": {**WINDOWS, "position_embedding_type": "alibi"},
    "windows with every dropout": {**WINDOWS, **_DROPOUTS},
    "recurrent decoder": {"decoder_self_attention": "ssru"},
    "merged, with capped logits": {"merged_attention": True, "final_logit_softcapping": 5.0},
}


def meta_model(config: MetaphraseConfig) -> MetaphraseForConditionalGeneration:
    """Return a model on the meta device, which takes no memory."""
    with torch.device("meta"):
        return MetaphraseForConditionalGeneration(config)


def training_model(**fields):
    return tiny_model(**WIDTHS | fields).train()


def batch_and_shape(is_packed, pairs=PAIRS):
    shape = BatchShape.of([SOURCE] * pairs, [TARGET] * pairs, is_packed)
    source, target = (torch.randint(4, 70, (pairs, length)) for length in (SOURCE, TARGET))
    if not is_packed:
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}, shape
    lengths = {"source_lengths": torch.tensor([SOURCE] * pairs), "target_lengths": torch.tensor([TARGET] * pairs)}
    longest = {"longest_source": SOURCE, "longest_target": TARGET}
    return {"input_ids": source.view(1, -1), "labels": target.view(1, -1), **lengths, **longest}, shape


def arguments_of(folder, **options):
    settings = {"save_strategy": "no", "dataloader_pin_memory": False}
    return Seq2SeqTrainingArguments(output_dir=str(folder), **QUIET | settings | options)
