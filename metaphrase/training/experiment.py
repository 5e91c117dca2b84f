"""Run of a recipe, from raw pairs to a folder with a trained and scored model.

`Experiment.train` tells the whole course: read and encode the pairs, make the model, train, save, score.
"""

import contextlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, Seq2SeqTrainingArguments, TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import is_peft_available

import metaphrase
from metaphrase.data.collators import PairCollator
from metaphrase.data.encoding import data_fingerprint
from metaphrase.data.pairs import TASK_COLUMN
from metaphrase.errors import MetaphraseError
from metaphrase.evaluation.evaluate import TaskScores, ValidationSample, evaluate_generator
from metaphrase.evaluation.metrics import DEFAULT_METRICS, write_metrics
from metaphrase.inference import Generator
from metaphrase.inference.batches import MAX_TOKENS_WITHOUT_POSITIONS, longest_source
from metaphrase.inference.line_files import as_lines
from metaphrase.plugins import needed_plugin, plugin
from metaphrase.storage.folders import write_json
from metaphrase.storage.loading import refuse_missing_folder
from metaphrase.tokenization import TokenizerPair
from metaphrase.training import checkpoints, model_setup
from metaphrase.training.callbacks import (
    EarlyStopping,
    EndOnInterrupt,
    ProgressLog,
    TimeBudget,
    final_share,
    parse_seconds,
)
from metaphrase.training.corpora import PairCorpus, open_corpus
from metaphrase.training.distributed import check_same_in_all, is_adapted, join_processes
from metaphrase.training.recipe.fields import DECODING, check_evaluated
from metaphrase.training.recipe.recipe import Recipe, saved_recipe
from metaphrase.training.trainer import MetaphraseTrainer, check_optimizer

logger = logging.getLogger(__name__)


class Experiment:
    """One run of a recipe. `train()` fills `folder` with the model and its records.

    The folder holds the model with its code and tokenizers, `recipe.yaml`, `data_report.json`, `trainer_state.json`, and
    `metrics.json` with the scores on the test pairs (or on the validation pairs, if there are no others).

    Attributes:
        recipe: The recipe, with length limits that the model can read. `train` adds the search that `choose_decoding` found.
        arguments: The training arguments.
        folder: The output directory.
        corpus: The texts, which `prepare` reads.
        checkpoint: The checkpoint to resume from, or None.
        deadline: End of `time_budget`, in seconds of `time.time()`.
    """

    def __init__(
        self,
        recipe: Recipe,
        is_dry_run: bool = False,
        started: float | None = None,
        data: model_setup.Data | None = None,
    ):
        """Check everything that can be checked before any work is done.

        Args:
            recipe: The recipe of the run.
            is_dry_run: True if nothing will be written, so that the folder may hold another run.
            started: Beginning of `time_budget`, in seconds of `time.time()`; None for now.
            data: The data, if they were prepared by a recipe with the same data, tokenizers and limits. Then it was checked.

        Raises:
            MetaphraseError: If the recipe names no training pairs or an unknown score, or its folder holds another run or model.
        """
        join_processes(recipe)
        self.arguments = make_arguments(recipe)
        self.folder = Path(self.arguments.output_dir)
        self.deadline = math.inf
        if recipe.time_budget is not None:
            self.deadline = (time.time() if started is None else started) + parse_seconds(recipe.time_budget)
        if data is None:
            check_optimizer(self.arguments)
            for name in ("model_name_or_path", "tokenizer_name_or_path", "target_tokenizer_name_or_path"):
                if getattr(recipe, name) is not None:
                    refuse_missing_folder(getattr(recipe, name), name)
            if recipe.lora_rank is not None and not is_peft_available():
                raise ImportError("LoRA needs peft, which is not installed: pip install metaphrase[lora]")
            self.corpus = open_corpus(recipe, self.arguments, model_setup.longest_sequences(recipe))
            recipe = self.corpus.recipe
        else:
            self.corpus = data.corpus
        check_evaluated(recipe)
        if recipe.choose_decoding:
            needed_plugin("choose_decoding", "choose_decoding")
        # Plain text has no scores.
        metrics = [] if recipe.objective != "pairs" else recipe.metrics or DEFAULT_METRICS
        self.recipe, self.scores, self._data = recipe, TaskScores(metrics, recipe.bleu_tokenize), data
        self.interrupt = EndOnInterrupt()
        self._is_unchecked = is_dry_run and not recipe.resume_from_checkpoint
        self.checkpoint = None if self._is_unchecked else checkpoints.checkpoint_to_resume(recipe, self.folder)

    def prepare(self) -> model_setup.Data:
        """Read the corpus, make the tokenizers and encode all pairs. A second call returns the same."""
        if self._data is None:
            with self.arguments.main_process_first(desc="reading the corpus"):
                load(self.corpus)
            tokenizers = model_setup.make_tokenizers(self.recipe, self.corpus, self.checkpoint)
            with self.arguments.main_process_first(desc="encoding the corpus"):
                self._data = model_setup.Data(self.corpus, tokenizers, self.corpus.encode(tokenizers))
        return self._data

    def make_model(self) -> PreTrainedModel:
        """Return the model to train."""
        return model_setup.make_model(self.recipe, self.prepare())

    def train(self, callbacks: Sequence[TrainerCallback] = ()) -> dict:
        """Train, save and score the model, and return the content of `metrics.json`. `callbacks` come after those of the run.

        Raises:
            MetaphraseError: If this one process has several GPUs, the data, the base model or the checkpoint do not fit, or
                another run writes to the folder.
        """
        lock = checkpoints.only_writer(self.folder) if self.arguments.process_index == 0 else contextlib.nullcontext()
        with lock:
            # A dry run skips these checks.
            if (count := self.arguments.n_gpu) > 1:
                # `torch.nn.DataParallel` would cut packed rows, and the two passes of R-Drop, in pieces.
                raise MetaphraseError(
                    f"Each GPU must have a process of its own, got one process with {count} GPUs. Start one for each by "
                    f"`torchrun --nproc_per_node {count} scripts/train.py ...` or `accelerate launch scripts/train.py ...`, "
                    "or train on one: `CUDA_VISIBLE_DEVICES=0`."
                )
            if self._is_unchecked:
                checkpoints.checkpoint_to_resume(self.recipe, self.folder)
            return self._train(callbacks)

    def _train(self, callbacks: Sequence[TrainerCallback]) -> dict:
        recipe, arguments = self.recipe, self.arguments
        set_seed(arguments.seed)
        data = self.prepare()
        if arguments.world_size > 1:
            versions = {library.__name__: library.__version__ for library in (metaphrase, torch, transformers)}
            checkpoint = self.checkpoint and Path(self.checkpoint).name
            check_same_in_all(versions=versions, data=data_fingerprint(data.encoded["train"]), checkpoint=checkpoint)
        model = self.make_model()
        if recipe.lora_rank is None:
            logger.info("The model has %s parameters.", f"{model.num_parameters():,}")
        trainer = make_trainer(recipe, arguments, data, model, self.scores, self.deadline)
        for callback in callbacks:
            trainer.add_callback(callback)
        if trainer.is_world_process_zero():
            warn("run", recipe, arguments, data.encoded, model)
            # When a checkpoint to resume from was loaded, not refused.
            beginning = TrainerCallback()
            beginning.on_train_begin = lambda *_, **__: self._write_provenance()
            trainer.add_callback(beginning)
        # Several processes would each end after another update. Workers end at once.
        can_end = arguments.world_size == 1 and not arguments.dataloader_num_workers
        if can_end:
            trainer.add_callback(self.interrupt)
        with self.interrupt.listening() if can_end else contextlib.nullcontext():
            trainer.train(resume_from_checkpoint=self.checkpoint)
        if recipe.average_last is not None or recipe.average_best is not None:
            needed_plugin("average", "average_best")(recipe, trainer, self.folder)
        model = save_final(trainer, data.tokenizers, self.folder)
        trainer.save_state()
        self.corpus.share_counts(trainer.accelerator)
        result = {}
        if trainer.is_world_process_zero():
            longest = self.corpus.longest[0] or longest_source(model) or MAX_TOKENS_WITHOUT_POSITIONS
            sizes = {"batch_size": arguments.per_device_eval_batch_size, "max_source_length": longest}
            if recipe.choose_decoding and recipe.is_open(*DECODING) and trainer.score is not None:
                self._choose_decoding(Generator(model.eval(), data.tokenizers, **sizes), trainer.score)
            # Again, since the counts of a stream are final now.
            self._write_provenance()
            result = self.evaluate(Generator(model.eval(), data.tokenizers, **sizes))
        trainer.accelerator.wait_for_everyone()
        return result

    def _choose_decoding(self, generator: Generator, sample: Callable) -> None:
        """Set the search that the recipe leaves open, and save it with the model and in the recipe."""
        choose = needed_plugin("choose_decoding", "choose_decoding")
        texts = self.corpus.splits[self.corpus.scored_split()]
        values, reason = choose(generator, sample, self.deadline, len(texts))
        logger.info("Chosen to decode: %s (%s)", ", ".join(f"{name} {value}" for name, value in values.items()), reason)
        config = generator.model.generation_config
        for name, value in values.items():
            setattr(config, name, value)
        model_setup.remove_ineffective_settings(config)
        config.save_pretrained(self.folder)
        self.recipe = self.recipe.replace(**values, reasons={**self.recipe.reasons, "num_beams": reason})

    def _write_provenance(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        reports = {split: report.to_dict() for split, report in self.corpus.reports.items()}
        write_json(self.folder / checkpoints.DATA_REPORT_NAME, reports)
        path = self.folder / checkpoints.RECIPE_NAME
        # The file of a resumed run may have comments.
        if not path.is_file() or saved_recipe(path).to_dict() != self.recipe.to_dict():
            self.recipe.save(path)

    def evaluate(self, generator: Generator, folder: Path | None = None) -> dict:
        """Score a generator on the test pairs, or else on the validation pairs, and return the content of `metrics.json`.

        Args:
            generator: The finished model, or another one with its tokenizers. Sources have their prefix already.
            folder: Folder of `metrics.json` and the predictions; None for that of the run.
        """
        corpus, split, folder = self.corpus, self.corpus.scored_split(), folder or self.folder
        if split is None:
            if self.recipe.objective == "pairs":
                logger.warning("There are neither test nor validation pairs: the model is not scored.")
            earlier = folder / "metrics.json"
            if earlier.exists():
                # The model card would take these scores for those of the new weights.
                renamed = earlier.rename(earlier.with_name("metrics_of_earlier_weights.json"))
                logger.warning("Scores of an earlier run were moved to %s.", renamed)
            return {}
        texts = corpus.splits[split]
        targets = texts["target"][:]
        references = generator.tokenizers.as_decoded(targets)
        result, predictions = evaluate_generator(
            generator,
            texts["source"][:],
            targets,
            references=references,
            metrics=self.scores.metrics,
            metric_options=self.scores.options,
            show_progress=not self.arguments.disable_tqdm,
            on_decoded=lambda texts: (folder / f"{split}_predictions.txt").write_text(as_lines(texts), "utf-8"),
        )
        warn("outputs", result["num_unfinished"], len(predictions), generator.model)
        result["data"] = {"name": corpus.data_name(split), "split": split, **corpus.sizes()}
        if self.recipe.tasks:
            result["tasks"] = self.scores.compute_by_task(predictions, references, texts[TASK_COLUMN][:])
            for task, part in result["tasks"].items():
                values = ", ".join(f"{name} {score['score']:.2f}" for name, score in part["scores"].items())
                logger.info("%s: %s", task, values)
        write_metrics(folder, result)
        return result


def make_arguments(recipe: Recipe) -> Seq2SeqTrainingArguments:
    """Return the training arguments of a recipe on this machine."""
    # Without `use_cpu`, transformers refuses bf16 where there is no accelerator.
    extra = {} if torch.accelerator.is_available() else {"dataloader_pin_memory": False, "use_cpu": True}
    arguments = recipe.training_arguments(**extra)
    # The arguments are saved with each checkpoint.
    arguments.hub_token = None
    if recipe.objective != "pairs":
        # There are no references to compare decoded text with.
        arguments.predict_with_generate, arguments.prediction_loss_only = False, True
    return arguments


def load(corpus: PairCorpus) -> None:
    """Read a corpus, and log alerts of its pairs."""
    corpus.load()
    if corpus.arguments.process_index == 0:
        warn("data", corpus)


def warn(occasion: str, *arguments: Any) -> None:
    """Log warnings of pairs, settings or outputs, if the ring that knows them is there."""
    if (log_alerts := plugin("alerts")) is not None:
        log_alerts(occasion, *arguments)


def pad_to_multiple_of(arguments: Seq2SeqTrainingArguments) -> int:
    """Return the multiple that widths of padded batches are rounded up to, for tensor cores."""
    return 8 if torch.accelerator.is_available() and not arguments.use_cpu else 1


def make_trainer(
    recipe: Recipe,
    arguments: Seq2SeqTrainingArguments,
    data: model_setup.Data,
    model: PreTrainedModel,
    scores: TaskScores,
    deadline: float = math.inf,
) -> MetaphraseTrainer:
    """Return the trainer of a model on the data of a run, which ends at a deadline in seconds of `time.time()`."""
    callbacks = []
    if recipe.early_stopping_patience is not None:
        callbacks.append(EarlyStopping(recipe.early_stopping_patience))
    if recipe.time_budget is not None:
        splits = data.corpus.splits
        sizes = [len(splits.get(split) or ()) for split in (data.corpus.scored_split(), "validation")]
        share = final_share(recipe, scores.metrics, *sizes)
        callbacks.append(TimeBudget(deadline, share, parse_seconds(recipe.time_budget)))
    validation, sample = data.encoded.get("validation"), None
    if scores.metrics and validation is not None:
        sample = ValidationSample(validation, recipe.max_decoded_samples, bool(recipe.tasks), data.tokenizers, scores)
    if recipe.freeze and recipe.freeze_steps is not None:
        callbacks.append(needed_plugin("frozen_start", "freeze_steps")(recipe.freeze, recipe.freeze_steps))
    if (make_alerts := plugin("training_alerts")) is not None:
        callbacks.append(make_alerts(scores.metrics))
    if (reward := make_reward(recipe, data)) is not None:
        callbacks.append(reward)
    trainer = MetaphraseTrainer(
        model=model,
        args=arguments,
        tokenizers=data.tokenizers,
        train_dataset=data.encoded["train"],
        eval_dataset=validation,
        data_collator=PairCollator(data.tokenizers.source.pad_token_id, pad_to_multiple_of(arguments)),
        callbacks=callbacks,
        score=sample,
        max_tokens_per_batch=recipe.max_tokens_per_batch,
        decoded_rows=sample.rows if sample is not None else [],
        r_drop_alpha=recipe.r_drop_alpha,
        r_drop_start_step=recipe.r_drop_start_step,
        num_best_kept=recipe.average_best or 0,
        num_last_kept=recipe.average_last or 0,
        best_kept_metric=recipe.metric_for_best_model or checkpoints.DEFAULT_METRIC,
        generation_options={"num_beams": arguments.generation_num_beams or 1},
        replace_batch=reward,
    )
    # Plain lines, in place of transformers' bars and dictionaries. A notebook keeps its table.
    if trainer.pop_callback(PrinterCallback) or trainer.pop_callback(ProgressCallback):
        trainer.add_callback(ProgressLog(deadline))
    return trainer


def make_reward(recipe: Recipe, data: model_setup.Data) -> Any:
    """Return the function that replaces batches of pairs in training, a callback, too; None without reward or preferences."""
    if recipe.rejected_column is not None:
        return needed_plugin("preferences", "rejected_column")(recipe, data.encoded["train"])
    return None if recipe.reward is None else needed_plugin("reward", "reward")(recipe, data.tokenizers)


def save_final(trainer: MetaphraseTrainer, tokenizers: TokenizerPair, run: Path) -> PreTrainedModel:
    """Save the model, with its adapter merged, and return it. All processes must call it."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not is_adapted(model):
        trainer.save_model()
        return trainer.whole_model()
    trainer.save_model(str(run / "adapter"))
    model = trainer.whole_model()
    if trainer.is_world_process_zero():
        model = merge_lora(model, run)
        tokenizers.save_pretrained(run)
    return model


def merge_lora(model: PreTrainedModel, output: str | Path) -> PreTrainedModel:
    """Add an adapter to its base weights in place, save the sum as a model that needs no peft, and return it."""
    is_tied = model.config.tie_word_embeddings
    with warnings.catch_warnings():
        # peft compares the output projection with the encoder's embedding, which is wrong for two vocabularies.
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        merged = model.merge_and_unload(safe_merge=True)
    merged.config.tie_word_embeddings = is_tied
    merged.requires_grad_(True)
    merged.save_pretrained(output)
    return merged
