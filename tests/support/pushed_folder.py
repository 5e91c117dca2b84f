UNSAFE = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin", "cache.pkl")
# Files of nobody, and leavings of other weights, which no one loads.
FOREIGN = ("data.parquet", "notes/text.txt", "customers.json", "train_corpus.txt", "model_before.safetensors")
FOREIGN += ("model-00001-of-00002.safetensors", "target_tokenizer/model.safetensors")
FORBIDDEN = (
    *(*UNSAFE, "target_tokenizer/merges.bin", *FOREIGN, ".secret.json", "checkpoint-20/model.safetensors"),
    *("runs/events.json", "evaluate_mine.py", "outputs.png"),
    # They name folders of this machine.
    *("trainer_state.json", "training_args.json"),
)


def push_words(folder, *options, repo_id="somebody/tiny"):
    return [str(folder), repo_id, "--token", "hf_of_the_test", *options]
