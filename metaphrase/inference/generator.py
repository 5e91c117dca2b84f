"""Generator: a model with its tokenizers, from source texts to target texts.

The way of a call: `Plan.of` reads its options once. `Generator.generate_planned` then tells the rest: texts become ids, ids
become hypotheses, and hypotheses become texts.
"""

import copy
import itertools
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

import metaphrase.modeling  # noqa: F401 (registers the models with the Auto classes)
from metaphrase.errors import MetaphraseError
from metaphrase.inference import batches
from metaphrase.inference.progress import progress_bar
from metaphrase.plugins import needed_plugin, plugin
from metaphrase.storage.folders import members_of
from metaphrase.storage.generation_options import complete_sampling
from metaphrase.storage.loading import check_device, default_device, is_exported, load_pretrained, naming
from metaphrase.tokenization import TextFrame, TokenizerPair, checked_texts, set_languages, shorten

logger = logging.getLogger(__name__)

ENGINES = ("auto", "torch", "ctranslate2")
# Options of `generate()` that phrases and loops add to those of transformers. None is as good as nothing.
_OWN_OPTIONS = ("must_contain", "never_contain", "force_words_ids", "assistant_model", "end_loops")


@dataclass(frozen=True)
class ScoredText:
    """One target text and its score (see `Hypothesis.score`)."""

    text: str
    score: float | None


@dataclass(frozen=True)
class Document:
    """A text in parts: sentences without white space around them; and the layout before, between and behind them."""

    sentences: list[str] = field(default_factory=list)
    layout: list[str] = field(default_factory=lambda: [""])

    def join(self, sentences: Sequence[str]) -> str:
        """Return the text with other sentences."""
        first, *gaps = self.layout
        return first + "".join(part for pair in zip(sentences, gaps, strict=True) for part in pair)


class Chunk(NamedTuple):
    """Sources that are decoded together: their number in a stream, the index of the first one, and the texts."""

    number: int
    first: int
    texts: list[str]


def read_chunks(lines: Iterable[str], size: int, first_chunk: int = 0) -> Iterator[Chunk]:
    """Yield chunks of `size` lines. The last one may be shorter."""
    if size < 1:
        raise MetaphraseError(f"`chunk_size` must be at least 1, got {size}.")
    iterator = iter(lines)
    for number in itertools.count(first_chunk):
        if not (texts := list(itertools.islice(iterator, size))):
            return
        yield Chunk(number, number * size, texts)


class TextStream:
    """Base of `Generator` and of what streams like it, such as `GeneratorPool`: counters over all calls.

    Attributes:
        num_unfinished: Hypotheses that met the length limit before their end of sequence.
        num_unknown: Sources with tokens that the tokenizer of the called generator does not know.
        num_cut: Sentences of whole texts that were too long and were cut into parts.
        num_loops: Targets that repeated themselves and were generated again, with `end_loops`.
        num_looping: Of these, targets that still repeat themselves.
        num_drafted: Tokens that draft models proposed.
        num_accepted: Proposed tokens that became part of a target.
    """

    num_unfinished = num_truncated = num_unknown = num_cut = 0
    num_loops = num_looping = num_drafted = num_accepted = 0
    num_targets: Callable[..., int]
    generate_stream: Callable[..., Iterator[list[ScoredText]]]

    def count(self, counts: Mapping[str, int], hypotheses: Iterable[list[batches.Hypothesis]] = ()) -> None:
        """Add to the counters, by name, and to `num_unfinished` the hypotheses without their end of sequence."""
        for name, number in counts.items():
            setattr(self, name, getattr(self, name) + number)
        self.num_unfinished += sum(not hypothesis.is_finished for row in hypotheses for hypothesis in row)

    def log_counts(self, num_sources: int) -> None:
        """Log the counters that tell of a problem, and the share of drafted tokens that were accepted."""
        problems = {
            "num_unfinished": "Targets that are unfinished at the length limit: {} (sources: {}). Raise max_new_tokens.",
            "num_loops": "Targets that repeated themselves and were decoded again: {}. Of these still repeat themselves: {}.",
            "num_truncated": "{} of {} sources had more than max_source_length tokens and were truncated.",
            "num_unknown": "{} of {} sources have unknown tokens, for characters or words that the vocabulary lacks.",
            "num_cut": "{} sentences were too long and were cut between clauses.",
        }
        for name, text in problems.items():
            if count := getattr(self, name):
                logger.warning(text.format(count, self.num_looping if name == "num_loops" else num_sources))
        if self.num_drafted:
            share = 100 * self.num_accepted / self.num_drafted
            logger.info("Of %d drafted tokens %.1f %% were accepted.", self.num_drafted, share)


COUNTERS = tuple(name for name in vars(TextStream) if name.startswith("num_"))


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
    joint_search: Callable | None
    options: dict[str, Any]
    num_targets: int
    ends_loops: bool
    return_scores: bool
    split_sentences: bool | str
    # True to choose by `generate_mbr()`, whose arguments the options then are.
    minimizes_risk: bool = False

    @classmethod
    def of(
        cls,
        generator: "Generator",
        options: dict[str, Any],
        return_scores: bool = False,
        split_sentences: bool | str = False,
        risk: Mapping[str, Any] | None = None,
    ) -> "Plan":
        """Read the options of a call, arguments of `generate()`. Raises `MetaphraseError` if they do not fit.

        `risk` has arguments of `generate_mbr()`, if its choice is to be the only candidate.
        """
        if risk is not None:
            if split_sentences:
                raise MetaphraseError("Minimum Bayes risk decoding compares whole texts: leave out `split_sentences`.")
            return cls([generator], None, {**risk, **options}, 1, False, True, False, minimizes_risk=True)
        if getattr(generator.model, "generation_config", None) is None:
            raise MetaphraseError(f"A model must have a decoder to write texts, got {type(generator.model).__name__}.")
        options = {name: value for name, value in options.items() if value is not None or name not in _OWN_OPTIONS}
        ends_loops = bool(options.pop("end_loops", False))
        options = batches.read_options(complete_sampling(options))
        partners, joint_search = generator.members, generator.joint_search
        if "assistant_model" in options:
            partners, joint_search = needed_plugin("joint_generate", "assistant_model")(generator, options)
        if phrases := options.keys() & {"must_contain", "never_contain", "force_words_ids"}:
            require = needed_plugin("phrases", min(phrases))
            options = require(generator.model, options, generator.tokenizers.target)
        num_targets = options.get("num_return_sequences", generator.model.generation_config.num_return_sequences or 1)
        generators = [generator, *partners]
        return cls(generators, joint_search, options, num_targets, ends_loops, return_scores, split_sentences)

    def encode(self, texts: list[str]) -> EncodedTexts:
        """Return the ids of the texts that are not blank, or of their sentences. `TooLongError` for too many tokens."""
        # A blank text has no sentence, and its target is empty.
        documents = [Document([text], ["", ""]) if text.strip() else Document() for text in texts]
        num_cut = 0
        if self.split_sentences:
            split = needed_plugin("split_sentences", "split_sentences")
            documents, num_cut = split(self.generators, texts, self.split_sentences)
        sentences = [sentence for document in documents for sentence in document.sentences]
        uncut = [generator.encode_uncut(sentences) for generator in self.generators]
        sources = [generator.truncate(ids) for generator, ids in zip(self.generators, uncut, strict=True)]
        # Compare tuples of all models' ids, so that a source counts once. What a draft model reads changes no target.
        counted = slice(1 + len(self.generators[0].members))
        num_truncated = sum(map(operator.ne, zip(*uncut[counted], strict=True), zip(*sources[counted], strict=True)))
        numbers = [number for number, text in enumerate(documents, start=1) for _ in text.sentences]
        unknown = self.generators[0].tokenizers.unknown_id
        num_unknown = len({number for number, ids in zip(numbers, sources[0], strict=True) if unknown in ids})
        with batches.numbering(numbers):
            for generator, ids in zip(self.generators, sources, strict=True):
                batches.check_sources(ids, batches.longest_source(generator.model), generator.max_tokens_per_batch)
        counts = {"num_cut": num_cut, "num_truncated": num_truncated, "num_unknown": num_unknown}
        return EncodedTexts(sources, documents, counts)

    def decode(self, documents: list[Document], hypotheses: list[list[batches.Hypothesis]]) -> list[list[ScoredText]]:
        """Return target texts for all sources. A blank source has empty ones.

        The score of a text is the mean of its sentences.
        """
        tokenizers, rows = self.generators[0].tokenizers, iter(hypotheses)
        results = []
        for document in documents:
            # Candidate i of a text has candidate i of each sentence.
            candidates = list(zip(*(next(rows) for _ in document.sentences), strict=True)) or [()] * self.num_targets
            results.append([])
            for row in candidates:
                score = sum(part.score for part in row) / max(len(row), 1) if self.return_scores else None
                sentences = tokenizers.decode_targets([part.ids for part in row])
                results[-1].append(ScoredText(document.join(sentences), score))
        return results


class Generator(TextStream):
    """A model with its tokenizers.

    Sources of similar length share a batch. Results have the order of the sources. A blank source gives an empty target and
    does not reach the model. For counters see `TextStream`.
    """

    def __init__(
        self,
        model: PreTrainedModel | batches.Engine,
        tokenizers: TokenizerPair,
        *,
        source_prefix: str = "",
        max_source_length: int | None = None,
        batch_size: int = batches.DEFAULT_BATCH_SIZE,
        max_tokens_per_batch: int = batches.DEFAULT_MAX_TOKENS_PER_BATCH,
        members: Sequence["Generator"] = (),
        vocabulary_map: Any = None,
    ):
        """Join the parts.

        Args:
            model: An encoder-decoder with a generation mixin, or an engine.
            source_prefix: Text before every source, such as `summarize: `.
            max_source_length: Most tokens of a source, with prefix and end of sequence. Longer sources are truncated. Without
                it no source is truncated, and a source with more tokens than the model has positions is an error. Members and
                assistants have limits of their own.
            max_tokens_per_batch: Most source tokens in a batch, padding included.
            members: Generators whose models join this one in an ensemble. All need the same target vocabulary; each reads
                sources with its own tokenizer. Generation settings are those of this generator.
            vocabulary_map: `VocabularyMap`. Greedy search, beam search and sampling of this model select only from the tokens
                that it permits for the sources of a batch. Other searches select from all tokens.

        Raises:
            MetaphraseError: If a size is below 1, `max_source_length` has no room for a token of the text, or the models cannot
                form an ensemble.
        """
        for name, value in (("batch_size", batch_size), ("max_tokens_per_batch", max_tokens_per_batch)):
            if value < 1:
                raise MetaphraseError(f"`{name}` must be at least 1, got {value}.")
        self.model = model
        self.tokenizers = tokenizers
        self.source_prefix = source_prefix
        self.max_source_length = max_source_length
        if max_source_length is not None:
            check_source_length(max_source_length, tokenizers, source_prefix)
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.vocabulary_map = vocabulary_map
        # Chooses between torch and a copy in another engine for each call, if set.
        self.engine_choice: Any = None
        self.members, self.joint_search = list(members), None
        if self.members:
            _, self.joint_search = needed_plugin("joint_generate", "members")(self, {})

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
        early_stopping: bool | None = None,
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
            dtype: Type of the weights; `auto` is the type of the checkpoint. On a CPU, `int8` stores the linear layers in that
                type and computes the rest in float32 (see `quantize`). `ctranslate2` also takes its own compute types.
            trust_remote_code: True to run code that comes with the model or its tokenizers. Metaphrase models do not need it.
            source_lang: Language code of the sources for a multilingual model (mBART, M2M100, NLLB), such as eng_Latn. The
                default is the tokenizer's.
            target_lang: Language code of the targets. The default is that of the model's generation config.
            use_vmap: True to use the vocabulary map of the model, `vmap.txt`.
            early_stopping: The option of `generate()`, for calls and models that do not set it.

        Raises:
            MetaphraseError: If a language or the engine is unknown, the engine cannot run the model, or the models cannot form an
                ensemble.
        """
        if engine not in ENGINES:
            raise MetaphraseError(f"`engine` must be one of {', '.join(ENGINES)}, got {engine!r}.")
        names: list[Any] = []
        for name in [name_or_path] if isinstance(name_or_path, str | os.PathLike) else name_or_path:
            names += members_of(name) or [name]
        if len(names) != 1 and (engine == "ctranslate2" or use_vmap or not names):
            raise MetaphraseError(f"Engine ctranslate2 and `use_vmap` need one model, ensembles several, got {names}.")
        if engine == "auto":
            engine = "torch" if len(names) > 1 else "ctranslate2" if is_exported(names[0]) else "auto"
        load_engine, choice = plugin("engine") if engine == "auto" else None, None
        if engine != "ctranslate2":
            device = default_device() if device is None else device
            check_device(device)
        if engine == "ctranslate2" or torch_dtype(dtype) == torch.int8:
            load_engine = needed_plugin("engine", "engine" if engine == "ctranslate2" else "dtype")
        loading: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        parts = []
        for name in names:
            with naming(name, "name_or_path"):
                tokenizers = TokenizerPair.from_pretrained(name, **loading)
                if use_vmap:
                    kwargs["vocabulary_map"] = needed_plugin("vocabulary_map", "use_vmap")(name, tokenizers)
                if load_engine is None:
                    model = load_pretrained(name, dtype=torch_dtype(dtype), **loading).to(device).eval()
                else:
                    options = {"engine": engine, "device": device, "dtype": dtype, **loading}
                    model, choice = load_engine(name, tokenizers, kwargs.get("vocabulary_map"), **options)
            parts.append((model, tokenizers))
            languages = set_languages(tokenizers, source_lang, target_lang)
            config = getattr(model, "generation_config", None)
            if config is None:  # An encoder alone.
                continue
            config.update(**languages)
            if early_stopping is not None and config.early_stopping is None:
                config.early_stopping = early_stopping
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
            split_sentences: True to split sources into sentences; or a code of their language, such as de. True means the
                language of a multilingual tokenizer, or else English.
            show_progress: True for a bar, or lines without a terminal; `None` for a bar on a terminal only.
            **generation_kwargs: As above; `num_return_sequences` must be 1.

        Raises:
            MetaphraseError: If `texts` is a single string or holds other objects than strings, a source has more tokens than the
                model has positions, `num_return_sequences` is not 1, or the assistant does not fit; or as `decode` and
                `encode_phrase` do.
        """
        # Overrides the model's own setting.
        plan = Plan.of(self, {"num_return_sequences": 1} | generation_kwargs, split_sentences=split_sentences)
        if (num := plan.num_targets) != 1:
            raise MetaphraseError(f"`num_return_sequences` must be 1 for `generate`, got {num}: use `generate_n_best`.")
        candidates = self.generate_planned(plan, list(checked_texts(texts)), show_progress)
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
            split_sentences: Target i of a source has target i of each sentence; its score is their mean.
            **generation_kwargs: As for `generate()`, with its errors.
        """
        plan = Plan.of(self, generation_kwargs, return_scores, split_sentences)
        return self.generate_planned(plan, list(checked_texts(texts)), show_progress)

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

        Args:
            num_references: Additional samples as pseudo-references. By default the candidates are the pseudo-references.
            utility: `chrf` or `bleu`, of a candidate against a pseudo-reference, or a judge of `load_judge`. The score is the
                expected utility, 0 to 100, or that of the judge, negative for an error.
            **generation_kwargs: As for `generate()`, for the candidates.

        Source: Kumar and Byrne 2004; Eikema and Aziz 2020, arXiv 2005.10283; epsilon sampling: Freitag et al. 2023,
        arXiv 2305.09860.
        """
        select = needed_plugin("minimum_bayes_risk", "generate_mbr")
        texts = list(checked_texts(texts))
        return select(self, texts, num_candidates, num_references, utility, show_progress, generation_kwargs)

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

        The sources of a chunk are sorted and share batches.

        Args:
            chunk_size: Sources of a chunk, at least 1.
            seed: Seed of the stream, at least 0. The random numbers of a chunk depend only on the seed and the chunk's number,
                so that a stopped stream can be resumed. Chunk 0 has those of `torch.manual_seed(seed)`.
            first_chunk: Number of the first chunk in `lines`, for a resumed stream.
            total: Sources of the whole stream, for the progress bar.
            risk: Arguments of `generate_mbr()`, if its choice is to be the only candidate.
            **generation_kwargs: As for `generate_n_best()`, with its errors.
        """
        chunks = read_chunks(checked_texts(lines, "lines"), chunk_size, first_chunk)
        # A bad option is an error before the first line is read.
        plan = Plan.of(self, generation_kwargs, return_scores, split_sentences, risk)
        # Batches hold sentences, and the bar counts texts.
        has_steps = not (plan.minimizes_risk or split_sentences)
        with progress_bar(total, "line", show_progress, initial=first_chunk * chunk_size) as bar:
            for chunk in chunks:
                candidates = self.generate_chunk(plan, chunk, seed, bar.update if has_steps else None)
                bar.update(sum(not text.strip() for text in chunk.texts) if has_steps else len(chunk.texts))
                yield from candidates

    def generate_chunk(
        self, plan: Plan, chunk: Chunk, seed: int | None, on_batch: batches.OnBatch = None
    ) -> list[list[ScoredText]]:
        """Return the candidates of each source of a chunk, whatever came before."""
        if chunk.number and self.engine_choice is not None:
            self.engine_choice.expect_many()
        if seed is not None and chunk.number:
            state = np.random.SeedSequence(seed, spawn_key=(chunk.number,)).generate_state(1, np.uint64)
            seed = int(state[0] >> np.uint64(1))
        if seed is not None:
            torch.manual_seed(seed)
        with batches.numbering(range(chunk.first + 1, chunk.first + len(chunk.texts) + 1)):
            if plan.minimizes_risk:
                return [[candidate] for candidate in self.generate_mbr(chunk.texts, **plan.options)]
            return self.generate_planned(plan, chunk.texts, on_batch=on_batch)

    def generate_planned(
        self, plan: Plan, texts: list[str], show_progress: bool | None = False, on_batch: batches.OnBatch = None
    ) -> list[list[ScoredText]]:
        """Return the candidates of each text: the way from texts to ids, from ids to hypotheses, and from these to texts."""
        encoded = plan.encode(texts)
        hypotheses = self.generate_encoded(plan, encoded, show_progress, on_batch)
        if plan.ends_loops:
            needed_plugin("end_loops", "end_loops")(self, plan, encoded, hypotheses)
        return plan.decode(encoded.documents, hypotheses)

    def generate_encoded(
        self, plan: Plan, encoded: EncodedTexts, show_progress: bool | None = False, on_batch: batches.OnBatch = None
    ) -> list[list[batches.Hypothesis]]:
        """Return the hypotheses of each sentence, and count. The server overrides this method, so that requests share batches."""
        ids, *partner_ids = encoded.ids
        # A copy, because the search counts its drafts.
        model, joint_search = self.model, copy.copy(plan.joint_search)
        inputs = zip(plan.generators[1:], partner_ids, strict=True)
        partners = [batches.Partner(other.model, rows) for other, rows in inputs]
        if self.engine_choice is not None and ids:
            sizes = self.batch_size, plan.return_scores, bool(partners)
            model = self.engine_choice.choose(model, plan.options, ids, *sizes)
        hypotheses = batches.decode(
            model,
            ids,
            options=plan.options,
            return_scores=plan.return_scores,
            batch_size=self.batch_size,
            max_tokens_per_batch=self.max_tokens_per_batch,
            show_progress=show_progress,
            on_batch=on_batch,
            partners=partners,
            search=joint_search,
            vocabulary_map=self.vocabulary_map,
        )
        drafts = {name: getattr(joint_search, name, 0) for name in ("num_drafted", "num_accepted")}
        self.count(encoded.counts | drafts, hypotheses)
        return hypotheses

    def generate_ids(
        self, texts: list[str], *, return_scores: bool = False, show_progress: bool | None = False, **generation_kwargs
    ) -> list[list[batches.Hypothesis]]:
        """Return the hypotheses of texts, of which blank ones are left out. The options are those of `generate_n_best()`."""
        plan = Plan.of(self, generation_kwargs, return_scores)
        return self.generate_encoded(plan, plan.encode(texts), show_progress)

    def num_targets(self, **generation_kwargs) -> int:
        """Return the number of candidates of a source with these options."""
        return Plan.of(self, generation_kwargs).num_targets

    def score(
        self, sources: Iterable[str], targets: Iterable[str | Sequence[int]], *, show_progress: bool | None = False
    ) -> list[Any]:
        """Return the log-probability of each token of given targets: one `ForcedScore` for each pair, in order.

        The scores are those of the model's own distribution. Penalties, forced tokens and other options of `generate` do not
        apply.

        Args:
            sources: Source texts without `source_prefix`.
            targets: One for each source: a text, or token ids without the start token, such as `Hypothesis.ids`.

        Raises:
            MetaphraseError: If the numbers of sources and targets differ, a side has more tokens than the model has positions, or
                this is an ensemble.
        """
        return needed_plugin("score", "score")(self, sources, targets, show_progress)

    def embed(self, texts: Iterable[str], *, show_progress: bool | None = False) -> np.ndarray:
        """Return an embedding of each text, the mean of the encoder's output over its tokens: (texts, hidden), float32.

        Source: Ni et al. 2022, Sentence-T5, section 3, arXiv 2108.08877.
        """
        return needed_plugin("embed", "embed")(self, texts, show_progress)

    def choice_scores(
        self, texts: Iterable[str], choices: Sequence[str], *, show_progress: bool | None = False
    ) -> np.ndarray:
        """Return the probability of each answer among the choices, for each text: (texts, choices), rows add up to 1.

        If each choice is one token and no two are equal, one step of the decoder is read, without the end of sequence. Otherwise
        the probabilities are those of whole targets, with their ends.

        Source: Nogueira et al. 2020, section 3, arXiv 2003.06713.
        """
        return needed_plugin("choice_scores", "choices")(self, texts, choices, show_progress)

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


def check_source_length(length: int, tokenizers: TokenizerPair, prefix: str) -> None:
    """Raise `MetaphraseError` if `max_source_length` has no room for a token of the text beside special tokens and prefix."""
    # White space at the end of the prefix may be part of the next token.
    [ids] = tokenizers.encode_sources([prefix.rstrip()])
    if length <= len(ids):
        raise MetaphraseError(f"`max_source_length` must be above {len(ids)}, the tokens around a text, got {length}.")


def torch_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the type of weights that `dtype` names: auto, a type of floating point or int8. `MetaphraseError` for others."""
    weight_type = "auto" if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."), None)
    is_float = isinstance(weight_type, torch.dtype) and weight_type.is_floating_point
    if dtype != "auto" and not is_float and weight_type != torch.int8:
        raise MetaphraseError(f"`dtype` must be auto, int8 or one of torch's, such as bfloat16, got {str(dtype)!r}.")
    return weight_type
