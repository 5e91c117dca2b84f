import json

from tiny_models import tiny_model
from transformers import Seq2SeqTrainingArguments

from metaphrase.data.collators import PairCollator
from metaphrase.training.checkpoints import checkpoints_in, what_is_missing
from metaphrase.training.trainer import MetaphraseTrainer

# Arguments of every Trainer in the tests.
QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False}
# Dimensions of a model for recipes.
SMALL = {"hidden_size": 16}
for side in ("encoder", "decoder"):
    SMALL |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 16}
PAIRS = [{"input_ids": [4 + number, 7, 2], "labels": [9, 5 + number, 2]} for number in range(8)]


def make_trainer(folder, trainer_class=MetaphraseTrainer, callbacks=(), collator=None, **options):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "per_device_train_batch_size": 2}
    sizes = {"hidden_size": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    return trainer_class(
        model=tiny_model(encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.1, **sizes),
        args=Seq2SeqTrainingArguments(output_dir=str(folder), **QUIET | settings | options),
        train_dataset=PAIRS,
        eval_dataset=PAIRS,
        data_collator=collator or PairCollator(0),
        callbacks=list(callbacks),
    )


def write_pairs(path, pairs):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")


def names(run):
    return [path.name for path in checkpoints_in(run)]


def is_whole(checkpoint):
    return not what_is_missing(checkpoint)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))
