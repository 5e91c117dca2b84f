"""What a result was measured on."""

import platform
import subprocess
from pathlib import Path

import torch
import transformers


def describe_processor(information: Path = Path("/proc/cpuinfo")) -> str:
    """Its name with family and model: cloud machines call several generations alike."""
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in fields:
        return platform.processor()
    generation = [f"{name.removeprefix('cpu ')} {fields[name]}" for name in ("cpu family", "model") if name in fields]
    return fields["model name"] + (f" ({', '.join(generation)})" if generation else "")


def describe_machine(threads: int) -> dict:
    """Processor, accelerator, versions and commit, for a file of results."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    description = {
        "processor": describe_processor(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }
    if torch.cuda.is_available():
        description["accelerator"] = torch.cuda.get_device_name()
    return description
