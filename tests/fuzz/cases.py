"""A case of the fuzz tests: a command line that meets broken input, run in a process of its own within limits."""

import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from other_families import other_model
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator, tiny_pair

# Processor time and time by the clock, of a machine that does other work too.
CPU_SECONDS, CLOCK_SECONDS = 40, 300
# Memory beyond that of the imported libraries.
LARGE_BYTES, MAX_BYTES = 2**30, 4 * 2**30
VALUES: list[Any] = [{}, [], {"a": 1}, [1, "x"], None, True, "", "x", "1", "../x", "\x00", -1, 0, 1, 3, 1.5, -0.5, 1e-9]
VALUES += [2**31, 2**63, 2**70, -(2**70), float("nan"), float("inf"), 1e300]


class Result(NamedTuple):
    """End of a process: exit status (below 0 a signal, None if it was stopped for its time), all messages, added bytes."""

    status: int | None
    messages: str
    added_bytes: int


class Case(NamedTuple):
    """A command line for `metaphrase.scripts.__main__.main`, and a name that says what is broken.

    Attributes:
        name: What is broken.
        words: The command line.
        check: Returns what is wrong after exit status 0 or a clean error, or "".
        fields: Names of the fields that are broken. An error of a library that names one of them is clean.
    """

    name: str
    words: list[str]
    check: Callable[[Result], str] | None = None
    fields: Sequence[str] = ()


def run(words: list[str], folder: Path) -> Result:
    """Run a command line in a forked process, with `folder / "work"` as the current folder."""
    (folder / "work").mkdir(parents=True, exist_ok=True)
    log, started = folder / "log", time.monotonic()
    base_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    sys.stdout.flush()
    if not (child := os.fork()):
        _run_here(words, folder / "work", log)
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() - started > CLOCK_SECONDS:
            os.kill(child, signal.SIGXCPU)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        # A command may have started processes.
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    text = log.read_text(encoding="utf-8", errors="replace")
    return Result(None if code == -signal.SIGXCPU else code, text, usage.ru_maxrss * 1024 - base_bytes)


def _run_here(words: list[str], folder: Path, log: Path) -> None:
    """Run a command line in this process, and end the process."""
    code: Any = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
        from metaphrase.scripts.__main__ import main

        sys.argv = ["metaphrase", *words]
        code = main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def mutate(content: bytes, rng: random.Random, added: Sequence[str] = ()) -> tuple[str, bytes]:
    """Return the name of a mutation of bytes or of a field of JSON, and the mutated bytes.

    Args:
        content: Any bytes.
        rng: Source of all random choices.
        added: Fields that JSON may get.
    """
    if content.startswith(b"{") and rng.random() < 0.65:
        return _mutate_field(json.loads(content), rng, added)
    start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    value = bytes([rng.choice((0, 9, 10, 13, 34, 44, 91, 123, 125, 0xC3, 0xED, 0xFF, rng.randrange(256)))])
    mutations = {
        "cut": content[:end],
        "byte": content[:start] + value + content[start + 1 :],
        "insert": content[:start] + value * rng.choice((1, 3, 2**17)) + content[start:],
        "remove": content[:start] + content[end:],
        "repeat": content[:end] + content[start:],
        "junk": rng.randbytes(rng.randrange(1, 300)),
        "UTF-16": content.decode("utf-8", errors="ignore").encode("utf-16"),
        "empty": b"",
        "list": b"[]",
        "null": b"null",
        "brackets": b'{"a": ' + b"[" * 100_000,
    }
    kind = rng.choice([*mutations])
    return f"{kind} {start}:{end} {value!r}", mutations[kind]


def _mutate_field(fields: dict, rng: random.Random, added: Sequence[str]) -> tuple[str, bytes]:
    owner: Any = fields
    path = [rng.choice(added)] if added and rng.random() < 0.35 else []
    while not path or (isinstance(owner.get(path[-1]), dict) and owner[path[-1]] and rng.random() < 0.6):
        owner = owner[path[-1]] if path else owner
        path.append(rng.choice(list(owner)))
    if rng.random() < 0.15:
        owner.pop(path[-1], None)
        return f"{'.'.join(path)} is missing", json.dumps(fields).encode()
    owner[path[-1]] = rng.choice(VALUES)
    return f"{'.'.join(path)} is {owner[path[-1]]!r}"[:80], json.dumps(fields).encode()


def write_world(folder: Path) -> Path:
    """Write texts and models that all parts use, and return the folder.

    `in` and `targets` have a text on each line, and `pairs.tsv` both. `model` is a small model of ours, and `bart` one of BART.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("in", SOURCES), ("targets", TARGETS), ("pairs.tsv", map("{}\t{}".format, SOURCES, TARGETS))):
        (folder / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    save_generator(tiny_generator(), folder / "model")
    other_model("bart").save_pretrained(folder / "bart")
    tiny_pair().save_pretrained(folder / "bart")
    return folder
