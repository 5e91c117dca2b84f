"""MetaphraseTrainer: `Seq2SeqTrainer` with the loss left to the model and an evaluation that decodes by length."""

from collections.abc import Callable, Sequence

import torch
from accelerate.utils import gather_object
from transformers import Seq2SeqTrainer

from metaphrase.inference import decode
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.batching import LengthGroupedSampler


class MetaphraseTrainer(Seq2SeqTrainer):
    """Trains an encoder-decoder.

    It differs from its parent in a few things. Batches of like length (`train_sampling_strategy: group_by_length`) come in
    random order, where the parent's run from the longest to the shortest again and again. Label smoothing happens inside the
    model, so it needs no decoder input from the collator, follows `num_items_in_batch`, and leaves the evaluation loss what it
    says it is. That loss is the mean over all tokens, not over batches, and its exponential is reported as perplexity. With
    `predict_with_generate`, the evaluation decodes in batches of like length and hands texts to `score`.
    """

    def __init__(
        self,
        *args,
        tokenizers: TokenizerPair | None = None,
        score: Callable[[list[list[int]], list[list[int]]], dict[str, float]] | None = None,
        generation_options: dict | None = None,
        **kwargs,
    ):
        """Adds to the parent's arguments:

        Args:
            tokenizers: Saved with every checkpoint.
            score: Takes decoded ids and label ids of the whole evaluation set, in order, and returns named scores.
            generation_options: Arguments of `generate()` for the evaluation.
        """
        super().__init__(*args, **kwargs)
        self.tokenizers = tokenizers
        self.score = score
        self.generation_options = dict(generation_options or {})
        self.label_smoothing = self.args.label_smoothing_factor
        # The parent's smoother would take the labels away from the model.
        self.label_smoother = None
        self._evaluation_loss = torch.zeros(2, dtype=torch.float64)

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        column = self.args.length_column_name
        if self.args.train_sampling_strategy != "group_by_length" or column not in getattr(dataset, "column_names", ()):
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return LengthGroupedSampler(list(dataset[column]), self.args.train_batch_size, seed)

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.tokenizers is not None:
            self.tokenizers.save_pretrained(output_dir or self.args.output_dir)

    def _issue_warnings_after_load(self, load_result):
        # A checkpoint holds tied weights once: their other names are not missing.
        tied = self.model.all_tied_weights_keys
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(type(load_result)(missing, load_result.unexpected_keys))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model.training:
            inputs = {**inputs, "smoothing": self.label_smoothing}
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=None)
        num_labels = (inputs["labels"] != IGNORED_LABEL).sum().item()
        self._evaluation_loss += torch.tensor([loss.item() * num_labels, num_labels], dtype=torch.float64)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self._evaluation_loss.zero_()
        decodes = self.args.predict_with_generate and self.score is not None
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only or decodes, ignore_keys, metric_key_prefix
        )
        total, count = self._sum_over_processes(self._evaluation_loss)
        if count:
            output.metrics[f"{metric_key_prefix}_loss"] = total / count
            output.metrics[f"{metric_key_prefix}_perplexity"] = float(torch.tensor(total / count).exp())
        if decodes:
            scores = self._decode_and_score(dataloader.dataset)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
        return output

    def _sum_over_processes(self, values: torch.Tensor) -> list[float]:
        gathered = self.accelerator.gather(values.float().to(self.args.device)[None])
        return (gathered.double().sum(dim=0) if self.args.world_size > 1 else values).tolist()

    def _decode_and_score(self, dataset: Sequence[dict]) -> dict[str, float]:
        """Decodes this process's share of the data set, gathers all and scores them."""
        rank, processes = self.args.process_index, self.args.world_size
        indices = range(rank, len(dataset), processes)
        hypotheses = decode(
            self.accelerator.unwrap_model(self.model, keep_torch_compile=False),
            [dataset[index]["input_ids"] for index in indices],
            batch_size=self.args.per_device_eval_batch_size,
            show_progress=None if not self.args.disable_tqdm and self.is_world_process_zero() else False,
            **self.generation_options,
        )
        decoded = [(index, candidates[0].ids) for index, candidates in zip(indices, hypotheses, strict=True)]
        if processes > 1:
            decoded = gather_object(decoded)
        in_order = [ids for _, ids in sorted(decoded)]
        return self.score(in_order, [dataset[index]["labels"] for index in range(len(dataset))])
