"""Run the pages of docs/life/, write their outputs and draw their pictures: `python docs/life.py runs/demo`."""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import life_images
from images import THEMES
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
PAGES = {path.stem: path for path in sorted(DOCS.glob("life/*.md"))}
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(\n```text\n(?P<output>.*?)```\n)?", re.DOTALL)


def run_code(code: str, namespace: dict) -> str:
    """Run a block of a page, and return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "page", "exec"), namespace)
    return "".join(line.rstrip() + "\n" for line in output.getvalue().splitlines())


def run_page(text: str, namespace: dict) -> Iterator[tuple[str, str]]:
    """Yield the output in the page and the output of the run, for each block of a page."""
    for block in BLOCK.finditer(text):
        yield block["output"] or "", run_code(block["code"], namespace)


def renew(text: str, namespace: dict) -> str:
    """Return the text of a page with the outputs of this run."""

    def replace(block: re.Match) -> str:
        output = run_code(block["code"], namespace)
        return f"```python\n{block['code']}```\n" + (f"\n```text\n{output}```\n" if output else "")

    return BLOCK.sub(replace, text)


def draw(name: str, function: Callable, namespace: dict) -> None:
    """Draw the picture of a page from the variables of its code, for light and dark pages."""
    for theme_name, theme in THEMES.items():
        figure = Figure(facecolor=theme["page"], layout="constrained")
        function(figure, theme, namespace)
        figure.savefig(DOCS / "images" / f"life_{name}_{theme_name}.png", dpi=100)


def main(folder: Path) -> None:
    # The pages read `runs/demo`.
    with contextlib.chdir(folder.resolve().parents[1]):
        for name, path in PAGES.items():
            print(name)
            namespace = {"__name__": "page"}
            path.write_text(renew(path.read_text(encoding="utf-8"), namespace), encoding="utf-8")
            if function := getattr(life_images, f"draw_{name}", None):
                draw(name, function, namespace)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
