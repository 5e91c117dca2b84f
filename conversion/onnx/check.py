"""The check of an ONNX export: onnxruntime computes from the files what the model computes, at lengths of all sizes."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from metaphrase.conversion.onnx.graphs import DECODER_NAME, DECODER_WITH_PAST_NAME, ENCODER_NAME

try:
    import onnxruntime
except ImportError as error:
    raise ImportError("ONNX is not installed: pip install metaphrase[onnx]") from error

# Of the largest value that is expected.
TOLERANCE = 1e-4
# Rows, tokens of the longest source, tokens read at the first step, and steps after it. None is as when traced.
_SIZES = ((3, 13, 1, 5), (1, 5, 2, 3), (4, 1, 1, 2), (1, 30, 5, 2))


class OnnxGraphs:
    """The three graphs of a folder in onnxruntime, on the processor."""

    def __init__(self, folder: str | os.PathLike):
        self.encoder, self.first, self.later = (
            onnxruntime.InferenceSession(os.fspath(Path(folder) / name), providers=["CPUExecutionProvider"])
            for name in (ENCODER_NAME, DECODER_NAME, DECODER_WITH_PAST_NAME)
        )

    def encode(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """(batch, source) -> (batch, source, hidden)"""
        return self.encoder.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})[0]

    def start(
        self, input_ids: np.ndarray, memory: np.ndarray, memory_mask: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits `(batch, target, vocab)` of the first tokens `(batch, target)`, and keys and values for the next step."""
        return self._run(
            self.first, input_ids, {"encoder_hidden_states": memory, "encoder_attention_mask": memory_mask}
        )

    def go_on(
        self, input_ids: np.ndarray, memory_mask: np.ndarray, past: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Likewise of one more token of each row, `(batch, 1)`."""
        logits, changed = self._run(self.later, input_ids, {"encoder_attention_mask": memory_mask, **past})
        return logits, {**past, **changed}

    @staticmethod
    def _run(
        session: "onnxruntime.InferenceSession", input_ids: np.ndarray, others: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        names = [output.name for output in session.get_outputs()]
        values = dict(zip(names, session.run(names, {"input_ids": input_ids, **others}), strict=True))
        logits = values.pop("logits")
        return logits, {name.replace("present", "past_key_values", 1): value for name, value in values.items()}


def check_graphs(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Compares the graphs of a folder with their model, on random texts with padding on either side.

    Args:
        model: In float32 and evaluation mode.
        folder: Holds the three graphs.

    Raises:
        RuntimeError: If encoder or decoder differ by more than `TOLERANCE` of the largest value expected.
    """
    graphs = OnnxGraphs(folder)
    draw = torch.Generator().manual_seed(0)
    config = model.config
    longest = config.max_position_embeddings if config.position_embedding_type == "learned" else None
    for rows, source, first, steps in _SIZES:
        if longest is not None:
            source, first = min(source, longest), min(first, longest)
            steps = min(steps, longest - first)
        ids = torch.randint(config.vocab_size, (rows, source), generator=draw)
        targets = torch.randint(config.decoder_vocab_size, (rows, first + steps), generator=draw)
        # Each row is two tokens shorter than the one before; every other one has its padding in front.
        lengths = [max(1, source - 2 * row) for row in range(rows)]
        mask = (torch.arange(source)[None, :] < torch.tensor(lengths)[:, None]).long()
        mask[1::2] = mask[1::2].flip(-1)
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets, use_cache=False)
        memory = graphs.encode(ids.numpy(), mask.numpy())
        _compare(ENCODER_NAME, memory, expected.encoder_last_hidden_state)
        logits, past = graphs.start(targets[:, :first].numpy(), memory, mask.numpy())
        _compare(DECODER_NAME, logits, expected.logits[:, :first])
        for place in range(first, first + steps):
            logits, past = graphs.go_on(targets[:, place : place + 1].numpy(), mask.numpy(), past)
            _compare(DECODER_WITH_PAST_NAME, logits, expected.logits[:, place : place + 1])


def _compare(name: str, found: np.ndarray, expected: torch.Tensor) -> None:
    if found.shape != tuple(expected.shape):
        raise RuntimeError(f"{name} must give the shape {tuple(expected.shape)} of the model, got {found.shape}.")
    largest = float(expected.abs().max())
    difference = float((torch.from_numpy(found) - expected).abs().max())
    # What is not a number is not within the tolerance either.
    if not difference <= TOLERANCE * largest:
        raise RuntimeError(
            f"{name} must compute what the model computes, within {TOLERANCE:g} of the largest value {largest:.4g}, "
            f"got a difference of {difference:.4g}."
        )
