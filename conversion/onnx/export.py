"""Export to ONNX: three graphs checked with onnxruntime, with configuration, tokenizers and generation settings."""

import os
from pathlib import Path

import torch

from metaphrase.conversion.onnx.check import check_graphs
from metaphrase.conversion.onnx.graphs import refuse_unsupported, write_graphs
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import check_output, folder_in_one_step, write_provenance
from metaphrase.storage.loading import load_whole
from metaphrase.tokenization import TokenizerPair

PROVENANCE_NAME = "export.json"


def export_onnx(source: str | os.PathLike, output: str | os.PathLike, *, overwrite: bool = False) -> Path:
    """Export a Metaphrase model to ONNX, in float32.

    Files and tensors have optimum's names: `encoder_model.onnx`, `decoder_model.onnx` for the first decoding step and
    `decoder_with_past_model.onnx` for later ones. The folder appears only when it is complete and onnxruntime computes
    what the model computes.

    Args:
        source: Folder or Hub id of a Metaphrase model.
        output: The folder to write.
        overwrite: True to replace an `output` that this package wrote.

    Returns:
        The path of the folder.

    Raises:
        ValueError: If ONNX cannot express the model, weights are missing, or an argument is invalid.
        OSError: If the model does not exist.
        RuntimeError: If onnxruntime's result differs.
    """
    source, output = os.fspath(source), Path(output)
    check_output(output, [Path(source)] if os.path.isdir(source) else [], overwrite, PROVENANCE_NAME, "exported")
    # Refuses a model before reading its weights.
    config = MetaphraseConfig.from_pretrained(source)
    refuse_unsupported(config)
    # The eager kernel always has a mask, and each of its operations becomes a node.
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
        fields = {"from": MetaphraseConfig.model_type, "to": "onnx"}
        write_provenance(partial / PROVENANCE_NAME, source, **fields)
    return output
