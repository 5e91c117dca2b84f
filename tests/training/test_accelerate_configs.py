"""Settings for `accelerate launch`: accelerate takes each file as it is, and processes that share the weights train as one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from tiny_models import tiny_config
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from metaphrase.modeling import MetaphraseForConditionalGeneration
from metaphrase.modeling.layers import MetaphraseDecoderLayer, MetaphraseEncoderLayer
from metaphrase.training.planning.memory import Sharding

FOLDER = Path(__file__).parents[2] / "scripts" / "recipes" / "accelerate"
FILES = {path.name: path for path in sorted(FOLDER.glob("*.yaml"))}
LAUNCHERS = {"MULTI_GPU": "multi_gpu", "FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed"}


def launch_arguments(name):
    """What `accelerate launch` makes of a file."""
    words = ["--config_file", str(FILES[name]), "--main_process_port", "0", "train.py", "recipe.yaml", "--use_cpu"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return arguments


@pytest.fixture
def environment():
    """Sets what the launcher of a file would set for the processes that it starts, until the test ends."""

    def launch(name):
        arguments = launch_arguments(name)
        is_deepspeed = arguments.use_deepspeed
        os.environ.update(prepare_deepspeed_cmd_env(arguments)[1] if is_deepspeed else prepare_multi_gpu_env(arguments))

    with patch.dict(os.environ):
        yield launch


def of_type(*types):
    return [name for name, path in FILES.items() if yaml.safe_load(path.read_text())["distributed_type"] in types]


def test_every_way_to_share_work_has_a_file():
    assert set(FILES) == {
        "ddp.yaml",
        "ddp_cpu_2_processes.yaml",
        "fsdp2.yaml",
        "fsdp2_cpu_2_processes.yaml",
        "deepspeed_zero2.yaml",
        "deepspeed_zero3.yaml",
        "deepspeed_zero3_offload.yaml",
    }


@pytest.mark.parametrize("name", FILES)
def test_accelerate_takes_the_file_and_starts_its_processes(name):
    settings = yaml.safe_load(FILES[name].read_text())
    config = load_config_from_file(str(FILES[name]))
    assert config.num_processes == settings["num_processes"] == (2 if "cpu_2_processes" in name else 8)
    arguments = launch_arguments(name)
    assert arguments.num_processes == config.num_processes
    # Only these launchers start several processes, and --cpu is stronger than all of them.
    launcher = LAUNCHERS[settings["distributed_type"]]
    assert [flag for flag in LAUNCHERS.values() if getattr(arguments, flag)] == [launcher]
    assert not arguments.cpu and arguments.training_script_args == ["recipe.yaml", "--use_cpu"]
    assert arguments.mixed_precision == "no"


@pytest.mark.parametrize("name", FILES)
def test_accelerate_knows_every_key(name):
    known = set(vars(launch_command_parser().parse_args(["train.py"])))
    settings = yaml.safe_load(FILES[name].read_text())
    for group in ("fsdp_config", "deepspeed_config"):
        for key, value in settings.get(group, {}).items():
            # accelerate itself puts unknown keys of a group aside without a word.
            assert key in known, key
            assert getattr(launch_arguments(name), key) == value


@pytest.mark.parametrize("name", of_type("FSDP"))
def test_fsdp_shares_out_each_layer(name, environment):
    environment(name)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True and plugin.cpu_ram_efficient_loading
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert not plugin.activation_checkpointing
    with torch.device("meta"):
        model = MetaphraseForConditionalGeneration(tiny_config())
    assert set(plugin.transformer_cls_names_to_wrap) == set(model._no_split_modules)
    plugin.set_auto_wrap_policy(model)
    wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    assert wrapped == {MetaphraseEncoderLayer, MetaphraseDecoderLayer}


def training_arguments(folder, **options):
    options = {"use_cpu": True, "report_to": "none", **options}
    return Seq2SeqTrainingArguments(output_dir=str(folder), **options)


class TrainerDeepSpeedConfig(HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
    """transformers' class on accelerate's, which it is not where deepspeed is not installed."""

    def __init__(self, config):
        HfDeepSpeedConfig.__init__(self, config)
        self._dtype, self.mismatches = None, []


@pytest.mark.parametrize("name", of_type("DEEPSPEED"))
@pytest.mark.parametrize("bf16", [True, False])
def test_deepspeed_agrees_with_the_recipe(name, bf16, environment, tmp_path):
    recipe = training_arguments(
        tmp_path, gradient_accumulation_steps=3, max_grad_norm=0.5, per_device_train_batch_size=5, bf16=bf16
    )
    environment(name)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16" if bf16 else "no")
    config = TrainerDeepSpeedConfig(plugin.deepspeed_config)
    config.trainer_config_process(recipe)
    # Raises if a value of the file contradicts one of the recipe.
    config.trainer_config_finalize(recipe, MetaphraseForConditionalGeneration(tiny_config()), 10)
    assert config.get_value("gradient_accumulation_steps") == 3
    assert config.get_value("gradient_clipping") == 0.5
    assert config.get_value("train_micro_batch_size_per_gpu") == 5
    assert config.get_value("bf16.enabled") is bf16
    stage = 2 if "zero2" in name else 3
    assert config.get_value("zero_optimization.stage") == plugin.zero_stage == stage
    assert config.is_offload() == ("offload" in name)
    assert plugin.zero3_save_16bit_model == (stage == 3)
    assert plugin.zero3_init_flag is False


@pytest.mark.parametrize(
    ("name", "engine", "stage"),
    [
        ("ddp.yaml", "ddp", 0),
        ("fsdp2.yaml", "fsdp", 3),
        ("deepspeed_zero2.yaml", "deepspeed", 2),
        ("deepspeed_zero3.yaml", "deepspeed", 3),
        ("deepspeed_zero3_offload.yaml", "deepspeed", 3),
    ],
)
def test_estimate_reads_what_the_launcher_sets(name, engine, stage, environment, tmp_path):
    arguments = training_arguments(tmp_path)
    environment(name)
    sharding = Sharding.of(arguments, devices=8)
    assert (sharding.engine, sharding.stage, sharding.devices) == (engine, stage, 8)
    assert sharding.is_offloaded == ("offload" in name)


PROGRAM = """
import json, os, sys
import datasets, torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import Seq2SeqTrainingArguments
sys.path.append(sys.argv[1])
from tiny_models import tiny_model
from metaphrase.data.collators import PairCollator
from metaphrase.training.distributed import leave_processes
from metaphrase.training.trainer import MetaphraseTrainer

folder, fields, options = sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
generator = torch.Generator().manual_seed(1)
rows = [torch.randint(4, 30, (int(length),), generator=generator).tolist() + [2]
        for length in torch.randint(2, 9, (48,), generator=generator)]
pairs = [{"input_ids": source, "labels": target, "source_length": len(source), "target_length": len(target)}
         for source, target in zip(rows[::2], rows[1::2])]
budget = options.pop("max_tokens_per_batch", None)
pairs = pairs[:options.pop("num_pairs", None)]
processes = int(os.environ.get("WORLD_SIZE", 1))
arguments = Seq2SeqTrainingArguments(
    output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    remove_unused_columns=False, per_device_train_batch_size=4 // processes, logging_steps=1, save_strategy="no",
    per_device_eval_batch_size=4, learning_rate=1e-2, lr_scheduler_type="constant", label_smoothing_factor=0.1,
    adam_epsilon=1e-3, optim="adamw_torch", **{"max_steps": 4, **options},
)
assert arguments.world_size == processes
if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    # accelerate looks for FSDP only where it sees accelerators; the device and the processes are those of a CPU all the same.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
model = tiny_model(initializer_range=None, **fields)
# Three pairs fewer than two processes have room for in their batches.
trainer = MetaphraseTrainer(model=model, args=arguments, train_dataset=datasets.Dataset.from_list(pairs), eval_dataset=pairs[:21],
                            data_collator=PairCollator(0), max_tokens_per_batch=budget)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
trainer.save_model()
process = arguments.process_index
local = sum(getattr(weight, "_local_tensor", weight).numel() for weight in trainer.model.parameters())
result = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [loss], "local": local,
          "is_sharded": trainer.accelerator.is_fsdp2, "drawn": torch.rand(3).tolist()}
del trainer, model
leave_processes()
with open(f"{folder}/result_{process}.json", "w") as file:
    json.dump(result, file)
"""
DESIGNS = {
    "one vocabulary, tied": {},
    "two vocabularies, tied": {"share_embeddings": False, "decoder_vocab_size": 31},
    "untied": {"tie_word_embeddings": False, "share_embeddings": False, "position_embedding_type": "relative"},
}


def run_program(command, folder, fields, options):
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(PROGRAM)
    words = [
        str(program),
        str(Path(__file__).parents[1] / "support"),
        str(folder),
        json.dumps(fields),
        json.dumps(options),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command + words, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result_*.json"))]


def launch(name):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FILES[name])]
    return [*launcher, "--main_process_port", "0"]


def assert_same_training(one, several, folders):
    assert several["losses"] == pytest.approx(one["losses"], abs=1e-5)
    models = [AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in folders]
    weights = [model.state_dict() for model in models]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=1e-5, msg=name)
    return models[1]


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_two_processes_with_shared_weights_train_as_one(design, tmp_path):
    fields, folders = DESIGNS[design], [tmp_path / "one", tmp_path / "two"]
    (one,) = run_program([sys.executable], folders[0], fields, {})
    shared = run_program(launch("fsdp2_cpu_2_processes.yaml"), folders[1], fields, {})
    assert [result["is_sharded"] for result in shared] == [True, True]
    # Rows are shared out whole: with an odd number of them, one process has one row more.
    sizes = [result["local"] for result in shared]
    assert sum(sizes) == one["local"] and max(sizes) < 0.52 * one["local"]
    model = assert_same_training(one, shared[0], folders)
    is_tied = model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert is_tied == model.config.tie_word_embeddings
    # What was saved is what one process saves: the class, its code, and each tied weight once.
    names = [{path.name for path in folder.iterdir()} - {"result_1.json"} for folder in folders]
    assert names[0] == names[1]
    assert (folders[0] / "config.json").read_text() == (folders[1] / "config.json").read_text()


@pytest.mark.slow
def test_layers_computed_again_have_the_same_dropout(tmp_path):
    folders = [tmp_path / "kept", tmp_path / "again"]
    fields, command = {"dropout": 0.2}, launch("fsdp2_cpu_2_processes.yaml")
    kept, _ = run_program(command, folders[0], fields, {})
    again, _ = run_program(command, folders[1], fields, {"gradient_checkpointing": True})
    assert_same_training(kept, again, folders)


@pytest.mark.parametrize(
    "batching",
    [
        # The sixth step of an epoch has one pair, so that one process has none of its own.
        pytest.param({"num_pairs": 21, "max_steps": 8}, id="pairs"),
        pytest.param({"max_tokens_per_batch": 10_000}, id="tokens"),
    ],
)
def test_two_processes_on_a_cpu_train_as_one(batching, tmp_path):
    # Within that budget, one process takes all pairs at once, and each of two takes half of the pairs, not of the tokens.
    folders = [tmp_path / "one", tmp_path / "two"]
    (one,) = run_program([sys.executable], folders[0], {}, batching)
    several = run_program(launch("ddp_cpu_2_processes.yaml"), folders[1], {}, batching)
    assert len(several) == 2 and not several[0]["is_sharded"]
    assert_same_training(one, several[0], folders)
    # The same order of pairs, and dropout of its own in each.
    assert several[0]["drawn"] != several[1]["drawn"]
