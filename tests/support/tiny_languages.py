from transformers import MBartTokenizer, NllbTokenizer

LETTERS = "▁abcdehilnoprst"
CODES = {"nllb": ["eng_Latn", "deu_Latn", "ron_Latn"], "mbart": ["en_XX", "de_DE", "ro_RO"]}


def nllb_tokenizer(codes=CODES["nllb"]):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *LETTERS]
    return NllbTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[], extra_special_tokens=list(codes)
    )


def mbart_tokenizer():
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *LETTERS]
    return MBartTokenizer(
        vocab=[(token, 0.0 if index < 4 else -2.0) for index, token in enumerate(tokens)],
        extra_special_tokens=CODES["mbart"],
    )


# Family of the model, and its tokenizer.
MAKERS = {"nllb": ("m2m_100", nllb_tokenizer), "mbart": ("mbart", mbart_tokenizer)}
