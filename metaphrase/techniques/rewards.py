"""Training by the scores of generated targets, in place of the cross-entropy of references.

A source of a batch stands once in a packed row, and has several targets with a weight each: candidates that the model has drawn,
and the reference. The cross-entropy times these weights has the gradient of the loss. The encoder, and the keys and values of
the cross-attention, are computed once for all targets of a source.

Source: expected risk by Shen et al. 2016, section 3.1, arXiv 1512.02433, and Edunov et al. 2018, section 3.2, arXiv 1711.04956;
REINFORCE by Ahmadian et al. 2024, section 3.2, arXiv 2402.14740; with the standard deviation by Shao et al. 2024, section 4.1,
arXiv 2402.03300.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from metaphrase.analysis.comparison import score_sentences
from metaphrase.analysis.judges import Judge, load_judge
from metaphrase.data.pairs import WEIGHT_COLUMN
from metaphrase.decoding.fast_generation import sample_by_prefix
from metaphrase.evaluation.metrics import METRICS, metric_options
from metaphrase.inference import decode
from metaphrase.modeling import IGNORED_LABEL
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.recipe.recipe import Recipe, is_better_lower
from metaphrase.training.trainer import TOKENS_MULTIPLE

logger = logging.getLogger(__name__)

# Samples of the whole distribution of the model, whatever its settings for generation are.
_SAMPLING = {"do_sample": True, "num_beams": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
Ids = tuple[int, ...]


def load_reward(name: str, bleu_tokenize: str | None = None) -> Judge:
    """Return the score that a reward names: a metric of `evaluate`, of single sentences from 0 to 1, or a judge."""
    options = metric_options(["bleu"], bleu_tokenize)["bleu"] if name == "bleu" and bleu_tokenize else {}
    if name not in METRICS:
        return load_judge(name, show_progress=False)

    def score(_: Any, targets: Sequence[str], references: Sequence[str]) -> list[float]:
        return [value / 100 for value in score_sentences(METRICS[name].segments(targets, references, **options))]

    return Judge(name, score, is_better_lower(name))


def rloo_weights(rewards: np.ndarray, log_probs: np.ndarray | None = None) -> np.ndarray:
    """Return weights of samples: reward minus the mean reward of the others, divided by the number of samples."""
    return (rewards - rewards.mean()) / (len(rewards) - 1)


def grpo_weights(rewards: np.ndarray, log_probs: np.ndarray | None = None) -> np.ndarray:
    """Return weights of samples: standardized rewards, divided by the number of samples."""
    return (rewards - rewards.mean()) / (len(rewards) * rewards.std(ddof=1))


def risk_weights(rewards: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Return weights of different candidates, whose probabilities are renormalized. The risk is minus the expected reward."""
    probabilities = np.exp(log_probs - log_probs.max())
    probabilities /= probabilities.sum()
    return probabilities * (rewards - probabilities @ rewards)


# The function of the weights of the candidates of a source, by the loss. Risk counts equal candidates once.
WEIGHTS = {"risk": risk_weights, "rloo": rloo_weights, "grpo": grpo_weights}


def pack(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Mapping[Ids, float]],
    multiple: int = 1,
    is_merged: bool = False,
) -> dict[str, torch.Tensor]:
    """Return a packed row of sources with several targets each, which come with their weights.

    Args:
        sources: Token ids, the longest first.
        targets: Weights of the targets of each source, by their token ids.
        multiple: Fills both rows up to a multiple of this many tokens, by a last source with one target.
        is_merged: True to repeat the source for each target, which a merged attention of the decoder needs.
    """
    counts, rows, weights = [*map(len, targets)], [*chain.from_iterable(targets)], []
    for of_source in targets:
        weights += of_source.values()
    if is_merged:
        sources = [source for source, count in zip(sources, counts, strict=True) for _ in range(count)]
        counts = [1] * len(rows)
    sides = [[*sources], rows]
    missing = [-sum(map(len, side)) % multiple for side in sides]
    if any(missing):
        counts, weights = [*counts, 1], [*weights, 0.0]
        for side, pad, count in zip(sides, (0, IGNORED_LABEL), missing, strict=True):
            side.append([pad] * (count or multiple))
    batch = {"targets_per_source": torch.tensor(counts), WEIGHT_COLUMN: torch.tensor(weights)}
    for (ids, sizes), side in zip((("input_ids", "source_lengths"), ("labels", "target_lengths")), sides, strict=True):
        batch |= {ids: torch.tensor([[*chain.from_iterable(side)]]), sizes: torch.tensor([*map(len, side)])}
    return batch


def rows_of(batch: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return the source ids and the labels of the pairs of a padded or packed batch, the longest sources first.

    Labels may be padded with -100. Fillers of a batch, which have no labels, are left out.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    if "source_lengths" in batch:
        sources = ids[0].split(batch["source_lengths"].tolist())
        targets = labels[0].split(batch["target_lengths"].tolist())
    else:
        sources, targets = [row[mask > 0] for row, mask in zip(ids, batch["attention_mask"], strict=True)], labels
    pairs = zip(sources, targets, strict=True)
    rows = [(source.tolist(), target.tolist()) for source, target in pairs if (target != IGNORED_LABEL).any()]
    return sorted(rows, key=lambda row: -len(row[0]))


def unpack(batch: Mapping[str, Any]) -> list[tuple[list[int], Ids]]:
    """Return the token ids of the pairs of a padded or packed batch, the longest sources first."""
    rows = rows_of(batch)
    return [(source, tuple(label for label in labels if label != IGNORED_LABEL)) for source, labels in rows]


class RewardTraining(TrainerCallback, ExportableState):
    """Function that replaces the pairs of a batch by sources with weighted candidates, and logs their mean reward."""

    def __init__(self, recipe: Recipe, tokenizers: TokenizerPair):
        self.tokenizers, self.recipe, self.judge = tokenizers, recipe, load_reward(recipe.reward, recipe.bleu_tokenize)
        self.multiple = TOKENS_MULTIPLE if recipe.bf16 or recipe.fp16 else 1
        # Mean rewards of the sources since the last log.
        self.rewards: list[float] = []
        self.has_warned = False

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"rewards": self.rewards, "has_warned": self.has_warned}}

    def logged(self) -> dict[str, float]:
        """Return what the log of the trainer gets, and begin again."""
        rewards, self.rewards = self.rewards, []
        return {"reward": sum(rewards) / len(rewards)} if rewards else {}

    def __call__(self, model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a packed batch in place of a batch of pairs."""
        pairs, device, share = unpack(batch), batch["labels"].device, self.recipe.cross_entropy_share
        if not pairs:
            # All processes must compute.
            return dict(batch)
        rows, log_probs = self._candidates(model, [source for source, _ in pairs])
        rewards = self._rewards(pairs, rows)
        learned: list[tuple[list[int], dict[Ids, float]]] = []
        for (source, reference), row, values, of_row in zip(pairs, rows, rewards, log_probs, strict=True):
            weights: Counter[Ids] = Counter()
            # Equal rewards have no gradient.
            if np.ptp(values) > 0:
                for ids, weight in zip(row, WEIGHTS[self.recipe.reward_loss](values, of_row), strict=True):
                    weights[ids] += (1 - share) * weight
            weights[reference] += share
            if any(weights.values()):
                learned.append((source, {ids: weight for ids, weight in weights.items() if weight}))
        if not any(np.ptp(values) > 0 for values in rewards) and not self.has_warned:
            logger.warning("The candidates of each source of a batch have equal rewards by %s.", self.recipe.reward)
            self.has_warned = True
        learned = learned or [(pairs[0][0], {pairs[0][1]: 0.0})]
        packed = pack(*zip(*learned, strict=True), self.multiple, model.config.merged_attention)
        return {name: value.to(device) for name, value in packed.items()}

    def _candidates(
        self, model: PreTrainedModel, sources: Sequence[Sequence[int]]
    ) -> tuple[list[list[Ids]], list[np.ndarray | None]]:
        """Return the candidates of each source; for the risk, different ones alone, and their log-probabilities."""
        is_risk, count = self.recipe.reward_loss == "risk", self.recipe.num_candidates
        has_beams = self.recipe.candidates == "beam"
        beams = {"num_beams": count, "do_sample": False, "length_penalty": 1.0}
        options = beams if has_beams else {"search": sample_by_prefix, **_SAMPLING}
        size = {"num_return_sequences": count, "batch_size": len(sources), "return_scores": is_risk}
        with torch.autocast(model.device.type, enabled=False):
            rows = decode(model, sources, **size, **options)
        if not is_risk:
            return [[tuple(item.ids) for item in row] for row in rows], [None] * len(rows)
        # The score of a beam is the mean of its tokens.
        totals = [{tuple(item.ids): item.score * (len(item.ids) if has_beams else 1) for item in row} for row in rows]
        return [[*row] for row in totals], [np.array([*row.values()]) for row in totals]

    def _rewards(self, pairs: Sequence[tuple[list[int], Ids]], rows: Sequence[Sequence[Ids]]) -> list[np.ndarray]:
        """Return the rewards of the candidates of each source."""
        tokenizers, owners = self.tokenizers, [index for index, row in enumerate(rows) for _ in row]
        sources = [tokenizers.source.decode(source, skip_special_tokens=True) for source, _ in pairs]
        references = tokenizers.decode_targets([reference for _, reference in pairs])
        targets = tokenizers.decode_targets([*chain.from_iterable(rows)])
        columns = [sources[index] for index in owners], targets, [references[index] for index in owners]
        rewards = np.split(self.judge.utilities(*columns), np.cumsum([*map(len, rows)])[:-1])
        self.rewards += [float(of_row.mean()) for of_row in rewards]
        return rewards
