from converted_models import fill_randomly
from tiny_generator import tiny_pair
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from metaphrase.inference import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline

NAMES = {"translation": "translation", "summarization": "summary", "text2text-generation": "generated"}
CLASSES = {
    "translation": TranslationPipeline,
    "translation_en_to_de": TranslationPipeline,
    "summarization": SummarizationPipeline,
    "text2text-generation": Text2TextGenerationPipeline,
}


def family_model(name, **fields):
    """Return a T5 or BART of transformers with large random weights and the vocabulary of `tiny_pair()`."""
    ids = {"vocab_size": len(tiny_pair().source), "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    if name == "t5":
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    else:
        ids |= {"bos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
        sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}
        sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(name, **sizes, **ids, **fields))
    fill_randomly(model, seed=1)
    return model.eval()


def texts_of(results, name="generated"):
    return [result[f"{name}_text"] for result in results]
