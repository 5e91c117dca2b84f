"""Models of the server, with their names and languages, and the bodies of requests, whose size the gate bounds."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs

import yaml
from fastapi import Request
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from metaphrase.errors import MetaphraseError
from metaphrase.filtering.rules import load_identifier
from metaphrase.inference import Generator
from metaphrase.serving.batcher import Batcher, QueuedGenerator, Ticket
from metaphrase.storage.folders import members_of, read_fields
from metaphrase.texts.documents import LANGUAGES, base_code
from metaphrase.tokenization import set_languages
from metaphrase.tokenization.tokenizer_pair import has_languages

NAMES = {code: name for code, _, name, *_ in LANGUAGES}
EXAMPLES = {row[0]: row[3] for row in LANGUAGES if row[3:]}
_LABELS = {"nb": "no", "fil": "tl"}  # the identifier's names of languages, where the table has another
# A shorter text does not tell its language; more characters tell no more.
_LEAST_CHARACTERS, _MOST_CHARACTERS = 40, 1000
# Pairs of languages with tokenizers of their own, of which each takes memory.
_MOST_VARIANTS = 32


class UnknownModelError(MetaphraseError):
    """No model has the name, or translates between the languages."""


class ServedModel:
    """A model with a name, its task, and the codes of its languages, such as en; none if they are unknown."""

    def __init__(
        self, name: str, generator: Generator, batcher: Batcher, *, languages: tuple[str, str] | None, task: str
    ):
        self.name, self.task, self.generator, self.batcher = name, task, generator, batcher
        is_multilingual = languages is None and has_languages(generator.tokenizers.source)
        self._codes = codes_of_tokenizer(generator.tokenizers.source) if is_multilingual else {}
        sides = ([base_code(code)] for code in languages) if languages else (list(self._codes),) * 2
        self.source_languages, self.target_languages = sides
        self._variants: dict[tuple, tuple[Generator, dict[str, int]]] = {}

    @classmethod
    def from_pretrained(
        cls, name: str | None, path: str, batcher: Batcher, *, task: str | None = None, **loading
    ) -> "ServedModel":
        """Load a model from a folder or the Hub, with the arguments `loading` of `Generator.from_pretrained`.

        A name such as en-de tells the languages, else the recipe does. A model with languages translates by default.
        """
        [folder, *_] = members_of(path) or [Path(path)]
        recipe = read_fields(folder / "recipe.yaml", yaml.safe_load) or {}
        pair = recipe.get("source_language"), recipe.get("target_language")
        is_known = all(isinstance(code, str) and len(base_code(code)) in (2, 3) for code in pair)
        codes = tuple((name or "").replace("_", "-").split("-"))
        languages = pair if is_known else None
        if len(codes) == 2 and all(base_code(code) in NAMES for code in codes):
            # A name such as my-model has no languages.
            languages = codes
        generator = Generator.from_pretrained(path, **loading)
        if generator.engine_choice is not None:
            generator.engine_choice.expect_many()
        is_translation = languages[0] != languages[1] if languages else has_languages(generator.tokenizers.source)
        task = task or ("translation" if is_translation else "text2text-generation")
        return cls(name or Path(path).resolve().name, generator, batcher, languages=languages, task=task)

    def open(self, ticket: Ticket, source: str | None, target: str | None) -> tuple[Generator, dict[str, int]]:
        """Return a generator for one request from and to two languages, and the generation options for its target language."""
        generator, options, pair = self.generator, {}, (source, target)
        for code, known in zip(pair, (self.source_languages, self.target_languages), strict=True):
            if code and known and base_code(code) not in known:
                raise UnknownModelError(f"The model {self.name!r} must know the language {code!r}, got {known}.")
        if self._codes and any(pair):
            spellings = (None, *self._codes.values())
            pair = tuple(code if code in spellings else self._codes[base_code(code)] for code in pair)
            if pair not in self._variants:
                for oldest in list(self._variants)[:-_MOST_VARIANTS]:
                    self._variants.pop(oldest, None)
                generator = copy.copy(generator)
                # The languages are a state of the tokenizers.
                generator.tokenizers = copy.deepcopy(generator.tokenizers)
                self._variants[pair] = generator, set_languages(generator.tokenizers, *pair)
            generator, options = self._variants[pair]
        return QueuedGenerator(generator, self.batcher, ticket), options

    def count_tokens(self, sources: Sequence[str], targets: Sequence[str]) -> tuple[int, int]:
        """Return the numbers of tokens of sources and targets."""
        source_ids = self.generator.encode_uncut(list(sources))
        return sum(map(len, source_ids)), sum(map(len, self.generator.tokenizers.encode_targets(list(targets))))


class Pivot(NamedTuple):
    """Two models that translate one after the other, by way of a third language."""

    first: ServedModel
    language: str
    second: ServedModel


def name_of(code: str) -> str:
    """Return the English name of a language, or its code."""
    return NAMES.get(base_code(code), code)


def codes_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the languages of a multilingual tokenizer: its own spelling by base code."""
    if m2m_codes := getattr(tokenizer, "lang_code_to_token", None):
        return {base_code(code): code for code in m2m_codes}
    tokens = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    spellings = [token for token in tokens if "_" in token.strip("_") and not token.startswith("<")]
    # A language may have several scripts. The first one by alphabet stands for it.
    return {base_code(token): token for token in sorted(spellings, reverse=True)}


def identify_languages(texts: Sequence[str], codes: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return for each text the confidence of each language, from 0 to 100, the highest first, as LibreTranslate writes it.

    All texts together tell the language of a short one. The identifier is fastText's small model.
    """
    if len(codes) == 1:
        return [[{"confidence": 100.0, "language": codes[0]}]] * len(texts)

    def identify(text: str) -> list[dict[str, Any]]:
        # The identifier refuses lone surrogates.
        scores = load_identifier()(text[:_MOST_CHARACTERS].encode(errors="replace").decode())
        shares = {code: scores.get(_LABELS.get(code, code), 0.0) for code in codes}
        total = sum(shares.values()) or 1.0
        best = sorted(codes, key=lambda code: -shares[code])
        return [{"confidence": round(100 * shares[code] / total, 1), "language": code} for code in best]

    together = identify(" ".join(texts))
    return [identify(text) if len(text) >= _LEAST_CHARACTERS else together for text in texts]


Fields = TypeVar("Fields", bound=BaseModel)
KINDS = _, _FORM = "application/json", "application/x-www-form-urlencoded"


async def read_body(request: Request, fields: type[Fields], *, lists: tuple[str, ...] = ()) -> Fields:
    """Return the fields of a JSON or form body, which may repeat the fields `lists`. `ValidationError` if one is wrong."""
    body = await request.body()
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        # curl calls every body a form.
        if kind == _FORM and not body.lstrip().startswith(b"{"):
            # Starlette's parser reads the UTF-8 that curl sends as Latin-1.
            pairs = parse_qs(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=1000)
            content = {name: values if name in lists else values[-1] for name, values in pairs.items()}
        else:
            content = dict(json.loads(body))
    except (ValueError, TypeError, RecursionError) as error:
        raise MetaphraseError("The body must be a JSON object or a form, got neither.") from error
    return fields.model_validate(content)


def schema_of(fields: type[BaseModel], *kinds: str) -> dict[str, Any]:
    """Return the description of a body for the OpenAPI page."""
    content = {kind: {"schema": fields.model_json_schema()} for kind in kinds or ("application/json",)}
    return {"requestBody": {"required": True, "content": content}}
