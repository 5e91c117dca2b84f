"""ONNX: a Metaphrase model as graphs that any ONNX runtime runs, checked by onnxruntime, with all that it needs beside them."""

import json
import os
from pathlib import Path

import torch

from metaphrase.conversion.onnx.check import check_graphs
from metaphrase.conversion.onnx.graphs import obstacles, write_graphs
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.loading import load_whole
from metaphrase.storage.weight_files import check_output, folder_in_one_step
from metaphrase.tokenization import TokenizerPair

# What says where a folder comes from, and so that it may be replaced.
PROVENANCE_NAME = "export.json"


def export_onnx(source: str | os.PathLike, output: str | os.PathLike, *, overwrite: bool = False) -> Path:
    """Writes a Metaphrase model as three ONNX graphs, with configuration, tokenizers and generation settings.

    Files and tensors have the names of optimum's exports: `encoder_model.onnx`, `decoder_model.onnx` for the first step and
    `decoder_with_past_model.onnx` for each later one. Weights are float32. The folder appears under its name only when it is
    complete and onnxruntime has computed from it what the model computes.

    Args:
        source: Folder or Hub id of a Metaphrase model.
        output: The folder to write.
        overwrite: Replace `output` if it exists and was written here.

    Returns:
        The path of the folder.

    Raises:
        ValueError: If the model cannot be exported, its weights are not whole, or an argument is out of its range.
        OSError: If there is no such model.
        RuntimeError: If onnxruntime computes something else.
    """
    source, output = os.fspath(source), Path(output)
    check_output(output, [Path(source)] if os.path.isdir(source) else [], overwrite, PROVENANCE_NAME, "exported")
    # What cannot be exported is refused before its weights are read.
    config = MetaphraseConfig.from_pretrained(source)
    if found := obstacles(config):
        raise ValueError(f"ONNX cannot express {'; '.join(found)}.")
    # The kernel that is written out leaves every step to the runtime, and always has a mask.
    model = load_whole(
        source, config=config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()
    tokenizers = TokenizerPair.from_pretrained(source)
    with folder_in_one_step(output) as partial:
        write_graphs(model, partial)
        check_graphs(model, partial)
        model.config.save_pretrained(partial)
        tokenizers.save_pretrained(partial)
        model.generation_config.save_pretrained(partial)
        name = Path(source).resolve().name if os.path.isdir(source) else source
        provenance = {"source": name, "from": MetaphraseConfig.model_type, "to": "onnx"}
        (partial / PROVENANCE_NAME).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
    return output
