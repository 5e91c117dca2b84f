"""Description of the machine and versions behind a result."""

import platform
import subprocess
from pathlib import Path

import torch
import transformers


def describe_processor(information: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name with family and model, since clouds give several generations one name."""
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in fields:
        return platform.processor()
    generation = [f"{name.removeprefix('cpu ')} {fields[name]}" for name in ("cpu family", "model") if name in fields]
    return fields["model name"] + (f" ({', '.join(generation)})" if generation else "")


def describe_machine(threads: int) -> dict:
    """Return processor, accelerator, versions and commit."""
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
