"""Explanation page: one HTML file that shows what each stage of a model computes for some pairs.

The file loads no other script, font or picture. Weights are rounded to 255ths and stored as base64.
"""

import base64
import html
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from metaphrase.hub_card.figures import spell_out
from metaphrase.storage.folders import file_in_one_step

if TYPE_CHECKING:
    from metaphrase.inference import Explanation

logger = logging.getLogger(__name__)

MAX_WEIGHT_BYTES = 8_000_000
MAX_PAIRS = 50
# Text for each detail of the attention weights that a page can hold.
_DETAILS = {"heads": "all heads", "layers": "the mean of each layer", "mean": "the mean of all layers"}


def write_explanation_page(
    explanations: Sequence["Explanation"],
    path: str | os.PathLike,
    *,
    title: str = "Explanation",
    max_weight_bytes: int = MAX_WEIGHT_BYTES,
) -> Path:
    """Write a page with tokens, shapes, positions, masks, attention, teacher forcing and decoding steps of each pair.

    The page offers all heads of all layers. If these exceed the size limit, it offers the mean of each layer, else the mean of
    all. The page and a warning then name the reduction.

    Args:
        explanations: One for each pair, of one model.
        path: The HTML file to write.
        title: Title of the page.
        max_weight_bytes: Maximum size of all attention weights in the file.

    Raises:
        ValueError: If there are no pairs or more than `MAX_PAIRS`, or even the means exceed the size limit.
    """
    check_pairs(len(explanations))
    detail = _affordable_detail(explanations, max_weight_bytes)
    note = ""
    if detail != "heads":
        note = f"All heads would exceed {max_weight_bytes:,} bytes: the page shows {_DETAILS[detail]}."
        logger.warning("%s", note)
    data = {"note": note, "detail": detail, "pairs": [_describe(explanation, detail) for explanation in explanations]}
    script = Path(__file__).with_name("explanation_page.js").read_text(encoding="utf-8")
    return write_page(path, "explanation_page.html", title=title, data=_json(data), script=script)


def write_page(path: str | os.PathLike, template: str, title: str, **fields: str) -> Path:
    """Write an HTML page in one step.

    Args:
        path: The file to write.
        template: File in this folder with `{{name}}` for each field. `{{style}}` is the style that all pages share.
        title: Title of the page, as text.
        **fields: Parts of the page, as HTML.
    """
    template, style = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in (template, "page.css"))
    fields |= {"title": html.escape(spell_out(title, ("Cc", "Cs"))), "style": style}
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match.group(1)], template)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_in_one_step(path) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")
    return path


def check_pairs(count: int) -> None:
    """Check the number of pairs of a page.

    Raises:
        ValueError: If it is 0 or above `MAX_PAIRS`.
    """
    if not 1 <= count <= MAX_PAIRS:
        raise ValueError(f"A page must show 1 to {MAX_PAIRS} pairs, got {count}.")


def _affordable_detail(explanations: Sequence["Explanation"], max_weight_bytes: int) -> str:
    for detail in _DETAILS:
        weights = [values for explanation in explanations for values in explanation.attentions.values()]
        # base64 writes four characters for three bytes
        size = sum(4 * -(-int(np.prod(_kept_maps(values, detail))) * values[0, 0].size // 3) for values in weights)
        if size <= max_weight_bytes:
            return detail
    raise ValueError(
        f"`explanations` must take at most {max_weight_bytes:,} bytes of attention weights in one page, got {size:,}. "
        "Show fewer or shorter pairs."
    )


def _kept_maps(weights: np.ndarray, detail: str) -> tuple[int, int]:
    """Return the numbers of layers and heads that the page holds."""
    layers, heads = weights.shape[:2]
    return {"heads": (layers, heads), "layers": (layers, 1), "mean": (1, 1)}[detail]


def _describe(explanation: "Explanation", detail: str) -> dict[str, Any]:
    """Return the content of one pair in the form that the script of the page reads."""
    content = asdict(explanation)
    del content["beam_tree"]
    content |= {
        "masks": {name: _pack(mask[None, None]) for name, mask in explanation.masks.items()},
        "attentions": {name: _pack(_reduce(weights, detail)) for name, weights in explanation.attentions.items()},
        "positions": [
            {"name": item.name, "kind": item.kind, **_pack_signed(item.values)} for item in explanation.positions
        ],
        "probabilities": explanation.probabilities.tolist(),
        "ranks": explanation.ranks.tolist(),
        "loss": explanation.loss,
        "beam": asdict(explanation.beam_tree),
    }
    return content


def _reduce(weights: np.ndarray, detail: str) -> np.ndarray:
    """Reduce weights `(layers, heads, query, key)` to the layers and heads that the page holds."""
    layers, heads = _kept_maps(weights, detail)
    weights = weights if heads == weights.shape[1] else weights.mean(axis=1, keepdims=True)
    return weights if layers == len(weights) else weights.mean(axis=0, keepdims=True)


def _pack(weights: np.ndarray) -> dict[str, Any]:
    rounded = np.rint(np.clip(weights, 0, 1) * 255).astype(np.uint8)
    return {"shape": list(weights.shape), "bytes": base64.b64encode(rounded.tobytes()).decode("ascii")}


def _pack_signed(values: np.ndarray) -> dict[str, Any]:
    """Pack values around 0: byte 128 is 0, byte 255 is the largest magnitude, which stands beside them."""
    largest = float(np.abs(values).max()) or 1.0
    rounded = np.rint(128 + 127 * values / largest).astype(np.uint8)
    packed = base64.b64encode(rounded.tobytes()).decode("ascii")
    return {"shape": list(values.shape), "bytes": packed, "largest": largest}


def _json(content: dict) -> str:
    """Return JSON that is safe inside a script element."""
    written = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        written = written.replace(character, f"\\u{ord(character):04x}")
    return written
