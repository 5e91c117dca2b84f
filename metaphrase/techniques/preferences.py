"""Training by preferences: each source has a chosen target and a rejected one.

A loss is a function of the log-probabilities of both targets. Its derivatives by them are the weights of two targets in a packed
row, whose cross-entropy has the gradient of the loss (see `rewards.py`).

The loss of an optimizer step is the sum over its pairs, divided by the labels of all their targets, as the Trainer divides by
labels. TRL divides by the pairs: its gradient is this one times a number, the mean labels of a pair.

Source: DPO by Rafailov et al. 2023, equation 7, arXiv 2305.18290; IPO by Azar et al. 2024, equation 17, arXiv 2310.12036, with
means over tokens as in TRL; SimPO by Meng et al. 2024, equation 6, arXiv 2405.14734; CPO by Xu et al. 2024, section 3, arXiv
2401.08417, whose second term is here the mean over the tokens of a chosen target.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from metaphrase.data.pairs import WEIGHT_COLUMN
from metaphrase.inference.batches import DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH, evaluating
from metaphrase.inference.progress import progress_bar
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.ops.projected_loss import chunk_rows
from metaphrase.storage.folders import file_in_one_step
from metaphrase.techniques.rewards import Ids, pack, rows_of
from metaphrase.tokenization.texts import batches_by_length
from metaphrase.training.distributed import from_first_process, gather_model, is_sharded
from metaphrase.training.recipe.recipe import Recipe
from metaphrase.training.trainer import TOKENS_MULTIPLE

# Log-probabilities of the targets by the first weights, in the output directory.
REFERENCE_NAME = "reference_log_probs.npz"
# Losses that compare with the first weights, and losses of mean log-probabilities of tokens.
_OF_REFERENCE, _OF_MEANS = ("dpo", "ipo"), ("ipo", "simpo")
_LOGGED = ("loss", "rewards/accuracies", "rewards/margins")
# A source, and its chosen and rejected target.
Preference = tuple[list[int], tuple[Ids, Ids]]


def preference_of(source: list[int], labels: Sequence[int]) -> Preference:
    """Return a source and its two targets from its labels, in which -100 stands between the targets and fills up a row."""
    parts = groupby(labels, key=lambda label: label != IGNORED_LABEL)
    chosen, rejected = (tuple(part) for is_target, part in parts if is_target)
    return source, (chosen, rejected)


def _key_of(preference: Preference) -> int:
    source, targets = preference
    ids = np.array([len(source), len(targets[0]), *source, *targets[0], *targets[1]], dtype=np.int32)
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


def target_log_probs(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each target of a packed row, without dropout and gradients, `(targets)`."""
    lengths = batch["target_lengths"]

    def add_up(network: PreTrainedModel, hidden_states: torch.Tensor, labels: torch.Tensor, _: Any) -> torch.Tensor:
        size = chunk_rows(network.config.decoder_vocab_size)
        parts = zip(hidden_states[0].split(size), labels[0].split(size), strict=True)
        losses = [cross_entropy(network.project(states).float(), ids, reduction="none") for states, ids in parts]
        numbers = torch.arange(len(lengths), device=labels.device).repeat_interleave(lengths)
        return -torch.zeros(len(lengths), device=labels.device).index_add(0, numbers, torch.cat(losses))

    inputs = {name: value for name, value in batch.items() if name != WEIGHT_COLUMN}
    with torch.no_grad(), evaluating([model]):
        return model(**inputs, loss_of_states=add_up).loss


class PreferenceTraining(TrainerCallback, ExportableState):
    """Function that replaces the pairs of a batch by sources with two weighted targets, and logs their loss.

    The log-probabilities of both targets by the first weights are computed once, before training, and a resumed run reads them
    from the output directory. The log has the loss, the share of pairs whose margin is above 0, and beta times the mean margin,
    of the first process, under the names of TRL.
    """

    def __init__(self, recipe: Recipe, pairs: Iterable[Mapping[str, Any]]):
        """Take a recipe with a `rejected_column`, and its training pairs as `encode_pairs` returns them."""
        self.pairs, self.loss, self.gamma = pairs, recipe.preference_loss, recipe.simpo_gamma
        self.multiple = TOKENS_MULTIPLE if recipe.bf16 or recipe.fp16 else 1
        # The papers have 0.1 and 2, and CPO has two terms of equal weight.
        self.beta = recipe.preference_beta or (2.0 if self.loss == "simpo" else 0.1)
        usual = 0.5 if self.loss == "cpo" else 0.0
        self.share = usual if recipe.is_open("cross_entropy_share") else recipe.cross_entropy_share
        self.reference: dict[int, Sequence[float]] | None = None
        # Number of pairs since the last log, and sums of what is logged.
        self.totals = [0.0] * (1 + len(_LOGGED))

    def losses(
        self, log_probs: torch.Tensor, lengths: torch.Tensor, reference: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each pair, and beta times its margin, `(pairs,)` each.

        All arguments have values of the chosen and of the rejected targets, `(pairs, 2)`: log-probabilities, tokens, and
        log-probabilities by the first weights, or 0.
        """
        scores = (log_probs - reference) / (lengths if self.loss in _OF_MEANS else 1)
        margins = scores[:, 0] - scores[:, 1]
        losses = -logsigmoid(self.beta * margins - (self.gamma if self.loss == "simpo" else 0.0))
        losses = (margins - 1 / (2 * self.beta)) ** 2 if self.loss == "ipo" else losses
        return (1 - self.share) * losses - self.share * log_probs[:, 0] / lengths[:, 0], self.beta * margins

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"totals": self.totals}}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.loss in _OF_REFERENCE:
            path, show_progress = Path(args.output_dir) / REFERENCE_NAME, not args.disable_tqdm
            if is_sharded(model) and not state.global_step:
                model = gather_model(model)

            def reference() -> dict[int, Sequence[float]]:
                if not state.global_step:
                    self._write_reference(model, path, show_progress)
                with np.load(path) as file:
                    return dict(zip(file["keys"].tolist(), file["log_probs"].tolist(), strict=True))

            self.reference = from_first_process(reference)

    def logged(self) -> dict[str, float]:
        """Return what the log of the trainer gets, and begin again."""
        (number, *sums), self.totals = self.totals, [0.0] * len(self.totals)
        return {name: total / number for name, total in zip(_LOGGED, sums, strict=True)} if number else {}

    def __call__(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a packed batch in place of a batch of pairs."""
        preferences, device = [preference_of(*row) for row in rows_of(batch)], batch["labels"].device
        if not preferences:
            # All processes must compute.
            return dict(batch)
        row, all_log_probs, places = self._log_probs(model, preferences, device)
        all_log_probs.requires_grad_()
        log_probs, lengths = all_log_probs[places], row["target_lengths"].cpu()[places]
        reference: Any = 0.0
        if self.reference is not None:
            reference = torch.tensor([[*self.reference[_key_of(item)]] for item in preferences], dtype=torch.float64)
        elif self.loss in _OF_REFERENCE:
            # An estimate of a run knows no other weights.
            reference = log_probs.detach()
        losses, margins = self.losses(log_probs, lengths, reference)
        losses.sum().backward()
        logged = [torch.ones_like(margins), losses.detach(), (margins > 0).double(), margins.detach()]
        self.totals = [total + float(values.sum()) for total, values in zip(self.totals, logged, strict=True)]
        return row | {WEIGHT_COLUMN: -all_log_probs.grad.float().to(device)}

    def _log_probs(
        self, model: PreTrainedModel, preferences: Sequence[Preference], device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Return a packed row, the log-probabilities of its targets, and the places `(pairs, 2)` of those of each source.

        The longest sources come first. Two equal targets of a source are one.
        """
        targets = [dict.fromkeys(pair, 1.0) for _, pair in preferences]
        row = pack([source for source, _ in preferences], targets, self.multiple, model.config.merged_attention)
        row = {name: value.to(device) for name, value in row.items()}
        ends, counts = np.cumsum([*map(len, targets)]), np.array([*map(len, targets)])
        places = torch.from_numpy(np.stack([ends - counts, ends - 1], axis=1))
        return row, target_log_probs(model, row).cpu().double(), places

    def _write_reference(self, model: PreTrainedModel, path: Path, show_progress: bool) -> None:
        """Write the log-probabilities of both targets of all training pairs with their keys."""
        items = [preference_of(row["input_ids"], row["labels"]) for row in self.pairs]
        keys, values = [*map(_key_of, items)], np.zeros((len(items), 2))
        lengths = [len(source) + sum(map(len, targets)) for source, targets in items]
        with progress_bar(len(items), "pairs", show_progress) as progress:
            for batch in batches_by_length(lengths, DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH):
                batch.sort(key=lambda index: -len(items[index][0]))
                _, log_probs, places = self._log_probs(model, [items[index] for index in batch], model.device)
                values[batch] = log_probs[places].numpy()
                progress.update(len(batch))
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_in_one_step(path) as partial, partial.open("wb") as file:
            np.savez(file, keys=np.array(keys, dtype=np.uint64), log_probs=values)
