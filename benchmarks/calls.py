"""Counts the files and functions of the package that a plain call enters: how much a reader must follow.

    python benchmarks/calls.py generate runs/demo --input FILE --output FILE
    python benchmarks/calls.py train pairs.tsv --max_steps 4 --output_dir DIR

A profiler of Python counts each function of the package once, by file and name, in all threads. Left out are lambdas,
comprehensions, functions that run while a module is imported, and worker processes. `--list` prints the functions.
"""

import argparse
import collections
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_ROOMS = {"tests", "benchmarks", "docs"}


def room_file(filename: str) -> str | None:
    """Return the path of a file of the package below the repository, or None for other files."""
    path = Path(filename).resolve()
    # Generated code, such as that of dataclasses, has a name in angle brackets.
    if filename.startswith("<") or not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return None if relative.parts[0] in NOT_ROOMS or relative.parts[0].startswith(".") else str(relative)


def is_importing(frame) -> bool:
    """Return True if a frame runs for the import of a module."""
    while frame is not None and frame.f_code.co_name != "_find_and_load":
        frame = frame.f_back
    return frame is not None


def count_calls(words: list[str]) -> dict[str, set[str]]:
    """Run a command line in this process. Return the names of the entered functions by file."""
    codes: set = set()

    def on_event(frame, event: str, argument: object) -> None:
        if event == "call" and frame.f_code not in codes and not is_importing(frame):
            codes.add(frame.f_code)

    from metaphrase.scripts.__main__ import main

    sys.argv = ["metaphrase", *words]
    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        status = main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if status:
        raise SystemExit(status)
    functions = collections.defaultdict(set)
    for code in list(codes):  # Threads may still enter functions.
        file = room_file(code.co_filename)
        is_function = code.co_flags & 2  # CO_NEWLOCALS: neither a module nor a class body.
        if file is not None and is_function and not code.co_name.startswith("<"):
            functions[file].add(code.co_name)
    return functions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the functions by file")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="VERB ...", help="command line of metaphrase")
    arguments = parser.parse_args()
    functions = count_calls(arguments.words)
    rooms = collections.Counter(str(Path(file).parent) for file in functions)
    for room in sorted(rooms):
        names = {file: names for file, names in functions.items() if str(Path(file).parent) == room}
        print(f"{room}: {rooms[room]} files, {sum(map(len, names.values()))} functions", file=sys.stderr)
        if arguments.list:
            for file in sorted(names):
                print(f"  {file}: {', '.join(sorted(names[file]))}", file=sys.stderr)
    print(f"{len(functions)} files, {sum(map(len, functions.values()))} functions", file=sys.stderr)


if __name__ == "__main__":
    main()
