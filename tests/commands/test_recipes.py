"""Recipes, accelerate_configs/ and slurm/: each file is read by what will read it; each recipe's trainer is built."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.commands.test_train import SMALL, metrics, results
from tests.support.exhaustive import exhaustive_but
from tests.support.paths import RECIPES, ROOT
from tests.support.quantised import bitsandbytes_works
from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.commands.command_words import AUTO
from trl_grpo_tasks.commands.serve import split_words
from trl_grpo_tasks.registry import TASKS

ALL_RECIPES = sorted(RECIPES.glob("*/*.yaml"))
FAMILIES = {"Qwen/Qwen2": (Qwen2Config, Qwen2ForCausalLM), "": (LlamaConfig, LlamaForCausalLM)}
# What a recipe takes from the Hub, and a file that stands for it here.
HUB_DATA = {
    "brick_data": str(ROOT / "tests/data/stabletext2brick.jsonl"),
    "prompts_file": str(ROOT / "tests/data/word_problems.json"),
}
# This machine has no GPU, and what comes before the trainer has tests of its own.
HERE = {
    "use_cpu": True, "bf16": False, "fp16": False, "report_to": "none", "train_rows": 8, "cold_start_steps": 0,
    "eval_before_and_after": False, "reward_workers": 0,
}  # fmt: skip


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


def flags(options):
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def family_of(model_name):
    return next(classes for prefix, classes in FAMILIES.items() if model_name.startswith(prefix))


def save_small(model_name, folder):
    """A one-layer model of the same family, which reads bytes."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    backend = Tokenizer(
        BPE({token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"])}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    config_class, model_class = family_of(model_name)
    config = config_class(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_has_every_recipe(task):
    names = {path.stem for path in (RECIPES / task).glob("*.yaml")}
    assert names >= {"colab_t4", "single_gpu", "multi_gpu", "paper"}


@pytest.mark.parametrize(
    "recipe", exhaustive_but([path for path in ALL_RECIPES if path.stem == "single_gpu"], ALL_RECIPES), ids=name_of
)
def test_the_trainer_of_every_recipe_is_built(recipe, tmp_path, judges_path, monkeypatch):
    """As a run builds it, up to its first step; large models are small ones of the same family."""
    asked = yaml.safe_load(recipe.read_text())
    options = HERE | {"output_dir": tmp_path / "run"}
    options |= {name: file for name, file in HUB_DATA.items() if name in asked}
    if asked["task"] == "infill":
        options |= {"judge": judges_path / "judge", "held_out_judge": judges_path / "held_out"}
    if "model_name_or_path" in asked:
        options["model_name_or_path"] = save_small(asked["model_name_or_path"], tmp_path / "model")
    if not bitsandbytes_works():
        options |= {"load_in_4bit": False}
    built = []
    monkeypatch.setattr(TaskGRPOTrainer, "train", lambda trainer, **_: built.append(trainer))
    assert run.main(["--config", str(recipe), *flags(options)]) == 0
    (trainer,) = built
    for name, value in asked.items():
        if hasattr(trainer.args, name) and name not in options:
            assert getattr(trainer.args, name) == value, name
    model = trainer.accelerator.unwrap_model(trainer.model)
    if "model_name_or_path" in asked:
        base = model.get_base_model() if asked.get("use_peft") else model
        assert isinstance(base, family_of(asked["model_name_or_path"])[1])
    trained = [name for name, weights in model.named_parameters() if weights.requires_grad]
    if asked.get("use_peft"):
        assert {name.split(".lora_")[0].split(".")[-1] for name in trained} == set(asked["lora_target_modules"])
    assert trained and (trainer.generation.constraint is not None) == trainer.args.constrain


@pytest.mark.parametrize(
    "recipe", [path for path in ALL_RECIPES if re.search(r"\b(8|eight) GPUs", path.read_text())], ids=name_of
)
def test_recipes_for_eight_gpus_make_whole_groups_there(recipe, monkeypatch):
    """TRL checks it for the processes there are; here there is one, so it is told of eight."""
    monkeypatch.setattr(TaskGRPOConfig, "world_size", property(lambda args: 8))
    options = HERE | {name: file for name, file in HUB_DATA.items() if name in recipe.read_text()}
    _, _, args, _ = parse(["--config", str(recipe), *flags(options)])
    said = re.search(r"(\d+) \w+\s+(?:# )?x (\d+) \w+ per step", recipe.read_text())
    if said:
        prompts, completions = map(int, said.groups())
        assert (args.num_generations, args.generation_batch_size) == (completions, prompts * completions)
    assert args.generation_batch_size % args.num_generations == 0


# ---- a card with 15 GB and without bf16


SHAPES = {
    "HuggingFaceTB/SmolLM2-135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                                   "num_attention_heads": 9, "num_key_value_heads": 3},
    "HuggingFaceTB/SmolLM2-360M": {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
                                   "num_attention_heads": 15, "num_key_value_heads": 5},
}  # fmt: skip
LONGEST_PROMPT = 512  # tokens, of the generated rows of these recipes


def estimated_bytes(asked):
    """What the largest moment of a LoRA run needs, with nothing shared and nothing freed early: an upper estimate."""
    shape = SHAPES[asked["model_name_or_path"].removesuffix("-Instruct")]
    config = LlamaConfig(**shape, vocab_size=49152, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = sum(weight.numel() for weight in model.parameters())
    linear = {n: m for n, m in model.named_modules() if n.split(".")[-1] in asked["lora_target_modules"]}
    adapter = sum(asked["lora_r"] * (m.in_features + m.out_features) for m in linear.values())
    held = weights * (2 if asked["dtype"] == "float16" else 4)
    held += 2 * weights  # the fp16 copies that autocast keeps during a pass
    held += 16 * adapter  # fp32 weights, gradients, and two averages
    rows, tokens = asked["per_device_train_batch_size"], LONGEST_PROMPT + asked["max_completion_length"]
    heads = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    cache = 4 * 2 * config.num_hidden_layers * heads * rows * asked["gradient_accumulation_steps"] * tokens
    kept = 4 * rows * tokens * config.hidden_size * config.num_hidden_layers  # the inputs of checkpointed layers
    one_layer = 4 * rows * tokens * (14 * config.hidden_size + 5 * config.intermediate_size)
    scores = 2 * 4 * rows * config.num_attention_heads * tokens**2
    logits = 2 * 4 * rows * asked["max_completion_length"] * config.vocab_size
    return held + max(cache, kept + one_layer + scores + logits)


@pytest.mark.parametrize("recipe", [path for path in ALL_RECIPES if path.stem == "colab_t4"], ids=name_of)
def test_a_t4_can_run_its_recipes(recipe):
    """The embedded models need less than 1 GB."""
    asked = yaml.safe_load(recipe.read_text())
    assert asked["bf16"] is False and asked.get("dtype") != "bfloat16"
    assert not {"load_in_4bit", "load_in_8bit"} & set(asked), "which would round to bf16"
    assert asked.get("use_peft", False) is ("model_name_or_path" in asked)
    if "model_name_or_path" in asked:
        assert asked["fp16"] is True and asked["gradient_checkpointing"]
        needed = estimated_bytes(asked)
        assert 1e9 < needed < 14e9, f"{needed / 1e9:.1f} GB, beside about 1 GB of CUDA"


# ---- accelerate_configs/


CONFIGURATIONS = ["cpu", "single_gpu", "multi_gpu", "zero2", "zero3", "fsdp2"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_accelerate_launch_understands_its_configuration(name, monkeypatch):
    """There is one for each kind of machine."""
    assert {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")} == set(CONFIGURATIONS)
    from accelerate.commands import launch
    from accelerate.utils import FullyShardedDataParallelPlugin

    for variable in list(os.environ):
        if variable.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(variable)
    file = str(ROOT / "accelerate_configs" / f"{name}.yaml")
    args = launch.launch_command_parser().parse_args(["--config_file", file, "train.py"])
    args, _, _ = launch._validate_launch_command(args)
    assert args.num_processes == (1 if name in ("cpu", "single_gpu") else 8)
    assert args.mixed_precision == ("no" if name == "cpu" else "bf16")
    assert bool(args.use_cpu) == (name == "cpu") and bool(args.multi_gpu) == (name == "multi_gpu")
    assert bool(args.use_deepspeed) == name.startswith("zero") and bool(args.use_fsdp) == (name == "fsdp2")
    if args.use_deepspeed:
        assert args.zero_stage == int(name.removeprefix("zero"))
    if args.use_fsdp:
        for key, value in launch.prepare_multi_gpu_env(args).items():
            monkeypatch.setenv(key, value)
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True


# ---- slurm/


SCRIPT = ROOT / "slurm" / "train.sbatch"
# Slurm's commands, as far as the script needs them: two nodes, which are this machine.
SCONTROL = 'test "$*" = "show hostnames node[1-2]" && printf "127.0.0.1\\nnode2\\n"\n'
SRUN = """test "$1" = --kill-on-bad-exit=1 || exit 2
shift
SLURM_NODEID=1 "$@" > node1.txt 2>&1 &
SLURM_NODEID=0 "$@" > node0.txt 2>&1 || exit 1
wait $!
"""


def submitted(folder, *words, commands, script=SCRIPT, **variables):
    """The script as Slurm starts it, with `commands` on the path."""
    tools = folder / "bin"
    tools.mkdir()
    for name, text in commands.items():
        (tools / name).write_text("#!/bin/bash\n" + text)
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": str(10_000 + os.getpid() % 10_000),
        "SLURM_GPUS_ON_NODE": "1", **variables,
    }  # fmt: skip
    return subprocess.run(
        ["bash", str(script), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_slurm_script_starts_accelerate_once_a_node(tmp_path):
    from accelerate.commands.launch import launch_command_parser

    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    accelerate = 'printf "%s\\n" "$@"\n'
    done = submitted(tmp_path, "brick/multi_gpu", "--run_name", "two words",
                     commands={"scontrol": SCONTROL, "srun": SRUN, "accelerate": accelerate},
                     SLURM_GPUS_ON_NODE="4")  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        command, *words = (tmp_path / f"node{rank}.txt").read_text().splitlines()
        args = launch_command_parser().parse_args(words)
        assert command == "launch" and (args.machine_rank, args.num_machines, args.num_processes) == (rank, 2, 8)
        assert args.main_process_ip == "127.0.0.1" and 20_000 <= args.main_process_port < 30_000
        assert (ROOT / args.config_file).is_file() and args.training_script == "train.py"
        assert args.training_script_args == [
            "--config", "brick/multi_gpu", "--resume_from_checkpoint", "auto", "--run_name", "two words",
        ]  # fmt: skip


VLLM_SCRIPT = ROOT / "slurm" / "train_vllm.sbatch"
THREE_NODES = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_NNODES": "3", "SLURM_GPUS_ON_NODE": "4"}


def steps_of_slurm(server, run):
    """Slurm's commands for three nodes. The step of the server is `server`, that of the run is `run`. A step writes
    its words to a file and waits for the file of the other, so that neither ends before both are ready."""
    srun = f"""trap 'echo ended > ended.txt; exit 0' TERM
both() {{
  printf "%s\\n" "${{@:2}}" > "$1.tmp"
  mv "$1.tmp" "$1"
  until [ -f server.txt ] && [ -f run.txt ]; do sleep 0.1; done
}}
case "$1" in
--relative=2) both server.txt "$@"; {server};;
--relative=0) both run.txt "$@"; {run};;
esac
"""
    return {"scontrol": "printf 'host1\\nhost2\\nhost3\\n'\n", "srun": srun}


WAITING = "while true; do sleep 0.1; done"


def test_the_slurm_script_with_vllm_gives_the_last_node_to_the_server(tmp_path):
    from accelerate.commands.launch import launch_command_parser

    subprocess.run(["bash", "-n", str(VLLM_SCRIPT)], check=True)
    done = submitted(tmp_path, "brick/multi_gpu", "--run_name", "two words", script=VLLM_SCRIPT,
                     commands=steps_of_slurm(WAITING, "exit 0"), **THREE_NODES)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "server.txt").read_text().splitlines()[:5] == [
        "--relative=2", "--nodes=1", "--ntasks=1", "trl-grpo-tasks", "serve"
    ]  # fmt: skip
    server = (tmp_path / "server.txt").read_text().splitlines()[5:]
    own, passed = split_words(server)
    assert passed == []
    words = (tmp_path / "run.txt").read_text().splitlines()
    assert words[:4] == ["--relative=0", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1"]
    args = launch_command_parser().parse_args(words[words.index("launch") + 1 :])
    assert (args.num_machines, args.num_processes, args.main_process_ip) == (2, 8, "host1")
    assert (ROOT / args.config_file).is_file() and args.training_script == "train.py"
    _, _, config, _ = parse([*args.training_script_args, "--use_cpu", "--bf16", "false"])
    assert config.use_vllm and config.vllm_mode == "server" and config.constrain and config.run_name == "two words"
    assert config.vllm_server_host == "host3" and config.resume_from_checkpoint == AUTO
    assert own == ["--config", "brick/multi_gpu", "--host", "0.0.0.0", "--port", str(config.vllm_server_port)]
    assert 30_000 <= config.vllm_server_port < 40_000 and args.main_process_port < 30_000


# The server must not end before the run has saved its step: only the end of the script ends it.
SAVES = """trap 'test ! -f ended.txt && echo saved > saved.txt; exit 5' TERM
kill -TERM $PPID
sleep 9 &> slept.txt & wait
exit 1"""


@pytest.mark.parametrize(
    ("server", "run", "status", "said"),
    [
        (WAITING, "exit 7", 7, ""),
        ("exit 3", WAITING, 1, "the vLLM server ended before the run"),
        (WAITING, SAVES, 5, ""),
    ],
    ids=["the run ends", "the server ends", "the signal before the time limit"],
)
def test_the_slurm_script_with_vllm_ends_with_the_status_of_the_run_and_ends_the_server(
    tmp_path, server, run, status, said
):
    done = submitted(tmp_path, "brick/multi_gpu", script=VLLM_SCRIPT, commands=steps_of_slurm(server, run),
                     VLLM_OPTIONS="--dtype bfloat16 --enforce-eager", **THREE_NODES)  # fmt: skip
    assert done.returncode == status and said in done.stderr and (tmp_path / "ended.txt").is_file()
    assert (tmp_path / "server.txt").read_text().endswith("--\n--dtype\nbfloat16\n--enforce-eager\n")
    assert (tmp_path / "saved.txt").is_file() == (run == SAVES)


@pytest.mark.parametrize(
    ("script", "words", "nodes", "said"),
    [
        (SCRIPT, [], "2", "usage: sbatch slurm/train.sbatch RECIPE [options"),
        (VLLM_SCRIPT, [], "2", "usage: sbatch slurm/train_vllm.sbatch RECIPE [options"),
        (VLLM_SCRIPT, ["brick/multi_gpu"], "1", "this job needs at least two"),
    ],
)
def test_what_the_slurm_scripts_need(tmp_path, script, words, nodes, said):
    done = submitted(tmp_path, *words, script=script, commands={}, SLURM_NNODES=nodes)
    assert done.returncode != 0 and said in done.stderr


@pytest.mark.exhaustive
def test_the_slurm_script_trains_on_two_nodes(tmp_path):
    """Two nodes of one process each, on this machine's CPU: the processes find each other and train together."""
    shutil.copy(ROOT / "train.py", tmp_path)
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    recipe = SMALL | {"max_steps": 2, "per_device_train_batch_size": 4, "cold_start_steps": 3, "constrain": True}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"output_dir": "run"}))
    accelerate = f'exec {sys.executable} -m accelerate.commands.accelerate_cli "$@"\n'
    done = submitted(tmp_path, "recipe.yaml", commands={"scontrol": SCONTROL, "srun": SRUN, "accelerate": accelerate})
    printed = "".join((tmp_path / f"node{rank}.txt").read_text() for rank in (0, 1))
    assert done.returncode == 0, printed[-4000:]
    assert printed.count("report: ") == 1 and printed.count("task my_task 1") == 1
    assert len(metrics(tmp_path / "run")) == 2 and list(results(tmp_path / "run")) == ["cold start", "GRPO"]
    assert (tmp_path / "run" / "checkpoint-2" / "task_state_1.pt").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert "2 processes" in json.loads((tmp_path / "run" / "settings.json").read_text())["machine"]
