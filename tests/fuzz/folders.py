"""Cases with a broken file in a model folder, for every verb that reads such a folder."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from cases import Case, mutate, write_world
from other_families import other_model
from tiny_generator import SOURCES, save_generator, tiny_generator, tiny_pair

from metaphrase.conversion import convert
from metaphrase.conversion.ctranslate2.export import export_ctranslate2

OURS, THEIRS = ("one", "two", "converted"), ("t5", "bart", "marian")
# Fields that a file of a tiny model lacks.
ADDED = {
    "config.json": "dtype model_type architectures auto_map num_beams quantization_config id2label tokenizer_class "
    "task_specific_params forced_bos_token_id eos_token_id rope_parameters attn_implementation head_dim",
    "generation_config.json": "forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens num_beams max_length "
    "do_sample temperature top_k top_p length_penalty early_stopping no_repeat_ngram_size num_return_sequences max_time "
    "stop_strings sequence_bias cache_implementation decoder_start_token_id eos_token_id use_cache guidance_scale",
    "tokenizer_config.json": "auto_map model_max_length extra_special_tokens padding_side chat_template tokenizer_class",
    "metrics.json": "scores data tasks generation loss",
    "trainer_state.json": "log_history global_step best_model_checkpoint",
    "recipe.yaml": "tasks source_language token source_prefix train_file",
}
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


def _verbs(base: str, data: Path) -> dict[str, list[str]]:
    """Return the command line of each verb, with `{model}` for a model folder and `{out}` for the folder around it."""
    sources, pairs = str(data / "in"), str(data / "pairs.tsv")
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
        "explain": ["explain", "{model}", *one, "--output", "{out}/page.html"],
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


def cases(seed: int, number: int, folder: Path) -> Iterator[Case]:
    """Yield command lines, each with a model folder of its own that has one broken file."""
    rng, paths = random.Random(seed), make_folders(folder / "whole")
    write_world(folder)
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
        mutation, content = mutate(file.read_bytes(), rng, ADDED.get(file.name, "").split())
        file.unlink()
        file.write_bytes(content)
        name = f"{verb} {base}: {file.relative_to(root / 'model')}: {mutation}"
        words = [word.format(model=root / "model", out=root) for word in verbs[verb]]
        yield Case(name, words, fields=[mutation.split(" is ")[0].split(".")[-1]] if " is " in mutation else [])
