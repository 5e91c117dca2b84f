"""Generator: texts in, texts out."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from metaphrase.decoding.options import check_ranges, plain_options
from metaphrase.decoding.searches.ensemble import EnsembleSearch
from metaphrase.decoding.searches.joint_search import check_partner, check_target_vocabulary
from metaphrase.inference.engine import Engine
from metaphrase.inference.loading import ENGINES, load_parts
from metaphrase.inference.minimum_bayes_risk import decode_by_risk
from metaphrase.inference.run import EncodedSources, Run, ScoredText, check_single, written_texts
from metaphrase.inference.scoring import ForcedScore, encode_forced, read_texts, score_targets
from metaphrase.inference.source_limits import check_source_length, count_cut, counting_on
from metaphrase.inference.text_options import read_text_options
from metaphrase.inference.windows import (
    PreparedWindows,
    check_seed,
    decode_windows,
    line_bar,
    read_windows,
    seed_window,
)
from metaphrase.modeling.pipeline_support import DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH
from metaphrase.tokenization import TextFrame, TokenizerPair, checked_texts, readable_tokens, shorten


class Generator:
    """A model with its tokenizers, ready to turn many texts into many texts.

    Sources of like length share a batch, and results come back in the order of the sources. A source that is empty or white
    space gives an empty text, without asking the model.

    Attributes:
        num_unfinished: Hypotheses so far that met the length limit before their end of sequence.
        num_truncated: Sources so far of which the end was cut off.
        num_drafted: Tokens so far that draft models proposed.
        num_accepted: Those of them that went into a target.
    """

    def __init__(
        self,
        model: PreTrainedModel | Engine,
        tokenizers: TokenizerPair,
        *,
        source_prefix: str = "",
        max_source_length: int | None = None,
        batch_size: int = DEFAULT_BATCH_SIZE,
        max_tokens_per_batch: int = DEFAULT_MAX_TOKENS_PER_BATCH,
        members: Sequence["Generator"] = (),
        ensemble_mean: str = "linear",
    ):
        """Joins the parts.

        Args:
            model: An encoder-decoder with a generation mixin, or an engine.
            tokenizers: Of its source and its target.
            source_prefix: Stands before every source, such as `summarize: `.
            max_source_length: Most tokens of a source, with prefix and end of sequence; of longer ones the end is cut off. By
                default none is, and one for which the model has no positions is an error. Members and assistants have limits of
                their own.
            batch_size: Most sources in a batch.
            max_tokens_per_batch: Most source tokens in a batch, padding counted.
            members: Others whose models write each target together with this one, an ensemble. Only their target vocabulary must
                be the same: each reads sources by its own tokenizer. Generation settings are those of this one.
            ensemble_mean: `linear`, the mean of their probabilities, or `log_linear`, that of their log-probabilities.

        Raises:
            ValueError: If a size is not above 0, a length leaves no place for a token of the text, or the models cannot write a
                target together.
        """
        for name, value in (("batch_size", batch_size), ("max_tokens_per_batch", max_tokens_per_batch)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.model = model
        self.tokenizers = tokenizers
        self.source_prefix = source_prefix
        self.max_source_length = max_source_length
        if max_source_length is not None:
            check_source_length(max_source_length, tokenizers.encode_sources, source_prefix)
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.num_unfinished = self.num_truncated = self.num_drafted = self.num_accepted = 0
        self.members = list(members)
        self.ensemble = EnsembleSearch(ensemble_mean)
        for number, member in enumerate(self.members, start=2):
            name = f"model {number} of the ensemble"
            check_single(member, name)
            check_target_vocabulary(tokenizers, member.tokenizers, name)
            check_partner(model, member.model, name)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike | Sequence[str | os.PathLike],
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
            name_or_path: Folder or Hub id; any encoder-decoder of transformers will do. Several make an ensemble, of Metaphrase
                models. For the engine `ctranslate2` an exported folder, or a Metaphrase model, of which a converted copy is
                made that lasts as long as the generator.
            engine: What computes, `torch` or `ctranslate2`.
            device: Where to run; by default an accelerator if there is one.
            dtype: Type of the weights; `auto` takes that of the checkpoint. On a CPU `int8` and `float16` are those of the linear
                layers alone, around which computing is in float32 (see `quantize`). For `ctranslate2` also one of its compute
                types.
            trust_remote_code: Whether code that comes with model or tokenizers may run. Metaphrase models do not need it here;
                others are refused without it.
            source_lang: For a model of many languages (mBART, M2M100, NLLB), the code of the sources' language that its tokenizer
                knows, such as eng_Latn; by default the tokenizer's own.
            target_lang: Likewise, of the language to write; by default as the model's generation config says.
            **kwargs: As for the constructor.

        Raises:
            ValueError: If the tokenizer does not know a language, the models cannot write a target together, there is no such
                engine, or it cannot run the model.
            ImportError: If the engine is not installed.
        """
        if engine not in ENGINES:
            raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}, got {engine!r}.")
        names = [name_or_path] if isinstance(name_or_path, str | os.PathLike) else list(name_or_path)
        if not names:
            raise ValueError("`name_or_path` must name at least one model, got none.")
        if engine != "torch" and len(names) > 1:
            raise ValueError(f"`engine` must be torch for an ensemble, got {engine!r}.")
        shared = {"engine": engine, "device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        shared |= {"source_lang": source_lang, "target_lang": target_lang}
        first, *others = names
        if others:
            of_sources = {name: kwargs[name] for name in ("source_prefix", "max_source_length") if name in kwargs}
            kwargs["members"] = [cls(*load_parts(other, **shared), **of_sources) for other in others]
        return cls(*load_parts(first, **shared), **kwargs)

    def generate(self, texts: Iterable[str], *, show_progress: bool | None = False, **generation_kwargs) -> list[str]:
        """The best target text for each source text.

        Args:
            texts: Sources.
            show_progress: A progress bar; `None` shows it on a terminal only.
            **generation_kwargs: As for `decode`; `num_return_sequences` must be 1. Phrases are given as texts: `must_contain`, a
                list of phrases, or of lists of phrases of which one is needed, and `never_contain`, a list of phrases. An
                `assistant_model`, a smaller Metaphrase model (or a generator of one) with the same vocabulary, drafts
                `num_assistant_tokens` at a time, at any batch size; of greedy search and of sampling, to which it is confined,
                it changes nothing but the time. What is of each text goes by its place among the texts, empty ones counted:
                rows of `decoder_input_ids`, of which there may also be one for all, and the number with which
                `prefix_allowed_tokens_fn` is called; in a stream that is the place in the whole stream, and rows are one.

        Raises:
            ValueError: If `texts` is a single string or holds anything but strings, or one with more tokens than the model has
                positions, more than one sequence is asked for (`generate_n_best` returns them), or the assistant does not fit; or
                as `decode` and `encode_phrase` do.
        """
        count = plain_options(generation_kwargs).get("num_return_sequences", 1)
        if count != 1:
            raise ValueError(f"`num_return_sequences` must be 1 for `generate`, got {count}: use `generate_n_best`.")
        # The model's own settings may ask for more.
        options = {**generation_kwargs, "num_return_sequences": 1}
        candidates = self._generate(list(checked_texts(texts)), False, options, show_progress)
        return [scored[0].text for scored in candidates]

    def generate_n_best(
        self,
        texts: Iterable[str],
        *,
        return_scores: bool = True,
        show_progress: bool | None = False,
        **generation_kwargs,
    ) -> list[list[ScoredText]]:
        """For each source `num_return_sequences` target texts with their scores, best first where they are ranked.

        Args:
            texts: Sources.
            return_scores: Whether texts carry their score.
            show_progress: A progress bar; `None` shows it on a terminal only.
            **generation_kwargs: As for `generate()`.

        Raises:
            ValueError: As `generate()` does, but for the number of sequences.
        """
        return self._generate(list(checked_texts(texts)), return_scores, generation_kwargs, show_progress)

    def generate_mbr(
        self,
        texts: Iterable[str],
        *,
        num_candidates: int = 32,
        num_references: int | None = None,
        utility: str = "chrf",
        reference_options: dict | None = None,
        show_progress: bool | None = False,
        **generation_kwargs,
    ) -> list[ScoredText]:
        """For each source the candidate of the highest expected utility: minimum Bayes risk decoding.

        Candidates are samples, of the model's whole distribution unless options say otherwise (`epsilon_cutoff=0.02` leaves out
        what is improbable; of the model's own settings those hold that forbid or force tokens, or bound lengths), and each
        counts as often as it was drawn; or, with `num_beams`, an n-best list, weighted by its scores, which are
        log-probabilities where `length_penalty` is 0.

        Source: Kumar and Byrne 2004; Eikema and Aziz 2020, arXiv 2005.10283; epsilon sampling for it: Freitag et al. 2023,
        arXiv 2305.09860.

        Args:
            texts: Sources.
            num_candidates: How many are drawn for each source.
            num_references: How many pseudo-references are drawn beside them; by default the candidates are these, too.
            utility: `chrf` or `bleu`, of a candidate against a pseudo-reference.
            reference_options: As `generation_kwargs`, for the pseudo-references; by default the same.
            show_progress: A progress bar; `None` shows it on a terminal only.
            **generation_kwargs: As for `generate()`, for the candidates.

        Returns:
            The chosen texts; the score is the expected utility, 0 to 100.

        Raises:
            ValueError: If a number is not above 0, the beam is narrower than that, the utility is unknown, or options are given
                for pseudo-references that are not drawn.
        """
        counts = []

        def draw(texts: list[str], return_scores: bool, options: dict) -> list[list[ScoredText]]:
            before = self.num_truncated
            drawn = self._generate(texts, return_scores, options, show_progress)
            counts.append(self.num_truncated - before)
            return drawn

        chosen = decode_by_risk(
            draw,
            list(checked_texts(texts)),
            own=self.model.generation_config,
            num_candidates=num_candidates,
            num_references=num_references,
            utility=utility,
            options=generation_kwargs,
            reference_options=reference_options,
        )
        # For pseudo-references of their own the same sources were read again.
        self.num_truncated -= sum(counts[1:])
        return [ScoredText(text, expected_utility) for text, expected_utility in chosen]

    def generate_stream(
        self,
        lines: Iterable[str],
        *,
        window: int = 4096,
        return_scores: bool = True,
        show_progress: bool | None = False,
        seed: int | None = None,
        first_window: int = 0,
        total: int | None = None,
        risk: Mapping[str, Any] | None = None,
        **generation_kwargs,
    ) -> Iterator[list[ScoredText]]:
        """Candidates for each source of a stream of any length, in bounded memory.

        The sources of a window are sorted and decoded together. Meanwhile another thread reads and tokenizes the next window, and
        no more than that one. It does not touch the tokenizers while the caller has the word.

        Args:
            lines: Sources; iterated in the other thread.
            window: Sources at a time.
            return_scores: Whether candidates carry their score.
            show_progress: A progress bar over the whole stream; `None` shows it on a terminal only.
            seed: Where it is given, the random numbers of a window depend on it and on the window's number alone, so that a
                stream that was left can be taken up again: the first window has those of `torch.manual_seed(seed)`.
            first_window: Number of the window with which `lines` begins, where those before it are done.
            total: Sources of the whole stream, for the progress bar.
            risk: Arguments of `generate_mbr()`, whose choice is the only candidate of a source then.
            **generation_kwargs: As for `generate_n_best()`.

        Raises:
            ValueError: If `window` is not above 0 or `seed` is negative, or as `generate_n_best()` does.
        """
        lines = checked_texts(lines, "lines")
        check_seed(seed)
        generation_kwargs = read_text_options(generation_kwargs, None)
        bar = line_bar(show_progress, total, first_window * window)
        if risk is not None:
            settings = {"seed": seed, "return_scores": return_scores, "risk": risk}
            with bar:
                yield from decode_windows(self, lines, window, first_window, bar, **settings, **generation_kwargs)
            return
        run = Run.of(self, generation_kwargs)
        read = itertools.count(first_window)

        def encode(texts: list[str]) -> EncodedSources:
            with counting_on(next(read) * window):
                return run.encode(texts)

        with bar, PreparedWindows(read_windows(lines, window), encode) as windows:
            for number, (texts, sources) in enumerate(windows, start=first_window):
                if seed is not None:
                    seed_window(seed, number)
                numbers = [number * window + place for place in written_texts(texts)]
                found = run.search(sources, numbers, return_scores, on_batch=bar.update)
                with windows.alone():
                    candidates = run.scored_texts(texts, found, return_scores)
                    bar.update(len(texts) - len(found))
                    yield from candidates
                    del found, candidates

    def num_targets(self, **generation_kwargs) -> int:
        """How many candidates a source has with these options."""
        check_ranges(generation_kwargs)
        own = self.model.generation_config.num_return_sequences or 1
        return plain_options(generation_kwargs).get("num_return_sequences", own)

    def score(
        self,
        sources: Iterable[str],
        targets: Iterable[str | Sequence[int]],
        *,
        show_progress: bool | None = False,
    ) -> list[ForcedScore]:
        """What the model gives each token of given targets: forced decoding, in batches of like length.

        It is the model's own distribution: penalties, forced tokens and the like, which `generate` may add, have no part in it.

        Args:
            sources: Source texts, without the generator's prefix, which is put before them.
            targets: One for each source: a text, or token ids without the start token, such as those of a `Hypothesis`.
            show_progress: A progress bar; `None` shows it on a terminal only.

        Returns:
            One score for each pair, in order.

        Raises:
            ValueError: If sources and targets are not equally many, a source is empty or white space, target ids are none or not
                the model's, a side has more tokens than the model has positions, or this is an ensemble.
        """
        check_single(self, "generator")
        sources, targets = read_texts(sources, targets)
        ids, whole = encode_forced(self.tokenizers, targets), self.encode_whole(sources)
        cut = self.cut(whole)
        scores = score_targets(
            self.model,
            cut,
            ids,
            batch_size=self.batch_size,
            max_tokens_per_batch=self.max_tokens_per_batch,
            show_progress=show_progress,
        )
        self.num_truncated += count_cut(whole, cut)
        tokens = [readable_tokens(self.tokenizers.target, row) for row in ids]
        return [ForcedScore(*parts) for parts in zip(ids, tokens, scores, strict=True)]

    def _generate(
        self, texts: list[str], return_scores: bool, generation_kwargs: dict, show_progress: bool | None
    ) -> list[list[ScoredText]]:
        run = Run.of(self, generation_kwargs, len(texts))
        numbers = written_texts(texts)
        found = run.search(run.encode(texts), numbers, return_scores, show_progress=show_progress)
        return run.scored_texts(texts, found, return_scores)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of source texts, as the model reads them."""
        return self.cut(self.encode_whole(texts))

    def encode_whole(self, texts: list[str]) -> list[list[int]]:
        """As `encode`, with nothing cut off."""
        return self.tokenizers.encode_sources([self.source_prefix + text for text in texts])

    def cut(self, sources: list[list[int]]) -> list[list[int]]:
        """Ids of which none has more than `max_source_length`."""
        if self.max_source_length is None:
            return sources
        end = TextFrame.of(self.tokenizers.encode_sources).end
        return [shorten(ids, self.max_source_length, end) for ids in sources]
