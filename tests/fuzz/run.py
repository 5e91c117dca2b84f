"""Run command lines with broken input, and print a table of their outcomes: `make test-fuzz`.

A failure is a traceback, a wrong result, a file that is lost, or much time or memory.
`ARGS="--seed 3 --parts recipes --match lora"` runs some cases.
"""

import argparse
import gc
import gzip
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
# The processes of the cases find the libraries imported.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import datasets
import torch
import yaml
from other_families import other_model
from safetensors.torch import load_file
from small_runs import SMALL
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator, tiny_pair

from metaphrase.conversion import convert
from metaphrase.modeling import MetaphraseConfig
from metaphrase.scripts.__main__ import find_main
from metaphrase.scripts.__main__ import main as run_command
from metaphrase.scripts.parsers import SUBCOMMANDS, make_parser
from metaphrase.training.recipe.fields import OWN_FIELDS, TRAINING_FIELDS

# Processor time and time by the clock, of a machine that does other work too.
CPU_SECONDS, CLOCK_SECONDS = 40, 300
# Memory beyond that of the imported libraries.
LARGE_BYTES, MAX_BYTES = 2**30, 4 * 2**30
CLEAN, ACCEPTED, FAILURES = "clean error", "accepted", ("traceback", "wrong", "slow", "large")
ERROR = re.compile(r"^(metaphrase( \w+)?: .*error: |usage: )", re.MULTILINE)
OUTPUTS = ("--output", "--output_dir", "--predictions")
VALUES: list[Any] = [{}, [], {"a": 1}, [1, "x"], None, True, "", "x", "1", "../x", "\x00", -1, 0, 1, 3, 1.5, -0.5, 1e-9]
VALUES += [2**31, 2**63, 2**70, -(2**70), float("nan"), float("inf"), 1e300]
# Numbers as other programs write them, and devices.
ODD_WORDS = ["-inf", "1e400", "0x10", "1_0", "\u0661", "1,5", " 1", "+1", "1.0", "nan%"]
ODD_WORDS += ["meta", "cuda:99", "mps", "CPU"]
# Texts that are no mistake, but unusual. The time of attention grows with the square of their length.
ODD_TEXTS = ["", " ", "\u2028", "\x00", "\u202eabc", "e\u0301" * 40, "\U0001f9d1\u200d\U0001f680", '"', "a" * 2000]
# Fields that a file of a tiny model lacks.
ADDED = {
    "config.json": "dtype model_type architectures auto_map num_beams quantization_config forced_bos_token_id eos_token_id",
    "generation_config.json": "forced_bos_token_id bad_words_ids num_beams max_length temperature top_p early_stopping",
    "tokenizer_config.json": "auto_map model_max_length extra_special_tokens padding_side tokenizer_class",
    "metrics.json": "scores data tasks generation loss",
    "trainer_state.json": "log_history global_step best_model_checkpoint",
    "recipe.yaml": "tasks source_language token source_prefix train_file",
}
RECIPE = {"tokenizer_kind": "char", "seed": 3, "preset": "metaphrase-tiny", "model": SMALL, "max_steps": 2}
RECIPE |= {"report_to": "none", "per_device_train_batch_size": 4, "use_cpu": True, "num_validation": 1}
RECIPE["generation_max_length"] = 8
# Fields and options that mean other machines, other processes, other outputs, or work that a user has chosen.
LEFT_OUT_FIELDS = ["dataloader", "fsdp", "deepspeed", "parallelism", "torch_compile", "local_rank", "use_cpu", "ddp"]
LEFT_OUT_FIELDS += ["tpu", "jit", "hub_", "push_to_hub", "auto_find", "num_train_epochs", "max_steps", "neftune"]
LEFT_OUT_OPTIONS = ["length", "new_tokens", "num_processes", "output", "predictions", "token", "revision", "help"]
LEFT_OUT_OPTIONS += ["quiet", "verbose", "mbr_candidates", "num_return_sequences", "repo_id", "shard"]


def make_world(folder: Path) -> dict[str, Path]:
    """Write texts and pairs, and return small models, each in a folder of its own: ours, a BART, and the BART converted."""
    folder.mkdir(parents=True)
    for name, texts in (("in", SOURCES), ("targets", TARGETS), ("pairs.tsv", map("{}\t{}".format, SOURCES, TARGETS))):
        (folder / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    models = {"one": tiny_generator(kind="byte_bpe"), "two": tiny_generator(joint=False)}
    paths = {name: save_generator(generator, folder / name / "model") for name, generator in models.items()}
    paths["bart"] = folder / "bart" / "model"
    other_model("bart").save_pretrained(paths["bart"])
    tiny_pair().save_pretrained(paths["bart"])
    paths["converted"] = convert(paths["bart"], folder / "converted" / "model")
    metrics = {"scores": {"bleu": {"score": 12.5, "signature": "x"}}, "data": {"name": "test.tsv"}, "loss": 1.5}
    state = {"global_step": 2, "log_history": [{"step": 1, "loss": 2.0}, {"step": 2, "eval_bleu": 1.5}]}
    recipe = {"train_file": "pairs.tsv", "source_language": "en", "target_language": "de"}
    for path in paths.values():
        for name, fields in (("metrics.json", metrics), ("trainer_state.json", state), ("recipe.yaml", recipe)):
            # JSON is YAML too.
            (path / name).write_text(json.dumps(fields), encoding="utf-8")
        shutil.copytree(path, path.with_name("twin"))
    return paths


def command_lines(model: Path, sources: Path, pairs: Path, out: Path) -> dict[str, list[str]]:
    read = ["--input", str(sources)]
    train = ["--max_steps", "1", "--use_cpu", "true", "--report_to", "none", "--per_device_train_batch_size", "2"]
    lines = {
        "generate": [model, *read, "--output", out],
        "evaluate": [model, "--file", pairs, "--output", f"{out}.json"],
        "attention": [model, *read, "--format", "pharaoh", "--output", out],
        "explain": [model, "--source", SOURCES[1], "--output", out],
        "backtranslate": [model, *read, "--output", f"{out}.tsv"],
        "distill": [model, "--input", pairs, "--output", f"{out}.tsv"],
        "shortlist": [model, pairs],
        "push": [model, "user/name", "--dry_run"],
        "average": [model, model.with_name("twin"), "--output", out],
        "convert": [model, out, *(["--to", "bart"] if model.parent.name == "converted" else [])],
        "export": [model, out, "--format", "ctranslate2"],
        "tokenize": ["--files", sources, "--output", out],
        "filter": [pairs, "--output", f"{out}.tsv"],
        "compare": [sources, sources, "--target", sources, "--names", "a", "b", "--output", f"{out}.json"],
        "train": ["--train_file", pairs, "--model_name_or_path", model, "--output_dir", out, *train],
    }
    return {subcommand: [subcommand, *map(str, words)] for subcommand, words in lines.items()}


def mutate(content: bytes, rng: random.Random, added: str = "") -> tuple[str, bytes]:
    """Return the name of a mutation of bytes, or of a field of JSON, and the mutated bytes. JSON may get fields of `added`."""
    if content.startswith(b"{") and rng.random() < 0.65:
        fields = owner = json.loads(content)
        path = [rng.choice(added.split())] if added and rng.random() < 0.35 else []
        while not path or (isinstance(owner.get(path[-1]), dict) and owner[path[-1]] and rng.random() < 0.6):
            owner = owner[path[-1]] if path else owner
            path.append(rng.choice(list(owner)))
        # Layers are built one by one, by transformers too.
        is_count = "layers" in str(path[-1])
        owner[path[-1]] = rng.choice(VALUES[: VALUES.index(2**31)] if is_count else VALUES)
        return f"{'.'.join(path)} is {owner[path[-1]]!r}"[:80], json.dumps(fields).encode()
    start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    value = bytes([rng.choice((0, 9, 10, 13, 34, 44, 91, 123, 125, 0xC3, 0xED, 0xFF, rng.randrange(256)))])
    mutations = {
        "cut": content[:end],
        "byte": content[:start] + value + content[start + 1 :],
        "insert": content[:start] + value * rng.choice((1, 3, 2**17)) + content[start:],
        "remove": content[:start] + content[end:],
        "junk": rng.randbytes(rng.randrange(1, 300)),
        "UTF-16": content.decode("utf-8", errors="ignore").encode("utf-16"),
        "empty": b"",
        "list": b"[]",
        "null": b"null",
        "brackets": b'{"a": ' + b"[" * 100_000,
    }
    kind = rng.choice([*mutations])
    return f"{kind} {start}:{end} {value!r}", mutations[kind]


# Parts: each returns the name of a broken thing, a command line, and the broken fields, which an error of a library may name.
Case = tuple[str, list[str], list[str]]


def break_folder(root: Path, world: Path, paths: dict[str, Path], rng: random.Random) -> Case:
    base = rng.choice([*paths])
    # Only the broken file needs a copy.
    model = shutil.copytree(paths[base].parent, root / base, copy_function=os.link) / "model"
    lines = command_lines(model, world / "in", world / "pairs.tsv", root / "out")
    subcommand = rng.choice([*lines])
    files = [path for path in sorted(model.rglob("*.*")) if path.suffix in (".json", ".yaml")]
    file = rng.choices(files, [4 if "config" in path.name else 1 for path in files])[0]
    mutation, content = mutate(file.read_bytes(), rng, ADDED.get(file.name, ""))
    file.unlink()
    file.write_bytes(content)
    fields = [mutation.split(" is ")[0].split(".")[-1]] if " is " in mutation else []
    return f"{subcommand} {base}: {file.relative_to(model)}: {mutation}", lines[subcommand], fields


def break_texts(root: Path, world: Path, paths: dict[str, Path], rng: random.Random) -> Case:
    subcommands = ("generate", "evaluate", "attention", "backtranslate", "distill", "shortlist", "tokenize", "filter")
    subcommand = rng.choice((*subcommands, "compare", "train"))
    kind = rng.choice(("bytes", "odd texts", "long line", "compressed"))
    files = {name: world / name for name in ("in", "pairs.tsv")}
    for name, path in files.items():
        content = path.read_bytes()
        if kind == "odd texts":
            content = b"".join(f"{rng.choice(ODD_TEXTS)}\t{rng.choice(ODD_TEXTS)}\n".encode() for _ in range(5))
        elif kind == "long line":
            content += b"a " * rng.choice((2000, 101_000)) + b"\n"
        elif kind == "bytes":
            _, content = mutate(content, rng)
        else:
            bomb, cut = gzip.compress(b"a " * 10**7), mutate(gzip.compress(content), rng)[1]
            name, content = f"{name}.gz", rng.choice((bomb, cut))
        files[path.name] = root / name
        files[path.name].write_bytes(content)
    lines = command_lines(paths["one"], files["in"], files["pairs.tsv"], root / "out")
    return f"{subcommand}: {kind}", lines[subcommand], []


def break_recipe(root: Path, world: Path, paths: dict[str, Path], rng: random.Random) -> Case:
    recipe, kind = RECIPE | {"train_file": str(world / "pairs.tsv")}, rng.choice(("field", "field", "network", "bytes"))
    names = [name for name in (*OWN_FIELDS, *TRAINING_FIELDS) if not any(part in name for part in LEFT_OUT_FIELDS)]
    network = [name for name in MetaphraseConfig(vocab_size=9).to_dict() if "layers" not in name]
    broken = rng.sample(names, rng.choice((1, 1, 2))) if kind == "field" else []
    recipe |= {name: rng.choice(VALUES) for name in broken}
    if kind == "network":
        broken = [rng.choice(network)]
        recipe["model"] = SMALL | {broken[0]: rng.choice(VALUES)}
    content = yaml.safe_dump(recipe).encode()
    if kind == "bytes":
        kind, content = mutate(content, rng)
    (root / "recipe.yaml").write_bytes(content)
    words = ["train", str(root / "recipe.yaml"), "--output_dir", str(root / "run")]
    words += ["--dry_run"] * (rng.random() < 0.5)
    return f"{kind} {[f'{name}={recipe.get(name)!r}'[:40] for name in broken]}", words, broken


def break_options(root: Path, world: Path, paths: dict[str, Path], rng: random.Random) -> Case:
    lines = command_lines(paths["one"], world / "in", world / "pairs.tsv", root / "out")
    subcommand = rng.choice([*lines])
    actions = [action for action in make_parser(subcommand)._actions if action.option_strings]
    actions = [action for action in actions if not any(part in str(action.option_strings) for part in LEFT_OUT_OPTIONS)]
    words = []
    for action in rng.sample(actions, min(len(actions), rng.choice((1, 2, 3)))):
        # Numbers of beams and groups take memory in proportion. An export to ONNX takes a minute.
        is_size = any(part in action.dest for part in ("num_", "size", "top_k"))
        values = [choice for choice in action.choices or () if choice != "onnx"] or VALUES + ODD_WORDS
        values = [value for value in values if not (is_size and isinstance(value, int | float) and value > 1000)]
        count = 0 if action.nargs == 0 else rng.choice((0, 1, 1, 1, 2))
        words += [action.option_strings[0], *(str(rng.choice(values)) for _ in range(count))]
    return f"{subcommand} {' '.join(word[:40] for word in words)}", [*lines[subcommand], *words], []


PARTS = {"folders": break_folder, "recipes": break_recipe, "texts": break_texts, "options": break_options}


def run(words: list[str], folder: Path) -> tuple[int | None, str, int]:
    """Run a command line in a forked process. Return its status (None after a timeout), its messages and added bytes."""
    log, started = folder / "log", time.monotonic()
    base_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    sys.stdout.flush()
    if not (child := os.fork()):
        code: Any = 1
        try:
            os.chdir(folder)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), descriptor, descriptor)):
                os.dup2(source, number)
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
            sys.argv = ["metaphrase", *words]
            code = run_command()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() - started > CLOCK_SECONDS:
            os.kill(child, signal.SIGXCPU)
        time.sleep(0.01)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    text = log.read_text(encoding="utf-8", errors="replace")
    return None if code == -signal.SIGXCPU else code, text, usage.ru_maxrss * 1024 - base_bytes


def digests(words: list[str]) -> dict[Path, bytes]:
    """Return the hash of each file that a command line names or that lies in a folder which it names, without outputs."""
    names = [word for before, word in zip(("", *words), words, strict=False) if before not in OUTPUTS]
    paths = [Path(name) for name in names if name.startswith("/") and os.path.exists(name)]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    # `shortlist --overwrite` writes the map into its model.
    return {file: hashlib.blake2b(file.read_bytes()).digest() for file in files if file.name != "vmap.txt"}


def outcome_of(words: list[str], fields: list[str], folder: Path) -> tuple[str, str]:
    before = digests(words)
    status, messages, added_bytes = run(words, folder)
    changed = [str(file) for file, digest in before.items() if digests(words).get(file) != digest]
    if status is None:
        return "slow", messages[-300:]
    if added_bytes > LARGE_BYTES:
        return "large", f"{added_bytes / 2**20:.0f} MiB"
    if "Traceback (most recent call last)" in messages or status not in (0, 2):
        # An error of a library that names the field.
        is_clean = status == 1 and any(field in messages for field in fields)
        return (CLEAN, "") if is_clean else ("traceback", f"status {status}: {messages[-700:]}")
    if changed:
        return "wrong", f"changed: {changed[0]}"
    if status == 2:
        return (CLEAN, "") if len(ERROR.findall(messages)) == 1 else ("wrong", f"no error: {messages[-500:]}")
    if words[0] == "train":
        weights = [load_file(path) for path in folder.rglob("run/*.safetensors")]
        if any(not weight.isfinite().all() for file in weights for weight in file.values()):
            return "wrong", "the weights are not finite"
    return ACCEPTED, ""


def work(parts: list[str], seed: int, number: int, folder: Path, match: str) -> list[dict[str, Any]]:
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    paths, rng, lines = make_world(folder / "world"), random.Random(seed), []
    for index in range(number):
        part, root = parts[index % len(parts)], folder / str(index)
        root.mkdir()
        name, words, fields = PARTS[part](root, folder / "world", paths, rng)
        if match in name:
            started = time.monotonic()
            outcome, reason = outcome_of(words, fields, root)
            line = {"part": part, "outcome": outcome, "name": name, "words": words, "reason": reason}
            lines.append(line | {"seconds": time.monotonic() - started})
        shutil.rmtree(root)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=2000, help="number of cases [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--match", default="", help="run only cases whose name holds this text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in SUBCOMMANDS:
        find_main(name)
    gc.collect()
    gc.freeze()
    started, num_jobs = time.monotonic(), len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="fuzz_") as root,
        multiprocessing.get_context("fork").Pool(num_jobs) as pool,
    ):
        first, number = arguments.seed * 1000, arguments.number // num_jobs
        jobs = [(first + job, number, Path(root, str(job))) for job in range(num_jobs)]
        results = pool.starmap(work, [(arguments.parts, *job, arguments.match) for job in jobs])
    lines = [line for result in results for line in result]
    failures = [line for line in lines if line["outcome"] in FAILURES]
    for line in failures:
        print(f"\n{line['outcome']}, {line['part']}: {line['name']}\n  {' '.join(line['words'])}\n  {line['reason']}")
    for (part, outcome), count in sorted(Counter((line["part"], line["outcome"]) for line in lines).items()):
        print(f"{part:12}{outcome:13}{count:6}")
    seconds, name = max(((line["seconds"], line["name"]) for line in lines), default=(0, ""))
    print(f"{len(lines)} cases in {time.monotonic() - started:.0f} seconds, the longest {seconds:.0f} seconds: {name}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
