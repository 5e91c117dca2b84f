"""Writes `TASK/{train,validation,test}.tsv` below a folder.

    python -m benchmarks.tasks FOLDER commands inflection normalization recall semantic

Those of commands and semantic parsing get `test_systematic.tsv` too, with combinations that training never shows.
"""

import argparse
from pathlib import Path

from . import GENERATED, PUBLIC, write_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder for all tasks")
    parser.add_argument("tasks", nargs="*", help=f"{', '.join((*GENERATED, *PUBLIC))} [those without a corpus]")
    parser.add_argument("--data_dir", type=Path, help="folder of the public corpora")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.tasks if name not in GENERATED | PUBLIC]:
        parser.error(f"tasks must be {', '.join((*GENERATED, *PUBLIC))}, got {', '.join(unknown)}")
    for name in arguments.tasks or GENERATED:
        write_task(name, arguments.folder, arguments.data_dir)


if __name__ == "__main__":
    main()
