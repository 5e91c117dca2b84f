"""Completion of a recipe: read the pairs, time a few updates, and fill the open fields."""

import collections
import dataclasses
import functools
import logging
import math
import os
import re
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch

from metaphrase.choices import rules
from metaphrase.choices.estimate import estimate_recipe, sampled_data
from metaphrase.data.encoding import PairEncoder
from metaphrase.data.pairs import LENGTH_COLUMNS, SIDES, column_texts, data_seed, split_pairs
from metaphrase.data.token_budget import check_beside_budget
from metaphrase.engines.engine_choice import free_main_memory
from metaphrase.errors import MetaphraseError
from metaphrase.evaluation.evaluate import ValidationSample
from metaphrase.inference import Generator
from metaphrase.ops.cpu_setup import has_fast_bfloat16
from metaphrase.plugins import needed_plugin, plugin
from metaphrase.storage.folders import ADAPTATION_NAME
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.texts import read_lines
from metaphrase.training import corpora
from metaphrase.training.callbacks import BEAMS_COST, TEXT_SCORES
from metaphrase.training.corpora import PairCorpus
from metaphrase.training.distributed import from_first_process
from metaphrase.training.experiment import Experiment, load
from metaphrase.training.model_setup import Data, make_model, make_tokenizers
from metaphrase.training.recipe.fields import VALIDATION_FIELDS
from metaphrase.training.recipe.recipe import BATCH_SIZES, Recipe, choose_plainly, is_better_lower

logger = logging.getLogger(__name__)

# Share of the time for updates. The rest is for evaluations and for the scores of the finished model.
_UPDATES_SHARE = 0.8
# Memory of a process relative to its tensors: see the note of `estimate_run`.
_HEAP = 1.8
# Pairs whose tokens are counted for the limits of length.
_SAMPLE_PAIRS = 10_000
# Pairs that are read and encoded before training. More of them are read during training.
_MOST_READ = 200_000
# Processes that encode pairs for one accelerator, which reads some thousand pairs a second.
_MOST_ENCODERS = 8
# In hours.
_LONG_RUN = 24


def complete(recipe: Recipe, is_dry_run: bool = False, started: float | None = None) -> tuple[Experiment, list[str]]:
    """Read the pairs, choose open fields from the texts, encode them, and choose the others from tokens and speed.

    Fields that are given stay. Many pairs become a stream, and a sample of them decides. Tasks and plain texts are not
    read beforehand, so the network alone decides. A resumed run keeps what it has.

    `started` is the beginning of `time_budget`, in seconds of `time.time()`; None for now.

    Returns:
        The experiment, and a line for each choice with its reason.

    Raises:
        MetaphraseError: If the pairs cannot be read, or fields contradict each other.
    """
    started, before, data = time.time() if started is None else started, recipe, None
    if recipe.resume_from_checkpoint:
        return Experiment(recipe, is_dry_run, started), []
    if recipe.reward is not None or recipe.rejected_column is not None:
        recipe = recipe.choose("weights of targets have either sign", label_smoothing_factor=0.0)
    if recipe.tasks or recipe.objective != "pairs":
        recipe = choose_plainly(recipe)
    else:
        opened, corpus = read_corpus(recipe, is_dry_run, started)
        recipe = corpus.recipe
        if (learn_combinations := plugin("combinations")) is not None:
            augment = functools.partial(rules.choose_augmentation, recipe, lambda: learn_combinations(corpus))
            recipe = _from_first_process(recipe, augment)
            corpus = corpus.with_recipe(recipe)
        tokenizers = make_tokenizers(recipe, corpus)
        recipe = rules.choose_limits(recipe, _sample_lengths(corpus, tokenizers), corpus.longest)
        corpus = corpus.with_recipe(recipe)
        with opened.arguments.main_process_first(desc="encoding the corpus"):
            data = sampled_data(Data(corpus, tokenizers, {}))
        recipe = _from_first_process(recipe, lambda: _choose_training(recipe, data, opened.deadline).checked())
        if recipe.streaming:
            corpus = corpus.with_recipe(recipe)
            corpus.reports = dict(data.corpus.reports)
            data = Data(corpus, tokenizers, data.encoded | {"train": corpus.stream_batches(tokenizers)})
    return Experiment(recipe, is_dry_run, started, data), rules.describe_choices(before, recipe)


def read_corpus(
    recipe: Recipe, is_dry_run: bool = False, started: float | None = None
) -> tuple[Experiment, PairCorpus]:
    """Read the pairs of a recipe, choose from their texts, and hold validation pairs out. Many pairs become a stream.

    Returns:
        An experiment that has checked the recipe, and the corpus, whose recipe has the choices.
    """
    if recipe.is_open(*BATCH_SIZES):
        check_beside_budget(recipe, None)
    recipe = choose_columns(choose_dataset(recipe))
    # Checks what can be checked before any work.
    opened = Experiment(_before_evaluation(recipe), is_dry_run, started)
    # The first process chooses for all. On each machine, one process reads, and the others take its caches.
    with opened.arguments.main_process_first(desc="reading the corpus"):
        opened.corpus.read(_MOST_READ if _may_stream(recipe) else math.inf)
    if opened.corpus.stream is not None:
        sizes = opened.corpus.num_pairs, len(opened.corpus.splits["train"])
        reason = "the files hold about {:,} pairs, of which a sample of {:,} decides".format(*sizes)
        recipe = recipe.choose(reason, streaming=True)
        # A rare bad line would end the run when it is read, hours later. The sample was read by the stricter rule.
        recipe = recipe.choose("a bad line is read late, and is counted", malformed="skip", invalid_utf8="skip")
        if torch.accelerator.is_available():
            cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            workers = max(1, min(_MOST_ENCODERS, cores - 1))
            recipe = recipe.choose("pairs are encoded beside training", dataloader_num_workers=workers)
    recipe = _from_first_process(recipe, lambda: _choose_from_files(recipe, opened.corpus))
    corpus = opened.corpus.with_recipe(recipe)
    with opened.arguments.main_process_first(desc="splitting the corpus"):
        load(corpus)
    return opened, corpus


def _from_first_process(recipe: Recipe, choose: Callable[[], Recipe]) -> Recipe:
    """Return the choices of the first process for a recipe, whose files and folders may lie elsewhere on this machine."""
    paths = [name for name in recipe.set_names if name.endswith(("_dir", "_file", "_path"))]
    return from_first_process(choose).replace(**{name: getattr(recipe, name) for name in paths})


def _may_stream(recipe: Recipe) -> bool:
    """True if no given field needs epochs, batches that are counted in pairs, or more held-out pairs than half of a sample."""
    is_open = recipe.is_open("streaming", "num_train_epochs", "per_device_train_batch_size", "rejected_column")
    is_open = is_open and 2 * (recipe.num_validation + recipe.num_test) < corpora.SAMPLED_PAIRS
    return is_open and "epoch" not in (recipe.eval_strategy, recipe.save_strategy, recipe.logging_strategy)


def _choose_from_files(recipe: Recipe, corpus: PairCorpus) -> Recipe:
    """Choose validation pairs, tokenizers and scores from training pairs as they stand in the files, and the precision."""
    train = corpus.splits["train"]
    has_open_size = recipe.is_open("num_validation")
    if recipe.num_test:
        train = split_pairs(train, 0, recipe.num_test, data_seed(recipe), recipe.keep_rare_words)["train"]
    recipe = choose_features(recipe, train)
    recipe = rules.choose_from_text(recipe, rules.CorpusProfile.of(train, corpus.scale))
    if has_open_size and recipe.num_validation:
        # Pairs with the same source stay together.
        splits = split_pairs(train, recipe.num_validation, 0, data_seed(recipe), recipe.keep_rare_words)
        recipe = recipe.replace(num_validation=len(splits.get("validation", ())))
    if recipe.is_open("bf16", "fp16", "use_cpu") and has_fast_bfloat16():
        recipe = recipe.choose("this machine multiplies matrices faster in bfloat16", bf16=True)
    return recipe


def _sample_lengths(corpus: PairCorpus, tokenizers: TokenizerPair) -> dict[str, list[int]]:
    """Return the tokens of some training texts of each side."""
    train = corpus.splits["train"]
    rows = [*range(0, len(train), -(-len(train) // _SAMPLE_PAIRS))]
    sample, encode = train.select(rows)[:], PairEncoder(tokenizers, None, None, too_long="truncate", empty="keep")
    if "recombination" in corpus.recipe.augmentation:
        made = needed_plugin("recombined", "augmentation")(corpus)
        sample = {side: [*sample[side], *(pair[index] for pair in made)] for index, side in enumerate(SIDES)}
    columns = encode(*(sample[side] for side in SIDES), [*range(len(sample["source"]))])
    lengths = {side: columns[name] for side, name in zip(SIDES, LENGTH_COLUMNS, strict=True)}
    if "rejected" in sample:
        lengths["target"] = [*lengths["target"], *map(len, tokenizers.encode_targets(sample["rejected"]))]
    return lengths


def _choose_training(recipe: Recipe, data: Data, deadline: float) -> Recipe:
    """Choose network, batches, optimizer, length of the run, and evaluation, from the tokens and the speed of this machine."""
    arguments = data.corpus.arguments
    share = rules.QUICK_BATCH if arguments.device.type == "cpu" else rules.QUICK_SHARE
    tokens = rules.TokenProfile.of(data.encoded["train"], data.corpus.scale, arguments.world_size, share)
    if recipe.streaming:
        # A longer pair than those of the sample may come.
        tokens = dataclasses.replace(tokens, longest=sum(data.corpus.limits))

    @functools.cache
    def cost_of(size: rules.Size) -> rules.StepCost:
        sized = recipe
        if recipe.model_name_or_path is None:
            # A given network has one speed.
            sized = rules.with_network(recipe, "", size if recipe.is_open("preset") else rules.SIZES[0])
        return _cost_of(_before_evaluation(sized), data, tokens)

    def time_left() -> float | None:
        # Reading long files may have used up all the time.
        return None if recipe.time_budget is None else _UPDATES_SHARE * max(0.0, deadline - time.time())

    if recipe.model_name_or_path is not None:
        with torch.device("meta"):
            model = make_model(recipe, data, with_weights=False)
        facts = model.config, model.generation_config.num_beams or 1, cost_of(rules.SIZES[0])
        has_seen_pairs = not Path(recipe.model_name_or_path, ADAPTATION_NAME).is_file()
        filled, total = rules.choose_finetuning(recipe, tokens, *facts, time_left(), has_seen_pairs)
    else:
        if recipe.time_budget is not None:
            cost_of(rules.SIZES[1])
        filled, total = rules.choose_from_tokens(recipe, tokens, cost_of, time_left())
    if recipe.time_budget is None and total > _LONG_RUN * 3600:
        logger.warning("This run takes about %.1f hours on this machine. Limit it by --time_budget 8h.", total / 3600)
    return filled


def _before_evaluation(recipe: Recipe) -> Recipe:
    """Return the recipe without fields of evaluation that need other fields, which are chosen after the pairs are read."""
    fields: dict[str, Any] = {}
    if recipe.is_open(*VALIDATION_FIELDS):
        fields = {"eval_strategy": "no", "choose_decoding": False}
    if any(recipe.is_open(name) for name in rules.STRATEGIES) or fields:
        fields["load_best_model_at_end"] = False
    return recipe.replace(**fields)


def _cost_of(recipe: Recipe, data: Data, tokens: rules.TokenProfile) -> rules.StepCost:
    """Return the cost of an optimizer step, which is split into as many batches as memory needs.

    A warning says if memory holds no batch of a model to fine-tune.
    """
    budget, batches = rules.tokens_per_update(recipe, tokens), recipe.gradient_accumulation_steps
    is_open = recipe.is_open(*BATCH_SIZES)
    is_final = not (is_open and recipe.is_open("gradient_accumulation_steps"))
    while True:
        size = {"max_tokens_per_batch": rules.tokens_of_batch(tokens, budget, batches)}
        trial = recipe.choose("", **size, gradient_accumulation_steps=batches) if is_open else recipe
        free = free_memory()
        lacking = _HEAP * estimate_recipe(trial, data, devices=tokens.devices).peak - free
        if lacking <= 0 or is_final or budget // (2 * batches * tokens.devices) < tokens.longest:
            break
        batches *= 2
    if lacking > 0 and recipe.model_name_or_path is not None:
        logger.warning(
            "Training takes about %.1f GiB, and %.1f GiB are free. Set `lora_rank: 16` (pip install metaphrase[lora]), or "
            "choose a smaller model.",
            *(size / _HEAP / 2**30 for size in (lacking + free, free)),
        )
    estimate = estimate_recipe(trial, data)
    return rules.StepCost(3600 * (estimate.hours or 0.0) / estimate.steps, batches)


def free_memory() -> int:
    """Return the bytes that this process may take for training, on the accelerator or else in main memory."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # Memory that torch keeps for later is free.
        return torch.cuda.mem_get_info()[0]
    return free_main_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


# Names of a source and its target.
PAIRS = (("source", "target"), ("src", "tgt"), ("input", "output"), ("question", "answer"), ("article", "highlights"))
PAIRS += (("prompt", "chosen"),)
PAIRS += tuple((source, "summary") for source in ("text", "document", "article", "dialogue"))
_VALIDATION_NAMES = ("validation", "valid", "dev", "val")
_VALIDATION = ("dataset_validation_split", "num_validation")


def choose_dataset(recipe: Recipe) -> Recipe:
    """Choose the splits and columns of `dataset_name`, if the recipe has it."""
    name, config = recipe.dataset_name, recipe.dataset_config_name
    if name is None:
        return recipe
    splits = list(datasets.load_dataset(name, config, streaming=recipe.streaming))
    reason = f"{name} has the splits {', '.join(splits)}"
    validation = next((split for split in _VALIDATION_NAMES if split in splits), None)
    if validation is not None and recipe.is_open(*_VALIDATION):
        recipe = recipe.choose(reason, dataset_validation_split=validation)
    if "test" in splits and recipe.is_open("dataset_test_split", "num_test"):
        recipe = recipe.choose(reason, dataset_test_split="test")
    if recipe.is_open("source_column", "target_column"):
        # The split may be a part, such as `train[:10%]`.
        options = {"split": recipe.dataset_train_split, "streaming": recipe.streaming}
        row = next(iter(datasets.load_dataset(name, config, **options)), {})
        source, target = find_columns(row, name, config)
        recipe = recipe.choose(f"{name} has the columns {', '.join(row)}", source_column=source, target_column=target)
    return recipe


def find_columns(row: dict, name: str, config: str | None) -> tuple[str, str]:
    """Return the columns of source and target. A configuration `de-en` decides the direction of a column `translation`."""
    languages = row.get("translation")
    names, direction = (languages, (config or "").split("-")) if isinstance(languages, dict) else (row, ())
    pairs = [tuple(pair) for pair in (direction, *PAIRS) if len(pair) == 2 and set(pair) <= set(names)]
    if len(pairs) != 1 and PAIRS[0] not in pairs:
        raise MetaphraseError(
            f"`source_column` and `target_column` must be given for {name}, which has {', '.join(names)}, got neither."
        )
    return PAIRS[0] if PAIRS[0] in pairs else pairs[0]


# Features of words, as in the files of SIGMORPHON: lemma, form and `V;PST`, or lemma, `V;PST` and form.
_FEATURES = re.compile(r"[!-:<-`{-~][!-:<-~]*(;[!-:<-~]+)*")
_FIRST_LINES = 100


def choose_columns(recipe: Recipe) -> Recipe:
    """Choose the columns of a .tsv file with three, if all texts of one of the last two are features."""
    if ".tsv" in Path(recipe.train_file or "").suffixes and recipe.is_open("source_column", "target_column"):
        path = recipe.data_path("train_file")
        rows = [line.text.split("\t") for line in islice(read_lines(path), _FIRST_LINES)]
        columns = [*zip(*rows, strict=True)] if {*map(len, rows)} == {3} else []
        has_features = [all(map(_FEATURES.fullmatch, texts)) and ";" in "".join(texts) for texts in columns[1:]]
        if sum(has_features) == 1:
            index = 1 + has_features.index(True)
            reason = f"column {index} of {path.name}, from 0, has the features of words"
            return recipe.choose(reason, source_column=[0, index], target_column=3 - index)
    return recipe


def choose_features(recipe: Recipe, pairs: datasets.Dataset) -> Recipe:
    """Choose a token for each feature of the pairs, if a recipe has columns of features."""
    sides = [side for side in SIDES if isinstance(getattr(recipe, f"{side}_column"), list)]
    features = {f";{name}" for side in sides for text in column_texts(pairs, side) for name in text.split(";")[1:]}
    tokens = recipe.additional_special_tokens or []
    # A token consists of such characters. Other features are read letter by letter.
    new = sorted(token for token in features.difference(tokens) if re.fullmatch("[!-~]{2,}", token))
    reasons = {**recipe.reasons, "additional_special_tokens": f"the pairs have {len(features)} features"}
    return recipe.replace(additional_special_tokens=[*tokens, *new], reasons=reasons) if new else recipe


# The search that decodes best

BEAMS = 4
# A penalty above 1 favors longer targets. Symbols and single words end where they must.
LENGTH_PENALTIES = (1.0, 0.6, 1.5)
# Points that early stopping may not cost.
_NOTICEABLE = 0.1


def choose_decoding(
    generator: Generator, sample: ValidationSample, deadline: float = math.inf, num_scored: int = 0
) -> tuple[dict[str, float], str]:
    """Compare greedy search with beams, and beams with several length penalties, by the first metric of the sample.

    The best beams are also tried with early stopping, which is faster, and the rule of fairseq, Marian and CTranslate2. It may
    end before the right target of a model whose other beams end soon, so that only a comparison tells.

    Returns:
        `num_beams`, with beams `length_penalty` too, `early_stopping` if it costs nothing, and the scores of all settings in one
        line.
    """
    metric, num_pairs = sample.scores.metrics[0], len(sample.sources)
    sign, duration, shown = -1 if is_better_lower(metric) else 1, 0.0, []
    best: tuple[float, dict[str, float]] = -math.inf, {"num_beams": 1}
    penalties = LENGTH_PENALTIES if metric in TEXT_SCORES else LENGTH_PENALTIES[:1]
    beams = [{"num_beams": BEAMS, "length_penalty": value} for value in penalties]
    settings = collections.deque([best[1], *beams])
    # The final scores come after this search, and take as long for each pair.
    while settings and time.time() + duration * (1 + num_scored / num_pairs) < deadline:
        setting, start = settings.popleft(), time.perf_counter()
        texts = generator.generate(list(sample.sources), show_progress=False, **setting)
        duration = (1.0 if shown else BEAMS_COST) * (time.perf_counter() - start)
        score = sign * sample.scores.compute(texts, sample.references)[metric]["score"]
        shown.append(f"{sign * score:.2f} with {_shown(setting)}")
        # The first of equal settings is the fastest.
        if score > best[0] or ("early_stopping" in setting and score > best[0] - _NOTICEABLE):
            best = score, setting
        if setting == beams[0] and best[1] != setting:
            break  # Beams bring nothing.
        if setting == beams[-1]:
            settings.append({**best[1], "early_stopping": True})
    if not shown:
        return best[1], "there is no time to compare beams"
    return best[1], f"{metric} of {num_pairs} validation pairs: {', '.join(shown)}"


def _shown(options: dict[str, float]) -> str:
    if options["num_beams"] == 1:
        return "greedy search"
    penalty = f" and length penalty {options['length_penalty']}" if options["length_penalty"] != 1 else ""
    return f"{options['num_beams']} beams{penalty}{' and early stopping' if 'early_stopping' in options else ''}"
