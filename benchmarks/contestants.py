"""One contestant of the training benchmark, in its own process.

A contestant is a whole `trainer.train()`: data loading, collation, loss, optimizer. For each line on standard input the
process trains for a round and writes a line of JSON, so that several contestants can take turns.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
import torch
from lengths import MIXES, LengthMix, make_pairs
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)

from metaphrase.data.collators import PairCollator
from metaphrase.data.token_budget import TokenBudgetSampler
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration
from metaphrase.ops.cpu_setup import keep_few_kernels, keep_freed_memory
from metaphrase.training.trainer import MetaphraseTrainer

VOCAB_SIZES = {"transformer-tiny": 10000, "transformer-base": 32000, "transformer-big": 32000, "t5-large": 32128}
SMOOTHING = 0.1
PAIRS = 6000


@dataclass(frozen=True)
class Contestant:
    """Settings of a contestant.

    Attributes:
        family: metaphrase, bart or t5.
        keeps_freed_memory: True if the C library keeps freed memory.
        bf16: True for autocast to bfloat16.
        groups_by_length: transformers' `group_by_length`.
        is_compiled: transformers' `torch_compile`.
        parts: Names of the parts of ours in use.
    """

    family: str
    keeps_freed_memory: bool = True
    bf16: bool = False
    groups_by_length: bool = False
    is_compiled: bool = False
    parts: tuple[str, ...] = ()


# Batches by tokens, packed rows, loss without whole logits, dropout from few random bits, rows of a multiple of tokens,
# weights kept for the backward pass, bias and ReLU in the product, and softmax by 2.
PARTS = ("few kernels", "token budget", "packing", "chunked loss", "cheap dropout", "few shapes", "kept attention")
PARTS += ("fused linear", "powers of 2")
CONTESTANTS = {
    "bart, as documented": Contestant("bart", keeps_freed_memory=False),
    "bart, group_by_length": Contestant("bart", keeps_freed_memory=False, groups_by_length=True),
    "bart, tuned": Contestant("bart", groups_by_length=True),
    "bart, tuned, bf16": Contestant("bart", groups_by_length=True, bf16=True),
    "bart, tuned, bf16, few kernels": Contestant("bart", groups_by_length=True, bf16=True, parts=("few kernels",)),
    "bart, tuned, bf16, compiled": Contestant("bart", groups_by_length=True, bf16=True, is_compiled=True),
    "t5, as documented": Contestant("t5", keeps_freed_memory=False),
    "t5, tuned": Contestant("t5", groups_by_length=True),
    "t5, tuned, bf16": Contestant("t5", groups_by_length=True, bf16=True),
    "metaphrase": Contestant("metaphrase", bf16=True, parts=PARTS),
    "metaphrase, fp32": Contestant("metaphrase", parts=PARTS),
    **{
        f"metaphrase, without {part}": Contestant(
            "metaphrase",
            bf16=True,
            # Packing needs a token budget.
            parts=tuple(p for p in PARTS if p != part and (part, p) != ("token budget", "packing")),
        )
        for part in PARTS
    },
    "metaphrase, none of these": Contestant("metaphrase"),
}


def make_model(contestant: Contestant, preset: str) -> nn.Module:
    """Return a model with the dimensions of a preset."""
    vocab_size = VOCAB_SIZES[preset]
    config = MetaphraseConfig.from_preset(preset, vocab_size=vocab_size, dropout=0.1)
    if contestant.family == "metaphrase":
        return MetaphraseForConditionalGeneration(config)
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    names += ("encoder_ffn_dim", "decoder_ffn_dim", "vocab_size", "dropout", "activation_function")
    if contestant.family == "bart":
        return BartForConditionalGeneration(
            BartConfig(d_model=config.hidden_size, **{name: getattr(config, name) for name in names})
        )
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocab_size,
            d_model=config.hidden_size,
            d_kv=config.stack_sizes("encoder").head_dim,
            d_ff=config.encoder_ffn_dim,
            num_layers=config.encoder_layers,
            num_decoder_layers=config.decoder_layers,
            num_heads=config.encoder_attention_heads,
            dropout_rate=config.dropout,
            decoder_start_token_id=0,
        )
    )


def switch_off(contestant: Contestant) -> None:
    """Replace each part that a contestant does without by the plain implementation."""
    from metaphrase.modeling.operators import acceleration, plain_add_dropout
    from metaphrase.ops import grid_attention, linear_and_dropout
    from metaphrase.plugins import PLACES
    from metaphrase.training import trainer

    if "cheap dropout" not in contestant.parts:
        acceleration.dropout, acceleration.add_dropout = torch.nn.functional.dropout, plain_add_dropout
    if "few shapes" not in contestant.parts:
        trainer.TOKENS_MULTIPLE = 1
    if "kept attention" not in contestant.parts:
        grid_attention.MAX_KEPT_BYTES = 0
    if "fused linear" not in contestant.parts:
        linear_and_dropout._LEAST_SIZE = sys.maxsize
    if "powers of 2" not in contestant.parts:
        grid_attention._LOG2_E, grid_attention._softmax = 1.0, functools.partial(torch.softmax, dim=-1)
    if "chunked loss" not in contestant.parts:
        PLACES["projected_loss"] = "metaphrase.ops.none:none"


class Turns(TrainerCallback):
    """Callback that waits before each round of training."""

    def __init__(self, steps_per_round: int):
        self.steps_per_round = steps_per_round
        self.step = self.tokens = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if self.step == 0:
            if sys.stdin.readline().strip() != "go":
                say(peak_bytes=peak_bytes())
                os._exit(0)
            self.tokens, self.start = 0, time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.step += 1
        if self.step == self.steps_per_round:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            say(tokens=int(self.tokens), seconds=time.perf_counter() - self.start)
            self.step = 0


def say(**values) -> None:
    print(json.dumps(values), flush=True)


def peak_bytes() -> int:
    """Return the peak memory of the process, on the accelerator if there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def budget_like(mix: LengthMix) -> int:
    """Return the token budget with which an epoch has as many updates as with the mix's pairs per batch."""
    lengths, updates = mix.draw(PAIRS, 0), -(-PAIRS // mix.pairs_per_batch)
    budget = mix.pairs_per_batch * lengths.sum(axis=1).mean()
    while len(TokenBudgetSampler(lengths, round(budget), seed=42)) > updates:
        budget *= 1.01
    return round(budget)


def counting(trainer_class: type[Seq2SeqTrainer], turns: Turns) -> type[Seq2SeqTrainer]:
    class Counting(trainer_class):
        def training_step(self, model, inputs, num_items_in_batch=None):
            mask = inputs.get("attention_mask")
            turns.tokens += (inputs["input_ids"] != model.config.pad_token_id).sum() if mask is None else mask.sum()
            turns.tokens += (inputs["labels"] != -100).sum()
            return super().training_step(model, inputs, num_items_in_batch)

    return Counting


def make_trainer(contestant: Contestant, preset: str, mix_name: str, turns: Turns, folder: str) -> Seq2SeqTrainer:
    mix = MIXES[mix_name]
    columns = make_pairs(mix, PAIRS, VOCAB_SIZES[preset], seed=0)
    model = make_model(contestant, preset)
    arguments = Seq2SeqTrainingArguments(
        output_dir=folder,
        max_steps=10**6,
        learning_rate=1e-4,
        label_smoothing_factor=SMOOTHING,
        per_device_train_batch_size=mix.pairs_per_batch,
        bf16=contestant.bf16,
        # Products in float32, such as those of the loss, in TensorFloat-32.
        tf32=True if torch.cuda.is_available() else None,
        torch_compile=contestant.is_compiled,
        use_cpu=not torch.cuda.is_available(),
        train_sampling_strategy="group_by_length" if contestant.groups_by_length else "random",
        remove_unused_columns=contestant.family != "metaphrase",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    shared = {"model": model, "args": arguments, "callbacks": [turns]}
    if contestant.family == "metaphrase":
        budget = budget_like(mix)
        trainer = counting(MetaphraseTrainer, turns)(
            **shared,
            data_collator=PairCollator(model.config.pad_token_id),
            train_dataset=datasets.Dataset.from_dict(columns),
            max_tokens_per_batch=budget if "token budget" in contestant.parts else None,
        )
        if "packing" not in contestant.parts:
            model.supports_packing = False
        return trainer
    del columns["source_length"], columns["target_length"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), pad_token="<pad>")
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    if not contestant.groups_by_length:
        del columns["length"]
    return counting(Seq2SeqTrainer, turns)(
        **shared, data_collator=collator, train_dataset=datasets.Dataset.from_dict(columns)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("preset", choices=VOCAB_SIZES)
    parser.add_argument("mix", choices=MIXES)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    contestant = CONTESTANTS[arguments.contestant]
    torch.set_num_threads(arguments.threads)
    datasets.disable_progress_bars()
    if contestant.keeps_freed_memory:
        keep_freed_memory()
    if "few kernels" in contestant.parts:
        keep_few_kernels()
    set_seed(0)
    switch_off(contestant)
    turns = Turns(arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(contestant, arguments.preset, arguments.mix, turns, folder)
        say(ready=asdict(contestant), base_bytes=0 if torch.cuda.is_available() else peak_bytes())
        trainer.train()


if __name__ == "__main__":
    main()
