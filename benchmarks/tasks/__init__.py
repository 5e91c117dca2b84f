"""Tasks that `choices.py` trains on: generated pairs and public corpora. The same seed gives the same pairs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import commands, corpora, inflection, normalization, paradigms, recall, semantic_parsing, slog, transliteration

# Source and target, or lemma, form and features.
Splits = dict[str, list[tuple[str, ...]]]

GENERATED: dict[str, Callable[[], Splits]] = {
    "commands": commands.make_splits,
    "commands_length": commands.make_length_splits,
    "commands_primitive": commands.make_primitive_splits,
    "inflection": inflection.make_splits,
    "inflection_agglutinative": paradigms.make_agglutinative,
    "inflection_copies": paradigms.make_copies,
    "inflection_features": partial(paradigms.make_agglutinative, hold_out=True),
    "normalization": normalization.make_splits,
    "recall": recall.make_splits,
    "semantic": semantic_parsing.make_splits,
    "semantic_nested": partial(semantic_parsing.make_splits, nested=True),
    "slog": slog.make_splits,
    "slog_nested": partial(slog.make_splits, nested=True),
    "transliteration": transliteration.make_splits,
    "demo": partial(corpora.make_demo, 30_000),
    "demo_500": partial(corpora.make_demo, 500),
}
# The argument is the folder of the corpora.
PUBLIC: dict[str, Callable[[Path], Splits]] = {
    **{f"g2p_{language}": partial(corpora.read_g2p, language=language) for language in corpora.G2P_LANGUAGES},
    "g2p_fre_1k": partial(corpora.read_g2p, language="fre", num_train=1000),
    "g2p_kor_1k": partial(corpora.read_g2p, language="kor", num_train=1000),
    "java_cs": partial(corpora.read_functions, source="java", target="cs"),
    "cs_java": partial(corpora.read_functions, source="cs", target="java"),
    "multi30k": corpora.read_multi30k,
    "tatoeba": corpora.read_tatoeba,
    "tatoeba_3k": partial(corpora.read_tatoeba, num_train=3000),
    "tatoeba_12k": partial(corpora.read_tatoeba, num_train=12_000),
}


def write_task(name: str, folder: Path, data_dir: Path | None = None) -> None:
    """Write `NAME/{train,validation,test}.tsv` below a folder, unless they are there.

    Args:
        name: Name of a task.
        folder: The folder for all tasks.
        data_dir: The folder of the public corpora.

    Raises:
        ValueError: If the task needs a public corpus, and `data_dir` is None.
    """
    if (folder / name / "train.tsv").is_file():
        return
    if name in GENERATED:
        splits = GENERATED[name]()
    elif data_dir is not None:
        splits = PUBLIC[name](data_dir)
    else:
        raise ValueError(f"`data_dir` must name the folder of the corpora for the task {name}, got None.")
    # The training pairs come last: they show that the task is complete.
    for split in sorted(splits, key=lambda split: split == "train"):
        lines = ["\t".join(pair) + "\n" for pair in splits[split] if all(text.strip() for text in pair)]
        path = folder / name / f"{split}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
