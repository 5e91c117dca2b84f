"""Generator: a model with its tokenizers, from source texts to target texts.

The way of a call: `Plan.of` reads its options once. `Plan.encode` makes sentences and ids of texts, `Plan.search` makes
hypotheses of ids, and `Plan.decode_texts` makes texts of hypotheses.
"""

import copy
import itertools
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

import metaphrase.modeling  # noqa: F401 (registers the models with the Auto classes)
from metaphrase.decoding.fast_generation import is_metaphrase
from metaphrase.decoding.quantization import quantization_of, quantize
from metaphrase.decoding.searches.constrained_beam_search import encode_phrases
from metaphrase.decoding.searches.joint_search import (
    DEFAULT_NUM_ASSISTANT_TOKENS,
    EnsembleSearch,
    Partner,
    SpeculativeSearch,
)
from metaphrase.engines.engine_choice import EngineChoice
from metaphrase.inference.batches import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_MAX_TOKENS_PER_BATCH,
    Engine,
    Hypothesis,
    check_source_length,
    check_sources,
    decode,
    longest_source,
    longest_target,
    numbering,
    read_options,
)
from metaphrase.inference.minimum_bayes_risk import (
    candidate_options,
    expected_utilities,
    find_utility,
    weigh_n_best,
    weigh_samples,
)
from metaphrase.inference.progress import ProgressBar, progress_bar
from metaphrase.inference.scoring import ForcedScore, encode_forced, read_texts, score_targets
from metaphrase.storage.folders import members_of
from metaphrase.storage.generation_options import complete_sampling
from metaphrase.storage.loading import check_device, default_device, is_exported, load_pretrained, naming
from metaphrase.texts.documents import Document, keep_whole, split_documents
from metaphrase.texts.plan import find_loop
from metaphrase.tokenization import TextFrame, TokenizerPair, checked_texts, readable_tokens, set_languages, shorten
from metaphrase.tokenization.vocabulary_map import VocabularyMap

ENGINES = ("auto", "torch", "ctranslate2")
COUNTERS = ("num_unfinished", "num_truncated", "num_cut", "num_loops", "num_looping", "num_drafted", "num_accepted")
# Tokens of a phrase that a target may not repeat, once it is a loop.
_LOOP_TOKENS = 3


@dataclass(frozen=True)
class ScoredText:
    """One target text and its score (see `Hypothesis.score`)."""

    text: str
    score: float | None


class Chunk(NamedTuple):
    """Sources that are decoded together: their number in a stream, the index of the first one, and the texts."""

    number: int
    first: int
    texts: list[str]


def read_chunks(lines: Iterable[str], size: int, first_chunk: int = 0) -> Iterator[Chunk]:
    """Yield chunks of `size` lines. The last one may be shorter."""
    iterator = iter(lines)
    for number in itertools.count(first_chunk):
        if not (texts := list(itertools.islice(iterator, size))):
            return
        yield Chunk(number, number * size, texts)


class TextStream:
    """Base of `Generator` and `GeneratorPool`: streams by their `decode_chunks`, and counters over all calls.

    Attributes:
        num_unfinished: Hypotheses that met the length limit before their end of sequence.
        num_truncated: Sources that were truncated.
        num_cut: Sentences of whole texts that were too long and were cut into parts.
        num_loops: Targets that repeated themselves and were decoded again, with `end_loops`.
        num_looping: Of these, targets that still repeat themselves.
        num_drafted: Tokens that draft models proposed.
        num_accepted: Proposed tokens that became part of a target.
    """

    num_unfinished = num_truncated = num_cut = num_loops = num_looping = num_drafted = num_accepted = 0

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to the counters, by name."""
        for name, number in counts.items():
            setattr(self, name, getattr(self, name) + number)

    def generate_stream(
        self,
        lines: Iterable[str],
        *,
        chunk_size: int = 4096,
        return_scores: bool = True,
        show_progress: bool | None = False,
        seed: int | None = None,
        first_chunk: int = 0,
        total: int | None = None,
        risk: Mapping[str, Any] | None = None,
        split_sentences: bool | str = False,
        **generation_kwargs,
    ) -> Iterator[list[ScoredText]]:
        """Yield the candidates of each source of a stream of any length, in order and in bounded memory.

        The sources of a chunk are sorted and decoded together. In a pool each process has a chunk, and one more chunk waits.

        Args:
            lines: Sources.
            chunk_size: Sources that are decoded together.
            return_scores: True if candidates carry their score.
            show_progress: As for `progress_bar`, over the stream.
            seed: Seed of the stream, at least 0. The random numbers of a chunk depend only on the seed and the chunk's number,
                so that a stopped stream can be resumed. Chunk 0 has those of `torch.manual_seed(seed)`.
            first_chunk: Number of the first chunk in `lines`, for a resumed stream.
            total: Sources of the whole stream, for the progress bar.
            risk: Arguments of `generate_mbr()`, if its choice is to be the only candidate.
            split_sentences: As for `generate_n_best()`.
            **generation_kwargs: As for `generate_n_best()`.

        Raises:
            ChildProcessError: If a process of a pool died.
            ValueError: If `chunk_size` is below 1, or as `generate_n_best()` does.
        """
        lines = checked_texts(lines, "lines")
        if chunk_size < 1:
            raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}.")
        if risk is not None and split_sentences:
            raise ValueError("Minimum Bayes risk decoding compares whole texts: leave out `split_sentences`.")
        options = {"seed": seed, "return_scores": return_scores, "risk": risk, "split_sentences": split_sentences}
        with progress_bar(total, "line", show_progress, initial=first_chunk * chunk_size) as bar:
            yield from self.decode_chunks(read_chunks(lines, chunk_size, first_chunk), bar, options | generation_kwargs)


@dataclass(frozen=True)
class EncodedTexts:
    """Texts as the models read them: for each generator of a plan the ids of each sentence, and the layout of each text."""

    ids: list[list[list[int]]]
    documents: list[Document]
    # Amounts to add to the counters of the caller.
    counts: dict[str, int]


@dataclass(frozen=True, eq=False)
class Plan:
    """All that a call decides before it reads texts. A plan changes none of its generators."""

    # The called generator first, then the members of its ensemble or its draft model.
    generators: list["Generator"]
    # The search that all of them take part in; `None` for a single model.
    joint_search: EnsembleSearch | SpeculativeSearch | None
    options: dict[str, Any]
    num_targets: int
    ends_loops: bool = False

    @classmethod
    def of(cls, generator: "Generator", options: Mapping[str, Any]) -> "Plan":
        """Read the options of a call, arguments of `generate()`. Raises `ValueError` if they do not fit."""
        ends_loops = bool(options.get("end_loops"))
        options = read_options(complete_sampling({k: v for k, v in options.items() if k != "end_loops"}))
        partners, joint_search = generator.members, EnsembleSearch() if generator.members else None
        if options.get("assistant_model") is not None:
            partners, joint_search = _read_assistant(generator, options)
        config = generator.model.generation_config
        num_targets = options.get("num_return_sequences", config.num_return_sequences or 1)
        options = encode_phrases(generator.tokenizers.target, config, options)
        return cls([generator, *partners], joint_search, options, num_targets, ends_loops)

    def encode(self, texts: list[str], split_sentences: bool | str = False) -> EncodedTexts:
        """Return the ids of the texts that are not blank, or of their sentences. `TooLongError` for too many tokens."""
        documents, num_cut = split_texts(self.generators, texts, split_sentences)
        sentences = [sentence for document in documents for sentence in document.sentences]
        uncut = [generator.encode_uncut(sentences) for generator in self.generators]
        sources = [generator.truncate(ids) for generator, ids in zip(self.generators, uncut, strict=True)]
        # Compare tuples of all models' ids, so that a source counts once.
        num_truncated = sum(map(operator.ne, zip(*uncut, strict=True), zip(*sources, strict=True)))
        if isinstance(self.joint_search, SpeculativeSearch):
            # A draft model may read only the beginning: its drafts change the time, never the result.
            draft = self.generators[1]
            limit, end = longest_source(draft.model), TextFrame.of(draft.tokenizers.encode_sources).end
            sources[1] = [shorten(source, limit, end) for source in sources[1]]
        with numbering([number for number, text in enumerate(documents, start=1) for _ in text.sentences]):
            for generator, ids in zip(self.generators, sources, strict=True):
                check_sources(ids, longest_source(generator.model), generator.max_tokens_per_batch)
        return EncodedTexts(sources, documents, {"num_cut": num_cut, "num_truncated": num_truncated})

    def search(
        self,
        encoded: EncodedTexts,
        return_scores: bool,
        *,
        show_progress: bool | None = False,
        on_batch: Callable[[int], object] | None = None,
    ) -> tuple[list[list[Hypothesis]], dict[str, int]]:
        """Return the hypotheses of each sentence, and the amounts to add to the counters of the caller. See `decode`."""
        generator, *partners = self.generators
        ids, *partner_ids = encoded.ids
        # A copy, because the search counts its drafts.
        joint_search, model = copy.copy(self.joint_search), generator.model
        if generator.engine_choice is not None and ids:
            sizes = generator.batch_size, return_scores, bool(partners)
            model = generator.engine_choice.choose(model, self.options, ids, *sizes)
        hypotheses = decode(
            model,
            ids,
            return_scores=return_scores,
            batch_size=generator.batch_size,
            max_tokens_per_batch=generator.max_tokens_per_batch,
            show_progress=show_progress,
            on_batch=on_batch,
            partners=[Partner(p.model, rows) for p, rows in zip(partners, partner_ids, strict=True)],
            search=joint_search,
            vocabulary_map=generator.vocabulary_map,
            **self.options,
        )
        if isinstance(joint_search, SpeculativeSearch):
            return hypotheses, {"num_drafted": joint_search.num_drafted, "num_accepted": joint_search.num_accepted}
        return hypotheses, {}

    def decode_texts(
        self, documents: list[Document], hypotheses: list[list[Hypothesis]], return_scores: bool
    ) -> list[list[ScoredText]]:
        """Return target texts for all sources. A blank source has empty ones.

        The score of a text is the mean of its sentences.
        """
        generator, rows = self.generators[0], iter(hypotheses)
        results = []
        for document in documents:
            # Candidate i of a text has candidate i of each sentence.
            candidates = list(zip(*(next(rows) for _ in document.sentences), strict=True)) or [()] * self.num_targets
            results.append([])
            for row in candidates:
                score = sum(part.score for part in row) / max(len(row), 1) if return_scores else None
                sentences = generator.tokenizers.decode_targets([part.ids for part in row])
                results[-1].append(ScoredText(document.join(sentences), score))
        return results


def split_texts(
    generators: Sequence["Generator"], texts: list[str], split_sentences: bool | str, has_lines: bool = True
) -> tuple[list[Document], int]:
    """Return the sentences and the layout of texts, and the number of sentences that were too long and were cut.

    `split_sentences` is a language; True for that of a multilingual tokenizer, or else English; False to keep texts whole.
    """
    if not split_sentences:
        return keep_whole(texts), 0
    if not isinstance(split_sentences, str):
        # Codes such as eng_Latn and en_XX begin with the language.
        split_sentences = re.split("[_-]", getattr(generators[0].tokenizers.source, "src_lang", None) or "en")[0]

    def find_long(texts: list[str]) -> list[bool]:
        is_long = [False] * len(texts)
        for generator in generators:
            limits = [generator.max_source_length, longest_source(generator.model)]
            limit = min((limit for limit in limits if limit is not None), default=None)
            if limit is not None:
                lengths = map(len, generator.encode_uncut(texts))
                is_long = [flag or length > limit for flag, length in zip(is_long, lengths, strict=True)]
        return is_long

    return split_documents(texts, split_sentences, find_long, has_lines)


class Generator(TextStream):
    """A model with its tokenizers.

    Sources of similar length share a batch. Results have the order of the sources. A blank source gives an empty target and
    does not reach the model. For streams and counters see `TextStream`.
    """

    # The server sets another function, to decode the sources of several requests together.
    run_search = staticmethod(Plan.search)

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
        vocabulary_map: VocabularyMap | None = None,
    ):
        """Join the parts.

        Args:
            model: An encoder-decoder with a generation mixin, or an engine.
            tokenizers: Of source and target.
            source_prefix: Text before every source, such as `summarize: `.
            max_source_length: Most tokens of a source, with prefix and end of sequence. Longer sources are truncated. Without
                it no source is truncated, and a source with more tokens than the model has positions is an error. Members and
                assistants have limits of their own.
            batch_size: Most sources in a batch.
            max_tokens_per_batch: Most source tokens in a batch, padding included.
            members: Generators whose models join this one in an ensemble. All need the same target vocabulary; each reads
                sources with its own tokenizer. Generation settings are those of this generator.
            vocabulary_map: Greedy search, beam search and sampling of this model select only from the tokens that the map
                permits for the sources of a batch. Other searches select from all tokens.

        Raises:
            ValueError: If a size is below 1, `max_source_length` has no room for a token of the text, or the models cannot
                form an ensemble.
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
        self.members = list(members)
        self.vocabulary_map = vocabulary_map
        self.engine_choice: EngineChoice | None = None
        for number, member in enumerate(self.members, start=2):
            _check_partner(self, member, f"model {number} of the ensemble")

    @property
    def is_single(self) -> bool:
        """True for one torch model, without an ensemble or another engine."""
        return isinstance(self.model, torch.nn.Module) and not self.members

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike | Sequence[str | os.PathLike],
        *,
        engine: str = "auto",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        trust_remote_code: bool = False,
        source_lang: str | None = None,
        target_lang: str | None = None,
        use_vmap: bool = False,
        **kwargs,
    ) -> "Generator":
        """Load model and tokenizers from a folder or from the Hub.

        Args:
            name_or_path: Folder or Hub id of any encoder-decoder of transformers. Several Metaphrase models form an ensemble, and
                so does a folder whose `ensemble.json` names them.
                An exported folder runs in CTranslate2. The engine `ctranslate2` converts a Metaphrase model into a temporary
                copy.
            engine: `torch`, `ctranslate2`, or `auto`: torch, and for each call on a CPU that CTranslate2 decodes faster and with
                the same tokens, a copy of the model in CTranslate2, in memory beside it.
            device: Where to run. The default is the accelerator if there is one.
            dtype: Type of the weights; `auto` is the type of the checkpoint. On a CPU, `int8` stores the linear layers in that
                type and computes the rest in float32 (see `quantize`). `ctranslate2` also takes its own compute types.
            trust_remote_code: True to run code that comes with the model or its tokenizers. Metaphrase models do not need it.
            source_lang: Language code of the sources for a multilingual model (mBART, M2M100, NLLB), such as eng_Latn. The
                default is the tokenizer's.
            target_lang: Language code of the targets. The default is that of the model's generation config.
            use_vmap: True to use the vocabulary map of the model, `vmap.txt`.
            **kwargs: As for the constructor.

        Raises:
            ValueError: If a language or the engine is unknown, the engine cannot run the model, or the models cannot form an
                ensemble.
            ImportError: If the engine is not installed.
        """
        if engine not in ENGINES:
            raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}, got {engine!r}.")
        names = [name_or_path] if isinstance(name_or_path, str | os.PathLike) else list(name_or_path)
        names = [model for name in names for model in members_of(name) or [name]]
        if len(names) != 1 and (engine == "ctranslate2" or use_vmap or not names):
            raise ValueError(f"The engine ctranslate2 and `use_vmap` need one model, an ensemble several, got {names}.")
        if engine == "auto" and len(names) == 1 and is_exported(names[0]):
            engine = "ctranslate2"
        parts, choice = [], None
        for name in names:
            with naming(name, "name_or_path"):
                if engine != "ctranslate2":
                    model = _load_model(name, default_device() if device is None else device, dtype, trust_remote_code)
                else:
                    from metaphrase.engines.ctranslate2_engine import CTranslate2Engine  # Needs an extra.

                    model = CTranslate2Engine.from_pretrained(name, device=device, dtype=dtype)
                    model.use_vmap = use_vmap
                tokenizers = TokenizerPair.from_pretrained(name, trust_remote_code=trust_remote_code)
                if use_vmap:
                    kwargs["vocabulary_map"] = VocabularyMap.from_pretrained(name, tokenizers)
            quantization = None if engine == "ctranslate2" else quantization_of(dtype, model.device)
            if engine == "auto" and len(names) == 1:
                choice = EngineChoice(model, tokenizers, quantization, kwargs.get("vocabulary_map"))
            if quantization is not None:
                quantize(model)
            model.generation_config.update(**set_languages(tokenizers, source_lang, target_lang))
            parts.append((model, tokenizers))
        first, *rest = parts
        if rest:
            member_kwargs = {name: kwargs[name] for name in ("source_prefix", "max_source_length") if name in kwargs}
            kwargs["members"] = [cls(*part, **member_kwargs) for part in rest]
        generator = cls(*first, **kwargs)
        generator.engine_choice = choice
        return generator

    def generate(
        self,
        texts: Iterable[str],
        *,
        split_sentences: bool | str = False,
        show_progress: bool | None = False,
        **generation_kwargs,
    ) -> list[str]:
        """Return the best target for each source.

        With `split_sentences`, each sentence of a source is decoded alone. Line breaks, indentation and list marks stay as they
        are. A sentence that is too long is cut between clauses, and counted in `num_cut`.

        Options beside those of `decode`:

        - `temperature`, `top_k`, `top_p` and the like: sample, unless `do_sample` is False.
        - `must_contain`: phrases that every target contains. An item may be a list of phrases, of which one is enough.
        - `never_contain`: phrases that no target contains.
        - `end_loops`: True to decode a target again that repeats a part of itself, with no phrase of three tokens twice. The
          second target counts if it has no such loop. Looping and still looping targets are counted.
        - `assistant_model`: a smaller Metaphrase model with the same vocabulary, or a generator of one. It drafts
          `num_assistant_tokens` tokens at a time for greedy search. The result stays the same.

        Args:
            texts: Sources.
            split_sentences: True to split sources into sentences; or a code of their language, such as de. True means the
                language of a multilingual tokenizer, or else English.
            show_progress: True for a bar, or lines without a terminal; `None` for a bar on a terminal only.
            **generation_kwargs: As above; `num_return_sequences` must be 1.

        Raises:
            ValueError: If `texts` is a single string or holds other objects than strings, a source has more tokens than the
                model has positions, `num_return_sequences` is not 1, or the assistant does not fit; or as `decode` and
                `encode_phrase` do.
        """
        # Overrides the model's own setting.
        options = {"num_return_sequences": 1} | generation_kwargs
        plan = Plan.of(self, options)
        if (count := plan.num_targets) != 1:
            raise ValueError(f"`num_return_sequences` must be 1 for `generate`, got {count}: use `generate_n_best`.")
        texts = list(checked_texts(texts))
        candidates = self._carry_out(plan, texts, False, show_progress, split_sentences)
        return [scored[0].text for scored in candidates]

    def generate_n_best(
        self,
        texts: Iterable[str],
        *,
        return_scores: bool = True,
        split_sentences: bool | str = False,
        show_progress: bool | None = False,
        **generation_kwargs,
    ) -> list[list[ScoredText]]:
        """Return `num_return_sequences` targets for each source. Beam search ranks them, best first.

        The score of a sample is its log-probability under the model. Temperature, `top_p` and the like do not change the score.

        Args:
            texts: Sources.
            return_scores: True if targets carry their score.
            split_sentences: As for `generate()`. Target i of a source has target i of each sentence; its score is their mean.
            show_progress: True for a bar, or lines without a terminal; `None` for a bar on a terminal only.
            **generation_kwargs: As for `generate()`.

        Raises:
            ValueError: As `generate()`, except for `num_return_sequences`.
        """
        plan, texts = Plan.of(self, generation_kwargs), list(checked_texts(texts))
        return self._carry_out(plan, texts, return_scores, show_progress, split_sentences)

    def generate_mbr(
        self,
        texts: Iterable[str],
        *,
        num_candidates: int = 32,
        num_references: int | None = None,
        utility: str = "chrf",
        show_progress: bool | None = False,
        **generation_kwargs,
    ) -> list[ScoredText]:
        """Return for each source the candidate of highest expected utility: minimum Bayes risk decoding.

        Candidates are samples of the model's whole distribution. Options may narrow it (`epsilon_cutoff=0.02`). Of the model's
        own settings only length bounds and forced or forbidden tokens hold. With `num_beams` the candidates are an n-best
        list, weighted by their scores. `length_penalty=0` makes the scores log-probabilities.

        Source: Kumar and Byrne 2004; Eikema and Aziz 2020, arXiv 2005.10283; epsilon sampling: Freitag et al. 2023,
        arXiv 2305.09860.

        Args:
            texts: Sources.
            num_candidates: Candidates for each source.
            num_references: Additional samples as pseudo-references. By default the candidates are the pseudo-references.
            utility: `chrf` or `bleu`, of a candidate against a pseudo-reference.
            show_progress: True for a bar, or lines without a terminal; `None` for a bar on a terminal only.
            **generation_kwargs: As for `generate()`, for the candidates.

        Returns:
            The chosen texts. The score is the expected utility, 0 to 100.

        Raises:
            ValueError: If a number is below 1, the beam is narrower than the number of candidates, or the utility is unknown.
        """
        # An unknown utility is an error before any text is decoded.
        find_utility(utility)
        texts = list(checked_texts(texts))

        def draw(name: str, count: int) -> list[dict[str, float]]:
            options = candidate_options(self.model.generation_config, name, count, generation_kwargs)
            has_beams = options["num_beams"] > 1
            rows = self.generate_n_best(texts, return_scores=has_beams, show_progress=show_progress, **options)
            if has_beams:
                return [weigh_n_best([c.text for c in row], [c.score for c in row]) for row in rows]
            return [weigh_samples([c.text for c in row]) for row in rows]

        candidates = references = draw("num_candidates", num_candidates)
        if num_references is not None:
            num_truncated = self.num_truncated
            references = draw("num_references", num_references)
            # The pseudo-references came from the same sources, which count once.
            self.num_truncated = num_truncated
        chosen = []
        for texts_of_source, weights in zip(candidates, references, strict=True):
            utilities = expected_utilities(list(texts_of_source), weights, utility)
            best = max(range(len(utilities)), key=utilities.__getitem__)
            chosen.append(ScoredText(list(texts_of_source)[best], utilities[best]))
        return chosen

    def decode_chunks(
        self, chunks: Iterator[Chunk], bar: ProgressBar, options: dict[str, Any]
    ) -> Iterator[list[ScoredText]]:
        """Yield the candidates of each source. The options are those of `decode_chunk`."""
        if options["risk"] is None:
            # A bad option is an error before the first line is read.
            names = ("seed", "return_scores", "risk", "split_sentences")
            options["plan"] = Plan.of(self, {name: value for name, value in options.items() if name not in names})
        # The bar counts texts.
        has_steps = options["risk"] is None and not options["split_sentences"]
        for chunk in chunks:
            candidates = self.decode_chunk(chunk, on_batch=bar.update if has_steps else None, **options)
            bar.update(sum(not text.strip() for text in chunk.texts) if has_steps else len(chunk.texts))
            yield from candidates

    def decode_chunk(
        self,
        chunk: Chunk,
        *,
        seed: int | None,
        return_scores: bool,
        risk: Mapping[str, Any] | None,
        split_sentences: bool | str,
        plan: Plan | None = None,
        on_batch: Callable[[int], object] | None = None,
        **options,
    ) -> list[list[ScoredText]]:
        """Return the candidates of each source of a chunk, whatever was decoded before. See `generate_stream`."""
        if chunk.number and self.engine_choice is not None:
            self.engine_choice.expect_many()
        if seed is not None and chunk.number:
            state = np.random.SeedSequence(seed, spawn_key=(chunk.number,)).generate_state(1, np.uint64)
            seed = int(state[0] >> np.uint64(1))
        if seed is not None:
            torch.manual_seed(seed)
        with numbering(range(chunk.first + 1, chunk.first + len(chunk.texts) + 1)):
            if risk is not None:
                return [[chosen] for chosen in self.generate_mbr(chunk.texts, **risk, **options)]
            plan = Plan.of(self, options) if plan is None else plan
            return self._carry_out(plan, chunk.texts, return_scores, False, split_sentences, on_batch)

    def num_targets(self, **generation_kwargs) -> int:
        """Return the number of candidates of a source with these options."""
        return Plan.of(self, generation_kwargs).num_targets

    def score(
        self, sources: Iterable[str], targets: Iterable[str | Sequence[int]], *, show_progress: bool | None = False
    ) -> list[ForcedScore]:
        """Return the log-probability of each token of given targets, computed in batches of similar length.

        The scores are those of the model's own distribution. Penalties, forced tokens and other options of `generate` do not
        apply.

        Args:
            sources: Source texts without `source_prefix`.
            targets: One for each source: a text, or token ids without the start token, such as `Hypothesis.ids`.
            show_progress: True for a bar, or lines without a terminal; `None` for a bar on a terminal only.

        Returns:
            One score for each pair, in order.

        Raises:
            ValueError: If the numbers of sources and targets differ, a side has more tokens than the model has positions, or
                this is an ensemble.
        """
        check_single(self, "generator")
        sources, targets = read_texts(sources, targets)
        ids, uncut = encode_forced(self.tokenizers, targets), self.encode_uncut(sources)
        cut = self.truncate(uncut)
        scores = score_targets(self.model, cut, ids, self.batch_size, self.max_tokens_per_batch, show_progress)
        self.num_truncated += sum(map(operator.ne, uncut, cut))
        tokens = [readable_tokens(self.tokenizers.target, row) for row in ids]
        return [ForcedScore(*parts) for parts in zip(ids, tokens, scores, strict=True)]

    def mean_entropies(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the mean negative log-probability of each target, in nats per token. Pairs have no blank sides.

        A pair that is too long for the model has an infinite one. Errors are those of `score`.
        """
        sources = self.encode([source for source, _ in pairs])
        targets = encode_forced(self.tokenizers, [target for _, target in pairs])
        limits = longest_source(self.model) or math.inf, longest_target(self.model) or math.inf
        rows = enumerate(zip(sources, targets, strict=True))
        fitting = [i for i, (source, target) in rows if len(source) <= limits[0] and len(target) <= limits[1]]
        scores = self.score([pairs[index][0] for index in fitting], [targets[index] for index in fitting])
        entropies = [math.inf] * len(pairs)
        for index, score in zip(fitting, scores, strict=True):
            entropies[index] = -score.mean
        return entropies

    def search(
        self, texts: list[str], return_scores: bool, generation_kwargs: dict, show_progress: bool | None
    ) -> list[list[Hypothesis]]:
        """Decode texts, of which blank ones are left out, and count. Returns the hypotheses."""
        plan = Plan.of(self, generation_kwargs)
        return self.search_encoded(plan, plan.encode(texts), return_scores, show_progress=show_progress)

    def search_encoded(
        self, plan: Plan, encoded: EncodedTexts, return_scores: bool, **progress
    ) -> list[list[Hypothesis]]:
        """Decode encoded texts, and count."""
        hypotheses, counts = self.run_search(plan, encoded, return_scores, **progress)
        num_unfinished = sum(not hypothesis.is_finished for row in hypotheses for hypothesis in row)
        self.count({**encoded.counts, **counts, "num_unfinished": num_unfinished})
        return hypotheses

    def _carry_out(
        self,
        plan: Plan,
        texts: list[str],
        return_scores: bool,
        show_progress: bool | None,
        split_sentences: bool | str,
        on_batch: Callable[[int], object] | None = None,
    ) -> list[list[ScoredText]]:
        encoded = plan.encode(texts, split_sentences)
        hypotheses = self.search_encoded(plan, encoded, return_scores, show_progress=show_progress, on_batch=on_batch)
        if plan.ends_loops:
            self._end_loops(plan, encoded, hypotheses, return_scores)
        return plan.decode_texts(encoded.documents, hypotheses, return_scores)

    def _end_loops(
        self, plan: Plan, encoded: EncodedTexts, hypotheses: list[list[Hypothesis]], return_scores: bool
    ) -> None:
        """Replace the hypotheses of sentences whose best target repeats itself, if others do not."""
        sentences = [sentence for document in encoded.documents for sentence in document.sentences]

        def find_looping(rows: Mapping[int, list[Hypothesis]]) -> list[int]:
            targets = self.tokenizers.decode_targets([best.ids for best, *_ in rows.values()])
            return [i for i, target in zip(rows, targets, strict=True) if find_loop(sentences[i], target)]

        looping = find_looping(dict(enumerate(hypotheses)))
        if not looping:
            return
        again = replace(plan, options=plan.options | {"no_repeat_ngram_size": _LOOP_TOKENS})
        part = EncodedTexts([[ids[i] for i in looping] for ids in encoded.ids], [], {})
        rows = dict(zip(looping, self.search_encoded(again, part, return_scores), strict=True))
        still_looping = find_looping(rows)
        for i in {*looping} - {*still_looping}:
            hypotheses[i], rows[i] = rows[i], hypotheses[i]
        num_unfinished = sum(not hypothesis.is_finished for row in rows.values() for hypothesis in row)
        counts = {"num_loops": len(looping), "num_looping": len(still_looping)}
        # The hypotheses that are left out count no longer.
        self.count({**counts, "num_unfinished": -num_unfinished})

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of sources as the model reads them."""
        return self.truncate(self.encode_uncut(texts))

    def encode_uncut(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of sources with their prefix, before truncation."""
        return self.tokenizers.encode_sources([self.source_prefix + text for text in texts])

    def truncate(self, sources: list[list[int]]) -> list[list[int]]:
        """Return the ids of each source, at most `max_source_length` of them."""
        if self.max_source_length is None:
            return sources
        end = TextFrame.of(self.tokenizers.encode_sources).end
        return [shorten(ids, self.max_source_length, end) for ids in sources]


def check_single(generator: "Generator", name: str) -> None:
    """Raise `ValueError` if a generator is an ensemble or has another engine than torch."""
    if not isinstance(generator.model, torch.nn.Module):
        raise ValueError(f"`{name}` must have a torch model here, got a {type(generator.model).__name__}.")
    if generator.members:
        raise ValueError(f"`{name}` must be one model, got an ensemble of {1 + len(generator.members)}.")


def _check_partner(generator: "Generator", partner: "Generator", name: str) -> None:
    """Raise `ValueError` if another generator, set by the option `name`, cannot write a target together with this one."""
    check_single(partner, name)
    for model in (generator.model, partner.model):
        if not is_metaphrase(model):
            raise ValueError(
                f"`{name}` and the first model must both be Metaphrase models, got {type(model).__name__}: "
                "convert it with `metaphrase convert`."
            )
    expected, actual = (item.tokenizers.target.get_vocab() for item in (generator, partner))
    if different := [token for token in {**expected, **actual} if expected.get(token) != actual.get(token)]:
        token = min(different)
        raise ValueError(
            f"The target vocabulary of `{name}` must be that of the first model, got {len(different)} tokens that differ: "
            f"{token!r} is {actual.get(token)} in place of {expected.get(token)}."
        )
    # Equal fields give the ids of targets the same meaning.
    for field in ("decoder_vocab_size", "decoder_start_token_id", "eos_token_id"):
        expected, actual = (getattr(item.model.config, field) for item in (generator, partner))
        if actual != expected:
            raise ValueError(f"`{field}` of `{name}` must be that of the first model, {expected}, got {actual}.")


def _read_assistant(
    generator: "Generator", options: dict[str, Any]
) -> tuple[list["Generator"], SpeculativeSearch | None]:
    """Return the draft model and its search. Takes their options out of `options`."""
    assistant = options["assistant_model"]
    if generator.members:
        raise ValueError("`assistant_model` must be left out for an ensemble, got one.")
    if not isinstance(assistant, Generator):
        if not (is_metaphrase(generator.model) and is_metaphrase(assistant)):
            # transformers' own assisted decoding runs, one source at a time.
            return [], None
        reading = {"source_prefix": generator.source_prefix, "max_source_length": generator.max_source_length}
        assistant = Generator(assistant, generator.tokenizers, **reading)
    _check_partner(generator, assistant, "assistant_model")
    del options["assistant_model"]
    num_tokens = options.pop("num_assistant_tokens", None)
    return [assistant], SpeculativeSearch(DEFAULT_NUM_ASSISTANT_TOKENS if num_tokens is None else num_tokens)


def _load_model(
    name_or_path: str | os.PathLike, device: str | torch.device, dtype: str | torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    check_device(device)
    quantization = quantization_of(dtype, device)
    weight_type = torch.float32 if quantization else getattr(torch, str(dtype).removeprefix("torch."), None)
    if dtype != "auto" and not (isinstance(weight_type, torch.dtype) and weight_type.is_floating_point):
        raise ValueError(
            f"`dtype` must be auto, int8 or one of torch's, such as float32, bfloat16 or float16, got {str(dtype)!r}."
        )
    weight_type = "auto" if dtype == "auto" else weight_type
    return load_pretrained(name_or_path, dtype=weight_type, trust_remote_code=trust_remote_code).to(device).eval()
