"""`metaphrase shortlist MODEL PAIRS`: write the vocabulary map of a model, for --use_vmap."""

import argparse
import logging
from pathlib import Path

from metaphrase.data.pairs import PairSource
from metaphrase.filtering.lexicon import MAX_PAIRS, make_vocabulary_map
from metaphrase.filtering.run import check_sample, sample_pairs
from metaphrase.scripts.parsers import given_options
from metaphrase.storage.folders import file_in_one_step
from metaphrase.storage.loading import check_model_folder
from metaphrase.tokenization import TokenizerPair
from metaphrase.tokenization.vocabulary_map import VOCABULARY_MAP_NAME

logger = logging.getLogger(__name__)


def main(arguments: argparse.Namespace) -> None:
    path, files = Path(arguments.model, VOCABULARY_MAP_NAME), arguments.pairs
    if not path.parent.is_dir():
        raise ValueError(f"`model` must be a folder, to write {path.name} into, got {arguments.model!r}.")
    if path.exists() and not arguments.overwrite:
        raise ValueError(f"`model` must have no {path.name}, got {str(path)!r}. Pass --overwrite to replace the file.")
    if len(files) > 2:
        raise ValueError(f"`pairs` must be one file, or two parallel files, got {len(files)}.")
    check_model_folder(path.parent)
    names = ("file",) if len(files) == 1 else ("source_file", "target_file")
    columns = given_options(arguments, ("source_column", "target_column"))
    if columns and len(files) == 2:
        raise ValueError(
            f"`{next(iter(columns))}` must be left out with two parallel files, got {files[0]} and {files[1]}."
        )
    source = PairSource(**dict(zip(names, files, strict=True)), **columns)
    num_records, pairs = sample_pairs(source.records(), MAX_PAIRS)
    check_sample(source, num_records, pairs)
    logger.info("Learning from %d of %d pairs.", len(pairs), num_records)
    tokenizers = TokenizerPair.from_pretrained(path.parent)
    sizes = {"num_per_token": arguments.num_per_token, "num_frequent": arguments.num_frequent}
    vocabulary_map = make_vocabulary_map(pairs, tokenizers, **sizes)
    with file_in_one_step(path) as partial:
        vocabulary_map.save(partial, tokenizers)
    logger.info("Written to %s", path)
