"""Draw the picture of README from a run of the demo, for light and dark pages: `python docs/images.py runs/demo`."""

import json
import sys
from pathlib import Path

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from metaphrase.inference import AttentionMap, Generator, cross_attention, word_weights

FOLDER = Path(__file__).parent / "images"
THEMES = {
    "light": {"page": "#ffffff", "text": "#1f2328", "line": "#d0d7de", "loss": "#0969da", "score": "#bc4c00"},
    "dark": {"page": "#0d1117", "text": "#e6edf3", "line": "#3d444d", "loss": "#58a6ff", "score": "#f0883e"},
}
MAX_WORDS = 9


def series(log: list[dict], key: str) -> tuple[list, list]:
    entries = [entry for entry in log if key in entry]
    return [entry["step"] for entry in entries], [entry[key] for entry in entries]


def draw_curve(panel, log: list[dict], theme: dict) -> None:
    """Draw the loss of training, and the score of validation pairs on an axis at the right."""
    panel.set_title("Training of the demo", color=theme["text"], fontsize=11)
    panel.plot(*series(log, "loss"), color=theme["loss"], linewidth=1.6)
    panel.set_ylabel("training loss", color=theme["loss"])
    panel.set_xlabel("updates", color=theme["text"])
    panel.set_ylim(bottom=0)
    scores = panel.twinx()
    scores.plot(*series(log, "eval_bleu"), color=theme["score"], linewidth=1.6, marker="o", markersize=4)
    scores.set_ylabel("BLEU of validation pairs", color=theme["score"])
    scores.set_ylim(0, 104)
    for axes in (panel, scores):
        axes.tick_params(colors=theme["text"], labelsize=9, length=0)
        axes.spines[:].set_color(theme["line"])
        axes.spines["top"].set_visible(False)


def draw_words(panel, attention: AttentionMap, theme: dict) -> None:
    """Draw the cross-attention of a sentence, word by word."""
    colors = LinearSegmentedColormap.from_list(theme["page"], [theme["page"], theme["loss"]])
    panel.imshow(word_weights(attention), cmap=colors, vmin=0, vmax=1)
    panel.set_title("Attention of German to English words", color=theme["text"], fontsize=11)
    panel.set_xticks(
        range(len(attention.source_words)), attention.source_words, rotation=60, ha="left", rotation_mode="anchor"
    )
    panel.set_yticks(range(len(attention.target_words)), attention.target_words)
    panel.tick_params(
        top=True, bottom=False, labeltop=True, labelbottom=False, length=0, colors=theme["text"], labelsize=10
    )
    panel.spines[:].set_color(theme["line"])


def main(folder: Path) -> None:
    log = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    lines = (folder / "data" / "test.tsv").read_text(encoding="utf-8").splitlines()
    # The verb of a subordinate clause stands at its end in German.
    source = next(
        line.split("\t")[0] for line in lines if ", weil " in line and len(line.split("\t")[0].split()) <= MAX_WORDS
    )
    attention = cross_attention(Generator.from_pretrained(folder), source, layer=-1, num_beams=4)
    FOLDER.mkdir(exist_ok=True)
    for name, theme in THEMES.items():
        figure = Figure(figsize=(9, 3.6), facecolor=theme["page"], layout="constrained")
        panels = figure.subplots(1, 2, width_ratios=[1.25, 1])
        for panel in panels:
            panel.set_facecolor(theme["page"])
        draw_curve(panels[0], log, theme)
        draw_words(panels[1], attention, theme)
        figure.savefig(FOLDER / f"demo_{name}.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
