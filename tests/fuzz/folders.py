"""Cases with a broken file in a model folder, for every verb that reads such a folder."""

import copy
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases import Case
from other_families import other_model
from tiny_generator import SOURCES, TARGETS, save_generator, tiny_generator, tiny_pair

from metaphrase.conversion import convert
from metaphrase.conversion.ctranslate2.export import export_ctranslate2
from metaphrase.inference import Generator

OURS, THEIRS = ("one", "two", "converted"), ("t5", "bart", "marian")
# Contents that are no model file, whatever the file.
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "list": b"[]",
    "list of numbers": b"[1, 2]",
    "null": b"null",
    "number": b"7",
    "text": b'"x"',
    "brackets": b"[" * 100_000,
    "braces": b'{"a": ' * 100_000,
    "nested field": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no UTF-8": b'{"a": "\xff\xfe\xe9"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "fields of another file": b'{"a": {"b": []}, "c": null}',
}
VALUES: list[Any] = [
    *({}, [], {"a": 1}, [1, "x"], [[1]], None, True, False, "", "x", "1", "../x"),
    *(-1, 0, 1, 3, 1.5, -0.5, 2**31, 2**63, 2**70, -(2**70), float("nan"), float("inf"), 1e300),
]
# Fields that a file of a tiny model lacks.
ADDED = {
    "config.json": "dtype torch_dtype model_type architectures auto_map num_beams max_length quantization_config id2label "
    "label2id tokenizer_class task_specific_params forced_bos_token_id eos_token_id custom_pipelines rope_parameters "
    "attn_implementation head_dim pruned_heads",
    "generation_config.json": "forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens num_beams max_length "
    "min_length do_sample temperature top_k top_p length_penalty early_stopping no_repeat_ngram_size repetition_penalty "
    "num_return_sequences num_beam_groups max_time stop_strings sequence_bias watermarking_config cache_implementation "
    "penalty_alpha decoder_start_token_id eos_token_id pad_token_id prefix_allowed_tokens_fn use_cache guidance_scale "
    "min_new_tokens begin_suppress_tokens exponential_decay_length_penalty renormalize_logits diversity_penalty",
    "tokenizer_config.json": "auto_map model_max_length extra_special_tokens padding_side chat_template target_tokenizer "
    "added_tokens_decoder tokenizer_class pad_token eos_token model_input_names",
    "metrics.json": "scores data tasks generation loss",
    "trainer_state.json": "log_history global_step best_model_checkpoint",
    "recipe.yaml": "tasks source_language token source_prefix train_file",
}
# Only the card is made from these.
_UNREAD = ("metrics.json", "trainer_state.json", "recipe.yaml")
_RECIPE = {"train_file": "pairs.tsv", "source_language": "en", "target_language": "de", "num_train_epochs": 1.0}
_METRICS = {"scores": {"bleu": {"score": 12.5, "signature": "x"}}, "data": {"name": "test.tsv"}, "loss": 1.5}
_STATE = {"global_step": 2, "log_history": [{"step": 1, "loss": 2.0}, {"step": 2, "eval_bleu": 1.5}]}


def make_folders(folder: Path) -> dict[str, Path]:
    """Write small model folders: ours with one and with two tokenizers, and those of other families."""
    models = {"one": tiny_generator(), "two": tiny_generator(joint=False)}
    paths = {name: save_generator(generator, folder / name / "model") for name, generator in models.items()}
    for family in THEIRS:
        paths[family] = folder / family / "model"
        other_model(family).save_pretrained(paths[family])
        tiny_pair().save_pretrained(paths[family])
    paths["converted"] = convert(paths["bart"], folder / "converted" / "model")
    export_ctranslate2(paths["one"], folder / "exported" / "model")
    for path in paths.values():
        for name, fields in (("metrics.json", _METRICS), ("trainer_state.json", _STATE), ("recipe.yaml", _RECIPE)):
            # JSON is YAML too.
            (path / name).write_text(json.dumps(fields), encoding="utf-8")
        shutil.copytree(path, path.with_name("twin"))
    return paths | {"exported": folder / "exported" / "model"}


def _mutate(content: bytes, file: str, rng: random.Random) -> tuple[str, bytes]:
    """Return the name of a mutation, and the mutated content."""
    kind = rng.choices(("content", "cut", "byte", "field"), (6, 1, 2, 16))[0]
    if kind == "content":
        name = rng.choice(list(CONTENTS))
        return name, CONTENTS[name]
    if kind == "cut":
        end = rng.choice((len(content) // 2, rng.randrange(len(content))))
        return f"cut at {end}", content[:end]
    if kind == "byte":
        offset, value = rng.randrange(len(content)), rng.randrange(256)
        return f"byte {offset} is {value}", content[:offset] + bytes([value]) + content[offset + 1 :]
    fields = json.loads(content)
    owner, key, path = _choose_field(fields, file, rng)
    if rng.random() < 0.15 and (isinstance(owner, list) or key in owner):
        del owner[key]
        return f"{path} is missing", json.dumps(fields).encode()
    owner[key] = value = copy.deepcopy(rng.choice(VALUES))
    return f"{path} is {value!r}"[:80], json.dumps(fields).encode()


def _choose_field(fields: dict, file: str, rng: random.Random) -> tuple[dict | list, Any, str]:
    """Return a mapping or list in `fields`, one of its keys, and the path of the key."""
    if rng.random() < 0.35 and file in ADDED:
        key = rng.choice(ADDED[file].split())
        return fields, key, key
    owner: dict | list = fields
    path: list[str] = []
    while True:
        key = rng.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
        path.append(str(key))
        value = owner[key]
        if not isinstance(value, dict | list) or not value or rng.random() < 0.4:
            return owner, key, ".".join(path)
        owner = value


def _verbs(base: str, data: Path) -> dict[str, list[str]]:
    """Return the command line of each verb, with `{model}` for a model folder and `{out}` for the folder around it."""
    sources, pairs = str(data / "sources.txt"), str(data / "pairs.tsv")
    one = ["--source", SOURCES[1]]
    train = ["--train_file", pairs, "--max_steps", "1", "--report_to", "none", "--use_cpu", "--max_source_length", "32"]
    train += ["--max_target_length", "32", "--per_device_train_batch_size", "2", "--save_strategy", "no"]
    verbs = {
        "generate": ["generate", "{model}", "--input", sources, "--output", "{out}/text"],
        "evaluate": ["evaluate", "{model}", "--file", pairs, "--output", "{out}/scores.json"],
    }
    if base == "exported":
        return {verb: [*words, "--engine", "ctranslate2"] for verb, words in verbs.items()}
    verbs |= {
        "attention": ["attention", "{model}", *one, "--output", "{out}/links.txt"],
        "backtranslate": ["backtranslate", "{model}", "--input", sources, "--output", "{out}/synthetic.tsv"],
        "distill": ["distill", "{model}", "{out}/twin", "--input", pairs, "--output", "{out}/distilled.tsv"],
        "shortlist": ["shortlist", "{model}", pairs],
        "explain": ["explain", "{model}", *one, "--text"],
        "push": ["push", "{model}", "user/name", "--dry_run"],
        # Writes the card, and finds no Hub.
        "card": ["push", "{model}", "user/name"],
        "average": ["average", "{model}", "{out}/twin", "--output", "{out}/mean"],
        "train": ["train", *train, "--model_name_or_path", "{model}", "--output_dir", "{out}/run"],
    }
    if base in (*THEIRS, "converted"):
        verbs["convert"] = ["convert", "{model}", "{out}/new", *(["--to", "bart"] if base == "converted" else [])]
    if base in OURS:
        verbs["export"] = ["export", "{model}", "{out}/exported", "--format", "ctranslate2"]
    return verbs


def _decode(folder: Path) -> bytes:
    return "".join(f"{text}\n" for text in Generator.from_pretrained(folder).generate(SOURCES)).encode()


def cases(seed: int, number: int, folder: Path) -> Iterator[Case]:
    """Yield command lines, each with a model folder of its own that has one broken file."""
    rng, paths = random.Random(seed), make_folders(folder / "whole")
    (folder / "sources.txt").write_text("".join(f"{text}\n" for text in SOURCES), encoding="utf-8")
    lines = [f"{source}\t{target}\n" for source, target in zip(SOURCES, TARGETS, strict=True)]
    (folder / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    targets = {base: _decode(path) for base, path in paths.items() if base != "exported"}
    for index in range(number):
        base = rng.choices([*paths], (4, 2, 2, 2, 2, 2, 1))[0]
        verbs = _verbs(base, folder)
        verb = rng.choice(list(verbs))
        root = folder / f"case_{index}"
        # Only the broken file needs a copy.
        shutil.copytree(paths[base].parent, root, copy_function=os.link)
        files = [path for path in sorted((root / "model").rglob("*.*")) if path.suffix in (".json", ".yaml")]
        likely = {"config.json": 6, "generation_config.json": 4, "tokenizer_config.json": 4, "tokenizer.json": 4}
        file = rng.choices(files, [likely.get(path.name, 1) for path in files])[0]
        mutation, content = _mutate(file.read_bytes(), file.name, rng)
        file.unlink()
        file.write_bytes(content)
        is_unread = verb == "generate" and file.name in _UNREAD
        expected = {root / "text": targets[base]} if is_unread else {}
        name = f"{verb} {base}: {file.relative_to(root / 'model')}: {mutation}"
        words = [word.format(model=root / "model", out=root) for word in verbs[verb]]
        yield Case(
            name, words, expected, fields=[mutation.split(" is ")[0].split(".")[-1]] if " is " in mutation else []
        )
