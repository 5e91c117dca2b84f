"""Sections of a model card in Markdown. A fact that the folder does not tell is called unknown."""

import fnmatch
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from metaphrase.hub_card.facts import Facts, TrainedFolder
from metaphrase.hub_card.figures import LOWER_IS_BETTER, SCORE_LABELS, is_finite
from metaphrase.modeling import MetaphraseConfig
from metaphrase.tokenization.tokenizer_pair import TARGET_SUBFOLDER

# (row, names of the field in different families, True to show the row when unknown)
ARCHITECTURE_ROWS = (
    ("Model type", ("model_type",), True),
    ("Encoder layers", ("encoder_layers", "num_layers"), True),
    ("Decoder layers", ("decoder_layers", "num_decoder_layers"), True),
    ("Hidden size", ("hidden_size", "d_model"), True),
    ("Encoder attention heads", ("encoder_attention_heads", "num_heads"), True),
    ("Decoder attention heads", ("decoder_attention_heads", "num_heads"), True),
    ("Key/value heads", ("num_key_value_heads",), False),
    ("Head dimension", ("head_dim", "d_kv"), False),
    ("Encoder feed-forward size", ("encoder_ffn_dim", "d_ff"), True),
    ("Decoder feed-forward size", ("decoder_ffn_dim", "d_ff"), True),
    ("Activation", ("activation_function",), False),
    ("Gated feed-forward", ("gated_mlp",), False),
    ("Positions", ("position_embedding_type",), True),
    ("Maximum positions", ("max_position_embeddings",), False),
    ("Normalisation", ("norm_type",), False),
    ("Place of the normalisation", ("norm_position",), False),
    ("Vocabulary size", ("vocab_size",), True),
    ("Decoder vocabulary size", ("decoder_vocab_size",), False),
    ("Encoder and decoder share embeddings", ("share_embeddings",), False),
    ("Output layer tied to embeddings", ("tie_word_embeddings",), False),
    ("Dropout", ("dropout",), False),
    ("Stored as", ("dtype", "torch_dtype"), False),
)
# (purpose, names of files and folders, True if `metaphrase push` uploads them)
FILE_ROWS = (
    ("Model", ("config.json", "generation_config.json", "*.safetensors", "*.index.json", "*.py"), True),
    (
        "Tokenizers",
        ("tokenizer*", "vocab*", "merges.txt", "vmap.txt", "*.model", "*.spm", f"{TARGET_SUBFOLDER}/"),
        True,
    ),
    ("Scores and outputs", ("metrics.json", "*_predictions.txt", "training_curve.png"), True),
    ("How the model was trained", ("recipe.yaml", "average.json", "data_report.json"), True),
    ("Log and arguments of the run", ("trainer_state.json", "training_args.json", "runs/", "tune/"), False),
    ("Checkpoints, only to resume the run", ("checkpoint-*/", "_abandoned-*/"), False),
    ("LoRA adapter before it was merged", ("adapter/",), False),
    ("Training data", ("data/",), False),
)
UNKNOWN = "unknown"
TWO_WAYS = """\
There are two ways to load the model. Both write the same tokens.

| | `trust_remote_code=True`, as above | `import metaphrase`, as below |
|---|---|---|
| Code that runs | the `.py` files beside the weights; read them first | the installed package, nothing from here |
| Needs | transformers | transformers and `pip install metaphrase` |
| Speed | that of transformers' loops | faster, most of all on a CPU |

```python
import metaphrase
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model_id})
model = AutoModelForSeq2SeqLM.from_pretrained({model_id})
```"""
OWN_CODE = "`trust_remote_code=True` runs the model code that is stored beside the weights."


def score_values(scores: dict[str, dict[str, Any]]) -> list[tuple[str, str, float, str | None]]:
    """Return (name, label, value, signature) of each score. ROUGE has four."""
    return [
        (name, SCORE_LABELS.get(name if part == "score" else part, name), result[part], result.get("signature"))
        for name, result in scores.items()
        for part in [kind for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum") if kind in result] or ["score"]
    ]


def with_interval(result: Mapping[str, Any]) -> str:
    """Return a score in percent with its 95 % interval, if the scores hold one."""
    mean, half = (result.get(f"confidence_{name}") for name in ("mean", "var"))
    interval = f" (95 % interval {mean - half:.2f} to {mean + half:.2f})" if is_finite(mean) and is_finite(half) else ""
    return f"{result['score']:.2f}{interval}"


def describe_code(folder: TrainedFolder, model_id: str) -> str:
    """Return a remark on the code beside the weights, empty if there is none. `model_id` is a Python string."""
    if not folder.has_own_code:
        return ""
    is_own = folder.config.get("model_type") == MetaphraseConfig.model_type
    return f"\n{TWO_WAYS.format(model_id=model_id) if is_own else OWN_CODE}\n"


def describe_files(folder: TrainedFolder) -> str:
    """Return the table of files in the folder, by purpose."""
    names = [path.name + "/" * path.is_dir() for path in folder.path.iterdir()]
    rows = []
    for purpose, patterns, is_uploaded in FILE_ROWS:
        matches = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
        shown = [pattern if len(matching) > 1 else matching[0] for pattern, matching in matches.items() if matching]
        if shown:
            rows.append((purpose, ", ".join(map(code, shown)), "yes" if is_uploaded else "no"))
    return table(("Purpose", "Files", "Uploaded by `metaphrase push`"), rows) if rows else f"{UNKNOWN.title()}."


def describe_scores(folder: TrainedFolder) -> str:
    """Return the table of scores with their signatures, data and settings."""
    if folder.metrics is None:
        return "No scores are known: there is no `metrics.json`."
    parts = []
    if folder.scores:
        rows = []
        for name, label, value, signature in score_values(folder.scores):
            direction = " (lower is better)" if name in LOWER_IS_BETTER else ""
            # ROUGE has several values. The interval is that of ROUGE-L.
            has_interval = name != "rouge" or label == "ROUGE-L"
            shown = with_interval(folder.scores[name]) if has_interval else f"{value:.2f}"
            rows.append((plain(label) + direction, shown, code(signature) if signature else UNKNOWN))
        parts.append(table(("Score", "Percent", "Signature"), rows))
        parts += _score_remarks(folder.scores)
        if folder.tasks:
            parts.append(_scores_of_tasks(folder.tasks))
    else:
        parts.append("No scores are known: `metrics.json` holds none.")
    metrics = folder.metrics
    generation = metrics.get("generation")
    settings = ", ".join(f"{code(name)} {code(value)}" for name, value in (generation or {}).items())
    facts = [
        f"Measured on: {_describe_scored_pairs(folder) or UNKNOWN}",
        f"Examples: {_known(metrics.get('num_examples'))}",
        f"Loss (nats per target token): {_known(metrics.get('loss'))}",
        f"Perplexity: {_known(metrics.get('perplexity'))}",
        f"Generation settings: {settings or UNKNOWN}",
    ]
    return "\n\n".join([*parts, bullets(facts)])


def _describe_scored_pairs(folder: TrainedFolder) -> str | None:
    """Return the data that the scores were measured on, or None if its name is unknown."""
    if not folder.data_name:
        return None
    split, count = (folder.metrics.get("data") or {}).get("split"), folder.metrics.get("num_examples")
    if (folder.recipe or {}).get(f"num_{split}") and count:
        return f"{number(count)} pairs taken out of {plain(folder.data_name)} before training"
    return plain(folder.data_name)


def _scores_of_tasks(tasks: dict[str, dict[str, Any]]) -> str:
    """Return the table of scores of each task."""
    rows = [
        (plain(task), plain(label), f"{value:.2f}", number(part["num_examples"]))
        for task, part in tasks.items()
        for _, label, value, _ in score_values(part["scores"])
    ]
    return table(("Task", "Score", "Percent", "Examples"), rows)


def _score_remarks(scores: dict[str, dict[str, Any]]) -> list[str]:
    remarks = []
    samples = next((result["bs"] for result in scores.values() if result.get("bs")), None)
    if samples:
        remarks.append(
            f"Intervals are those of sacreBLEU's bootstrap with {number(samples)} resamples of the test set."
        )
    bleu = scores.get("bleu", {})
    if bleu.get("precisions") and bleu.get("bp") is not None:
        precisions = "/".join(f"{value:.1f}" for value in bleu["precisions"])
        lengths = f", lengths {_known(bleu.get('sys_len'))} and {_known(bleu.get('ref_len'))} (output, reference)"
        remarks.append(f"BLEU in detail: precisions {precisions}, brevity penalty {bleu['bp']:.3f}{lengths}.")
    if "tok:none" in (bleu.get("signature") or ""):
        remarks.append(
            "BLEU was computed on text that was tokenised before (`tok:none`). It must not be compared with BLEU on plain text."
        )
    return remarks


def _field(value: Any) -> str:
    return ", ".join(map(code, value)) if isinstance(value, list) else code(value)


def _known(value: Any) -> str:
    return UNKNOWN if value is None else number(value)


def describe_training_data(folder: TrainedFolder) -> str:
    """Return the table of data fields in recipe and scores."""
    fields, _, _ = folder.split_recipe()
    rows = [(code(name), _field(value)) for name, value in fields.items()]
    data = (folder.metrics or {}).get("data") or {}
    for name, value in data.items():
        if isinstance(value, dict):
            rows += [(f"{plain(name)}: {plain(part)}", number(amount)) for part, amount in value.items()]
        else:
            rows.append((plain(name), number(value)))
    if not rows:
        return "Unknown: neither a recipe nor the scores name the data."
    return table(("Field", "Value"), rows)


def describe_training_procedure(folder: TrainedFolder) -> str:
    """Return the length of training and the hyperparameters of the recipe."""
    parts = [_describe_progress(folder)]
    _, hyperparameters, secrets = folder.split_recipe()
    if hyperparameters:
        rows = [(code(name), _field(value)) for name, value in hyperparameters.items()]
        parts.append(table(("Hyperparameter", "Value"), rows))
        parts.append("The table lists the fields of `recipe.yaml`, with absolute paths cut to their last part.")
    else:
        parts.append("The hyperparameters are unknown: there is no `recipe.yaml`, or it names none.")
    if secrets:
        parts.append(f"Left out as secret: {', '.join(map(code, secrets))}.")
    return "\n\n".join(parts)


def _describe_progress(folder: TrainedFolder) -> str:
    state = folder.trainer_state
    if state is None:
        return "The length of training is unknown: there is no `trainer_state.json`."
    progress = f"Trained for {_known(state.get('global_step'))} optimizer steps, {_known(state.get('epoch'))} epochs."
    if state.get("best_metric") is not None:
        step, metric = _known(state.get("best_global_step")), number(state["best_metric"])
        progress += f" The best step by the validation metric was {step}, with {metric}."
    return progress


def describe_architecture(folder: TrainedFolder) -> str:
    """Return the table of dimensions in the configuration."""
    if folder.config is None:
        return f"Unknown: there is no `config.json`. Parameters: {_known(folder.num_parameters)}."
    rows = [("Parameters", _known(folder.num_parameters))]
    for label, names, is_needed in ARCHITECTURE_ROWS:
        value = next((folder.config[name] for name in names if folder.config.get(name) is not None), None)
        if value is not None or is_needed:
            rows.append((label, UNKNOWN if value is None else number(value)))
    return table(("Part", "Value"), rows)


def describe_limits(folder: TrainedFolder, facts: Facts) -> str:
    """Return the known limits of the model."""
    limits = []
    if folder.scores:
        where = _describe_scored_pairs(folder) or "data whose name is unknown"
        limits.append(f"The scores were measured on {where}. Quality on other kinds of text is unknown.")
    else:
        limits.append("Its quality is unknown: no scores are recorded.")
    if facts.source_language and facts.target_language:
        languages = f"{plain(facts.source_language)} to {plain(facts.target_language)}"
        limits.append(f"It was trained from {languages}. Other languages are untested.")
    else:
        limits.append("The languages it was trained for are not recorded.")
    config = folder.config or {}
    positions = config.get("max_position_embeddings")
    if config.get("position_embedding_type") == "learned" and positions is not None:
        limits.append(f"Positions are learned: inputs and outputs end at {number(positions)} tokens.")
    else:
        limits.append("Lengths above those of the training data are untested.")
    limits.append("No examination of bias or of harmful output is recorded.")
    return bullets(limits)


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


def plain(value: Any) -> str:
    """Return a value as one line of text, with the special characters of Markdown and HTML escaped."""
    text = _one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]{}#|~!$])", r"\\\1", text)


def from_plain(text: str) -> str:
    """Undo `plain`."""
    return html.unescape(re.sub(r"\\(.)", r"\1", text))


def code(value: Any) -> str:
    """Return a value as a span of code that may stand in a table."""
    text = _one_line(value).replace("|", "\\|")
    if not text:
        return "(empty)"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Header and cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def bullets(items: Iterable[str]) -> str:
    """Return a bullet list. The items are Markdown."""
    return "\n".join(f"- {item}" for item in items)


def number(value: Any) -> str:
    """Return a number with at most four digits, a boolean as yes or no, and any other value as code."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return code(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
