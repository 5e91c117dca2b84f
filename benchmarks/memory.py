"""Estimates the memory of training from a model's dimensions. All models are on the meta device.

python benchmarks/memory.py --write        # writes the tables into docs/memory.md
"""

import argparse
from bisect import bisect_right
from pathlib import Path

import torch
from transformers import TrainingArguments

from metaphrase.choices.memory import (
    BatchShape,
    Precision,
    Sharding,
    estimate_activations,
    estimate_states,
    optimizer_bytes,
)
from metaphrase.modeling import MetaphraseConfig, MetaphraseForConditionalGeneration

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
# Names of the tables in the page.
SHARED, SINGLE, LARGEST = "shared", "single", "largest"

ARGUMENTS = TrainingArguments("unused", optim="adamw_torch_fused", use_cpu=True)
SHARED_PRESETS = ("t5-3b", "t5-11b")
DEVICES = (8, 16, 64)
SINGLE_PRESETS = (
    *("metaphrase-tiny", "metaphrase-small", "metaphrase-base", "metaphrase-large"),
    *("transformer-base", "transformer-big", "bart-base", "bart-large"),
    *("t5-small", "t5-base", "t5-large", "t5-3b"),
)
# Pairs, and tokens of a source and of a target, on each device.
SHARED_BATCH, SINGLE_BATCH = (64, 128, 128), (128, 32, 32)
_GIBIBYTE = 2**30
# Gigabytes of devices as they are sold, and the share of them that the estimate may fill: it leaves out the allocator's losses.
MEMORIES, USABLE = (24, 80, 141), 0.8
LARGEST_DEVICES, LARGEST_LAYERS, WIDTH_STEP = (1, 8, 64), 24, 128


def meta_model(config: MetaphraseConfig) -> MetaphraseForConditionalGeneration:
    """Return a model on the meta device, which takes no memory."""
    with torch.device("meta"):
        return MetaphraseForConditionalGeneration(config)


def batch_of(pairs: int, source: int, target: int) -> BatchShape:
    return BatchShape.of([source] * pairs, [target] * pairs, is_packed=True)


def describe(batch: tuple[int, int, int]) -> str:
    pairs, source, target = batch
    return f"{pairs * (source + target):,} tokens, {pairs} pairs of {source} source and {target} target tokens"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown. Only the first column is text."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def gibibytes(size: int) -> str:
    return f"{size / _GIBIBYTE:,.1f}"


def shared_table() -> str:
    """Return the table of FSDP2: sharded float32 weights, AdamW, bfloat16, and gradient checkpointing."""
    precision = Precision(compute_bytes=2, stream_bytes=2, on_accelerator=True)
    rows = []
    for preset in SHARED_PRESETS:
        model = meta_model(MetaphraseConfig.from_preset(preset))
        optimizer, _ = optimizer_bytes(model, ARGUMENTS)
        activations = estimate_activations(model.config, batch_of(*SHARED_BATCH), precision, is_checkpointed=True)
        count = model.num_parameters()
        for devices in DEVICES:
            state = estimate_states(model, optimizer, precision, Sharding(devices, 3, "fsdp"))
            traffic = state.gathered_weights + state.buffers
            workspace = max(activations.loss_workspace, activations.backward_workspace)
            most = state.peak(activations)
            sizes = (state.weights, state.gradients, state.optimizer, traffic, activations.kept_bytes, workspace, most)
            rows.append([f"{preset} ({count / 1e9:.2f} B)", str(devices), *map(gibibytes, sizes)])
    head = ["model", "devices", "weights", "gradients", "optimizer", "gathered", "activations", "workspace", "**most**"]
    return f"GiB of each device at {describe(SHARED_BATCH)} on each:\n\n" + table(head, rows)


def single_table() -> str:
    """Return the table of one accelerator: float32 and bfloat16 autocast, with and without checkpointing."""
    rows = []
    for preset in SINGLE_PRESETS:
        model = meta_model(MetaphraseConfig.from_preset(preset))
        optimizer, _ = optimizer_bytes(model, ARGUMENTS)
        row = [preset, f"{model.num_parameters() / 1e6:,.0f} M"]
        for compute_bytes in (4, 2):
            precision = Precision(compute_bytes=compute_bytes, on_accelerator=True)
            state = estimate_states(model, optimizer, precision, Sharding())
            for is_checkpointed in (False, True):
                activations = estimate_activations(
                    model.config, batch_of(*SINGLE_BATCH), precision, is_checkpointed=is_checkpointed
                )
                row.append(gibibytes(state.peak(activations)))
        rows.append(row)
    head = ["model", "parameters", "float32", "float32, checkpoints", "bfloat16", "bfloat16, checkpoints"]
    return f"GiB at {describe(SINGLE_BATCH)}:\n\n" + table(head, rows)


def wide_model(width: int) -> MetaphraseForConditionalGeneration:
    """Return a model of the proportions of metaphrase-large, with more layers and another width."""
    stacks = (("layers", LARGEST_LAYERS), ("attention_heads", width // 64), ("ffn_dim", width * 11 // 4))
    sizes = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in stacks}
    return meta_model(MetaphraseConfig.from_preset("metaphrase-large", hidden_size=width, **sizes))


def largest_model(limit: float, devices: int) -> MetaphraseForConditionalGeneration:
    """Return the widest model whose peak by the estimate is at most `limit` bytes on each device."""
    sharding = Sharding(devices, 3, "fsdp") if devices > 1 else Sharding()
    # One device computes by autocast, which keeps states in float32.
    precision = Precision(compute_bytes=2, stream_bytes=2 if devices > 1 else 4, on_accelerator=True)

    def peak(width: int) -> int:
        model = wide_model(width)
        optimizer, _ = optimizer_bytes(model, ARGUMENTS)
        activations = estimate_activations(model.config, batch_of(*SINGLE_BATCH), precision, is_checkpointed=True)
        return estimate_states(model, optimizer, precision, sharding).peak(activations)

    # Narrower models all fit.
    widths = range(WIDTH_STEP, 32768, WIDTH_STEP)
    return wide_model(widths[bisect_right(widths, limit, key=peak) - 1])


def largest_table() -> str:
    """Return the table of the largest models: one device by autocast, several by FSDP2, AdamW, gradient checkpointing."""
    rows = []
    for memory in MEMORIES:
        models = [largest_model(USABLE * memory * 1e9, devices) for devices in LARGEST_DEVICES]
        sizes = (f"{model.num_parameters() / 1e9:,.1f} B (width {model.config.hidden_size:,})" for model in models)
        rows.append([f"{memory} GB", *sizes])
    head = ["memory of a device", *(f"{devices} device{'s' * (devices > 1)}" for devices in LARGEST_DEVICES)]
    return f"Parameters at {describe(SINGLE_BATCH)} on each:\n\n" + table(head, rows)


def replace_table(text: str, name: str, content: str, program: str = "benchmarks/memory.py") -> str:
    """Replace the text between the two markers of a table, the first of which names its program.

    Raises:
        ValueError: If a marker is missing.
    """
    start, end = f"<!-- {name}: {program} -->", f"<!-- end of {name} -->"
    before, opening, rest = text.partition(start)
    _, closing, after = rest.partition(end)
    if not opening or not closing:
        raise ValueError(f"The page must have the markers {start!r} and {end!r}, got {len(text)} characters without.")
    return f"{before}{start}\n{content}\n{end}{after}"


def fill(text: str) -> str:
    """Return the page with current tables."""
    for name, make_table in TABLES.items():
        text = replace_table(text, name, make_table())
    return text


TABLES = {SHARED: shared_table, SINGLE: single_table, LARGEST: largest_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(*(make_table() for make_table in TABLES.values()), sep="\n\n")


if __name__ == "__main__":
    main()
