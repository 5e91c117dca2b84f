"""The fields of a recipe beside transformers' own: what each means, its default and its range."""

from dataclasses import dataclass, field
from typing import Any, Literal

from metaphrase.evaluation.metrics import DEFAULT_METRICS, METRICS
from metaphrase.modeling import MetaphraseConfig
from metaphrase.tokenization import TOKENIZER_KINDS

DEFAULT_PRESET = "metaphrase-small"


def _about(group: str, words: str, minimum: float | None = None) -> dict[str, Any]:
    return {"group": group, "help": words, "minimum": minimum}


def _setting(group: str, words: str, default: Any = None, minimum: float | None = None) -> Any:
    return field(default=default, metadata=_about(group, words, minimum))


@dataclass(kw_only=True)
class RecipeFields:
    """All of them, by group; `metaphrase train --help` shows them."""

    data_dir: str | None = _setting("data", "Folder that relative data files are in; give it on the command line.")
    train_file: str | None = _setting(
        "data", "Pairs in one .tsv, .csv, .jsonl, .json or .parquet file; all but the last may end in .gz."
    )
    validation_file: str | None = _setting("data", "Likewise, for validation.")
    test_file: str | None = _setting("data", "Likewise, for the test.")
    train_source_file: str | None = _setting("data", "Text with one source per line, .gz or not.")
    train_target_file: str | None = _setting("data", "Text with one target per line.")
    validation_source_file: str | None = _setting("data", "Likewise, for validation.")
    validation_target_file: str | None = _setting("data", "Likewise, for validation.")
    test_source_file: str | None = _setting("data", "Likewise, for the test.")
    test_target_file: str | None = _setting("data", "Likewise, for the test.")
    dataset_name: str | None = _setting("data", "Data set on the Hub, or a folder, in place of files.")
    dataset_config_name: str | None = _setting("data", "Its configuration.")
    dataset_train_split: str = _setting("data", "Its split for training.", "train")
    dataset_validation_split: str | None = _setting("data", "Its split for validation, if it has one.")
    dataset_test_split: str | None = _setting("data", "Its split for the test, if it has one.")
    source_column: str | int | None = _setting(
        "data",
        "Column of sources: a name [source], or in a .tsv file a number from 0 [0, where no line names columns].",
    )
    target_column: str | int | None = _setting("data", "Column of targets, likewise [target, or 1].")
    source_language: str | None = _setting("data", "Language code of the sources, for the model card.")
    target_language: str | None = _setting("data", "Language code of the targets, for the model card.")
    source_prefix: str | None = _setting("data", "Text put before each source, such as `summarize: `.")
    max_source_length: int = _setting(
        "data", "Most tokens of a training source, end of sequence included.", 256, minimum=2
    )
    max_target_length: int = _setting(
        "data", "Most tokens of a training target, end of sequence included.", 256, minimum=2
    )
    too_long: Literal["skip", "truncate", "error"] = _setting(
        "data",
        "What becomes of longer pairs; one to be scored that the model cannot read is refused, or truncated for truncate.",
        "skip",
    )
    empty: Literal["skip", "error", "keep"] = _setting(
        "data",
        "What becomes of training pairs with an empty side; validation and test keep them, unless error.",
        "skip",
    )
    malformed: Literal["error", "skip"] = _setting("data", "What becomes of lines that hold no pair.", "error")
    invalid_utf8: Literal["error", "skip"] = _setting(
        "data", "What becomes of pairs, or lines of text, that are not UTF-8.", "error"
    )
    streaming: bool = _setting(
        "data", "Read training pairs as they are needed, not all beforehand; set `max_steps`.", False
    )
    pairs_in_buffer: int = _setting("data", "Pairs that a stream shuffles and sorts together.", 20000, minimum=1)
    objective: Literal["pairs", "span_corruption", "ul2", "text_infilling"] = _setting(
        "data", "What is learned: given pairs, or to mend plain text (as T5, UL2, BART).", "pairs"
    )
    train_text_file: str | None = _setting(
        "data", "Plain text with one document per line, .gz or not, to be damaged and mended."
    )
    validation_text_file: str | None = _setting("data", "Likewise, for validation.")
    noise_density: float | None = _setting("data", "Share of a text that is hidden; by default the paper's.", minimum=0)
    mean_span_length: float | None = _setting(
        "data", "Mean tokens of a hidden span; by default the paper's.", minimum=1
    )
    spans_anywhere: bool = _setting("data", "Let spans of span_corruption begin and end anywhere.", False)
    end_documents: bool = _setting("data", "Put the end of sequence after each document of plain text.", True)
    remainder: Literal["drop", "keep"] = _setting(
        "data", "What becomes of the rest that fills no block of text.", "drop"
    )
    num_sentinels: int = _setting("data", "Tokens of a new tokenizer that stand for hidden spans.", 100, minimum=1)
    max_train_samples: int | None = _setting("data", "Take only so many training pairs.", minimum=1)
    max_validation_samples: int | None = _setting("data", "Take only so many validation pairs.", minimum=1)
    max_test_samples: int | None = _setting("data", "Take only so many test pairs.", minimum=1)
    num_validation: int = _setting("data", "Pairs taken out of the training pairs for validation.", 0, minimum=0)
    num_test: int = _setting("data", "Pairs taken out of the training pairs for the test.", 0, minimum=0)

    tasks: dict[str, dict] = field(
        default_factory=dict,
        metadata=_about(
            "tasks",
            "Several tasks in one run: for each its name, with fields of `data` such as `train_file` and `source_prefix`, "
            "and a `weight`.",
        ),
    )
    task_mixing: Literal["proportional", "temperature", "equal"] = _setting(
        "tasks",
        "How often each task is met: in proportion to its pairs, to a root of them, or all alike.",
        "proportional",
    )
    mixing_temperature: float = _setting("tasks", "The degree of that root.", 2.0, minimum=1)
    mixing_limit: int | None = _setting("tasks", "Most pairs that a task counts as having.", minimum=1)

    tokenizer_name_or_path: str | None = _setting("tokenizer", "A tokenizer that exists; otherwise one is trained.")
    target_tokenizer_name_or_path: str | None = _setting("tokenizer", "One for targets alone that exists.")
    source_lang: str | None = _setting(
        "tokenizer",
        "Code of the sources' language that the tokenizer knows: eng_Latn (NLLB), en_XX (mBART), en (M2M100).",
    )
    target_lang: str | None = _setting("tokenizer", "Likewise, of the targets; decoding starts as it asks.")
    tokenizer_kind: str | None = _setting(
        "tokenizer", f"Kind of the tokenizer to train: {', '.join(TOKENIZER_KINDS)} [byte_bpe]."
    )
    vocab_size: int | None = _setting(
        "tokenizer", "Its number of entries [8000 where pieces are learned, else as many as there are].", minimum=1
    )
    target_vocab_size: int | None = _setting(
        "tokenizer", "That of the target tokenizer, if it is not joint.", minimum=1
    )
    joint_vocabulary: bool | None = _setting("tokenizer", "Whether one tokenizer serves both sides [true].")
    lowercase: bool = _setting("tokenizer", "Lower-case all text.", False)
    normalization: str | None = _setting("tokenizer", "Unicode normalization of all text: nfc or nfkc [none].")
    min_frequency: int | None = _setting("tokenizer", "How often a piece must occur to be learned.", minimum=1)
    joiner: str | None = _setting("tokenizer", "Mark of a split word in pretokenized text [@@].")
    additional_special_tokens: list[str] | None = field(
        default=None, metadata=_about("tokenizer", "More special tokens, such as language codes.")
    )

    model_name_or_path: str | None = _setting("model", "A model to fine-tune.")
    preset: str | None = _setting(
        "model", f"Named dimensions of a new model: {', '.join(MetaphraseConfig.presets())} [{DEFAULT_PRESET}]."
    )
    model: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about("model", "Fields of MetaphraseConfig over those of the preset (--model.hidden_size 256)."),
    )

    max_tokens_per_batch: int | None = _setting(
        "batches",
        "Most source and target tokens in a batch of one device, padding counted, in place of `per_device_train_batch_size`.",
        minimum=2,
    )

    r_drop_alpha: float = _setting(
        "technique",
        "Weight of R-Drop's divergence of two passes, such as 5; a batch takes the memory of two.",
        0.0,
        minimum=0,
    )
    r_drop_start_step: int = _setting(
        "technique", "Updates before R-Drop sets in, at half the cost each.", 0, minimum=0
    )
    exponential_average_decay: float | None = _setting(
        "technique",
        "Decay of a running mean of the weights, such as 0.999, evaluated and kept in their place.",
        minimum=0,
    )
    exponential_average_warmup: bool = _setting("technique", "Let that mean forget faster in the beginning.", True)
    average_last: int | None = _setting("technique", "Keep the mean of the last so many checkpoints.", minimum=2)
    average_best: int | None = _setting("technique", "Likewise, of the best by `metric_for_best_model`.", minimum=2)
    freeze: list[str] | None = field(
        default=None,
        metadata=_about(
            "technique", "Parts that are not trained: encoder, decoder.layers.0-3, embeddings, ...; !part is."
        ),
    )
    learning_rate_factors: dict[str, float] = field(
        default_factory=dict,
        metadata=_about("technique", "Factors of the learning rate by part (--learning_rate_factors.encoder 0.1)."),
    )
    layer_decay: float = _setting("technique", "Factor of the learning rate from each layer to the one below.", 1.0)
    lora_rank: int | None = _setting("technique", "Train an adapter of this rank (LoRA), not the weights.", minimum=1)
    lora_alpha: float = _setting("technique", "Weight of the adapter, divided by its rank.", 16.0)
    lora_dropout: float = _setting("technique", "Probability to drop an input of the adapter.", 0.0, minimum=0)
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata=_about("technique", "Layers with an adapter, such as q_proj; by default all linear ones."),
    )

    metrics: list[str] | None = field(
        default=None,
        metadata=_about(
            "evaluation",
            f"Scores to compute on validation and test, of {', '.join(METRICS)} [{' '.join(DEFAULT_METRICS)}].",
        ),
    )
    bleu_tokenize: str | None = _setting(
        "evaluation", "sacreBLEU's tokenizer, such as 13a, or none for tokenized text."
    )
    num_beams: int | None = _setting(
        "evaluation", "Beams of the finished model; `generation_num_beams` while training.", minimum=1
    )
    length_penalty: float | None = _setting("evaluation", "Exponent of the length that beam scores are divided by.")
    no_repeat_ngram_size: int | None = _setting("evaluation", "Length of n-grams that may not repeat.", minimum=0)
    repetition_penalty: float | None = _setting("evaluation", "Penalty of tokens that were generated before.")
    max_decoded_samples: int | None = _setting(
        "evaluation",
        "Validation pairs, evenly spread, that are decoded and scored while training; all by default.",
        minimum=1,
    )
    early_stopping_patience: int | None = _setting(
        "evaluation", "Evaluations without a better score before the end.", minimum=1
    )
    early_stopping_threshold: float | None = _setting("evaluation", "What counts as better.", minimum=0)
