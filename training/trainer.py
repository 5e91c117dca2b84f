"""`MetaphraseTrainer`: transformers' `Seq2SeqTrainer` for encoder-decoders, with all that this package adds to training."""

import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Seq2SeqTrainer

from metaphrase.data.collators import with_decoder_inputs
from metaphrase.modeling import IGNORED_LABEL, sequence_loss
from metaphrase.storage.folders import set_modes_of_weights
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.adapters import is_adapted
from metaphrase.training.checkpointing.averaging import DEFAULT_METRIC, is_better_lower, scores_in
from metaphrase.training.checkpointing.folders import ARGUMENTS_NAME, checkpoints_in, step_of
from metaphrase.training.checkpointing.sharding import (
    as_plain_class,
    gather_model,
    gather_partitions,
    is_sharded,
    keep_embeddings_together,
)
from metaphrase.training.checkpointing.trainer_mixin import WholeCheckpoints
from metaphrase.training.distributed import ProcessSeeds, ignore_repeated_pairs
from metaphrase.training.divergence import FiniteTraining
from metaphrase.training.evaluation_loop import EvaluationMixin
from metaphrase.training.loaders import DataLoadersMixin
from metaphrase.training.optimizer import optimizer_class_and_options

logger = logging.getLogger(__name__)

_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


class MetaphraseTrainer(FiniteTraining, EvaluationMixin, DataLoadersMixin, WholeCheckpoints, Seq2SeqTrainer):
    """Trainer of an encoder-decoder.

    - Batches: by a token budget with `max_tokens_per_batch`, or of like length. See `DataLoadersMixin`.
    - Loss: a mean over the tokens of a whole step, for models of other families too. So gradient accumulation and several
      processes give the gradient of one large batch, unless a `compute_loss_func` computes it. The model smooths labels, and in
      training alone. R-Drop runs each batch twice in one call, which needs the memory of two batches, and adds the divergence of
      the two predictions (Liang et al. 2021, section 2, arXiv 2106.14448).
    - Evaluation: the loss is a mean over tokens that counts each pair once. `score` gets decoded texts. See `EvaluationMixin`.
    - Checkpoints: whole, or absent. A resumed run ends as one that never stopped. See `WholeCheckpoints`.
    - Divergence: an error ends a training that is no longer finite. See `FiniteTraining`.
    """

    get_optimizer_cls_and_kwargs = staticmethod(optimizer_class_and_options)

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
        num_best_kept: int = 0,
        num_last_kept: int = 0,
        best_kept_metric: str | None = None,
        **kwargs,
    ):
        """Add to the parent's arguments:

        Args:
            tokenizers: Saved with every checkpoint.
            score: Function of decoded ids and label ids, row by row, that returns named scores.
            generation_options: Arguments of `generate()` for the evaluation.
            max_tokens_per_batch: Most tokens of both sides in a batch of one device, padding included, for training and for the
                evaluation loss. The data sets need the columns `source_length` and `target_length`. With `None`,
                `per_device_train_batch_size` holds.
            decoded_rows: Rows of `eval_dataset` to decode; `None` means all. Of other data sets, all rows are decoded.
            r_drop_alpha: Weight of the divergence of two passes (5 for translation in Liang et al. 2021); 0 is plain training.
            r_drop_start_step: Updates of plain training before R-Drop.
            num_best_kept: Number of checkpoints, the best by `best_kept_metric`, to keep whatever their age.
            num_last_kept: Number of last checkpoints to keep beside the best.
            best_kept_metric: An evaluated metric; by default `metric_for_best_model`, or else BLEU.
        """
        super().__init__(*args, **kwargs)
        self.tokenizers = tokenizers
        self.score = score
        self.generation_options = dict(generation_options or {})
        self.max_tokens_per_batch = max_tokens_per_batch
        self.decoded_rows = decoded_rows
        self.r_drop_alpha = r_drop_alpha
        self.r_drop_start_step = r_drop_start_step
        self.num_best_kept, self.num_last_kept = num_best_kept, num_last_kept
        self.best_kept_metric = best_kept_metric or self.args.metric_for_best_model or DEFAULT_METRIC
        self.label_smoothing = self.args.label_smoothing_factor
        # The parent's smoother would hide the labels from the model.
        self.label_smoother = None
        self.has_custom_loss = self.compute_loss_func is not None
        self._check_arguments()
        if not self.has_custom_loss and not _smooths_labels(self.model):
            # Models of other families neither smooth labels nor divide by the labels of the whole step.
            self.compute_loss_func = self._loss_of_logits
        self.add_callback(ProcessSeeds(self.accelerator))

    def _check_arguments(self) -> None:
        if self.decodes and self.compute_metrics is not None:
            raise ValueError("`score` and `compute_metrics` must not both be given with `predict_with_generate`.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"`label_smoothing_factor` must be at least 0 and below 1, got {self.label_smoothing}.")
        if not 0 <= self.r_drop_alpha < math.inf:
            raise ValueError(f"`r_drop_alpha` must be at least 0 and finite, got {self.r_drop_alpha}.")
        if self.r_drop_alpha and self.has_custom_loss:
            raise ValueError("`r_drop_alpha` must be left out with `compute_loss_func`, which knows of no second pass.")
        if self.r_drop_alpha:
            # The passes may differ by other noise than the model's dropout.
            check_r_drop(self.model, other_dropout=1.0)
        metric = self.args.metric_for_best_model
        if metric is not None and self.args.greater_is_better is is_better_lower(metric):
            logger.warning(
                "`greater_is_better` is %s, while %s is better when it is %s.",
                *(self.args.greater_is_better, metric, "lower" if is_better_lower(metric) else "higher"),
            )

    # Training

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            self.accelerator.prepare = keep_embeddings_together(self.accelerator.prepare)

    # Loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            return self._compute_evaluation_loss(model, inputs, return_outputs)
        if self._uses_r_drop():
            inputs = {**repeat_batch(inputs), "r_drop_alpha": self.r_drop_alpha}
            num_items_in_batch = None if num_items_in_batch is None else 2 * num_items_in_batch
        if self.compute_loss_func is None:
            inputs = {**inputs, "smoothing": self.label_smoothing}
        model, inputs = self._with_decoder_inputs(model, inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _compute_evaluation_loss(self, model, inputs, return_outputs):
        state, labels = self.accelerator.gradient_state, inputs["labels"]
        if state.end_of_dataloader:
            labels = ignore_repeated_pairs(labels, state.remainder, self.args.process_index)
        num_labels = (labels != IGNORED_LABEL).sum().item()
        # All processes must compute, where weights are sharded: a batch of repeated pairs alone runs with its labels, uncounted.
        inputs = {**inputs, "labels": labels} if num_labels else inputs
        model, inputs = self._with_decoder_inputs(model, inputs)
        if self.evaluates_without_logits and self.packs_pairs and not self.has_custom_loss:
            inputs = {**inputs, "return_logits": False}
        # A custom loss divides by the number it gets.
        count = torch.tensor(max(num_labels, 1), device=labels.device) if self.has_custom_loss else None
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=count)
        if num_labels:
            # Without labels the loss is undefined.
            counted = torch.tensor([loss.item() * num_labels, num_labels], dtype=torch.float64)
            self.evaluation_loss = self.evaluation_loss + counted
        return (loss, outputs) if return_outputs else loss

    def _uses_r_drop(self) -> bool:
        if self.r_drop_alpha and 0 < self.state.max_steps <= self.r_drop_start_step:
            # The number of steps of an epoch is not known earlier.
            raise ValueError(
                f"`r_drop_start_step` must be below the {self.state.max_steps} steps of the run, got {self.r_drop_start_step}."
            )
        return bool(self.r_drop_alpha) and self.state.global_step >= self.r_drop_start_step

    def _with_decoder_inputs(self, model, inputs: Mapping) -> tuple[Callable, Mapping]:
        """Return model and inputs so that the decoder gets its inputs, although the parent hides labels from the model."""
        if self.compute_loss_func is None:
            return model, inputs
        if not self.has_custom_loss:
            inputs = with_decoder_inputs(self.model, inputs)
            return partial(model, labels=inputs["labels"]), inputs
        network = self.accelerator.unwrap_model(self.model)
        if "decoder_input_ids" in inputs or not hasattr(network, "prepare_decoder_input_ids_from_labels"):
            return model, dict(inputs)
        packed = {name: inputs[name] for name in ("target_lengths",) if name in inputs}
        shifted = network.prepare_decoder_input_ids_from_labels(inputs["labels"], **packed)
        return model, {**inputs, "decoder_input_ids": shifted}

    def _loss_of_logits(self, outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
        smoothing = self.label_smoothing if self.model.training else 0.0
        return sequence_loss(outputs["logits"], labels, num_items_in_batch, smoothing)

    # Evaluation

    def whole_model(self) -> PreTrainedModel:
        """Return the model to decode with, whole on each process. If weights are sharded, all processes must call this."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        # FSDP 1 marks its wrapper, which is gone here, and not the model.
        return gather_model(model) if self.is_fsdp_enabled or is_sharded(model) else model

    # Saving

    @property
    def has_whole_checkpoints(self) -> bool:
        """True if a checkpoint holds weights for `from_pretrained`, not only the share of each process."""
        if self.is_fsdp_enabled:
            return "FULL" in str(self.accelerator.state.fsdp_plugin.state_dict_type)
        if not self.is_deepspeed_enabled:
            return True
        zero = self.accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        # accelerate does not gather with "auto".
        return zero.get("stage") != 3 or zero.get("stage3_gather_16bit_weights_on_model_save") is True

    def protected_checkpoints(self, run: Path) -> list[str | Path | None]:
        checkpoints = checkpoints_in(run)
        scores = scores_in(self.state.log_history, self.best_kept_metric)
        scored = [path for path in checkpoints if step_of(path) in scores]
        scored.sort(key=lambda path: (scores[step_of(path)], step_of(path)), reverse=True)
        last = checkpoints[-self.num_last_kept :] if self.num_last_kept else []
        return [*super().protected_checkpoints(run), *scored[: self.num_best_kept], *last]

    def save_model(self, output_dir=None, _internal_call=False):
        """Save the model as the parent does, and whole even if checkpoints are not."""
        if not (_internal_call and output_dir is not None):
            self._save_whole(output_dir, _internal_call)
            return
        if self.has_whole_checkpoints or not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            # accelerate saves the shares of the weights later.
            with as_plain_class(self.model):
                self.model.config.save_pretrained(output_dir)
            self._save_beside_weights(output_dir, has_generation_config=False)

    def _save_whole(self, output_dir: str | None, _internal_call: bool) -> None:
        if self.has_whole_checkpoints:
            super().save_model(output_dir, _internal_call)
            return
        state = self.accelerator.get_state_dict(self.model) if self.is_fsdp_enabled else gather_partitions(self.model)
        self._save(output_dir or self.args.output_dir, state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # transformers 5.24.0: writes the arguments as a pickle, and saves tied weights of a gathered state twice.
    def _save(self, output_dir=None, state_dict=None):
        folder = output_dir or self.args.output_dir
        if state_dict is not None:
            tied = self.model.all_tied_weights_keys
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        # If the model was sharded when it was loaded, all processes gather its weights.
        if self.args.should_save or getattr(self, "is_distributed_loading_by_transformers", False):
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            with as_plain_class(model):
                model.save_pretrained(folder, state_dict=state_dict, is_main_process=self.args.should_save)
        if self.args.should_save:
            processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processor is not None:
                processor.save_pretrained(folder)
            set_modes_of_weights(Path(folder))
            self._save_beside_weights(folder, not is_adapted(self.model))

    def _save_beside_weights(self, folder: str, has_generation_config: bool) -> None:
        arguments = json.dumps(self.args.to_dict(), indent=2, default=str)
        (Path(folder) / ARGUMENTS_NAME).write_text(arguments + "\n", encoding="utf-8")
        # peft saves the adapter alone.
        if not has_generation_config:
            self.model.generation_config.save_pretrained(folder)
        if self.tokenizers is not None:
            self.tokenizers.save_pretrained(folder)


def _smooths_labels(model: PreTrainedModel) -> bool:
    """True if the model's own loss smooths labels, as the loss of Metaphrase models does."""
    base = model.get_base_model() if is_adapted(model) else model
    return "smoothing" in inspect.signature(base.forward).parameters


def check_r_drop(model: PreTrainedModel, other_dropout: float) -> None:
    """Check that R-Drop can train a model.

    Args:
        model: The model to train.
        other_dropout: Dropout of an adapter beside the model.

    Raises:
        ValueError: If it is no Metaphrase model, or all dropout is 0, so that both passes agree.
    """
    if not _smooths_labels(model):
        raise ValueError(f"`r_drop_alpha` must come with a Metaphrase model, got a {type(model).__name__}.")
    if not other_dropout and not any(getattr(model.config, name) for name in _DROPOUTS):
        raise ValueError(f"`r_drop_alpha` must come with a model whose {', '.join(_DROPOUTS)} are not all 0.")


def repeat_batch(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with all its rows twice.

    Args:
        inputs: Tensors (B, ...), with `labels` among them. Plain values, and tensors without a row for each pair such as
            positions (1, T), are not repeated. A packed batch, which has `source_lengths`, is a row (1, tokens) and gets longer.
    """
    num_rows, is_packed = len(inputs["labels"]), inputs.get("source_lengths") is not None
    repeated = {}
    for name, value in inputs.items():
        is_batch = isinstance(value, torch.Tensor) and value.ndim > 0
        if is_batch and (is_packed or len(value) == num_rows):
            value = torch.cat([value, value], dim=min(value.ndim - 1, 1) if is_packed else 0)
        repeated[name] = value
    return repeated
