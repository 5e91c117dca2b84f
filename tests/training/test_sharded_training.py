import contextlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from safetensors.torch import load_file
from small_runs import write_pairs
from tiny_models import tiny_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard
from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainingArguments

from metaphrase.choices.memory import Sharding
from metaphrase.demo.corpus import make_demo_corpus
from metaphrase.techniques.partial_training import add_lora
from metaphrase.training.distributed import (
    gather_model,
    is_sharded,
    load_whole_weights,
    saves_whole_weights,
    whole_shape,
)

FOLDER = Path(__file__).parents[2] / "scripts" / "recipes" / "accelerate"
WAYS = {way: f"{way}_cpu_2_processes.yaml" for way in ("ddp", "fsdp2")}
WAYS |= {way: f"deepspeed_{way}.yaml" for way in ("zero2", "zero3")}
PROGRAM = """
import os, sys
from accelerate import PartialState
from accelerate.utils import DistributedType
from metaphrase.training.experiment import Experiment
from metaphrase.training.distributed import leave_processes
from metaphrase.training.recipe.recipe import load_recipe
from metaphrase.training.trainer import MetaphraseTrainer

def train(self, **options):
    result = whole_train(self, **options)
    weights = [getattr(weight, "_local_tensor", weight) for weight in self.model.parameters()]
    print(f"This process holds {sum(weight.numel() for weight in weights)} numbers.", flush=True)
    return result

whole_train, MetaphraseTrainer.train = MetaphraseTrainer.train, train
experiment = Experiment(load_recipe(None, sys.argv[1:]))
assert experiment.arguments.world_size == int(os.environ.get("WORLD_SIZE", 1))
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    # accelerate looks for FSDP only where it sees accelerators; the device and the processes are those of a CPU all the same.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
experiment.train()
leave_processes()
"""
BASE = {f"{split}_file": f"{split}.tsv" for split in ("train", "validation", "test")}
BASE |= {f"{event}_strategy": "steps" for event in ("eval", "save")} | {"eval_steps": 2, "save_steps": 2}
BASE |= {"max_steps": 6, "logging_steps": 1, "learning_rate": 3e-3, "adam_epsilon": 1e-4, "optim": "adamw_torch"}
BASE |= {"metrics": "bleu", "num_beams": 2, "generation_max_length": 12, "use_cpu": True, "disable_tqdm": True}
NEW = {"preset": "metaphrase-tiny", "vocab_size": 300, "model.dropout": 0}
NEW |= {f"model.{side}_layers": 1 for side in ("encoder", "decoder")} | {"model.hidden_size": 32}
NEW |= {f"model.{side}_ffn_dim": 48 for side in ("encoder", "decoder")}

WEIGHTED = {"train_file": "train.jsonl", "weight_column": "w"}
LORA = {"lora_rank": 4, "learning_rate": 3e-2}
ZERO = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs `pip install .[deepspeed]`")
RUNS = [
    # The third step of an epoch has one pair, so that one process has none of its own.
    ("ddp", {"max_train_samples": 17}),
    # One process takes all pairs at once, and each of two takes half of the pairs, not of the tokens.
    ("ddp", {"max_tokens_per_batch": 10_000, **WEIGHTED}),
    ("fsdp2", {"joint_vocabulary": False, "target_vocab_size": 280, **WEIGHTED}),
    ("fsdp2", {"model.tie_word_embeddings": False, "model.position_embedding_type": "relative"}),
    *((way, fields) for way in ("fsdp2", "zero2", "zero3") for fields in ({"average_last": 2}, LORA)),
]
RUNS = [
    pytest.param(*run, marks=[ZERO] if run[0].startswith("zero") else [], id=f"{run[0]}, {next(iter(run[1]))}")
    for run in RUNS
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    made = make_demo_corpus(num_train=2000, num_validation=20, num_test=20)
    for split, pairs in made.items():
        write_pairs(folder / f"{split}.tsv", pairs[: 60 if split == "train" else 7])
    rows = [{"source": s, "target": t, "w": number % 4 / 2} for number, (s, t) in enumerate(made["train"][:60])]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "program.py").write_text(PROGRAM)
    return folder


def carry_out(data, output, way, fields):
    command, pairs = [sys.executable], 8
    # DeepSpeed does without an accelerator then.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if way is not None:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(FOLDER / WAYS[way])]
        command += ["--main_process_port", "0", "--num_processes", "2"]
        pairs = 4
    words = ["--data_dir", str(data), "--output_dir", str(output)]
    if "max_tokens_per_batch" not in fields:
        fields = {"per_device_train_batch_size": pairs} | fields
    words += [word for name, value in (BASE | fields).items() for word in (f"--{name}", str(value))]
    command += [str(data / "program.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return SimpleNamespace(
        weights=load_file(output / "model.safetensors"),
        metrics=json.loads((output / "metrics.json").read_text()),
        losses=[entry["loss"] for entry in log if "loss" in entry],
        held=[int(count) for count in re.findall(r"This process holds (\d+) numbers", done.stdout)],
    )


def assert_same(actual, expected):
    assert actual.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(actual.weights[name], weight, rtol=0, atol=1e-4, msg=name)
    assert actual.losses == pytest.approx(expected.losses, abs=1e-4)
    assert actual.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-4)
    assert actual.metrics["num_examples"] == expected.metrics["num_examples"] == 7


@pytest.mark.slow
@pytest.mark.parametrize(("way", "fields"), RUNS)
def test_two_processes_end_as_one(way, fields, data, tmp_path):
    has_adapter = "lora_rank" in fields
    if has_adapter:
        pytest.importorskip("peft")
        carry_out(data, tmp_path / "base", None, NEW | {"max_steps": 2})
    fields = ({"model_name_or_path": tmp_path / "base"} if has_adapter else NEW) | fields
    folders = [tmp_path / "one", tmp_path / "two"]
    expected, actual = (carry_out(data, *run, fields) for run in zip(folders, (None, way), strict=True))
    assert_same(actual, expected)
    if way == "ddp":
        assert actual.held == expected.held * 2
    elif way == "fsdp2" and not has_adapter:
        assert sum(actual.held) == sum(expected.held) and max(actual.held) < 0.52 * sum(actual.held)
    # Several processes save the same files as one: the class, its code, and each tied weight once.
    assert len({tuple(sorted(path.name for path in folder.iterdir())) for folder in folders}) == 1
    for name in ("generation_config.json", *([] if has_adapter else ["config.json"])):
        assert len({(folder / name).read_text() for folder in folders}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp2", *(pytest.param(way, marks=ZERO) for way in ("zero2", "zero3"))])
def test_a_run_that_was_stopped_goes_on(way, data, tmp_path):
    fields = NEW | {"lr_scheduler_type": "constant"}
    expected = carry_out(data, tmp_path / "whole", way, fields)
    carry_out(data, tmp_path / "stopped", way, fields | {"max_steps": 4})
    resumed = carry_out(data, tmp_path / "stopped", way, fields | {"resume_from_checkpoint": True})
    assert_same(resumed, expected)


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("is_shared", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_whole_weights_are_put_into_a_model_and_taken_out_of_it(fields, is_shared, mesh, tmp_path):
    model, other = tiny_model(**fields), tiny_model(**fields, initializer_range=0.3)
    assert not is_sharded(model)
    if is_shared:
        fully_shard(model, mesh=mesh)
        assert is_sharded(model)
    other.save_pretrained(tmp_path)
    load_whole_weights(model, tmp_path)
    whole = gather_model(model)
    assert type(whole) is type(other) and whole.generation_config is model.generation_config
    assert (whole.lm_head.weight is whole.model.decoder.embed_tokens.weight) == ("tie_word_embeddings" not in fields)
    for name, weight in other.state_dict().items():
        assert torch.equal(whole.state_dict()[name], weight), name


def partition(model, monkeypatch):
    """Stands in for DeepSpeed's third stage: weights are empty outside `GatheredParameters`. Returns what will be gathered."""
    whole, gathered = {}, []
    for name, weight in model.named_parameters():
        weight.ds_id, weight.ds_shape, whole[id(weight)] = name, weight.shape, weight.data
        weight.data = torch.empty(0)

    @contextlib.contextmanager
    def gathered_parameters(weights, modifier_rank):
        for weight in weights:
            gathered.append(weight.ds_id)
            weight.data = whole[id(weight)].clone()
        yield
        for weight in weights:
            if modifier_rank == 0:
                whole[id(weight)] = weight.data.clone()
            # The memory is another weight's next.
            weight.data.zero_()
            weight.data = torch.empty(0)

    zero = SimpleNamespace(GatheredParameters=gathered_parameters)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
    return gathered


def test_partitions_are_gathered_one_by_one_and_in_the_order_of_the_model(monkeypatch, tmp_path):
    model, other = tiny_model(), tiny_model(initializer_range=0.3)
    other.save_pretrained(tmp_path)
    gathered = partition(model, monkeypatch)
    assert is_sharded(model)
    head = model.get_output_embeddings().weight
    assert head.shape == (0,) and whole_shape(head) == whole_shape(other.get_output_embeddings().weight) == (37, 32)
    load_whole_weights(model, tmp_path)
    # Processes that gather in different orders wait for each other for ever.
    order = [weight.ds_id for weight in model.state_dict(keep_vars=True).values()]
    assert gathered == order
    whole = gather_model(model)
    assert gathered == order * 2 and all(weight.numel() == 0 for weight in model.parameters())
    for name, weight in other.state_dict().items():
        assert torch.equal(whole.state_dict()[name], weight), name


def zero(stage, **fields):
    return {"deepspeed_plugin": SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage} | fields})}


@pytest.mark.parametrize(
    ("plugins", "is_whole"),
    [
        ({"fsdp_plugin": SimpleNamespace(state_dict_type=StateDictType.FULL_STATE_DICT)}, True),
        ({"fsdp_plugin": SimpleNamespace(state_dict_type=StateDictType.SHARDED_STATE_DICT)}, False),
        (zero(2), True),
        (zero(3, stage3_gather_16bit_weights_on_model_save=True), True),
        (zero(3, stage3_gather_16bit_weights_on_model_save="auto"), False),
        (zero(3), False),
    ],
)
def test_it_is_known_whether_checkpoints_are_whole(plugins, is_whole):
    assert saves_whole_weights(SimpleNamespace(**plugins)) == is_whole


def test_weights_that_are_never_saved_stay(tmp_path):
    sizes = {"d_model": 8, "vocab_size": 11, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 8}
    model, other = (MarianMTModel(MarianConfig(**sizes)) for _ in range(2))
    other.save_pretrained(tmp_path)
    load_whole_weights(model, tmp_path)
    for name, weight in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    positions = model.model.encoder.embed_positions.weight
    assert positions.any() and "model.encoder.embed_positions.weight" not in load_file(tmp_path / "model.safetensors")


def test_a_model_with_an_adapter_is_gathered_with_it(mesh):
    pytest.importorskip("peft")
    model = add_lora(tiny_model(), rank=2, alpha=4, target_modules=["q_proj"])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    random_state = torch.get_rng_state()
    whole = gather_model(fully_shard(model, mesh=mesh))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert before.keys() == whole.state_dict().keys() and any("lora" in name for name in before)
    assert all(torch.equal(whole.state_dict()[name], weight) for name, weight in before.items())


FILES = {path.name: path for path in sorted(FOLDER.glob("*.yaml"))}
LAUNCHERS = {"MULTI_GPU": "multi_gpu", "FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed"}


def launch_arguments(name):
    words = ["--config_file", str(FILES[name]), "--main_process_port", "0", "train.py", "recipe.yaml", "--use_cpu"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return arguments


@pytest.mark.parametrize("name", FILES)
def test_accelerate_takes_the_file_and_starts_its_processes(name):
    settings, arguments = yaml.safe_load(FILES[name].read_text()), launch_arguments(name)
    assert arguments.num_processes == settings["num_processes"] == (2 if "cpu_2_processes" in name else 8)
    # Only these launchers start several processes, and --cpu is stronger than all of them.
    launcher = LAUNCHERS[settings["distributed_type"]]
    assert [flag for flag in LAUNCHERS.values() if getattr(arguments, flag)] == [launcher] and not arguments.cpu
    assert arguments.mixed_precision == "no"
    # accelerate itself puts unknown keys of a group aside without a word.
    known = vars(launch_command_parser().parse_args(["train.py"])).keys()
    values = {**settings.get("fsdp_config", {}), **settings.get("deepspeed_config", {})}
    assert values.keys() <= known and {key: getattr(arguments, key) for key in values} == values


STAGES = {"ddp": ("ddp", 0), "fsdp2": ("fsdp", 3), "deepspeed_zero2": ("deepspeed", 2)}
STAGES |= dict.fromkeys(("deepspeed_zero3", "deepspeed_zero3_offload"), ("deepspeed", 3))


@pytest.mark.parametrize(("name", "engine", "stage"), [(f"{name}.yaml", *stage) for name, stage in STAGES.items()])
def test_estimate_reads_what_the_launcher_sets(name, engine, stage, tmp_path):
    arguments, launched = (
        Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to="none"),
        launch_arguments(name),
    )
    is_deepspeed = engine == "deepspeed"
    environment = prepare_deepspeed_cmd_env(launched)[1] if is_deepspeed else prepare_multi_gpu_env(launched)
    with patch.dict(os.environ, environment):
        sharding = Sharding.of(arguments, devices=8)
    assert (sharding.engine, sharding.stage, sharding.devices) == (engine, stage, 8)
    assert sharding.is_offloaded == ("offload" in name)
