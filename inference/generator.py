"""Generator: a model with its tokenizers, from source texts to target texts."""

import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

import metaphrase.modeling  # noqa: F401 (registers the models with the Auto classes)
from metaphrase.decoding.options import plain_options
from metaphrase.decoding.quantization import PackedLinear, quantization_of, quantize
from metaphrase.decoding.searches.joint_search import EnsembleSearch
from metaphrase.inference.chunks import Chunk, PreparedChunks, StreamDecoder, decode_chunk
from metaphrase.inference.engine import Engine, Hypothesis, default_device, find_device, is_exported
from metaphrase.inference.engine_choice import EngineChoice
from metaphrase.inference.minimum_bayes_risk import decode_by_risk
from metaphrase.inference.progress import ProgressBar
from metaphrase.inference.run import EncodedSources, Run, ScoredText, check_partner, check_single
from metaphrase.inference.scoring import ForcedScore, encode_forced, read_texts, score_targets
from metaphrase.inference.source_limits import check_source_length, count_cut
from metaphrase.modeling.pipeline_support import DEFAULT_BATCH_SIZE, DEFAULT_MAX_TOKENS_PER_BATCH
from metaphrase.storage.loading import load_whole, naming
from metaphrase.storage.model_files import check_options
from metaphrase.tokenization import TextFrame, TokenizerPair, checked_texts, readable_tokens, set_languages, shorten
from metaphrase.tokenization.vocabulary_map import VocabularyMap

ENGINES = ("auto", "torch", "ctranslate2")


class Generator(StreamDecoder):
    """A model with its tokenizers.

    Sources of similar length share a batch. Results have the order of the sources. A blank source gives an empty target and
    does not reach the model. For streams and counters see `StreamDecoder`.
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
            ensemble_mean: `linear` averages the probabilities, `log_linear` the log-probabilities.
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
        self.ensemble = EnsembleSearch(ensemble_mean)
        self.vocabulary_map = vocabulary_map
        self.engine_choice: EngineChoice | None = None
        for number, member in enumerate(self.members, start=2):
            check_partner(self, member, f"model {number} of the ensemble")

    def __repr__(self) -> str:
        model, settings = self.model, self.model.generation_config
        facts = [type(model).__name__]
        if isinstance(model, PreTrainedModel):
            packed = next((layer for layer in model.modules() if isinstance(layer, PackedLinear)), None)
            weights = f"{model.num_parameters():,} parameters, {str(model.dtype).removeprefix('torch.')}"
            # Packed weights are no parameters.
            facts.append(f"{weights if packed is None else type(packed).__name__} on {model.device}")
        pair = self.tokenizers
        sizes = [
            f"{len(tokenizer):,}" for tokenizer in ([pair.source] if pair.is_joint else [pair.source, pair.target])
        ]
        facts.append(f"vocabulary {' and '.join(sizes)}")
        beams = settings.num_beams or 1
        facts.append(f"{beams} beams" if beams > 1 else "sampling" if settings.do_sample else "greedy search")
        if self.members:
            facts.append(f"ensemble of {1 + len(self.members)} models")
        name = getattr(model, "name_or_path", "")
        return f"Generator({', '.join([repr(name)] * bool(name) + facts)})"

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
            name_or_path: Folder or Hub id of any encoder-decoder of transformers. Several Metaphrase models form an ensemble.
                An exported folder runs in CTranslate2. The engine `ctranslate2` converts a Metaphrase model into a temporary
                copy.
            engine: `torch`, `ctranslate2`, or `auto`: torch, and for each call on a CPU that CTranslate2 decodes faster and with
                the same tokens, a copy of the model in CTranslate2. The copy stays in a cache folder.
            device: Where to run. The default is the accelerator if there is one.
            dtype: Type of the weights; `auto` is the type of the checkpoint. On a CPU, `int8` and `float16` store the linear
                layers in that type and compute the rest in float32 (see `quantize`). `ctranslate2` also takes its own compute
                types.
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
        if not names:
            raise ValueError("`name_or_path` must name at least one model, got none.")
        if engine == "ctranslate2" and len(names) > 1:
            raise ValueError(f"`engine` must be torch for an ensemble, got {engine!r}.")
        if use_vmap and len(names) > 1:
            raise ValueError(f"`use_vmap` must be left out for an ensemble, got {len(names)} models.")
        if engine == "auto" and len(names) == 1 and is_exported(names[0]):
            engine = "ctranslate2"
        parts, choice = [], None
        for name in names:
            with naming(name, "name_or_path"):
                if engine != "ctranslate2":
                    model = _load_model(name, default_device() if device is None else device, dtype, trust_remote_code)
                else:
                    from metaphrase.inference.ctranslate2.engine import CTranslate2Engine  # Needs an extra.

                    model = CTranslate2Engine.from_pretrained(name, device=device, dtype=dtype)
                    model.use_vmap = use_vmap
                tokenizers = TokenizerPair.from_pretrained(name, trust_remote_code=trust_remote_code)
                if use_vmap:
                    kwargs["vocabulary_map"] = VocabularyMap.from_pretrained(name, tokenizers)
            quantization = None if engine == "ctranslate2" else quantization_of(dtype, model.device)
            if engine == "auto" and len(names) == 1:
                choice = EngineChoice(model, tokenizers, quantization, kwargs.get("vocabulary_map"))
            if quantization is not None:
                quantize(model, quantization)
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
        - `assistant_model`: a smaller Metaphrase model with the same vocabulary, or a generator of one. It drafts
          `num_assistant_tokens` tokens at a time for greedy search or sampling. The result stays the same.
        - `decoder_input_ids`: a row for each text, blank ones included, or one row for all. A stream takes one row.
        - `prefix_allowed_tokens_fn`: called with the index of the text, in a stream that in the whole stream.

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
        count = plain_options(generation_kwargs).get("num_return_sequences", 1)
        if count != 1:
            raise ValueError(f"`num_return_sequences` must be 1 for `generate`, got {count}: use `generate_n_best`.")
        # Overrides the model's own setting.
        options = {**generation_kwargs, "num_return_sequences": 1}
        candidates = self._generate(list(checked_texts(texts)), False, options, show_progress, split_sentences)
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
        return self._generate(
            list(checked_texts(texts)), return_scores, generation_kwargs, show_progress, split_sentences
        )

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
            reference_options: Options for the pseudo-references. The default is `generation_kwargs`.
            show_progress: True for a bar, or lines without a terminal; `None` for a bar on a terminal only.
            **generation_kwargs: As for `generate()`, for the candidates.

        Returns:
            The chosen texts. The score is the expected utility, 0 to 100.

        Raises:
            ValueError: If a number is below 1, the beam is narrower than the number of candidates, the utility is unknown, or
                `reference_options` are given without `num_references`.
        """
        num_truncated = self.num_truncated
        chosen = decode_by_risk(
            lambda *arguments: self._generate(*arguments, show_progress),
            list(checked_texts(texts)),
            config=self.model.generation_config,
            num_candidates=num_candidates,
            num_references=num_references,
            utility=utility,
            options=generation_kwargs,
            reference_options=reference_options,
        )
        if num_references is not None:
            # The pseudo-references came from the same sources, which count once.
            self.num_truncated -= (self.num_truncated - num_truncated) // 2
        return [ScoredText(text, expected_utility) for text, expected_utility in chosen]

    def decode_chunks(self, chunks: Iterator[Chunk], bar: ProgressBar, **options) -> Iterator[list[ScoredText]]:
        """See `StreamDecoder`."""
        if options["risk"] is not None:
            for chunk in chunks:
                yield from decode_chunk(self, chunk, **options)
                bar.update(len(chunk.texts))
            return
        seed, return_scores, _ = (options.pop(name) for name in ("seed", "return_scores", "risk"))
        split_sentences = options.pop("split_sentences")
        run = Run.of(self, options)

        def encode(chunk: Chunk) -> EncodedSources:
            with chunk.numbering():
                return run.encode(chunk.texts, split_sentences)

        with PreparedChunks(chunks, encode) as prepared_chunks:
            for chunk, sources in prepared_chunks:
                chunk.prepare(self, seed)
                indices = [chunk.indices[index] for index in sources.indices()]
                # The bar counts texts.
                on_batch = None if split_sentences else bar.update
                hypotheses, counts = run.search(sources, indices, return_scores, on_batch=on_batch)
                self.count(counts)
                with prepared_chunks.alone():
                    candidates = run.decode_texts(sources.documents, hypotheses, return_scores)
                    bar.update(len(chunk.texts) - (len(hypotheses) if on_batch else 0))
                    yield from candidates
                    del hypotheses, candidates

    def num_targets(self, **generation_kwargs) -> int:
        """Return the number of candidates of a source with these options."""
        check_options(generation_kwargs)
        default = self.model.generation_config.num_return_sequences or 1
        return plain_options(generation_kwargs).get("num_return_sequences", default)

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
            ValueError: If the numbers of sources and targets differ, a source is blank, target ids are empty or not in the
                vocabulary, a side has more tokens than the model has positions, or this is an ensemble.
        """
        check_single(self, "generator")
        sources, targets = read_texts(sources, targets)
        ids, uncut = encode_forced(self.tokenizers, targets), self.encode_uncut(sources)
        cut = self.truncate(uncut)
        scores = score_targets(self, cut, ids, show_progress)
        self.num_truncated += count_cut(uncut, cut)
        tokens = [readable_tokens(self.tokenizers.target, row) for row in ids]
        return [ForcedScore(*parts) for parts in zip(ids, tokens, scores, strict=True)]

    def search(
        self, texts: list[str], return_scores: bool, generation_kwargs: dict, show_progress: bool | None
    ) -> list[list[Hypothesis]]:
        """Decode texts, of which blank ones are left out, and count. Returns the hypotheses."""
        run = Run.of(self, generation_kwargs, len(texts))
        return self.search_encoded(run, run.encode(texts), return_scores, show_progress)

    def search_encoded(
        self, run: Run, sources: EncodedSources, return_scores: bool, show_progress: bool | None
    ) -> list[list[Hypothesis]]:
        """Decode encoded sources, and count.

        The server overrides this method, to decode the sources of several requests together.
        """
        hypotheses, counts = run.search(sources, sources.indices(), return_scores, show_progress=show_progress)
        self.count(counts)
        return hypotheses

    def _generate(
        self,
        texts: list[str],
        return_scores: bool,
        generation_kwargs: dict,
        show_progress: bool | None,
        split_sentences: bool | str = False,
    ) -> list[list[ScoredText]]:
        run = Run.of(self, generation_kwargs, len(texts))
        sources = run.encode(texts, split_sentences)
        hypotheses = self.search_encoded(run, sources, return_scores, show_progress)
        return run.decode_texts(sources.documents, hypotheses, return_scores)

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


def _load_model(
    name_or_path: str | os.PathLike, device: str | torch.device, dtype: str | torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    _check_device(device)
    quantization = quantization_of(dtype, device)
    model = load_whole(
        name_or_path, dtype=torch.float32 if quantization else _find_dtype(dtype), trust_remote_code=trust_remote_code
    )
    return model.to(device).eval()


def _check_device(name: str | torch.device) -> None:
    try:
        # The device `meta` holds no numbers.
        torch.zeros(1, device=find_device(name)).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # CUDA's message may have many lines.
        reason = str(error).partition("\n")[0]
        raise ValueError(f"`device` must be one that torch can use here, got {str(name)!r}: {reason}") from error


def _find_dtype(name: str | torch.dtype) -> str | torch.dtype:
    """Return torch's type for a name. `auto` stays as it is."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if name != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(
            f"`dtype` must be auto, int8 or one of torch's, such as float32, bfloat16 or float16, got {str(name)!r}."
        )
    return name if dtype is None else dtype
