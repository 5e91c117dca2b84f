"""Several processes: start, end, the seed of each, and pairs that two of them share."""

import gc
import os
import random
from datetime import timedelta

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import distributed
from transformers import TrainerCallback, TrainingArguments

from metaphrase.modeling import IGNORED_LABEL

# Processes


def meet_on_cpu(timeout: float, backend: str | None = None) -> None:
    """Start the process group on a CPU with a timeout, which transformers does not set there.

    torch's default of half an hour ends a run while one process reads a large corpus or scores the finished model.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not distributed.is_initialized():
        PartialState(cpu=True, backend=backend, timeout=timedelta(seconds=timeout))


def check_devices(num_devices: int) -> None:
    """Refuse one process with several GPUs.

    transformers would split each batch with `torch.nn.DataParallel`, which cuts packed rows and R-Drop's two passes in pieces.
    """
    if num_devices > 1:
        raise ValueError(
            f"Each GPU must have a process of its own, got one process with {num_devices} GPUs. Start one for each by `torchrun "
            f"--nproc_per_node {num_devices} scripts/train.py ...` or `accelerate launch scripts/train.py ...`, or train on one: "
            "`CUDA_VISIBLE_DEVICES=0`."
        )


def leave_processes() -> None:
    """Leave the process group, if there is one. Call this last, when no trainer or model is referenced any more.

    A trainer and its model keep the group's threads alive, which need the interpreter to free their gradients. torch aborts a
    process that exits meanwhile. The launcher then ends the other processes, even while they write.
    """
    if distributed.is_available() and distributed.is_initialized():
        # Trainer and model refer to each other.
        gc.collect()
        distributed.destroy_process_group()


def is_data_parallel(arguments: TrainingArguments, accelerator: Accelerator) -> bool:
    """True if several processes train on pairs of their own. Processes of other kinds of parallelism share each batch."""
    return arguments.world_size > 1 and getattr(accelerator, "parallelism_config", None) is None


def ignore_repeated_pairs(labels: torch.Tensor, num_pairs: int, process_index: int) -> torch.Tensor:
    """Return the labels (B, T) of a last batch, with those of repeated pairs set to `IGNORED_LABEL`.

    accelerate repeats the first pairs of an epoch to give all processes batches of equal size. The last batches of all processes
    in order have `num_pairs` pairs that are no repeats; 0 or less means all.
    """
    if num_pairs <= 0:
        return labels
    num_counted = max(0, num_pairs - process_index * len(labels))
    return torch.cat([labels[:num_counted], torch.full_like(labels[num_counted:], IGNORED_LABEL)])


class ProcessSeeds(TrainerCallback):
    """Different random numbers in each process, so that each process drops different entries.

    transformers seeds all processes alike. The first process keeps its numbers. A resumed run takes the states of its checkpoint.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator

    def on_train_begin(self, args, state, control, **kwargs):
        # Processes that share a batch must drop alike.
        if args.process_index > 0 and is_data_parallel(args, self.accelerator):
            words = np.random.SeedSequence([args.seed, args.process_index]).generate_state(3).tolist()
            random.seed(words[0])
            np.random.seed(words[1])  # noqa: NPY002
            # Accelerators too.
            torch.manual_seed(words[2])
