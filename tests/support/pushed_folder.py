UNSAFE = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin", "cache.pkl")
# Files of nobody, and leavings of other weights, which no one loads.
FOREIGN = ("data.parquet", "notes/text.txt", "customers.json", "train_corpus.txt", "model_before.safetensors")
FOREIGN += ("model-00001-of-00002.safetensors", "target_tokenizer/model.safetensors")
FORBIDDEN = {
    **dict.fromkeys((*UNSAFE, "target_tokenizer/merges.bin"), "not safetensors"),
    **dict.fromkeys(FOREIGN, "not a file of the model"),
    ".secret.json": "hidden",
    "checkpoint-20/model.safetensors": "a checkpoint",
    "runs/events.json": "logs",
    "evaluate_mine.py": "not code of the model",
    "outputs.png": "not a picture of the card",
    # They name folders of this machine.
    "trainer_state.json": "a state of the training run",
    "training_args.json": "a state of the training run",
}


def push_words(folder, *options, repo_id="somebody/tiny"):
    return [str(folder), repo_id, "--token", "hf_of_the_test", *options]
