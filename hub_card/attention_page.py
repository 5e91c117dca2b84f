"""Attention page: one HTML file that shows the cross-attention of several sentences.

The file loads no other script, font or picture. Weights are rounded to 255ths and stored as base64.
"""

import base64
import html
import json
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metaphrase.hub_card.figures import spell_out

if TYPE_CHECKING:
    from metaphrase.inference import AttentionMap

logger = logging.getLogger(__name__)

MAX_WEIGHT_BYTES = 8_000_000
MAX_SENTENCES = 500
_TEMPLATE = Path(__file__).with_name("attention_page.html")
_SIDES = ("source", "target")


def write_attention_page(
    maps: Sequence["AttentionMap"],
    path: str | os.PathLike,
    *,
    title: str = "Cross-attention",
    layer: int | None = None,
    head: int | None = None,
    max_weight_bytes: int = MAX_WEIGHT_BYTES,
) -> Path:
    """Write a page that shows the attention of a word to the words of the other side while the mouse points at it.

    With `head_weights` the page offers all heads of all layers. If these exceed the size limit, it offers the mean of each layer,
    else only `weights`. The page and a warning then name the reduction.

    Args:
        maps: One for each sentence, of one model.
        path: The HTML file to write.
        title: Title of the page.
        layer: Layer to show first, or that of `weights`. `None` is the mean of all.
        head: Head to show first, or that of `weights`. `None` is the mean of all.
        max_weight_bytes: Maximum size of all weights in the file.

    Raises:
        ValueError: If there are no maps or more than `MAX_SENTENCES`, or `weights` alone exceed the size limit.
    """
    check_sentences(len(maps))
    detail = _affordable_detail(maps, max_weight_bytes)
    num_layers, num_heads = (0, 0) if maps[0].head_weights is None else maps[0].head_weights.shape[:2]
    if num_layers:
        # -1 is the last
        layer = None if layer is None else layer % num_layers
        head = None if head is None else head % num_heads
    shown = {
        # Labels of menus without a choice.
        "choice": {
            "layer": "mean of all" if layer is None else f"{layer}",
            "head": "mean" if layer is None or head is None else f"{head}",
        },
        "layers": num_layers if detail != "chosen" else 0,
        "heads": num_heads if detail == "heads" else 0,
        "layer": layer if detail != "chosen" else None,
        "head": head if detail == "heads" else None,
    }
    note = ""
    if num_layers and detail != "heads":
        rest = describe_choice(layer, head)
        if detail == "layers":
            rest = "the mean of each layer" + (f", not head {head} alone" if head is not None else "")
        note = f"All heads would exceed {max_weight_bytes:,} bytes: this is {rest}."
        logger.warning("%s %d sentences, %d layers of %d heads.", note, len(maps), num_layers, num_heads)
    sentences = [_describe(attention) | {"weights": _pack(attention, detail)} for attention in maps]
    fields = {
        "title": html.escape(title),
        "note": html.escape(note),
        "sentences": "\n".join(_section(index, sentence) for index, sentence in enumerate(sentences)),
        "data": _json({**shown, "sentences": sentences}),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match.group(1)], _TEMPLATE.read_text(encoding="utf-8"))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", newline="\n")
    return path


def describe_choice(layer: int | None, head: int | None) -> str:
    """Describe the weights that `cross_attention` returns for a layer and a head."""
    if layer is None:
        return "the mean over all layers and heads"
    return f"layer {layer}, " + ("the mean over its heads" if head is None else f"head {head}")


def check_sentences(count: int) -> None:
    """Check the number of sentences of a page.

    Raises:
        ValueError: If it is 0 or above `MAX_SENTENCES`.
    """
    if not 1 <= count <= MAX_SENTENCES:
        raise ValueError(f"A page must show 1 to {MAX_SENTENCES} sentences, got {count}.")


def _affordable_detail(maps: Sequence["AttentionMap"], max_weight_bytes: int) -> str:
    """Return the finest detail within the size limit: all `heads`, the mean of each of the `layers`, or the `chosen` weights."""
    counts = {"chosen": 1}
    if all(attention.head_weights is not None for attention in maps):
        num_layers, num_heads = maps[0].head_weights.shape[:2]
        counts = {"heads": num_layers * num_heads, "layers": num_layers, "chosen": 1}
    for detail, count in counts.items():
        # base64 writes four characters for three bytes
        size = sum(4 * -(-count * attention.weights.size // 3) for attention in maps)
        if size <= max_weight_bytes:
            return detail
    raise ValueError(
        f"`maps` must take at most {max_weight_bytes:,} bytes in one page, got {len(maps)} sentences that take "
        f"{size:,}: show fewer or shorter ones."
    )


def _pack(attention: "AttentionMap", detail: str) -> str:
    weights = attention.weights
    if detail != "chosen":
        # (layers, heads, target, source) -> (layers, target, source) for the mean of each layer
        weights = attention.head_weights if detail == "heads" else attention.head_weights.mean(axis=1)
    rounded = np.rint(np.clip(weights, 0, 1) * 255).astype(np.uint8)
    return base64.b64encode(rounded.tobytes()).decode("ascii")


def _describe(attention: "AttentionMap") -> dict:
    """Return words, tokens and the word of each token for both sides. Without words, each token is its own word."""
    described = {}
    for side in _SIDES:
        tokens, ids = getattr(attention, f"{side}_tokens"), getattr(attention, f"{side}_word_ids")
        words = getattr(attention, f"{side}_words")
        if ids is None:
            words, ids = tokens, list(range(len(tokens)))
        # HTML cannot hold control characters.
        texts = {"words": words, "tokens": tokens}
        described[side] = {name: [spell_out(text, ("Cc", "Cs")) for text in texts[name]] for name in texts}
        described[side]["ids"] = list(ids)
    return described


def _section(index: int, sentence: dict) -> str:
    lines = []
    for side in _SIDES:
        buttons = " ".join(
            f'<button type="button" class="word" id="sentence-{index}-{side}-{number}" data-side="{side}" '
            f'aria-pressed="false">{html.escape(word)}</button>'
            for number, word in enumerate(sentence[side]["words"])
        )
        lines.append(f'<div class="words"><b>{side}</b> <span dir="auto">{buttons}</span></div>\n')
    return f"""<section id="sentence-{index}" aria-label="sentence {index + 1}">
<h2>{index + 1}</h2>
{"".join(lines)}<p class="reading" aria-live="polite"></p>
<details><summary>matrix</summary><div class="matrix"></div></details>
</section>"""


def _json(content: dict) -> str:
    """Return JSON that is safe inside a script element."""
    written = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        written = written.replace(character, f"\\u{ord(character):04x}")
    return written
