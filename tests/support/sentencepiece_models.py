"""Models of sentencepiece, trained on a few texts."""

import io
from pathlib import Path

import sentencepiece


def train_model(texts: list[str], path: Path) -> list[str]:
    """Writes a model of the texts, and returns its pieces."""
    model = io.BytesIO()
    options = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts * 3), model_writer=model, **options)
    path.write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
