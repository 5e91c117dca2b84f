"""Processes: whether as many were started as were asked for, one for each device, and how they meet and part."""

import gc
import os
from datetime import timedelta

from accelerate import Accelerator, PartialState
from torch import distributed
from transformers import TrainingArguments

_MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_processes() -> None:
    """Refuses the one process that `accelerate launch --cpu --num_processes N` starts in place of N.

    That launcher leaves the starting of processes to mpirun, and says nothing where there is none. It sets the address at which
    the processes would meet, but no rank.

    Raises:
        ValueError: If this is such a process.
    """
    is_from_launcher = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    if is_from_launcher and not any(name in os.environ for name in ("WORLD_SIZE", "LOCAL_RANK", *_MPI)):
        raise ValueError(
            "`accelerate launch` must start several processes on a CPU by `--multi_gpu --num_processes N`, got `--cpu`, "
            "with which it starts one. `torchrun --nproc_per_node N` starts them too."
        )


def meet_on_cpu(timeout: float, backend: str | None = None) -> None:
    """Lets several processes on a CPU meet, if there are any, and wait for each other so long: transformers would not say.

    Half an hour, torch's default, ends a run where one process reads a large corpus or scores the finished model.

    Args:
        timeout: Seconds.
        backend: Of the group; by default accelerate's choice.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not distributed.is_initialized():
        PartialState(cpu=True, backend=backend, timeout=timedelta(seconds=timeout))


def share_out_pairs(arguments: TrainingArguments, accelerator: Accelerator) -> bool:
    """Whether several processes have pairs of their own, each with the whole model; others share out the layers of one batch."""
    return arguments.world_size > 1 and getattr(accelerator, "parallelism_config", None) is None


def check_devices(num_devices: int) -> None:
    """Refuses one process with several GPUs, among which transformers would share out each batch by `torch.nn.DataParallel`.

    That cuts packed rows and the two passes of R-Drop in pieces.

    Args:
        num_devices: GPUs of this process.

    Raises:
        ValueError: If they are several.
    """
    if num_devices > 1:
        raise ValueError(
            f"Each GPU must have a process of its own, got one process with {num_devices} GPUs. Start one for each by `torchrun "
            f"--nproc_per_node {num_devices} scripts/train.py ...` or `accelerate launch scripts/train.py ...`, or train on one: "
            "`CUDA_VISIBLE_DEVICES=0`."
        )


def leave_processes() -> None:
    """Takes this process out of the group of those that train together, if there is one: the last thing that it does.

    Nothing that trained may be in reach any more. A trainer and its model keep the group and its threads, which let go of what
    they have added up when they come to it. A thread needs the interpreter for that: torch aborts a process that ends
    meanwhile, and the launcher ends the other processes then, whatever they are writing.
    """
    if distributed.is_available() and distributed.is_initialized():
        # Trainer and model refer to each other.
        gc.collect()
        distributed.destroy_process_group()
