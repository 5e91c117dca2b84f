"""The places of the core where the outer rings plug in.

The core imports no ring. It names a place, and uses the function there, or goes on without it if the ring was taken away.
docs/house.md has a picture of core and rings.
"""

import importlib
from collections.abc import Callable
from typing import Any

from metaphrase.errors import MetaphraseError

# Module and name, by the place. A ring is imported when its place is used for the first time.
PLACES: dict[str, str] = {
    # From a corpus of a recipe and its tokenizers to the changes of training pairs.
    "augmentation": "metaphrase.augmentation.augmentation:make_augmenter",
    # Words and parts of pairs of a corpus that may take the places of others, and pairs that these make.
    "combinations": "metaphrase.augmentation.augmentation:learn_combinations",
    "recombined": "metaphrase.augmentation.augmentation:recombined_pairs",
    # The corpus of plain text, from which an objective makes pairs.
    "objective": "metaphrase.augmentation.denoising:TextCorpus",
    # Subcommands of the command line.
    "subcommands": "metaphrase.scripts.parsers.rings:subcommands",
    # Texts to texts: other engines than torch, int8 and processes; searches of the fast decoder; whole texts.
    "engine": "metaphrase.engines.engine_choice:load_engine",
    "generator_pool": "metaphrase.engines.generator_pool:GeneratorPool",
    "generate_loop": "metaphrase.decoding.fast_generation:generate",
    "joint_generate": "metaphrase.decoding.joint_search:join_generators",
    "phrases": "metaphrase.decoding.constrained_beam_search:require_phrases",
    "minimum_bayes_risk": "metaphrase.decoding.minimum_bayes_risk:generate_mbr",
    "score": "metaphrase.analysis.scoring:score_targets",
    "judge": "metaphrase.analysis.judges:load_judge",
    "embed": "metaphrase.analysis.reading:embed",
    "choice_scores": "metaphrase.analysis.reading:choice_scores",
    "split_sentences": "metaphrase.texts.documents:split_texts",
    "end_loops": "metaphrase.texts.documents:end_loops",
    "generate_whole_texts": "metaphrase.texts.whole_texts:generate_whole_texts",
    "pivot": "metaphrase.texts.whole_texts:load_pivot",
    # From a tokenizer with two vocabularies, Marian's or FSMT's, to two.
    "split_tokenizer": "metaphrase.conversion.marian:split_tokenizer",
    # From a model and its tokenizers to its vocabulary map.
    "vocabulary_map": "metaphrase.conversion.vocabulary_map:load_vocabulary_map",
    # The mean of checkpoints as the finished weights.
    "average": "metaphrase.techniques.averaging:average_run",
    # The corpus of several tasks, and a run of several trainings.
    "tasks": "metaphrase.techniques.mixtures:TaskCorpus",
    "stages": "metaphrase.techniques.stages:run_stages",
    # Candidates with rewards in place of the pairs of a batch.
    "reward": "metaphrase.techniques.rewards:RewardTraining",
    # Chosen and rejected targets with their weights in the place of pairs.
    "preferences": "metaphrase.techniques.preferences:PreferenceTraining",
    # Parts of a model that are not trained, for a while or at all, and an adapter that is trained in their place.
    "freeze": "metaphrase.techniques.partial_training:freeze",
    "frozen_start": "metaphrase.techniques.partial_training:FrozenStart",
    "adapter": "metaphrase.techniques.partial_training:add_lora",
    # The experiment of a recipe with its open fields filled, and the reasons.
    "choose": "metaphrase.choices.completion:complete",
    # The search that decodes best: options of `generate()` and the reason.
    "choose_decoding": "metaphrase.choices.completion:choose_decoding",
    # Warnings of pairs, settings and outputs, and a callback that warns of scores during training.
    "alerts": "metaphrase.choices.alerts:warn",
    "training_alerts": "metaphrase.choices.alerts:TrainingAlerts",
    # The needs of an experiment.
    "estimate": "metaphrase.choices.estimate:dry_run",
    # Setup of a process that decodes or trains on a CPU, and the alert that bfloat16 is slow there.
    "kept_memory": "metaphrase.ops.cpu_setup:keep_freed_memory",
    "cpu_setup": "metaphrase.ops.cpu_setup:prepare_cpu",
    "slow_bfloat16": "metaphrase.ops.cpu_setup:slow_bfloat16_alerts",
    # Faster operators, and the decoder.
    "training_operators": "metaphrase.ops.packed_stacks:plug_in",
    "projected_loss": "metaphrase.ops.projected_loss:loss_of_head",
    "fast_decoder": "metaphrase.decoding.fast_generation:plug_in",
}

# Public names of a package that rings hold, by their module.
PUBLIC_NAMES = {
    "metaphrase.conversion": {
        "metaphrase.conversion.adaptation": "adapt",
        "metaphrase.conversion.families": "FAMILIES",
        "metaphrase.conversion.folders": "convert",
        "metaphrase.conversion.torch_transformer": "from_torch_transformer to_torch_transformer",
        "metaphrase.conversion.trimmed_vocabulary": "trim_vocabulary",
    },
    "metaphrase.hub_card": {"metaphrase.analysis.pages": "draw_attention_map write_explanation_page"},
    "metaphrase.inference": {
        "metaphrase.analysis.alignment": "AttentionMap alignment_error_rate cross_attention cross_attentions "
        "format_pharaoh word_alignment word_weights",
        "metaphrase.analysis.explanation": "Explanation explain",
        "metaphrase.analysis.scoring": "ForcedScore",
        "metaphrase.decoding.constrained_beam_search": "constrained_beam_search",
        "metaphrase.decoding.joint_search": "EnsembleSearch SpeculativeSearch",
        "metaphrase.decoding.minimum_bayes_risk": "expected_utilities",
        "metaphrase.decoding.quantization": "quantize",
        "metaphrase.engines.generator_pool": "GeneratorPool",
        "metaphrase.texts.plan": "Terms",
        "metaphrase.texts.whole_texts": "TextDecoder",
    },
    "metaphrase.tokenization": {
        "metaphrase.analysis.words": "readable_tokens word_ids_by_offsets words_of_decoded words_of_source words_of_target",
        "metaphrase.augmentation.denoising": "sentinel_tokens",
        "metaphrase.conversion.vocabulary_map": "VocabularyMap",
        "metaphrase.decoding.constrained_beam_search": "encode_phrase",
    },
}


def import_name(path: str) -> Any:
    """Return what a module holds by a name: `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def names_of_rings(package: str) -> tuple[dict[str, str], Callable[[str], Any]]:
    """Return the public names of a package that rings hold, and a `__getattr__` that imports them."""
    modules = {name: module for module, names in PUBLIC_NAMES[package].items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_name(f"{modules[name]}:{name}")

    return modules, load


def plugin(place: str) -> Callable[..., Any] | None:
    """Return the function that a ring has put into a place, or None if that ring was taken away."""
    try:
        return import_name(PLACES[place])
    except ModuleNotFoundError as error:
        # A ring may need another one that was taken away. Any other name is an extra that is not installed.
        if not (error.name or "").startswith("metaphrase."):
            raise
        return None


def needed_plugin(place: str, option: str) -> Callable[..., Any]:
    """Return the function in a place. Raises `MetaphraseError` that names `option` if its ring was taken away."""
    function = plugin(place)
    if function is None:
        module = PLACES[place].partition(":")[0]
        raise MetaphraseError(f"`{option}` must be left out: it needs {module}, which this copy of the package lacks.")
    return function
