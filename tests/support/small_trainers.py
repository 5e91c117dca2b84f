import dataclasses

import torch
from datasets import Dataset
from small_runs import QUIET
from tiny_models import tiny_model
from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainingArguments

from metaphrase.data.collators import PairCollator
from metaphrase.training.trainer import MetaphraseTrainer

SIDES = {"source": "input_ids", "target": "labels"}


def small_pairs(count=12, vocab_size=60):
    generator = torch.Generator().manual_seed(1)

    def row():
        length = int(torch.randint(2, 9, (), generator=generator))
        return [*torch.randint(4, vocab_size, (length,), generator=generator).tolist(), 2]

    return [{"input_ids": row(), "labels": row()} for _ in range(count)]


def make_trainer(model, pairs, folder, **options):
    fields = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    own = {"eval_dataset": pairs} | {name: options.pop(name) for name in options.keys() - fields}
    settings = {"predict_with_generate": True, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 5}
    arguments = Seq2SeqTrainingArguments(output_dir=str(folder), **QUIET | settings | options)
    return MetaphraseTrainer(model=model, args=arguments, train_dataset=pairs, data_collator=PairCollator(0), **own)


def with_lengths(pairs):
    return Dataset.from_list(
        [{f"{side}_length": len(pair[name]) for side, name in SIDES.items()} | pair for pair in pairs]
    )


def tiny_bart():
    """With positions to spare, and the same weights at each call."""
    torch.manual_seed(3)
    fields = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    fields |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0, "forced_eos_token_id": None}
    fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return BartForConditionalGeneration(BartConfig(vocab_size=60, max_position_embeddings=32, **fields))


def model_of_two_passes(**fields):
    """A model whose two passes of R-Drop differ, by something that does not depend on how many rows share a batch."""

    def perturb_second_half(module, arguments, output):
        first, second = output.flatten(0, 1).chunk(2)
        return torch.cat((first, second * 1.5)).view_as(output) if module.training else output

    model = tiny_model(initializer_range=0.2, **fields)
    model.get_encoder().embed_tokens.register_forward_hook(perturb_second_half)
    return model.train()


def pairs_of_eight_lengths():
    """Eight pairs of ids for the smallest vocabularies."""
    generator = torch.Generator().manual_seed(1)
    lengths = [8, 1, 5, 2, 7, 3, 3, 6]
    rows = [torch.randint(3, 31, (2, length), generator=generator).tolist() for length in lengths]
    return [{"input_ids": [*source, 2], "labels": [*target, 2]} for source, target in rows]


def make_sgd_trainer(model, folder, **options):
    """A trainer of one step of plain gradient descent on `pairs_of_eight_lengths`, whose updates show the gradients."""
    settings = {"max_steps": 1, "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "logging_steps": 1}
    settings |= {"lr_scheduler_type": "constant", "per_device_train_batch_size": 8}
    return make_trainer(model, pairs_of_eight_lengths(), folder, **settings | options)
