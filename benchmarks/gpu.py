"""Measures training and generation on one GPU, beside transformers and CTranslate2.

    python -m benchmarks.gpu --output results

It needs no download: weights and ids are random. Each part is a process that writes a JSON file. A second call leaves out the
parts that have a file, so that it goes on where the first one was stopped. `gpu.md` in the folder has the tables.

Training is whole Trainers that take turns (see `training.py`), on the tokens of the pairs without padding. The share of the peak
(MFU) counts what the network itself needs: 6 floating-point operations for each weight and token (Kaplan et al. 2020, section
2.1), and 12 d for each query and key of a layer of width d (Chowdhery et al. 2022, appendix B); of a causal layer half. The
embedding of tokens takes none, and nothing is counted twice for gradient checkpoints.

Generation has random weights without an end of sequence, so that all targets have the same length. In float32, the tokens of
the contestants are compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

# Multiplications and additions in a second, bfloat16 without sparsity, by a part of the device's name.
PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L4": 121e12}
# Million parameters: preset, and length mixes that fit into 78 GiB with all contestants.
SIZES = {
    "60": ("transformer-base", ("multi30k_large_batches", "512_tokens")),
    "220": ("transformer-big", ("multi30k_large_batches", "512_tokens")),
    "770": ("t5-large", ("multi30k", "512_tokens_few_pairs")),
}
TRAINERS = ("metaphrase", "bart, tuned, bf16", "bart, tuned, bf16, compiled", "t5, tuned, bf16")
GENERATED = ("60", "220")
SETTINGS = {
    f"{name}, batch {size}": (beams, size) for name, beams in (("greedy", 1), ("4 beams", 4)) for size in (1, 32, 256)
}
NEW_TOKENS = 32
# Sources whose targets are compared in float32.
COMPARED = 32


def flops_of_pairs(config: Any, lengths: np.ndarray) -> float:
    """Return the mean operations of an update for a pair, with lengths (pairs, 2). See the head of this file."""
    width, sides = config.hidden_size, {}
    for stack in ("encoder", "decoder"):
        sizes = config.stack_sizes(stack)
        inner = sizes.attention_heads * sizes.head_dim
        sides[stack] = getattr(config, f"{stack}_layers"), inner, 2 * width * getattr(config, f"{stack}_ffn_dim")
    sources, targets = lengths.T.astype(float)
    layers, inner, feed_forward = sides["encoder"]
    total = layers * (6 * (4 * width * inner + feed_forward) * sources + 12 * inner * sources**2)
    layers, inner, feed_forward = sides["decoder"]
    # Keys and values of the cross-attention are of the source.
    total += layers * (6 * (6 * width * inner + feed_forward) * targets + 6 * 2 * width * inner * sources)
    total += layers * 12 * inner * (targets**2 / 2 + sources * targets)
    return float(np.mean(total + 6 * config.decoder_vocab_size * width * targets))


def train(preset: str, mix: str, names: list[str], rounds: int, steps: int) -> dict:
    """Train in turns, and return the speeds with the share of the peak."""
    import torch
    from contestants import PAIRS, VOCAB_SIZES
    from lengths import MIXES
    from turns import OURS, measure_group

    from metaphrase.modeling import MetaphraseConfig

    arguments = argparse.Namespace(
        rounds=rounds, steps=steps, steps_unsorted=steps, threads=torch.get_num_threads(), core=None
    )
    results, lengths = measure_group(preset, mix, names, arguments), MIXES[mix].draw(PAIRS, 0)
    config = MetaphraseConfig.from_preset(preset, vocab_size=VOCAB_SIZES[preset])
    flops_of_token = flops_of_pairs(config, lengths) / lengths.sum(axis=1).mean()
    peak = next((value for name, value in PEAKS.items() if name in device_name()), None)
    for result in results.values():
        result["teraflops"] = round(result["real_tokens_per_second"] * flops_of_token / 1e12, 3)
        result["share_of_peak"] = peak and round(1e12 * result["teraflops"] / peak, 3)
        result["speed_of_metaphrase"] = round(
            result["real_tokens_per_second"] / results[OURS]["real_tokens_per_second"], 3
        )
    return {"preset": preset, "lengths": mix, "results": results}


def generate(preset: str, device: str, settings: dict[str, tuple[int, int]], rounds: int) -> dict:
    """Generate in turns, and return the speeds; and the number of equal targets in float32."""
    import torch
    from engines import save_random
    from generation import by_length, measure
    from transformers import AutoModelForSeq2SeqLM

    from metaphrase.conversion import convert
    from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration

    config = MetaphraseConfig.from_preset(preset, logits_bias=True, initializer_range=0.2)
    half = torch.bfloat16 if device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = save_random(config, Path(folder, "ours")), Path(folder, "theirs")
        convert(ours, theirs, to="marian")

        def load(kind: type, path: Path, dtype: Any) -> Any:
            model = kind.from_pretrained(path, dtype=dtype).eval().to(device)
            model.generation_config.max_new_tokens = NEW_TOKENS
            return model

        exact = {
            "transformers": by_length(load(AutoModelForSeq2SeqLM, theirs, torch.float32)),
            "metaphrase": by_length(load(MetaphraseForConditionalGeneration, ours, torch.float32)),
        }
        count = max(COMPARED, *(size for _, size in settings.values()))
        sources = np.random.default_rng(0).integers(10, config.vocab_size, (count, 16)).tolist()
        sources = [[*row, config.eos_token_id] for row in sources]
        same = {
            name: sum(map(list.__eq__, *(run(sources[:COMPARED], beams, COMPARED) for run in exact.values())))
            for name, beams in (("greedy", 1), ("4 beams", 4))
        }
        exact.clear()
        contestants = {
            "transformers": by_length(load(AutoModelForSeq2SeqLM, theirs, half)),
            "metaphrase": by_length(load(MetaphraseForConditionalGeneration, ours, half)),
        }
        try:
            from metaphrase.engines.ctranslate2_engine import CTranslate2Engine
        except ImportError:
            print("CTranslate2 is not installed and takes no part.", flush=True)
        else:
            for dtype in ("float16", "int8_float16") if device == "cuda" else ("float32",):
                engine = CTranslate2Engine.from_pretrained(ours, device=device, dtype=dtype)
                engine.generation_config.max_new_tokens = NEW_TOKENS
                contestants[f"ctranslate2, {dtype}"] = by_length(engine)
        results, memory = {}, {}
        for name, setting in settings.items():
            few = sources[: max(4, setting[1])]
            # Wall time: two threads or more.
            results[name], _ = measure(contestants, few, setting, rounds, threads=2)
        if device == "cuda":
            for name, run in contestants.items():
                torch.cuda.reset_peak_memory_stats()
                run(sources, 4, len(sources))
                memory[name] = round(torch.cuda.max_memory_allocated() / 2**20)
    return {"preset": preset, "same_in_float32": same, "of": COMPARED, "settings": results, "peak_mib": memory}


def run_tests() -> dict:
    """Run the tests that need a GPU."""
    root = Path(__file__).parent.parent
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    output = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False).stdout
    return {"last_line": output.strip().splitlines()[-1]}


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def parts(is_tiny: bool, device: str) -> dict[str, Any]:
    """Return the function of each part, by its name."""
    if is_tiny:
        few = {name: setting for name, setting in SETTINGS.items() if setting[1] == 1}
        return {
            "train_tiny": lambda: train("transformer-tiny", "multi30k", ["metaphrase"], 1, 1),
            "generate_tiny": lambda: generate("transformer-tiny", device, few, 1),
        }
    trainings = {
        f"train_{size}_{mix}": lambda preset=preset, mix=mix: train(
            # The steps of a compiled network must all have one shape.
            preset,
            mix,
            [name for name in TRAINERS if "512" in mix or "compiled" not in name],
            3,
            10,
        )
        for size, (preset, mixes) in SIZES.items()
        for mix in mixes
    }
    generations = {
        f"generate_{size}": lambda size=size: generate(SIZES[size][0], device, SETTINGS, 3) for size in GENERATED
    }
    return trainings | generations | {"tests": run_tests}


def table(reports: dict[str, dict]) -> str:
    """Return the tables of all parts that have run, in Markdown."""
    lines = ["| training | | tokens/s | share of the peak | MiB |", "|---|---|---:|---:|---:|"]
    for name, report in reports.items():
        for contestant, row in report["results"].items() if name.startswith("train") else ():
            share = f"{100 * row['share_of_peak']:.1f} %" if row["share_of_peak"] else ""
            speed = f"{row['real_tokens_per_second']:,.0f}"
            lines.append(
                f"| {report['preset']}, {report['lengths']} | {contestant} | {speed} | {share} | {row['peak_mib']:,} |"
            )
    lines += ["", "| generation | | sentences/s | times as fast as transformers |", "|---|---|---:|---:|"]
    for name, report in reports.items():
        for setting, rows in report["settings"].items() if name.startswith("generate") else ():
            for contestant, row in rows.items():
                figures = f"{row['sentences_per_second']:,.1f} | {row['speed_of_transformers']:.2f}"
                lines.append(f"| {report['preset']}, {setting} | {contestant} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="%(default)s")
    parser.add_argument("--tiny", action="store_true", help="networks and settings that a CPU runs in seconds")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and device_name() == "cpu":
        raise SystemExit("There is no GPU. Pass --device cpu with --tiny.")
    functions = parts(arguments.tiny, arguments.device)
    if arguments.part:
        from machine import describe_machine

        report = functions[arguments.part]() | {"machine": describe_machine(os.cpu_count())}
        (arguments.output / f"{arguments.part}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in functions:
        if not (arguments.output / f"{name}.json").is_file():
            print(name, flush=True)
            words = [
                sys.executable,
                __file__,
                "--part",
                name,
                "--device",
                arguments.device,
                "--output",
                arguments.output,
            ]
            # A part that fails must not cost the others.
            subprocess.run([*words, *["--tiny"] * arguments.tiny], check=False)
    files = {name: arguments.output / f"{name}.json" for name in functions}
    reports = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items() if path.is_file()}
    (arguments.output / "gpu.md").write_text(table(reports), encoding="utf-8")
    if missing := sorted(files.keys() - reports.keys()):
        raise SystemExit(f"These parts failed: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
