"""Pictures of the pages in docs/life/. `draw_NAME` draws that of the page NAME, from the variables of its code."""

from images import THEMES
from matplotlib.colors import LinearSegmentedColormap

__all__ = ["THEMES"]


def set_colors(panel, theme: dict) -> None:
    """Give a panel the colors of a light or dark page."""
    panel.set_facecolor(theme["page"])
    panel.tick_params(colors=theme["text"], labelsize=9, length=0)
    panel.spines[:].set_color(theme["line"])
    panel.title.set_color(theme["text"])
    for axis in (panel.xaxis, panel.yaxis):
        axis.label.set_color(theme["text"])


def draw_table(panel, values, rows: list[str], columns: list[str], theme: dict, title: str = "") -> None:
    """Draw values between 0 and 1 as a table of colored cells."""
    colors = LinearSegmentedColormap.from_list(theme["page"], [theme["page"], theme["loss"]])
    panel.imshow(values, cmap=colors, vmin=0, vmax=1)
    panel.set_title(title, fontsize=10)
    panel.set_xticks(range(len(columns)), columns, rotation=45, ha="left", rotation_mode="anchor")
    panel.set_yticks(range(len(rows)), rows)
    set_colors(panel, theme)
    panel.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False)
