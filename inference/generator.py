"""Generator: texts in, texts out."""

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

import metaphrase.modeling  # noqa: F401 (registers the models with the Auto classes)
from metaphrase.inference.decoding import DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH, Engine, decode
from metaphrase.tokenization import TokenizerPair, set_languages

ENGINES = ("torch", "ctranslate2")


@dataclass(frozen=True)
class ScoredText:
    """One target text and its score (see `Hypothesis.score`)."""

    text: str
    score: float | None


class Generator:
    """A model with its tokenizers, ready to turn many texts into many texts.

    Sources of like length share a batch, and results come back in the order of the sources. A source that is empty or white
    space gives an empty text, without asking the model.

    Attributes:
        num_unfinished: Hypotheses so far that met the length limit before their end of sequence.
    """

    def __init__(
        self,
        model: PreTrainedModel | Engine,
        tokenizers: TokenizerPair,
        *,
        source_prefix: str = "",
        batch_size: int = DEFAULT_BATCH_SIZE,
        max_tokens_per_batch: int = DEFAULT_MAX_TOKENS_PER_BATCH,
    ):
        """Joins the parts.

        Args:
            model: An encoder-decoder with a generation mixin, or an engine.
            tokenizers: Of its source and its target.
            source_prefix: Stands before every source, such as `summarize: `.
            batch_size: Most sources in a batch.
            max_tokens_per_batch: Most source tokens in a batch, padding counted.

        Raises:
            ValueError: If a size is not above 0.
        """
        for name, value in (("batch_size", batch_size), ("max_tokens_per_batch", max_tokens_per_batch)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.model = model
        self.tokenizers = tokenizers
        self.source_prefix = source_prefix
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.num_unfinished = 0

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        engine: str = "torch",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        trust_remote_code: bool = False,
        source_lang: str | None = None,
        target_lang: str | None = None,
        **kwargs,
    ) -> "Generator":
        """Loads model and tokenizers from a folder or from the Hub.

        Args:
            name_or_path: Folder or Hub id; any encoder-decoder of transformers will do. For the engine `ctranslate2` an exported
                folder, or a Metaphrase model, of which a converted copy is made that lasts as long as the generator.
            engine: What computes, `torch` or `ctranslate2`.
            device: Where to run; by default an accelerator if there is one.
            dtype: Type of the weights; `auto` takes that of the checkpoint. For `ctranslate2` also one of its compute types,
                such as int8.
            trust_remote_code: Whether code in the folder may run. Metaphrase models do not need it here.
            source_lang: For a model of many languages (mBART, M2M100, NLLB), the code of the sources' language that its tokenizer
                knows, such as eng_Latn; by default the tokenizer's own.
            target_lang: Likewise, of the language to write; by default as the model's generation config says.
            **kwargs: As for the constructor.

        Raises:
            ValueError: If the tokenizer does not know a language, there is no such engine, or it cannot run the model.
            ImportError: If the engine is not installed.
        """
        if engine not in ENGINES:
            raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}, got {engine!r}.")
        if engine == "ctranslate2":
            from metaphrase.inference.ctranslate2_engine import CTranslate2Engine  # An extra.

            model = CTranslate2Engine.from_pretrained(name_or_path, device=device, dtype=dtype)
            tokenizers = TokenizerPair.from_pretrained(name_or_path)
            model.generation_config.update(**set_languages(tokenizers, source_lang, target_lang))
            return cls(model, tokenizers, **kwargs)
        if device is None:
            device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        model = AutoModelForSeq2SeqLM.from_pretrained(name_or_path, dtype=dtype, trust_remote_code=trust_remote_code)
        tokenizers = TokenizerPair.from_pretrained(name_or_path)
        model.generation_config.update(**set_languages(tokenizers, source_lang, target_lang))
        return cls(model.to(device).eval(), tokenizers, **kwargs)

    def generate(self, texts: Iterable[str], *, show_progress: bool | None = False, **generation_kwargs) -> list[str]:
        """The best target text for each source text.

        Args:
            texts: Sources.
            show_progress: A progress bar; `None` shows it on a terminal only.
            **generation_kwargs: As for `generate()`; `num_return_sequences` must be 1.

        Raises:
            ValueError: If more than one sequence is asked for: `generate_n_best` returns them.
        """
        count = generation_kwargs.get("num_return_sequences", 1)
        if count != 1:
            raise ValueError(f"`num_return_sequences` must be 1 for `generate`, got {count}: use `generate_n_best`.")
        candidates = self._generate(list(texts), False, show_progress, generation_kwargs)
        return [scored[0].text for scored in candidates]

    def generate_n_best(
        self, texts: Iterable[str], *, show_progress: bool | None = False, **generation_kwargs
    ) -> list[list[ScoredText]]:
        """For each source `num_return_sequences` target texts with their scores, best first where they are ranked."""
        return self._generate(list(texts), True, show_progress, generation_kwargs)

    def generate_stream(
        self,
        lines: Iterable[str],
        *,
        window: int = 4096,
        return_scores: bool = True,
        show_progress: bool | None = False,
        **generation_kwargs,
    ) -> Iterator[list[ScoredText]]:
        """Candidates for each source of a stream of any length: sorted and held in memory are `window` sources at a time."""
        iterator = iter(lines)
        while chunk := list(itertools.islice(iterator, window)):
            yield from self._generate(chunk, return_scores, show_progress, generation_kwargs)

    def _generate(
        self, texts: list[str], return_scores: bool, show_progress: bool | None, generation_kwargs: dict
    ) -> list[list[ScoredText]]:
        written = [index for index, text in enumerate(texts) if text.strip()]
        sources = self.tokenizers.encode_sources([self.source_prefix + texts[index] for index in written])
        hypotheses = decode(
            self.model,
            sources,
            batch_size=self.batch_size,
            max_tokens_per_batch=self.max_tokens_per_batch,
            return_scores=return_scores,
            show_progress=show_progress,
            **generation_kwargs,
        )
        own_count = self.model.generation_config.num_return_sequences or 1
        count = generation_kwargs.get("num_return_sequences", own_count)
        results = [[ScoredText("", 0.0 if return_scores else None)] * count for _ in texts]
        for index, candidates in zip(written, hypotheses, strict=True):
            self.num_unfinished += sum(not candidate.is_finished for candidate in candidates)
            decoded = self.tokenizers.decode_targets([candidate.ids for candidate in candidates])
            results[index] = [ScoredText(text, c.score) for text, c in zip(decoded, candidates, strict=True)]
        return results
