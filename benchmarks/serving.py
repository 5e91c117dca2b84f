"""Measures `metaphrase serve`: many clients against offline decoding, one client against `Generator`, and overload.

    python benchmarks/serving.py en-de=runs/demo --source runs/demo/data/test.tsv --output benchmarks/results/serving_demo.json

The server is a process of its own. Each client sends one text, waits for the answer, and sends the next. The clients share the
processors with the server. A refused client waits as long as `Retry-After` says.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from machine import describe_machine

from metaphrase.inference import Generator

VERB = [sys.executable, "-m", "metaphrase"]


@dataclass
class Load:
    """Answers of all clients of a phase.

    Attributes:
        seconds: Seconds of each answered request, by status.
        targets: Target of each text.
        num_errors: Broken connections.
        megabytes: Memory of the server at the quarters of the phase.
    """

    seconds: dict[int, list[float]] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    num_errors: int = 0
    megabytes: list[float] = field(default_factory=list)


class Server:
    """A server process."""

    def __init__(self, model: str, *options: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [*VERB, "serve", model, "--port", str(self.port), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> "Server":
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port)):
                    return self
            except OSError:
                if self._process.poll() is not None:
                    raise RuntimeError("The server did not start.") from None
                time.sleep(0.1)

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait()

    def megabytes(self) -> float:
        """Return the resident memory."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return round(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024, 1)


async def run_client(port: int, texts: list[str], end: float, load: Load) -> None:
    """Send texts one by one until the end."""
    reader = writer = None
    while time.perf_counter() < end:
        for text in texts:
            if time.perf_counter() >= end:
                break
            body = json.dumps({"inputs": text}).encode()
            head = (
                f"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            started = time.perf_counter()
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head.encode() + body)
                headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                answer = await reader.readexactly(int(re.search(r"content-length: (\d+)", headers)[1]))
            except (OSError, asyncio.IncompleteReadError):
                load.num_errors += 1
                writer = None
                continue
            status = int(headers.split()[1])
            load.seconds.setdefault(status, []).append(time.perf_counter() - started)
            if status == 200:
                load.targets[text] = json.loads(answer)[0]["generated_text"]
            elif match := re.search(r"retry-after: (\d+)", headers):
                await asyncio.sleep(int(match[1]))
    if writer is not None:
        writer.close()


def run_clients(server: Server, texts: list[str], num_clients: int, seconds: float) -> Load:
    """Run clients that start at different texts."""
    load, end = Load(), time.perf_counter() + seconds

    async def watch_memory() -> None:
        for _ in range(4):
            load.megabytes.append(server.megabytes())
            await asyncio.sleep(seconds / 4)
        load.megabytes.append(server.megabytes())

    async def run_all() -> None:
        starts = [number * len(texts) // num_clients for number in range(num_clients)]
        await asyncio.gather(
            watch_memory(), *(run_client(server.port, texts[i:] + texts[:i], end, load) for i in starts)
        )

    asyncio.run(run_all())
    return load


def describe(load: Load, seconds: float) -> dict:
    """Return the figures of a phase. Times are in milliseconds."""
    figures = {
        "megabytes": load.megabytes,
        "errors": load.num_errors,
        "statuses": {str(s): len(times) for s, times in load.seconds.items()},
    }
    for status, times in load.seconds.items():
        ordered = sorted(1000 * value for value in times)
        quantiles = {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 2) for q in (50, 95, 99)}
        figures[f"milliseconds_{status}"] = quantiles | {"longest": round(ordered[-1], 2)}
    figures["sentences_per_second"] = round(len(load.seconds.get(200, [])) / seconds, 1)
    return figures


def decode_offline(model: str, texts: list[str]) -> tuple[float, list[str]]:
    """Return the sentences per second of `metaphrase generate`, without loading, and the targets."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source.txt"), Path(folder, "target.txt")
        source.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        command = [*VERB, "generate", model, "--input", str(source), "--output", str(target), "--split_sentences"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return float(re.search(r"([\d.]+) lines per second", log)[1]), target.read_text("utf-8").split("\n")[:-1]


def measure_one_text(model: str, texts: list[str]) -> float:
    """Return the median milliseconds of `Generator.generate` for one text."""
    generator, times = Generator.from_pretrained(model), []
    for text in texts:
        started = time.perf_counter()
        generator.generate([text], split_sentences=True)
        times.append(time.perf_counter() - started)
    return round(1000 * statistics.median(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="NAME=FOLDER of a translation model, such as en-de=runs/demo")
    parser.add_argument("--source", required=True, help="file of sources, or a .tsv file of pairs")
    parser.add_argument("--clients", type=int, default=64, help="%(default)s")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of each phase [%(default)s]")
    parser.add_argument("--timeout_seconds", type=float, default=10, help="promised time under overload [%(default)s]")
    parser.add_argument(
        "--repeat", type=int, default=10, help="times that offline decoding reads the texts [%(default)s]"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    lines = Path(arguments.source).read_text("utf-8").split("\n")[:-1]
    texts = list(dict.fromkeys(line.split("\t")[0] for line in lines))
    model, seconds = arguments.model, arguments.seconds
    folder = model.rpartition("=")[2]
    speed, targets = decode_offline(folder, texts * arguments.repeat)
    report = {"model": Path(folder).name, "texts": len(texts), "offline_sentences_per_second": speed}
    with Server(model) as server:
        run_clients(server, texts, 8, 5)
        load = run_clients(server, texts, arguments.clients, seconds)
        report["clients"] = describe(load, seconds) | {"number": arguments.clients}
        report["clients"]["share_of_offline"] = round(report["clients"]["sentences_per_second"] / speed, 3)
        expected = dict(zip(texts, targets, strict=False))
        report["clients"]["other_targets_than_offline"] = sum(
            expected[text] != load.targets[text] for text in load.targets
        )
        one = describe(run_clients(server, texts, 1, seconds / 3), seconds / 3)
    alone = measure_one_text(folder, texts[: len(texts) // 2])
    report["one_client"] = one | {"generator_p50": alone, "ratio": round(one["milliseconds_200"]["p50"] / alone, 3)}
    options = ("--max_requests", str(arguments.clients), "--timeout_seconds", str(arguments.timeout_seconds))
    with Server(model, *options) as server:
        run_clients(server, texts, 8, 5)
        overload = run_clients(server, texts, 4 * arguments.clients, seconds)
        report["overload"] = describe(overload, seconds) | {"number": 4 * arguments.clients}
    report["machine"] = describe_machine(len(os.sched_getaffinity(0)))
    text = json.dumps(report, indent=2, ensure_ascii=False)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
