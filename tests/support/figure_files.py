import struct

LOG = [
    {"step": 10, "epoch": 1.0, "loss": 8.0},
    {"step": 10, "epoch": 1.0, "eval_loss": 7.0, "eval_bleu": 3.0},
    {"step": 20, "epoch": 2.0, "loss": 5.0},
    {"step": 20, "epoch": 2.0, "eval_loss": 5.5, "eval_bleu": 9.0},
    {"step": 30, "epoch": 3.0, "eval_loss": 5.0, "eval_bleu": 8.0},
    {"step": 30, "train_runtime": 1.0, "train_loss": 6.0},
]


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])
