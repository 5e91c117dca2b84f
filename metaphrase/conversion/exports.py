"""Common parts of the exports: from a model's folder to an exported folder, and tables of positions."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from metaphrase.conversion.checkpoints import OURS, new_folder
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import EXPORT_NAME, write_provenance
from metaphrase.storage.loading import check_model_folder, load_whole
from metaphrase.tokenization import TokenizerPair

# Sinusoids have no limit, but a table has. A longer text raises an error.
SINUSOIDAL_POSITIONS = 4096


def export_folder(
    source: str | os.PathLike,
    output: str | os.PathLike,
    overwrite: bool,
    write: Callable[[PreTrainedModel, TokenizerPair, Path], None],
    obstacles_of: Callable[[MetaphraseConfig], list[str]],
    provenance: dict[str, str],
    **load_options,
) -> Path:
    """Export the folder or Hub id of a Metaphrase model to a folder, which appears only when it is complete.

    `write` writes the model itself, and `obstacles_of` returns the options that the format cannot express. `provenance` has the
    format as `to`. The model is loaded with `load_options`.
    """
    source, output = os.fspath(source), Path(output)
    sources = [Path(source)] if os.path.isdir(source) else []
    with new_folder(output, sources, overwrite, EXPORT_NAME, "exported") as partial:
        # Refuses a model before reading its weights.
        check_model_folder(source)
        config = MetaphraseConfig.from_pretrained(source)
        if obstacles := obstacles_of(config):
            raise ValueError(f"The format {provenance['to']} cannot express {'; '.join(obstacles)}.")
        model = load_whole(source, config=config, trust_remote_code=False, **load_options).eval()
        tokenizers = TokenizerPair.from_pretrained(source)
        tokenizers.save_pretrained(partial)
        write(model, tokenizers, partial)
        model.generation_config.save_pretrained(partial)
        write_provenance(partial / EXPORT_NAME, source, **{"from": OURS}, **provenance)
    return output


def position_table(positions: nn.Module, config: MetaphraseConfig) -> torch.Tensor:
    """Return the positions to add to the embeddings, (positions, H)."""
    length = max(config.max_position_embeddings, SINUSOIDAL_POSITIONS)
    if config.position_embedding_type == "learned":
        length = positions.num_embeddings - positions.offset
    return positions(torch.arange(length)[None], None)[0].detach()
