"""Page of one model: targets while you type, alternatives and examples."""

import os

import gradio as gr
from transformers import pipeline

MODEL_ID = "user/name"
TASK = "translation"
PREFIX = ""
SOURCE_LABEL = "Source"
TARGET_LABEL = "Target"
EXAMPLES: list[str] = []
NUM_TARGETS = 4

# A folder may take the place of the model.
generate = pipeline(TASK, model=os.environ.get("MODEL_ID", MODEL_ID), trust_remote_code=True)


def answer(text: str) -> tuple[str, str]:
    """Return the best target of a text, and the other ones. A translation goes line by line."""
    lines = text.splitlines() if TASK == "translation" else [text]
    options = {"num_beams": NUM_TARGETS, "num_return_sequences": NUM_TARGETS}
    if PREFIX:
        options["prefix"] = PREFIX
    try:
        results = iter(generate([line for line in lines if line.strip()], **options))
    except ValueError as error:
        raise gr.Error(str(error)) from error
    rows = [
        [str(*result.values()) for result in next(results)] if line.strip() else [line] * NUM_TARGETS for line in lines
    ]
    targets = ["\n".join(parts) for parts in zip(*rows, strict=True)] or [""]
    return targets[0], "\n".join(target for target in dict.fromkeys(targets) if target != targets[0])


with gr.Blocks(title=MODEL_ID) as page:
    gr.Markdown(f"# [{MODEL_ID}](https://huggingface.co/{MODEL_ID})")
    with gr.Row():
        # A phone has no room for both in a row.
        source = gr.Textbox(label=SOURCE_LABEL, lines=6, placeholder="Type or paste a text", min_width=300)
        target = gr.Textbox(label=TARGET_LABEL, lines=6, buttons=["copy"], min_width=300)
    alternatives = gr.Textbox(label="Alternatives", lines=3)
    # Texts come while one is computed. Only the last one counts.
    source.change(answer, source, [target, alternatives], trigger_mode="always_last", show_progress="hidden")
    if EXAMPLES:
        gr.Examples(EXAMPLES, source)

if __name__ == "__main__":
    page.launch()
