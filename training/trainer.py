"""MetaphraseTrainer: `Seq2SeqTrainer` with the loss left to the model and an evaluation that decodes by length."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, Seq2SeqTrainer

from metaphrase.data.collators import with_decoder_inputs
from metaphrase.data.pairs import data_seed
from metaphrase.data.token_budget import LengthGroupedSampler
from metaphrase.modeling import IGNORED_LABEL, sequence_loss
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.adapters import is_adapted
from metaphrase.training.checkpointing.averaging import DEFAULT_METRIC, is_better_lower, scores_in
from metaphrase.training.checkpointing.folders import checkpoints_in, step_of
from metaphrase.training.checkpointing.sharding import (
    as_plain_class,
    gather_model,
    gather_partitions,
    is_sharded,
    keep_embeddings_together,
)
from metaphrase.training.checkpointing.trainer_mixin import WholeCheckpoints
from metaphrase.training.distributed import ProcessSeedsMixin, RepeatedPairsMixin
from metaphrase.training.evaluation_loop import DecodedEvaluationMixin
from metaphrase.training.exponential_average import ExponentialAverageMixin
from metaphrase.training.loaders import TokenBudgetMixin
from metaphrase.training.optimizer import AdafactorOptionsMixin, GradientClippingMixin, ParameterGroupsMixin
from metaphrase.training.r_drop import RDropMixin

logger = logging.getLogger(__name__)


class MetaphraseTrainer(
    DecodedEvaluationMixin,
    ExponentialAverageMixin,
    RDropMixin,
    ParameterGroupsMixin,
    AdafactorOptionsMixin,
    GradientClippingMixin,
    TokenBudgetMixin,
    RepeatedPairsMixin,
    ProcessSeedsMixin,
    WholeCheckpoints,
    Seq2SeqTrainer,
):
    """Trains an encoder-decoder.

    It differs from its parent in a few things. With `max_tokens_per_batch`, batches are formed by a budget of tokens, not by a
    number of pairs, and packed without padding where the model can read that. Without it, batches of like length
    (`train_sampling_strategy: group_by_length`) come in random order, where the parent's run from the longest to the shortest
    again and again. Label smoothing happens inside the model (for other families, on its logits), so it needs no decoder input
    from the collator, follows `num_items_in_batch`, and leaves the evaluation loss what it says it is. That loss is the mean over
    all tokens, not over batches, of each pair once, however many processes share them (but where a collator packs them without
    `max_tokens_per_batch`), and its exponential is reported as perplexity. Accumulated batches give the gradient of one large
    batch, with models of other families, too, and so do those of several processes, each pair of an epoch counted once (but with
    a `compute_loss_func`). Checkpoints are whole or not there, and a resumed run ends as one that was not stopped. With
    `predict_with_generate`, the evaluation decodes in batches of like length and hands texts to `score`.
    """

    def __init__(
        self,
        *args,
        tokenizers: TokenizerPair | None = None,
        score: Callable[[list[list[int]], list[list[int]]], dict[str, float]] | None = None,
        generation_options: dict | None = None,
        max_tokens_per_batch: int | None = None,
        decoded_rows: Sequence[int] | None = None,
        r_drop_alpha: float = 0.0,
        r_drop_start_step: int = 0,
        learning_rate_factors: Mapping[str, float] | None = None,
        layer_decay: float = 1.0,
        num_best_kept: int = 0,
        num_last_kept: int = 0,
        best_kept_metric: str | None = None,
        **kwargs,
    ):
        """Adds to the parent's arguments:

        Args:
            max_tokens_per_batch: Most tokens of both sides in a batch of one device, padding counted, for training and for the
                evaluation loss. The data sets need the columns `source_length` and `target_length` then. `None` leaves it to
                `per_device_train_batch_size`.
            tokenizers: Saved with every checkpoint.
            score: Takes decoded ids and label ids of the rows that are decoded, in order, and returns named scores.
            decoded_rows: Those of `eval_dataset` that are decoded; `None` means all, as of any other data set.
            generation_options: Arguments of `generate()` for the evaluation.
            r_drop_alpha: Weight of the divergence of two passes (5 for translation in Liang et al. 2021); 0 is plain training.
            r_drop_start_step: Updates of plain training before that.
            learning_rate_factors: See `parameter_groups`, as for `layer_decay`.
            num_best_kept: So many checkpoints, the best by `best_kept_metric`, are kept however old they are.
            num_last_kept: So many checkpoints, the last ones, are kept beside the best.
            best_kept_metric: One that is evaluated; by default `metric_for_best_model` (of which a schedule that is led by a
                metric makes the loss, if nothing else is said) or BLEU.
        """
        super().__init__(*args, **kwargs)
        self.tokenizers = tokenizers
        self.score = score
        self.generation_options = dict(generation_options or {})
        self.max_tokens_per_batch = max_tokens_per_batch
        self.decoded_rows = decoded_rows
        self.r_drop_alpha = r_drop_alpha
        self.r_drop_start_step = r_drop_start_step
        self.learning_rate_factors = learning_rate_factors
        self.layer_decay = layer_decay
        self.num_best_kept, self.num_last_kept = num_best_kept, num_last_kept
        self.best_kept_metric = best_kept_metric or self.args.metric_for_best_model or DEFAULT_METRIC
        self.label_smoothing = self.args.label_smoothing_factor
        # The parent's smoother would take the labels away from the model.
        self.label_smoother = None
        self._check_arguments()
        # Earlier versions of transformers count labels of an encoder-decoder as those of a decoder, which shifts them.
        self._loss_shifts_labels = False
        if self.compute_loss_func is None and not _smooths(self.model):
            if r_drop_alpha:
                raise ValueError(
                    f"`r_drop_alpha` must come with a Metaphrase model, got a {type(self.model).__name__}."
                )
            # Models of other families neither smooth labels nor divide by those of the whole step.
            self.compute_loss_func = self._loss_of_logits

    def _check_arguments(self) -> None:
        """Refuses arguments of which one would be ignored.

        Raises:
            ValueError: Naming them.
        """
        if self.optimizer is not None and (self.learning_rate_factors or self.layer_decay != 1):
            raise ValueError(
                "`optimizers` must be left out with `learning_rate_factors` or `layer_decay`, which make one."
            )
        if self._decodes and self.compute_metrics is not None:
            raise ValueError("`score` and `compute_metrics` must not both be given with `predict_with_generate`.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"`label_smoothing_factor` must be at least 0 and below 1, got {self.label_smoothing}.")
        if self.r_drop_alpha < 0:
            raise ValueError(f"`r_drop_alpha` must be at least 0, got {self.r_drop_alpha}.")
        if self.r_drop_alpha and self.compute_loss_func is not None:
            raise ValueError("`r_drop_alpha` must be left out with `compute_loss_func`, which knows of no second pass.")
        metric = self.args.metric_for_best_model
        if metric is not None and self.args.greater_is_better is is_better_lower(metric):
            better = "lower" if is_better_lower(metric) else "higher"
            logger.warning(
                "`greater_is_better` is %s, while %s is better when it is %s.",
                self.args.greater_is_better,
                metric,
                better,
            )

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            self.accelerator.prepare = keep_embeddings_together(self.accelerator.prepare)

    def whole_model(self) -> PreTrainedModel:
        """The model to decode with, alone on each process. Where weights are sharded, all processes must ask for it."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        # The first version of FSDP marks its wrapper, which is off here, and not the model.
        return gather_model(model) if self.is_fsdp_enabled or is_sharded(model) else model

    @property
    def has_whole_checkpoints(self) -> bool:
        """Whether a checkpoint holds the weights as `from_pretrained` reads them, and not the share of each process alone."""
        if self.is_fsdp_enabled:
            return "FULL" in str(self.accelerator.state.fsdp_plugin.state_dict_type)
        if not self.is_deepspeed_enabled:
            return True
        zero = self.accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        # Where it says "auto", accelerate does without.
        return zero.get("stage") != 3 or zero.get("stage3_gather_16bit_weights_on_model_save") is True

    def _kept_checkpoints(self, run: Path) -> list[str | Path | None]:
        whole = checkpoints_in(run)
        scores = scores_in(self.state.log_history, self.best_kept_metric)
        scored = [path for path in whole if step_of(path) in scores]
        scored.sort(key=lambda path: (scores[step_of(path)], step_of(path)), reverse=True)
        last = whole[-self.num_last_kept :] if self.num_last_kept else []
        return [*super()._kept_checkpoints(run), *scored[: self.num_best_kept], *last]

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        column = self.args.length_column_name
        if self.args.train_sampling_strategy != "group_by_length" or column not in getattr(dataset, "column_names", ()):
            return super()._get_train_sampler(train_dataset)
        return LengthGroupedSampler(dataset[column][:], self.args.train_batch_size, data_seed(self.args))

    def _get_dataloader(self, dataset, *args, is_training=False, **kwargs):
        drops = self.args.dataloader_drop_last
        try:
            # What is evaluated is never left out.
            self.args.dataloader_drop_last = drops and is_training
            return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_drop_last = drops

    def save_model(self, output_dir=None, _internal_call=False):
        """As the parent's, and whole also where a checkpoint is not: there, transformers saves no model that can be loaded."""
        is_checkpoint = _internal_call and output_dir is not None
        if self.has_whole_checkpoints or (is_checkpoint and not self.is_fsdp_enabled):
            super().save_model(output_dir, _internal_call)
        elif is_checkpoint:
            # The shares of its weights follow.
            self._save_around_weights(output_dir)
        else:
            is_fsdp = self.is_fsdp_enabled
            state = self.accelerator.get_state_dict(self.model) if is_fsdp else gather_partitions(self.model)
            self._save(output_dir or self.args.output_dir, state)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_around_weights(self, folder: str) -> None:
        """What a checkpoint needs beside the weights, for the run to go on."""
        if not self.args.should_save:
            return
        with as_plain_class(self.model):
            self.model.config.save_pretrained(folder)
            self.model.generation_config.save_pretrained(folder)
        if self.tokenizers is not None:
            self.tokenizers.save_pretrained(folder)

    def _save(self, output_dir=None, state_dict=None):
        if state_dict is not None:
            # Gathered one by one, tied weights have lost their ties.
            tied = self.model.all_tied_weights_keys
            state_dict = {name: state for name, state in state_dict.items() if name not in tied}
        with as_plain_class(self.model):
            super()._save(output_dir, state_dict)
        if is_adapted(self.model):
            # peft saves the adapter alone.
            self.model.generation_config.save_pretrained(output_dir or self.args.output_dir)
        if self.tokenizers is not None and self.args.should_save:
            self.tokenizers.save_pretrained(output_dir or self.args.output_dir)

    def _issue_warnings_after_load(self, load_result):
        # A checkpoint holds tied weights once: their other names are not missing.
        tied = self.model.all_tied_weights_keys
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(type(load_result)(missing, load_result.unexpected_keys))

    def _loss_of_logits(self, outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
        smoothing = self.label_smoothing if self.model.training else 0.0
        return sequence_loss(outputs["logits"], labels, num_items_in_batch, smoothing)

    @property
    def _has_own_loss(self) -> bool:
        """Whether a `compute_loss_func` was given."""
        return self.compute_loss_func is not None and self.compute_loss_func != self._loss_of_logits

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        is_training, num_labels = model.training, 0
        if not is_training:
            state, labels = self.accelerator.gradient_state, inputs["labels"]
            if state.end_of_dataloader:
                labels = self._own_labels(labels, state.remainder)
            num_labels = (labels != IGNORED_LABEL).sum().item()
            # A batch of repeats alone is computed as it stands and not counted: where weights are shared, all must take part.
            inputs = {**inputs, "labels": labels} if num_labels else inputs
        is_given = self._has_own_loss
        # For a function, the parent takes away the labels, of which models make what their decoder reads.
        if is_given:
            inputs = self._with_shifted_labels(inputs)
        elif self.compute_loss_func is not None:
            inputs = with_decoder_inputs(self.model, inputs)
            model = partial(model, labels=inputs["labels"])
        elif is_training:
            inputs = {**inputs, "smoothing": self.label_smoothing}
        if is_training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._evaluates_without_logits and self._is_packing_model and not is_given:
            inputs = {**inputs, "return_logits": False}
        # A function that was given divides by what it is told.
        count = torch.tensor(max(num_labels, 1), device=labels.device) if is_given else None
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=count)
        self._count_loss(loss, num_labels)
        return (loss, outputs) if return_outputs else loss

    def _with_shifted_labels(self, inputs: Mapping) -> dict:
        """Inputs with what the decoder reads, for a model that does not get to see the labels."""
        model = self.accelerator.unwrap_model(self.model)
        if "decoder_input_ids" in inputs or not hasattr(model, "prepare_decoder_input_ids_from_labels"):
            return dict(inputs)
        packed = {name: inputs[name] for name in ("target_lengths",) if name in inputs}
        return {**inputs, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(inputs["labels"], **packed)}


def _smooths(model: PreTrainedModel) -> bool:
    """Whether a model's own loss knows label smoothing, as that of Metaphrase models does."""
    base = model.get_base_model() if is_adapted(model) else model
    return "smoothing" in inspect.signature(base.forward).parameters
