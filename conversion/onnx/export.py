"""Export to ONNX: three graphs checked with onnxruntime, with configuration, tokenizers and generation settings."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import PreTrainedModel

from metaphrase.conversion.onnx.graphs import (
    DECODER_NAME,
    DECODER_WITH_PAST_NAME,
    ENCODER_NAME,
    refuse_unsupported,
    write_graphs,
)
from metaphrase.modeling import MetaphraseConfig
from metaphrase.storage.folders import check_output, folder_in_one_step, write_provenance
from metaphrase.storage.loading import load_whole
from metaphrase.tokenization import TokenizerPair

PROVENANCE_NAME = "export.json"
# Relative to the largest expected value.
TOLERANCE = 1e-4
# Rows, longest source, tokens of the first decoding step, later steps. None equals the traced sizes.
_SIZES = ((3, 13, 1, 5), (1, 5, 2, 3), (4, 1, 1, 2), (1, 30, 5, 2))


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


def check_graphs(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Compare the graphs of a folder with their model, on random ids with padding on either side.

    Args:
        model: The model, in float32 and evaluation mode.
        folder: Holds the three graphs.

    Raises:
        RuntimeError: If a difference exceeds `TOLERANCE` times the largest expected value.
    """
    encoder, first_step, later_step = (
        onnxruntime.InferenceSession(os.fspath(Path(folder) / name), providers=["CPUExecutionProvider"])
        for name in (ENCODER_NAME, DECODER_NAME, DECODER_WITH_PAST_NAME)
    )
    generator = torch.Generator().manual_seed(0)
    config = model.config
    longest = config.max_position_embeddings if config.position_embedding_type == "learned" else sys.maxsize
    for rows, source, first, steps in _SIZES:
        source, first = min(source, longest), min(first, longest)
        steps = min(steps, longest - first)
        ids = torch.randint(config.vocab_size, (rows, source), generator=generator)
        targets = torch.randint(config.decoder_vocab_size, (rows, first + steps), generator=generator)
        # Each row is two tokens shorter than the row before; every other row is padded on the left.
        lengths = [max(1, source - 2 * row) for row in range(rows)]
        mask = (torch.arange(source)[None, :] < torch.tensor(lengths)[:, None]).long()
        mask[1::2] = mask[1::2].flip(-1)
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets, use_cache=False)
        encoder_output = encoder.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        _compare(ENCODER_NAME, encoder_output, expected.encoder_last_hidden_state)
        inputs = {"encoder_attention_mask": mask.numpy(), "encoder_hidden_states": encoder_output}
        logits, past = _run_step(first_step, targets[:, :first], inputs)
        _compare(DECODER_NAME, logits, expected.logits[:, :first])
        del inputs["encoder_hidden_states"]
        for step in range(first, first + steps):
            logits, present = _run_step(later_step, targets[:, step : step + 1], inputs | past)
            past |= present
            _compare(DECODER_WITH_PAST_NAME, logits, expected.logits[:, step : step + 1])


def _run_step(
    session: onnxruntime.InferenceSession, input_ids: torch.Tensor, inputs: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return logits (B, T, V), and keys and values by their names at the next step."""
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, {"input_ids": input_ids.numpy(), **inputs}), strict=True))
    logits = outputs.pop("logits")
    return logits, {name.replace("present", "past_key_values", 1): value for name, value in outputs.items()}


def _compare(name: str, actual: np.ndarray, expected: torch.Tensor) -> None:
    if actual.shape != tuple(expected.shape):
        raise RuntimeError(f"{name} must give the shape {tuple(expected.shape)} of the model, got {actual.shape}.")
    largest = float(expected.abs().max())
    difference = float((torch.from_numpy(actual) - expected).abs().max())
    # This form also refuses NaN.
    if not difference <= TOLERANCE * largest:
        raise RuntimeError(
            f"{name} must compute what the model computes, within {TOLERANCE:g} of the largest value {largest:.4g}, "
            f"got a difference of {difference:.4g}."
        )
