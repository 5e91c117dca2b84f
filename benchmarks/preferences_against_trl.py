"""Compare losses and gradients of preferences with those of TRL, on T5 models of random weights in float64.

TRL 0.28.0 is the last version whose `DPOTrainer` trains encoder-decoders. It needs an environment of its own:

    python -m venv trl_environment
    trl_environment/bin/pip install torch==2.13.0 transformers==5.2.0 trl==0.28.0
    trl_environment/bin/python benchmarks/preferences_against_trl.py trl FOLDER
    python benchmarks/preferences_against_trl.py compare FOLDER

The first call writes the models, the token ids that TRL learns from, its losses, and T5 models whose weights are its gradients.
The second converts them, and writes benchmarks/results/preferences_against_trl.json.

TRL's DPO leaves out the last position of a padded row, which is the end of the longest target. Here one more position of padding
keeps it. TRL's CPO takes the mean cross-entropy over the tokens of a batch, and Metaphrase that of each pair: they are compared
on batches of one pair.
"""

import json
import platform
import sys
from pathlib import Path

import torch

TEXTS = [("a b c d", "e f", "g h a"), ("b f", "c", "d d d e"), ("h g f e d c", "a b c", "b")]
NAMES = ("prompt", "chosen", "rejected")
# Name, loss and its share of cross-entropy, and pairs in a batch.
CASES = {
    "dpo": ("dpo", 0.0, 3),
    "ipo": ("ipo", 0.0, 3),
    "simpo": ("simpo", 0.0, 3),
    "cpo without cross-entropy": ("cpo", 0.0, 3),
    "cpo": ("cpo", 0.5, 1),
}
MODELS = {
    "t5": {"tie_word_embeddings": True, "feed_forward_proj": "relu"},
    "t5 1.1": {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
}
SIZES = {"vocab_size": 12, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
SIZES |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
RESULTS = Path(__file__).parent / "results" / "preferences_against_trl.json"


def write_trl(folder: Path) -> None:
    """Write the losses and gradients of TRL."""
    import datasets
    import transformers
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    pairs = datasets.Dataset.from_list([dict(zip(NAMES, texts, strict=True)) for texts in TEXTS])
    written = {"versions": {"trl": trl.__version__, "transformers": transformers.__version__}, "cases": {}}
    for kind, fields in MODELS.items():
        torch.manual_seed(0)
        reference, policy = (T5ForConditionalGeneration(T5Config(**SIZES, **fields)) for _ in range(2))
        for model in (reference, policy):
            for weight in model.parameters():
                # The weights of T5's initialization hardly tell sources apart.
                torch.nn.init.normal_(weight, std=0.3)
        reference.save_pretrained(folder / kind / "reference")
        policy.save_pretrained(folder / kind / "policy")
        reference, policy = reference.double(), policy.double()
        for case, (loss, share, size) in CASES.items():
            options = {"output_dir": str(folder / "trl"), "per_device_train_batch_size": size, "use_cpu": True}
            options |= {"report_to": "none", "remove_unused_columns": False, "bf16": False}
            options |= {"beta": 2.0 if loss == "simpo" else 0.1, "dataloader_pin_memory": False}
            shared = {"model": policy, "train_dataset": pairs, "processing_class": tokenizer}
            if loss in ("dpo", "ipo"):
                arguments = trl.DPOConfig(loss_type="sigmoid" if loss == "dpo" else "ipo", **options)
                trainer = trl.DPOTrainer(ref_model=reference, args=arguments, **shared)
            else:
                alpha = {"cpo_alpha": share / (1 - share), "loss_type": "simpo" if loss == "simpo" else "sigmoid"}
                trainer = CPOTrainer(args=CPOConfig(**options, **alpha, simpo_gamma=1.0), **shared)
            policy.zero_grad()
            total, rows = 0.0, []
            for batch in trainer.get_train_dataloader():
                for name in NAMES[1:]:
                    for part, padding in (("input_ids", 0), ("attention_mask", 0)):
                        if f"{name}_{part}" in batch:
                            batch[f"{name}_{part}"] = torch.nn.functional.pad(
                                batch[f"{name}_{part}"], (0, 1), value=padding
                            )
                rows += ids_of(batch)
                value, _ = trainer.get_batch_loss_metrics(policy.eval(), batch)
                value = value * size / len(TEXTS)
                value.backward()
                total += value.item()
            with torch.no_grad():
                gradients = T5ForConditionalGeneration(policy.config)
                for (name, weight), source in zip(gradients.named_parameters(), policy.parameters(), strict=True):
                    assert source.grad is not None, name
                    weight.copy_(source.grad)
            gradients.save_pretrained(folder / kind / case)
            written["cases"][f"{kind}, {case}"] = {"loss": total, "rows": rows}
    (folder / "trl.json").write_text(json.dumps(written), encoding="utf-8")


def ids_of(batch: dict) -> list[list[list[int]]]:
    """Return source, chosen and rejected ids of each pair, without padding."""
    sides = ["prompt_input_ids"]
    sides += (
        ["chosen_labels", "rejected_labels"] if "chosen_labels" in batch else ["chosen_input_ids", "rejected_input_ids"]
    )
    return [
        [[token for token in row.tolist() if token > 0] for row in rows]
        for rows in zip(*map(batch.get, sides), strict=True)
    ]


def compare(folder: Path) -> None:
    """Compare the losses and gradients of Metaphrase with those in the folder."""
    import transformers
    from transformers import AutoModelForSeq2SeqLM

    from metaphrase.conversion import convert
    from metaphrase.data.collators import PairCollator
    from metaphrase.modeling import IGNORED_LABEL
    from metaphrase.techniques.preferences import PreferenceTraining
    from metaphrase.training.recipe.recipe import Recipe
    from metaphrase.training.training_loss import TrainingLoss, weights_of_labels

    def load(path: Path) -> torch.nn.Module:
        output = folder / "converted" / path.relative_to(folder)
        if not output.exists():
            convert(path, output)
        return AutoModelForSeq2SeqLM.from_pretrained(output).double()

    written = json.loads((folder / "trl.json").read_text(encoding="utf-8"))
    results = {}
    for kind in MODELS:
        reference, model = load(folder / kind / "reference"), load(folder / kind / "policy")
        for case, (loss, share, _) in CASES.items():
            expected = written["cases"][f"{kind}, {case}"]
            pairs = [
                {"input_ids": source, "labels": [*chosen, IGNORED_LABEL, *rejected]}
                for source, chosen, rejected in expected["rows"]
            ]
            fields = {
                "train_file": "a.tsv",
                "rejected_column": 2,
                "preference_loss": loss,
                "cross_entropy_share": share,
            }
            training = PreferenceTraining(Recipe.from_mapping(fields, "here"), pairs)
            if loss in ("dpo", "ipo"):
                training.reference = training._compute_reference(reference, folder / "reference.npz", False)
            inputs = training(model, PairCollator(0)(pairs))
            weights, num_labels = weights_of_labels(inputs), int((inputs["labels"] != IGNORED_LABEL).sum())
            inputs.pop("weight")
            model.zero_grad()
            model(
                **inputs,
                loss_of_states=lambda *parts, weights=weights: TrainingLoss()(*parts, label_weights=weights),
                num_items_in_batch=num_labels,
            ).loss.backward()
            # TRL divides by pairs, and does not multiply by 1 - share.
            factor = len(pairs) / num_labels * (1 - share)
            difference = largest = 0.0
            for (name, weight), theirs in zip(
                model.named_parameters(), load(folder / kind / case).parameters(), strict=True
            ):
                assert weight.grad is not None, name
                difference = max(difference, (weight.grad - factor * theirs).abs().max().item())
                largest = max(largest, weight.grad.abs().max().item())
            value = training.totals[1] / len(pairs) / (1 - share)
            results[f"{kind}, {case}"] = {
                "loss": value,
                "difference of the losses": abs(value - expected["loss"]),
                "largest gradient": largest,
                "largest difference of the gradients": difference,
            }
            assert abs(value - expected["loss"]) <= 1e-5 * max(1, abs(value)) and difference <= 1e-5 * largest, case
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    report = {"versions": {"metaphrase": versions, "trl": written["versions"]}, "pairs": len(TEXTS), "cases": results}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    {"trl": write_trl, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
