"""A tiny generator: a random model with large weights and real tokenizers, the same in every call."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

from tiny_models import tiny_model
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from metaphrase.inference import Generator
from metaphrase.tokenization import CONTROL_TOKENS, TokenizerPair, train_tokenizer

SOURCES = ["a small dog runs", "the cat sleeps", "a cat", "two dogs and the small cat run", "the dog"]
TARGETS = ["ein kleiner Hund läuft", "die Katze schläft", "eine Katze", "zwei Hunde und die Katze laufen", "der Hund"]
# The targets as other tools split them into subwords.
PIECES = [target[:2] + "@@ " + target[2:] for target in TARGETS]


@functools.cache
def tiny_pair(joint: bool = True, kind: str | None = None) -> TokenizerPair:
    """Return a joint tokenizer of both sides, or one per side. The kind `pretokenized` is trained on `PIECES`.

    Without a kind, each character is a token and others are unknown: an untrained model then writes no broken bytes.
    """
    if kind is None:
        source = _letter_tokenizer(SOURCES + TARGETS if joint else SOURCES)
        return TokenizerPair(source, source if joint else _letter_tokenizer(TARGETS))
    targets = PIECES if kind == "pretokenized" else TARGETS
    return TokenizerPair.train(SOURCES * 3, targets * 3, joint=joint, kind=kind, show_progress=False)


def _letter_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(texts, kind="char", show_progress=False)
    counts = Counter("".join(texts))
    entries = [*CONTROL_TOKENS, *sorted(counts, key=lambda letter: (-counts[letter], letter))]
    backend = tokenizer.backend_tokenizer
    backend.model = models.BPE({entry: index for index, entry in enumerate(entries)}, [], unk_token="<unk>")
    backend.pre_tokenizer, backend.decoder = None, decoders.Fuse()
    return tokenizer


def tiny_generator(
    joint: bool = True, kind: str | None = None, seed: int = 0, layers: int = 2, **generator_options: Any
) -> Generator:
    """Return a generator of an untrained model. Its outputs are arbitrary, but the same in every call."""
    pair = tiny_pair(joint, kind)
    # Sentences of other tests are long, in letters.
    sizes = {"encoder_layers": layers, "decoder_layers": layers, "max_position_embeddings": 256}
    model = tiny_model(seed=seed, share_embeddings=joint, **sizes, **pair.config_fields())
    model.generation_config.max_new_tokens = 8
    return Generator(model, pair, **generator_options)


def save_generator(generator: Generator, folder: Path) -> Path:
    generator.model.save_pretrained(folder)
    generator.tokenizers.save_pretrained(folder)
    return folder
