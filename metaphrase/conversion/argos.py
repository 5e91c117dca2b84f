"""Export to Argos Translate, which LibreTranslate runs: a zip with a CTranslate2 model and a sentencepiece model."""

import json
import os
import re
import struct
import tempfile
import zipfile
from pathlib import Path

from metaphrase.conversion.checkpoints import find_folder
from metaphrase.conversion.ctranslate2 import export_ctranslate2
from metaphrase.errors import MetaphraseError
from metaphrase.storage.folders import file_in_one_step, json_text, read_json
from metaphrase.tokenization import TokenizerPair

SUFFIX = ".argosmodel"
# Types of pieces in a sentencepiece model.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def export_argos(
    source: str | os.PathLike,
    output: str | os.PathLike,
    *,
    source_language: tuple[str, str],
    target_language: tuple[str, str],
    quantization: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Export a Metaphrase model to a package of Argos Translate, which appears only when it is complete.

    Args:
        source: Folder or Hub id of a Metaphrase model for one pair of languages, with one tokenizer of the kind `unigram`.
        output: The file to write, such as `en_de.argosmodel`.
        source_language: Code and name of the language of sources, such as en and English.
        target_language: The same for targets.
        quantization: Type of the weights, as for `export_ctranslate2`.

    Raises:
        MetaphraseError: If the model or its tokenizer cannot be expressed, or an argument is invalid.
    """
    output = Path(output)
    if output.suffix != SUFFIX or output.is_dir():
        raise MetaphraseError(f"`output` must be a file that ends in {SUFFIX}, got {str(output)!r}.")
    if output.exists() and not overwrite:
        raise MetaphraseError(f"`output` must not exist, got {output}. Pass --overwrite to replace it.")
    codes, names = zip(source_language, target_language, strict=True)
    for code in codes:
        # The code is part of a path.
        if not re.fullmatch("[a-z]{2,3}", code):
            raise MetaphraseError(f"The code of a language must have two or three letters, such as en, got {code!r}.")
    folder = find_folder(source)
    pieces = sentencepiece_model(TokenizerPair.from_pretrained(folder))
    metadata = {"package_version": "1.0", "argos_version": "1.11", "type": "translate"}
    metadata |= {"from_code": codes[0], "from_name": names[0], "to_code": codes[1], "to_name": names[1]}
    card = folder / "README.md"
    readme = card.read_text(encoding="utf-8") if card.is_file() else f"# {names[0]} to {names[1]}\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary, file_in_one_step(output) as partial:
        exported = export_ctranslate2(folder, Path(temporary, "model"), quantization=quantization)
        config = read_json(exported / "config.json")
        if config["decoder_start_token"] is None:
            raise MetaphraseError("Argos Translate cannot express a start of targets that varies.")
        # Argos Translate encodes without an end of sequence.
        contents = {
            "metadata.json": json_text(metadata),
            "README.md": readme,
            "sentencepiece.model": pieces,
            "model/config.json": json_text(config | {"add_source_eos": True}),
        }
        # The packages of all models are unpacked in one folder.
        root = f"translate-{codes[0]}_{codes[1]}"
        with zipfile.ZipFile(partial, "w") as file:
            for name, content in contents.items():
                file.writestr(f"{root}/{name}", content)
            for path in [exported / "model.bin", *sorted(exported.glob("*_vocabulary.json"))]:
                file.write(path, f"{root}/model/{path.name}")
    return output


def sentencepiece_model(tokenizers: TokenizerPair) -> bytes:
    """Return a sentencepiece model that splits texts as a tokenizer of the kind `unigram`. Texts begin without a space.

    Raises:
        MetaphraseError: If the tokenizer is of another kind, or normalizes texts.
    """
    tokenizer = tokenizers.source
    state = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast and tokenizers.is_joint else {}
    steps = [step["type"] for step in (state.get("pre_tokenizer") or {}).get("pretokenizers", [])]
    model = state.get("model", {})
    if (model.get("type"), steps, state.get("normalizer")) != ("Unigram", ["Metaspace", "Split"], None):
        kind = model.get("type") or ("two tokenizers" if tokenizer.is_fast else type(tokenizer).__name__)
        text = "Train the model with `tokenizer_kind: unigram`, or serve this one with `metaphrase serve`."
        raise MetaphraseError(
            f"Argos needs one tokenizer of the kind unigram without normalization, got {kind}. {text}"
        )
    types = {token["content"]: _CONTROL if token["special"] else _USER_DEFINED for token in state["added_tokens"]}
    types[model["vocab"][model["unk_id"]][0]] = _UNKNOWN
    # Fields of a piece: text, score and type. Without a field of the trainer, a model is a unigram model.
    pieces = (
        _field(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([types.get(piece, _NORMAL)])
        for piece, score in model["vocab"]
    )
    # Field 4 of the normalizer: spaces in a row stay.
    return b"".join(_field(1, piece) for piece in pieces) + _field(3, b"\x20\x00")


def _field(number: int, content: bytes) -> bytes:
    """Return a field of bytes in the format of protobuf: number and type, length, content."""
    length, size = len(content), b""
    while length > 127:
        size += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content
