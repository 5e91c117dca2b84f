"""Corpora of plain text for denoising."""

import logging
from collections.abc import Iterable

from metaphrase.data.denoising.dataset import DenoisingDataset, longest_block, make_objective, objective_tokens
from metaphrase.data.denoising.span_corruption import MIN_BLOCK_LENGTH
from metaphrase.data.pairs import column_texts
from metaphrase.data.text_blocks import load_texts, text_blocks
from metaphrase.tokenization import TokenizerPair
from metaphrase.training.corpora import PairCorpus

logger = logging.getLogger(__name__)


class TextCorpus(PairCorpus):
    """Plain text, from which a denoising objective makes pairs: the corrupted text and its hidden spans."""

    def _check(self) -> None:
        if self.recipe.train_text_file is None:
            raise ValueError(f"`objective` {self.recipe.objective} must come with `train_text_file`, got none.")

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return objective_tokens(self.recipe.objective, self.recipe.num_sentinels)

    def load(self) -> None:
        for split in ("train", "validation"):
            if getattr(self.recipe, f"{split}_text_file") is not None:
                path = self.recipe.data_path(f"{split}_text_file")
                max_samples = getattr(self.recipe, f"max_{split}_samples")
                self.splits[split] = load_texts(path, max_samples, invalid_utf8=self.recipe.invalid_utf8)

    def sides(self) -> tuple[Iterable[str], Iterable[str]]:
        texts = self.splits["train"]
        if self.recipe.invalid_utf8 == "skip":
            texts = texts.filter(lambda text: text is not None, input_columns=["text"], desc="Selecting valid UTF-8")
        return column_texts(texts, "text"), ()

    def _encode(self, split: str, tokenizers: TokenizerPair) -> DenoisingDataset:
        recipe = self.recipe
        objective = make_objective(
            recipe.objective, tokenizers.source, recipe.noise_density, recipe.mean_span_length, recipe.spans_anywhere
        )
        length = longest_block(objective, recipe.max_source_length, recipe.max_target_length)
        blocks, self.reports[split] = text_blocks(
            self.splits[split],
            tokenizers,
            length,
            end_documents=recipe.end_documents,
            remainder=recipe.remainder,
            least_length=1 if recipe.objective == "text_infilling" else MIN_BLOCK_LENGTH,
        )
        logger.info("%s: %s", split, self.reports[split])
        return DenoisingDataset(blocks, objective, self.seed)

    def scored_split(self) -> None:
        return None

    def sizes(self) -> dict[str, int]:
        return {f"num_{name}_documents": len(split) for name, split in self.splits.items()}
