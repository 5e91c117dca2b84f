"""Evaluation of a trainer: a loss over all tokens, and scores of texts that are decoded in batches of like length."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from accelerate.utils import gather_object

from metaphrase.data.collators import source_of
from metaphrase.inference import decode
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.training.distributed import sum_over_processes


class EvaluationMixin:
    """Evaluation whose loss is a mean over tokens, and which decodes texts for a `score`; stands before `Seq2SeqTrainer`.

    The trainer has `whole_model()`, and its `compute_loss` adds the loss of each batch to `evaluation_loss`.
    """

    score: Callable[[list[list[int]], list[list[int]]], dict[str, float]] | None = None
    decoded_rows: Sequence[int] | None = None
    generation_options: Mapping = {}
    # Sum of the losses of all labels, and number of labels, in this process and evaluation.
    evaluation_loss = torch.zeros(2, dtype=torch.float64)
    _needs_loss_alone = False
    _is_own_dataset = True

    @property
    def decodes(self) -> bool:
        """True if the evaluation decodes texts for `score`."""
        return self.args.predict_with_generate and self.score is not None and not self.args.prediction_loss_only

    @property
    def evaluates_without_logits(self) -> bool:
        """True if nothing of the evaluation reads logits."""
        return self.decodes or self._needs_loss_alone

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval", **gen_kwargs):
        self._is_own_dataset = eval_dataset is None or eval_dataset is self.eval_dataset
        options = self._decoding_options(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **options)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test", **gen_kwargs):
        """Predict as the parent does. With `score`, predictions are token ids (rows, longest), padded with -100.

        The rows are all rows, but for `eval_dataset` only `decoded_rows`.
        """
        self._is_own_dataset = test_dataset is self.eval_dataset
        options = self._decoding_options(gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix, **options)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self.evaluation_loss = torch.zeros(2, dtype=torch.float64)
        # Loaders with persistent workers count epochs: another epoch would have other noise.
        dataloader.iteration = 0
        decodes = self.decodes
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        self._needs_loss_alone = prediction_loss_only or decodes
        try:
            output = super().evaluation_loop(
                dataloader, description, self._needs_loss_alone, ignore_keys, metric_key_prefix
            )
        finally:
            self._needs_loss_alone = False
        total, count = sum_over_processes(self.accelerator, self.args, self.evaluation_loss)
        if count:
            output.metrics[f"{metric_key_prefix}_loss"] = total / count
            output.metrics[f"{metric_key_prefix}_perplexity"] = float(torch.tensor(total / count).exp())
        if decodes:
            decoded, labels = self._decode(dataloader.dataset)
            scores = self.score(decoded, labels)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
            output = output._replace(predictions=_as_array(decoded), label_ids=_as_array(labels))
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        loss, generated, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
        )
        if loss is not None and self.args.predict_with_generate and not prediction_loss_only:
            # The parent does not compute this loss by `compute_loss`.
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(inputs)).detach()
        return loss, generated, labels

    def _decoding_options(self, call: Mapping) -> dict:
        """Return arguments of `generate()`: of this call, over those of the trainer. The parent adds training arguments."""
        limits = {"max_length", "max_new_tokens"}
        # `generate()` obeys `max_new_tokens` where both limits are set.
        overridden = limits if limits & call.keys() else set()
        return {name: value for name, value in self.generation_options.items() if name not in overridden} | call

    def _decode(self, dataset: Sequence[dict]) -> tuple[list[list[int]], list[list[int]]]:
        """Decode this process's share of the chosen rows. Return the decoded ids and the label ids of all processes."""
        is_chosen = self.decoded_rows is not None and self._is_own_dataset
        rows = list(self.decoded_rows if is_chosen else range(len(dataset)))
        share = range(self.args.process_index, len(rows), self.args.world_size)
        hypotheses = decode(
            self.whole_model(),
            [source_of(dataset[rows[index]]) for index in share],
            batch_size=self.args.per_device_eval_batch_size,
            show_progress=None if not self.args.disable_tqdm and self.is_world_process_zero() else False,
            **{name: value for name, value in self._gen_kwargs.items() if value is not None},
        )
        decoded = [(index, candidates[0].ids) for index, candidates in zip(share, hypotheses, strict=True)]
        if self.args.world_size > 1:
            decoded = gather_object(decoded)
        # Labels may have been padded already.
        labels = [[label for label in dataset[row]["labels"] if label != IGNORED_LABEL] for row in rows]
        return [ids for _, ids in sorted(decoded)], labels


def _as_array(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return ids (rows, longest), padded as transformers pads predictions."""
    array = np.full((len(rows), max(map(len, rows), default=0)), IGNORED_LABEL)
    for row, ids in enumerate(rows):
        array[row, : len(ids)] = ids
    return array
