"""A generator whose targets are its sources, or a change of them."""

from collections.abc import Callable

from tiny_generator import tiny_pair
from transformers import GenerationConfig

from metaphrase.inference import Generator, Hypothesis
from metaphrase.texts.plan import Links, find_words


class IdentityEngine:
    """An engine that writes the ids of the source, changed by a function of texts."""

    def __init__(self, change: Callable[[str], str] | None = None):
        self.generation_config = GenerationConfig(num_return_sequences=1)
        self.change = change

    def make_generate(self, options, return_scores):
        count = options.get("num_return_sequences", 1)
        return lambda sources: [[Hypothesis(self._target(ids), -1.0 * len(ids), True)] * count for ids in sources]

    def _target(self, ids: list[int]) -> list[int]:
        if self.change is None:
            return list(ids)
        pair = tiny_pair(kind="byte_bpe")
        [text] = pair.decode_targets([ids])
        return pair.encode_targets([self.change(text)])[0]


def identity_generator(change: Callable[[str], str] | None = None, **options) -> Generator:
    return Generator(IdentityEngine(change), tiny_pair(kind="byte_bpe"), **options)


def align_by(chooser):
    """Return a stand-in for the alignment: a function that chooses the source word of each target word."""

    def align(self, sentences, targets):
        rows = []
        for sentence, target in zip(sentences, targets, strict=True):
            source, words = find_words(sentence.text), find_words(target)
            rows.append(Links(source, words, [chooser(index, len(source)) for index in range(len(words))]))
        return rows

    return align
