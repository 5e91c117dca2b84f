import io
import json
from pathlib import Path

import sentencepiece


def train_model(texts: list[str], path: Path, **options: int) -> list[str]:
    """Writes a model of the texts, with further options of the trainer, and returns its pieces."""
    model = io.BytesIO()
    options = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts * 3), model_writer=model, **options)
    path.write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


def write_marian_tokenizer(folder: Path, sources: list[str], targets: list[str]) -> dict[str, int]:
    """Write files as the OPUS-MT models have them: two models of pieces and one vocabulary, which is returned."""
    folder.mkdir()
    pieces = [*train_model(sources, folder / "source.spm"), *train_model(targets, folder / "target.spm")]
    names = dict.fromkeys(["</s>", "<unk>", *(piece for piece in pieces if piece != "<s>"), "<pad>"])
    vocabulary = {piece: index for index, piece in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "de"}', encoding="utf-8")
    return vocabulary
