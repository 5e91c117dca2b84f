"""Setup of a run: its tokenizers, and its model, which may be a base model that is fitted to them, and how it decodes."""

import contextlib
import logging
import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from metaphrase.errors import MetaphraseError
from metaphrase.inference.batches import LONGER_SOURCES, MAX_TOKENS_WITHOUT_POSITIONS
from metaphrase.inference.progress import has_bar
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.plugins import needed_plugin
from metaphrase.storage.generation_options import use_floats
from metaphrase.storage.loading import load_pretrained, naming
from metaphrase.tokenization import TokenizerPair, set_languages
from metaphrase.training.corpora import PairCorpus
from metaphrase.training.distributed import from_first_process, whole_shape
from metaphrase.training.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
# Other families with a table of positions. FSMT and M2M100 extend theirs when needed.
_TABLED_FAMILIES = {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus"}
_TABLED_FAMILIES |= {"plbart"}


class Data(NamedTuple):
    """Data of a run: the texts, with the reports on them, the tokenizers, and the token ids by split."""

    corpus: PairCorpus
    tokenizers: TokenizerPair
    encoded: dict[str, Any]


def make_tokenizers(recipe: Recipe, corpus: PairCorpus, checkpoint: str | None = None) -> TokenizerPair:
    """Load the tokenizers of a checkpoint or those that the recipe names, or train new ones on a corpus that was read.

    All processes must call this: the first one trains for all.
    """
    if checkpoint is not None:
        return TokenizerPair.from_pretrained(checkpoint)
    existing = recipe.tokenizer_name_or_path or recipe.model_name_or_path
    if existing is not None:
        field = "tokenizer_name_or_path" if recipe.tokenizer_name_or_path is not None else "model_name_or_path"
        with naming(existing, field):
            tokenizers = TokenizerPair.from_pretrained(existing, recipe.target_tokenizer_name_or_path)
        # A T5 has the tokens of its objective, an adapted model has not.
        is_new = not {*corpus.special_tokens} & tokenizers.source.get_vocab().keys()
        if special := [*(corpus.special_tokens if is_new else ()), *recipe.special_tokens]:
            tokenizers.add_special_tokens(special)
        set_languages(tokenizers, recipe.source_lang, recipe.target_lang)
        return tokenizers
    names = ("vocab_size", "target_vocab_size", "lowercase", "normalization", "min_frequency", "joiner")
    options = {name: getattr(recipe, name) for name in names if getattr(recipe, name) is not None}
    joint = recipe.joint_vocabulary
    if joint is None:
        joint = recipe.target_tokenizer_kind is None and recipe.target_vocab_size is None
    if special := [*corpus.special_tokens, *recipe.special_tokens]:
        options["additional_special_tokens"] = special
    options |= {"kind": recipe.tokenizer_kind or "byte_bpe", "target_kind": recipe.target_tokenizer_kind}
    made = needed_plugin("recombined", "augmentation")(corpus) if "recombination" in recipe.augmentation else []
    sides = [chain(texts, [pair[side] for pair in made]) for side, texts in enumerate(corpus.sides())]
    # In a notebook, the bar of this library is a few empty lines.
    options["show_progress"] = not corpus.arguments.disable_tqdm and has_bar() and sys.stderr.isatty()
    tokenizers = from_first_process(lambda: TokenizerPair.train(*sides, joint=joint, **options))
    sizes = len(tokenizers.source), len(tokenizers.target)
    text = "Trained a joint tokenizer of %d entries." if joint else "Trained separate tokenizers of %d and %d entries."
    logger.info(text, *sizes[: 1 if joint else 2])
    return tokenizers


def make_model(recipe: Recipe, data: Data, with_weights: bool = True) -> PreTrainedModel:
    """Return the model to train, with frozen parts or an adapter. Without weights, a base model has its shape alone."""
    tokenizers = data.tokenizers
    languages = set_languages(tokenizers, recipe.source_lang, recipe.target_lang)
    if recipe.model_name_or_path is not None:
        model = load_base(recipe, with_weights)
    else:
        separate = {} if tokenizers.is_joint else {"share_embeddings": False}
        fields = {**tokenizers.config_fields(), **separate, **recipe.model}
        model = MetaphraseForConditionalGeneration(MetaphraseConfig.from_preset(recipe.preset, **fields))
    fit_vocabulary(model, recipe, tokenizers, with_weights)
    if recipe.model_name_or_path is not None and recipe.tokenizer_name_or_path is not None:
        check_special_ids(model, tokenizers)
    if (positions := getattr(model.config, "max_position_embeddings", None)) is not None:
        for tokenizer in (tokenizers.source, tokenizers.target):
            # transformers' value for a tokenizer that declares none.
            if tokenizer.model_max_length >= VERY_LARGE_INTEGER:
                tokenizer.model_max_length = positions
    if recipe.suppress_tokens:
        if missing := {*recipe.suppress_tokens} - tokenizers.target.get_vocab().keys():
            raise MetaphraseError(f"`suppress_tokens` must be tokens of the target tokenizer, got {min(missing)!r}.")
        never = {*tokenizers.target.convert_tokens_to_ids(recipe.suppress_tokens)}
        never |= {*(model.generation_config.suppress_tokens or ())}
        model.generation_config.update(suppress_tokens=sorted(never), renormalize_logits=True)  # for CTranslate2
    # By default, generate() stops at 20 tokens.
    longest = data.corpus.limits[1] + 1
    if recipe.reward is not None:
        # Sources may have no references.
        longest = max(longest, model.generation_config.max_length or 0)
    set_generation_config(model, recipe, recipe.generation_max_length or longest, languages)
    if recipe.usual_source_length is not None:
        longer = recipe.usual_source_length, data.corpus.longest[1] or MAX_TOKENS_WITHOUT_POSITIONS
        # With this mark, transformers would not load settings that it does not know.
        vars(model.generation_config).update(zip(LONGER_SOURCES, longer, strict=True), _from_model_config=None)
    has_dropout = any(getattr(model.config, name, 1) for name in _DROPOUTS)
    has_dropout |= recipe.lora_rank is not None and recipe.lora_dropout > 0
    if recipe.r_drop_alpha and not has_dropout:
        # Both passes would agree, at twice the cost.
        raise MetaphraseError(f"`r_drop_alpha` must come with a model whose {', '.join(_DROPOUTS)} are not all 0.")
    if recipe.freeze and recipe.freeze_steps is None:
        needed_plugin("freeze", "freeze")(model, recipe.freeze)
    if recipe.lora_rank is not None:
        options = recipe.lora_rank, recipe.lora_alpha, recipe.lora_dropout, recipe.lora_target_modules
        model = needed_plugin("adapter", "lora_rank")(model, *options)
    return model


def longest_sequences(recipe: Recipe) -> tuple[int | None, int | None]:
    """Return the maximum tokens of a source and of a target for the model of a recipe; None if positions have no end."""
    config = _load_config(recipe)
    if config.model_type == "metaphrase":
        return config.position_limit, config.decoder_position_limit
    rows = getattr(config, "max_position_embeddings", None)
    return (rows if config.model_type in _TABLED_FAMILIES and isinstance(rows, int) else None,) * 2


def _load_config(recipe: Recipe) -> PreTrainedConfig:
    if recipe.model_name_or_path is None:
        # The tokenizer is unknown yet. With two vocabularies, embeddings cannot be shared.
        return MetaphraseConfig.from_preset(recipe.preset, **{"share_embeddings": False, **recipe.model})
    with naming(recipe.model_name_or_path, "model_name_or_path"):
        return AutoConfig.from_pretrained(recipe.model_name_or_path, trust_remote_code=False)


def load_base(recipe: Recipe, with_weights: bool = True) -> PreTrainedModel:
    """Load the model to fine-tune in float32, since half precision would round most updates away.

    With an adapter, which is in float32 itself, the model keeps its saved precision. Without weights it has its shape alone.
    """
    name = recipe.model_name_or_path
    config = _load_config(recipe)
    dtype = config.dtype or torch.float32
    if dtype != torch.float32 and recipe.lora_rank is None:
        logger.info("The weights of %s, which are in %s, are trained in float32.", name, dtype)
        dtype = torch.float32
    if with_weights:
        return load_pretrained(name, dtype=dtype, trust_remote_code=False)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=dtype, trust_remote_code=False)
    with contextlib.suppress(OSError):  # It has none.
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def fit_vocabulary(
    model: PreTrainedModel, recipe: Recipe, tokenizers: TokenizerPair, with_weights: bool = True
) -> None:
    """Resize the embeddings of a model to hold its tokenizers, or refuse tokenizers that it cannot hold."""
    fields = tokenizers.config_fields()
    source = fields["vocab_size"]
    target = fields["decoder_vocab_size"] or source
    decoder = model.get_decoder()
    # FSMT's decoder is a plain module.
    embedding = decoder.get_input_embeddings() if isinstance(decoder, PreTrainedModel) else decoder.embed_tokens
    if embedding.weight is model.get_input_embeddings().weight:
        source = target = max(source, target)
    rows = model.get_input_embeddings().num_embeddings
    if source > rows:
        _announce_growth(recipe, "embedding", source, rows)
        model.resize_token_embeddings(source, mean_resizing=with_weights)
    head = model.get_output_embeddings()
    rows = target if head is None else whole_shape(head.weight)[0]
    if target <= rows:
        return
    if not hasattr(model, "resize_decoder_token_embeddings"):
        name = "target_tokenizer_name_or_path" if recipe.target_tokenizer_name_or_path else "tokenizer_name_or_path"
        raise MetaphraseError(f"`{name}` must have at most the {rows} target entries of the model, got {target}.")
    _announce_growth(recipe, "embedding of targets", target, rows)
    # The method of other families has no options.
    options = {} if with_weights else {"mean_resizing": False}
    model.resize_decoder_token_embeddings(target, **options)


def _announce_growth(recipe: Recipe, what: str, entries: int, rows: int) -> None:
    logger.warning("The %s grows from %d to %d rows, to hold the tokenizer.", what, rows, entries)
    if recipe.lora_rank is not None:
        raise MetaphraseError(
            "`lora_rank` must come with a tokenizer that the model's embedding holds, because an adapter trains no "
            f"new rows, got {entries} entries and {rows} rows."
        )


def check_special_ids(model: PreTrainedModel, tokenizers: TokenizerPair) -> None:
    """Refuse tokenizers whose special ids are not those of the model: its decoding would never end."""
    fields = tokenizers.config_fields()
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        ids = getattr(model.config, name, None)
        # Often only one of model and tokenizer has a bos token.
        if None not in (ids, fields[name]) and fields[name] not in (ids if isinstance(ids, list) else [ids]):
            raise MetaphraseError(f"`tokenizer_name_or_path` must have the model's `{name}` {ids}, got {fields[name]}.")


# Settings of one way to decode.
_OF_SAMPLING = ("temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "min_p", "top_h")
_OF_BEAMS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")


def set_generation_config(
    model: PreTrainedModel, recipe: Recipe, max_length: int, languages: Mapping[str, int]
) -> None:
    """Set the generation settings of a model such that transformers can save them with each checkpoint.

    transformers refuses to save settings that contradict each other. Settings of a base model without effect, such as the
    `length_penalty` of a summarizer in greedy search, are removed with a warning. `max_length` counts the start token too, and
    `languages` is the result of `set_languages`.
    """
    config = model.generation_config
    vars(config).pop(LONGER_SOURCES[0], None)
    names = ("num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size", "repetition_penalty")
    options = {name: value for name in names if (value := getattr(recipe, name)) is not None}
    if recipe.generation_max_length is not None:
        # `max_new_tokens` would replace `max_length`.
        config.max_new_tokens = None
    for name, value in {"max_length": max_length, **options, **languages}.items():
        setattr(config, name, value)
    use_floats(vars(config))
    remove_ineffective_settings(config)
    # An error names the setting.
    config.validate(strict=True)


def remove_ineffective_settings(config: GenerationConfig) -> None:
    """Unset settings of sampling and of beams without these, with which transformers would not save the configuration."""
    names = (*(() if config.do_sample else _OF_SAMPLING), *(() if (config.num_beams or 1) > 1 else _OF_BEAMS))
    dropped = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    for name in dropped:
        setattr(config, name, None)
    if dropped:
        shown = ", ".join(f"{name} {value}" for name, value in dropped.items())
        logger.warning("These generation settings have no effect beside the others and are removed: %s.", shown)
