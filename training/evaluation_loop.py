"""Evaluation of a trainer: a loss over all tokens, and scores of what the model writes, decoded in batches of like length."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from accelerate.utils import gather_object

from metaphrase.data.collators import source_of
from metaphrase.inference import decode
from metaphrase.modeling import IGNORED_LABEL


class DecodedEvaluationMixin:
    """For a trainer, before its parents: an evaluation whose loss is a mean over tokens, and which decodes for a `score`.

    The trainer has `whole_model()`, and its `compute_loss` hands each loss to `_count_loss`.
    """

    score: Callable[[list[list[int]], list[list[int]]], dict[str, float]] | None = None
    decoded_rows: Sequence[int] | None = None
    generation_options: Mapping = {}
    # Sum over labels and their number, in this process and evaluation.
    _evaluation_loss = torch.zeros(2, dtype=torch.float64)
    _evaluates_loss_alone = False
    # Whether it is `eval_dataset` that is evaluated.
    _evaluates_own = True
    # Arguments of this call of `evaluate` or `predict`.
    _asked_of_decoding: Mapping = {}

    @property
    def _decodes(self) -> bool:
        return self.args.predict_with_generate and self.score is not None and not self.args.prediction_loss_only

    @property
    def _evaluates_without_logits(self) -> bool:
        return self._decodes or self._evaluates_loss_alone

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval", **gen_kwargs):
        self._evaluates_own = eval_dataset is None or eval_dataset is self.eval_dataset
        self._asked_of_decoding = gen_kwargs
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **gen_kwargs)

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test", **gen_kwargs):
        """As the parent's. With `score`, predictions are token ids `(rows, longest)`, and those of shorter rows end in -100.

        Rows are those that are decoded: all, but of `eval_dataset` only `decoded_rows`.
        """
        self._evaluates_own, self._asked_of_decoding = test_dataset is self.eval_dataset, gen_kwargs
        return super().predict(test_dataset, ignore_keys, metric_key_prefix, **gen_kwargs)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self._evaluation_loss = torch.zeros(2, dtype=torch.float64)
        # Loaders with persistent workers are kept, and count: another epoch would be evaluated with another noise.
        dataloader.iteration = 0
        decodes = self._decodes
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        self._evaluates_loss_alone = prediction_loss_only or decodes
        try:
            output = super().evaluation_loop(
                dataloader, description, self._evaluates_loss_alone, ignore_keys, metric_key_prefix
            )
        finally:
            self._evaluates_loss_alone = False
        total, count = self._sum_over_processes(self._evaluation_loss)
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
            # The parent's is that of one batch, and counted nowhere.
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(inputs)).detach()
        return loss, generated, labels

    def _count_loss(self, loss: torch.Tensor, num_labels: int) -> None:
        """Counts a batch's loss, a mean over so many labels; one without labels has none."""
        if num_labels:
            counted = torch.tensor([loss.item() * num_labels, num_labels], dtype=torch.float64)
            self._evaluation_loss = self._evaluation_loss + counted

    def _sum_over_processes(self, values: torch.Tensor) -> list[float]:
        gathered = self.accelerator.gather(values.float().to(self.args.device)[None])
        return (gathered.double().sum(dim=0) if self.args.world_size > 1 else values).tolist()

    def _decoding_options(self) -> dict:
        """Arguments of `generate()`: those of this call before those of the trainer, and these before the training arguments."""
        options, limits = dict(self.generation_options), ("max_length", "max_new_tokens")
        if any(name in self._asked_of_decoding for name in limits):
            # Of the two, `generate()` obeys the second.
            options = {name: value for name, value in options.items() if name not in limits}
        options |= self._asked_of_decoding
        if "max_new_tokens" not in options:
            options.setdefault("max_length", self.args.generation_max_length)
        options.setdefault("num_beams", self.args.generation_num_beams)
        return {name: value for name, value in options.items() if value is not None}

    def _decode(self, dataset: Sequence[dict]) -> tuple[list[list[int]], list[list[int]]]:
        """Decodes this process's share of the data set and gathers all: decoded ids and label ids of the chosen rows."""
        is_chosen = self.decoded_rows is not None and self._evaluates_own
        rows = list(self.decoded_rows if is_chosen else range(len(dataset)))
        own = range(self.args.process_index, len(rows), self.args.world_size)
        hypotheses = decode(
            self.whole_model(),
            [source_of(dataset[rows[place]]) for place in own],
            batch_size=self.args.per_device_eval_batch_size,
            show_progress=None if not self.args.disable_tqdm and self.is_world_process_zero() else False,
            **self._decoding_options(),
        )
        decoded = [(place, candidates[0].ids) for place, candidates in zip(own, hypotheses, strict=True)]
        if self.args.world_size > 1:
            decoded = gather_object(decoded)
        # Padded already, labels end in what is none.
        labels = [[label for label in dataset[row]["labels"] if label != IGNORED_LABEL] for row in rows]
        return [ids for _, ids in sorted(decoded)], labels


def _as_array(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Ids `(rows, longest)`, padded as transformers pads what it predicts."""
    array = np.full((len(rows), max(map(len, rows), default=0)), IGNORED_LABEL)
    for row, ids in enumerate(rows):
        array[row, : len(ids)] = ids
    return array
