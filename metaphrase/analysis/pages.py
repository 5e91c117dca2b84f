"""Pages of `metaphrase explain` and `metaphrase compare`, which load no other file, and attention maps as PNG files.

Attention weights are rounded to 255ths and stored as base64.
"""

import base64
import html
import os
import re
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.patches import Rectangle

from metaphrase.analysis.explanation import Explanation
from metaphrase.errors import MetaphraseError
from metaphrase.hub_card.figures import BEST_COLOR, SCORE_LABELS, TEXT_COLOR, save_figure
from metaphrase.storage.folders import file_in_one_step
from metaphrase.tokenization.tokenizer_trainer import SPACE_MARK


def write_explanation_page(
    explanations: Sequence[Explanation], path: str | os.PathLike, *, title: str = "Explanation"
) -> Path:
    """Write a page with tokens, shapes, positions, masks, attention, teacher forcing and decoding steps of each pair."""
    script = Path(__file__).with_name("explanation_page.js").read_text(encoding="utf-8")
    data = {"pairs": [_describe(explanation) for explanation in explanations]}
    return write_page(path, "explanation_page.html", title=title, data=data, script=script)


def write_page(path: str | os.PathLike, template: str, title: str, **fields: Any) -> Path:
    """Write an HTML page in one step from a template of Jinja, in which texts are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        # Control characters are shown. Markup is no plain string.
        finalize=lambda value: spell_out(value, ("Cc", "Cf", "Cs")) if type(value) is str else value,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    title = Markup(html.escape(spell_out(title, ("Cc", "Cs"))))
    page = environment.get_template(template).render(title=title, **fields)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_in_one_step(path) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")
    return path


def spell_out(text: str, categories: Sequence[str]) -> str:
    """Write characters of some Unicode categories as escapes, such as a newline."""
    return "".join(
        mark.encode("unicode_escape").decode() if unicodedata.category(mark) in categories else mark for mark in text
    )


def _describe(explanation: Explanation) -> dict[str, Any]:
    content = asdict(explanation)
    for item in content["positions"]:
        # Byte 128 is 0, and byte 255 the largest magnitude.
        values = item.pop("values")
        largest = float(np.abs(values).max()) or 1.0
        item |= _pack((128 + 127 * values / largest) / 255) | {"largest": largest}
    content["beam"] = content.pop("beam_tree")
    content["masks"] = {name: _pack(mask[None, None]) for name, mask in explanation.masks.items()}
    content["attentions"] = {name: _pack(weights) for name, weights in explanation.attentions.items()}
    content |= {name: content[name].tolist() for name in ("probabilities", "ranks")}
    return content | {"loss": explanation.loss}


def _pack(weights: np.ndarray) -> dict[str, Any]:
    rounded = np.rint(np.clip(weights, 0, 1) * 255).astype(np.uint8)
    return {"shape": list(weights.shape), "bytes": base64.b64encode(rounded.tobytes()).decode("ascii")}


Row = Sequence[str]
# Words, single characters of scripts without spaces, and all else.
_PIECE = re.compile(r"\s+|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]+|.", re.DOTALL)


def label_of(name: str) -> str:
    """Return the label of a score. An external score is its own label."""
    return SCORE_LABELS.get(name, name)


def show_score(name: str, value: float) -> str:
    """Return a score with two decimals, and an external one, which may lie between 0 and 1, with four."""
    return f"{value:.{2 if name in SCORE_LABELS else 4}f}"


def score_rows(report: dict[str, Any]) -> list[Row]:
    """Return the table of scores with intervals and probabilities, header first."""
    rows = [["score", "system", "value", "95 % interval", "difference", "p, bootstrap", "p, randomization"]]
    for name, part in report["scores"].items():
        label = label_of(name) + (" (lower is better)" if name in report["lower_is_better"] else "")
        for row in part["systems"]:
            interval = " to ".join(show_score(name, limit) for limit in row["interval"])
            tests = ["baseline", "", ""]
            if "difference" in row:
                sign = "+" if row["difference"] >= 0 else ""
                values = row["p_bootstrap"], row["p_randomization"]
                shown = [f"{'* ' if max(values) < 0.05 else ''}{value:.4f}" for value in values]
                # sacreBLEU's bootstrap gives equal scores a low probability, on purpose.
                shown = shown if row["difference"] else ["-", "-"]
                tests = [sign + show_score(name, row["difference"]), *shown]
            rows.append([label, row["system"], show_score(name, row["score"]), interval, *tests])
            label = ""
    return rows


def length_rows(report: dict[str, Any]) -> list[Row]:
    """Return the table of scores by the length of the reference, header first."""
    columns = [(name, system) for name in report["scores"] for system in report["systems"]]
    rows = [["words", "sentences", *(f"{label_of(name)} {system}" for name, system in columns)]]
    for bucket in report["lengths"]:
        scores = (show_score(name, bucket["scores"][name][system]) for name, system in columns)
        rows.append([_range(bucket), f"{bucket['num_sentences']:,}", *scores])
    return rows


def word_rows(report: dict[str, Any]) -> list[Row]:
    """Return the table of the F1 of words by their frequency, header first."""
    rows = [["frequency", "words", *(f"F1 {system}" for system in report["systems"])]]
    for bucket in report["words"]:
        rows.append([_range(bucket), f"{bucket['num_words']:,}", *(f"{value:.2f}" for value in bucket["f1"].values())])
    return rows


def _range(bucket: dict[str, Any]) -> str:
    low, high = bucket["from"], bucket["to"]
    return f"{low:,} or more" if high is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"


def describe_tests(report: dict[str, Any]) -> str:
    """Return a sentence on the tests of the scores."""
    return (
        f"{report['num_bootstrap_samples']:,} paired bootstrap resamples by sacreBLEU, "
        f"{report['num_randomization_trials']:,} trials of approximate randomization, seed {report['seed']}. "
        "* marks p < 0.05 in both tests."
    )


def write_comparison_page(report: dict[str, Any], path: str | os.PathLike) -> Path:
    """Write the report of `compare` as a page that loads no other file."""
    baseline, *systems = report["systems"]
    title = f"{', '.join(systems)} against {baseline}"
    functions = {"label_of": label_of, "show_score": show_score, "compare_texts": _compare_texts}
    tables = {"scores": score_rows(report), "lengths": length_rows(report), "words": word_rows(report)}
    tests = describe_tests(report)
    return write_page(path, "comparison_page.html", title, report=report, tests=tests, **functions, **tables)


def _compare_texts(text: str, other: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a text, each with True if the other text has it, too."""
    pieces, other_pieces = _PIECE.findall(text), _PIECE.findall(other)
    for kind, start, end, _, _ in SequenceMatcher(None, pieces, other_pieces, autojunk=False).get_opcodes():
        yield kind == "equal", "".join(pieces[start:end])


# Fonts for characters that matplotlib's DejaVu Sans lacks. Only installed ones are used.
FALLBACK_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Hiragino Sans", "Microsoft YaHei")
FALLBACK_FONTS += ("Noto Sans Devanagari", "Noto Sans Thai", "Noto Emoji")


def draw_attention_map(
    weights: Any,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    path: str | os.PathLike,
    title: str | None = None,
) -> Path:
    """Draw one sentence's attention weights as a heat map: source tokens on top, target tokens at the left.

    A frame marks the largest weight of each row. The picture grows with the number of tokens. A character that no installed
    font holds becomes an empty box.

    Args:
        weights: (target, source), from 0 to 1; an array or a tensor.

    Raises:
        MetaphraseError: If the shape does not fit the tokens, or there are too many tokens for one picture.
    """
    weights = np.asarray(weights.detach().float().cpu() if hasattr(weights, "detach") else weights, dtype=float)
    rows, columns = len(target_tokens), len(source_tokens)
    if weights.shape != (rows, columns) or weights.size == 0:
        counts = f"{weights.shape} for {rows} target and {columns} source tokens"
        raise MetaphraseError(f"`weights` must have the shape (target tokens, source tokens), got {counts}.")
    cell = float(np.clip(18 / max(rows, columns), 0.16, 0.34))  # inches
    width, height = columns * cell, rows * cell
    # The cells decide the size; saving with a tight box then adds what the labels need, so that none is cut off.
    figure = Figure(figsize=(width, height))
    panel = figure.add_axes((0, 0, 1, 1))
    image = panel.imshow(weights, cmap="Blues", vmin=0, vmax=max(float(weights.max()), 1e-9), aspect="auto")
    # Without `parse_math=False` two dollar signs in a token would start a formula.
    installed = set(fontManager.get_font_names())
    fonts = ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]
    plain = {"parse_math": False, "family": fonts, "color": TEXT_COLOR}
    labels = plain | {"fontsize": min(10.0, cell * 72 * 0.55)}
    panel.xaxis.tick_top()
    panel.xaxis.set_label_position("top")
    # Without marks of spaces and characters that a font cannot show.
    sides = (
        [spell_out(token.replace(SPACE_MARK, " "), ("Cc", "Cf", "Zl", "Zp", "Cs")) for token in side]
        for side in (source_tokens, target_tokens)
    )
    source_labels, target_labels = ([text.strip() or repr(text) for text in side] for side in sides)
    panel.set_xticks(range(columns), source_labels, rotation=90, **labels)
    panel.set_yticks(range(rows), target_labels, **labels)
    panel.set_xlabel("source", color=TEXT_COLOR)
    panel.set_ylabel("target", color=TEXT_COLOR)
    panel.set_xticks(np.arange(-0.5, columns), minor=True)
    panel.set_yticks(np.arange(-0.5, rows), minor=True)
    panel.grid(which="minor", color="white", linewidth=0.6)
    panel.tick_params(which="both", length=0, pad=3)
    for row, column in enumerate(weights.argmax(axis=1)):
        panel.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=BEST_COLOR, linewidth=1.2))
    bar_height = max(1.6, min(height, 4.0))
    note = "Frame: the largest weight of the row. The attention of a target token adds up to 1."
    note = textwrap.fill(note, int(16 * (width + 0.9)))
    corner = 0, min(0, 1 - bar_height / height)
    panel.annotate(note, corner, (0, -6), "axes fraction", "offset points", va="top", fontsize=8, color=TEXT_COLOR)
    bar = figure.add_axes((1 + 0.2 / width, 1 - bar_height / height, 0.14 / width, bar_height / height))
    figure.colorbar(image, cax=bar, label="attention weight").outline.set_visible(False)
    bar.yaxis.label.set_color(TEXT_COLOR)
    bar.tick_params(labelsize=8, length=2, colors=TEXT_COLOR)
    if title:
        panel.set_title(textwrap.fill(title, int(10.5 * (width + 0.9))), fontweight="bold", **plain)
    return save_figure(figure, path, bbox_inches="tight", pad_inches=0.15)
