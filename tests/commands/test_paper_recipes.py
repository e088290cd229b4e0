"""The `paper` recipes against the requirement documents: what a document says, in our words, and what the option is.

The documents themselves are not part of the repository. Where a recipe differs on purpose, its comment says why.
"""

import json
import math
import re
from typing import Any, NamedTuple

import pytest
import yaml
from transformers import AutoTokenizer

from tests.commands.test_recipes import HUB_DATA, flags, save_small
from tests.support.paths import RECIPES
from trl_grpo_tasks.commands import train
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.report.run_folder import METRICS_FILE
from trl_grpo_tasks.rewards.components import component_weights
from trl_grpo_tasks.tasks.brick.structure import SIZES
from trl_grpo_tasks.tasks.theory.reward import TOO_LONG


class Says(NamedTuple):
    """A statement of a document and the value that an option must have. `explained` is for an option with another
    value than the document's: words of the recipe's comment that explain it."""

    statement: str
    option: str
    value: Any
    explained: str = ""


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GROUP_RELATIVE = "the advantage is (reward - group mean) / group standard deviation"
DOCUMENTS = {
    "brick": [
        Says("the model is BrickGPT from the Hub", "model_name_or_path", "AvaLovelace/BrickGPT"),
        Says("a structure has at most 100 bricks", "max_bricks", 100),
        Says("a brick is rejected at most 50 times", "max_brick_rejections", 50),
        Says("rejection sampling places the bricks", "constrain", True, "samples under the constraint"),
        Says("8 sequences form a group", "num_generations", 8),
        Says("the learning rate is 1e-5", "learning_rate", 1e-5),
        Says("the KL coefficient is 0.1", "beta", 0.1),
        Says("the discount factor is 0.99", "gamma", 1.0, "discount of 0.99 is left out"),
        Says("the ratio is clipped at 0.2", "epsilon", 0.2),
        Says(GROUP_RELATIVE, "advantage_estimator", "grpo"),
        Says("training takes 10 epochs", "num_train_epochs", 10),
        Says("a batch has 4 captions", "per_device_train_batch_size", 4 * 8),
        Says("gradients are accumulated over 4 batches", "gradient_accumulation_steps", 4),
        Says("the warm-up takes 100 steps", "warmup_steps", 100),
        Says("a checkpoint is saved every 500 steps", "save_steps", 500),
        Says("metrics are logged every 50 steps", "logging_steps", 50),
        Says("Gurobi analyses the stability", "stability_backend", "auto", "Gurobi, which needs a licence"),
        Says("stability has weight 1", "stability_weight", 1.0),
        Says("connectivity has weight 0.5", "connectivity_weight", 0.5),
        Says("stability, length and quality are the reward", "shape_weight", 2.0, "requested shape counts as well"),
        Says("a brick is placed by a pivot brick and an offset", "text_form", "pivot"),
        Says("an offset is at most 5", "max_offset_distance", 5),
    ],
    "theory": [
        Says("64 completions form a group", "num_generations", 64),
        Says("an episode has one prompt", "per_device_train_batch_size", 4 * 64, "four prompts instead of one"),
        Says("the learning rate is 1e-4", "learning_rate", 1e-4),
        Says("the KL coefficient is 0.05", "beta", 0.05),
        Says("the ratio is clipped at 0.2", "epsilon", 0.2),
        Says("the entropy coefficient is 0.01", "entropy_coef", 0.01),
        Says("the temperature is 1", "temperature", 1.0),
        Says("training takes 1,000 episodes", "max_steps", 1000),
        Says("statistics are logged every 10 episodes", "logging_steps", 10),
        Says("a checkpoint is saved every 100 episodes", "save_steps", 100),
        Says("an evaluation takes 100 episodes", "eval_rows", 64, "instead of the document's 100 episodes"),
        Says("training starts from scratch or from a model", "cold_start_steps", 100, "cold start of 100 steps"),
        Says(GROUP_RELATIVE, "advantage_estimator", "grpo"),
        Says("advantages are divided within a group", "scale_rewards", "group"),
        Says("a grammar constrains the generation", "constrain", True),
        Says("a curriculum has phases from easy to hard", "curriculum", True),
        Says("the phases are about length, masses, anomalies", "goals", ["length", "exotics", "anomalies"]),
        Says("the replay buffer has 1,000 entries", "replay_size", 1000),
        Says("prioritised replay is off by default", "replay_alpha", 0.6, "prefers groups with large advantages"),
        Says("exotics must be heavier than 100 GeV", "threshold_gev", 100.0),
        Says("the reward is the sum of three parts", "component_weights", None, "rewards success and distinct"),
    ],
    "infill": [
        Says("8 completions form a group", "num_generations", 8),
        Says("the KL coefficient is 0.1", "beta", 0.1),
        Says("the learning rate is 1e-5", "learning_rate", 1e-5),
        Says("the learning rate follows a cosine", "lr_scheduler_type", "cosine"),
        Says("the temperature is 0.8", "temperature", 0.8),
        Says("nucleus sampling keeps 0.95", "top_p", 0.95),
        Says("the reference is the frozen initial generator", "reference_mode", "static"),
        Says("the advantage is the reward minus the group's baseline", "advantage_estimator", "mean"),
        Says("all gaps are filled in one step", "policy", "masked"),
        Says("each rollout is used for one update", "num_iterations", 1),
        Says("the judge's score is the reward", "component_weights", None),
    ],
    "machine": [
        Says("Qwen2.5-14B-Instruct is fine-tuned", "model_name_or_path", "Qwen/Qwen2.5-14B-Instruct"),
        Says("LoRA has rank 64", "lora_r", 64),
        Says("LoRA is on all linear layers", "lora_target_modules", ALL_LINEAR),
        Says("only LoRA weights are trained", "use_peft", True),
        Says("the optimizer is 8-bit AdamW", "optim", "adamw_8bit"),
        Says("the weight decay is 0.01", "weight_decay", 0.01),
        Says("the learning rate is 5e-6", "learning_rate", 5e-6),
        Says("the KL penalty has weight 0.001", "beta", 0.001),
        Says("there is no entropy regularisation", "entropy_coef", 0.0),
        Says("gradients are clipped at 0.5", "max_grad_norm", 0.5),
        Says("64 rollouts are made for each prompt", "num_generations", 64),
        Says("an update uses the 64 rollouts of one prompt", "generation_batch_size", 64),
        Says("the advantage is the reward minus the mean of all 64", "advantage_estimator", "mean"),
        Says("the estimator is Pass@k with k = 64", "pass_k", None, 'calls its advantage "Pass@k, k = 64"'),
        Says("the advantage is clamped to +-0.2", "advantage_clip", 0.2),
        Says("the ratio is clipped at 0.2", "epsilon", 0.2),
        Says("the ratio is to the pretrained model", "num_iterations", 1, "to the policy which sampled"),
        Says("training takes 400 iterations", "max_steps", 400),
        Says("each GPU has a batch of 1", "per_device_train_batch_size", 1),
        Says("gradients are accumulated over 8 batches", "gradient_accumulation_steps", 8),
        Says("training uses mixed precision", "bf16", True),
        Says("RL follows a cold start on designs", "cold_start_steps", 1248, "but not the settings"),
        Says("tasks are the car and the catapult", "trials", ["car", "catapult"]),
        Says("machines are read from JSON, without a grammar", "constrain", False),
    ],
    "prompts": [
        Says("4 completions form a group", "num_generations", 4),
        Says("a rollout has 256 prompts", "generation_batch_size", 256 * 4),
        Says("a completion has at most 512 tokens", "max_completion_length", 512),
        Says("the temperature is 0.8", "temperature", 0.8),
        Says("each rollout is used for 2 epochs", "num_iterations", 2),
        Says("a minibatch has 64 completions", "per_device_train_batch_size", 64),
        Says("there are 1,000 cycles of rollout and training", "max_steps", 1000 * 2 * (256 * 4 // 64)),
        Says("the KL coefficient is 0.1", "beta", 0.1),
        Says("the learning rate is 1e-5", "learning_rate", 1e-5),
        Says("the gradient norm is at most 1", "max_grad_norm", 1.0),
        Says("the reference is static", "reference_mode", "static"),
        Says(GROUP_RELATIVE, "advantage_estimator", "grpo"),
        Says("the loss has no clipping", "epsilon", 0.2, "clipped at 0.2, which the document does not do"),
    ],
}


def path_of(name):
    return RECIPES / name / "paper.yaml"


def parsed(name):
    written = yaml.safe_load(path_of(name).read_text())
    options = {"use_cpu": True, "bf16": False} | {key: file for key, file in HUB_DATA.items() if key in written}
    return parse(["--config", str(path_of(name)), *flags(options)])


def comment_of(name):
    lines = [line for line in path_of(name).read_text().splitlines() if line.startswith("#")]
    return " ".join(line.lstrip("# ") for line in lines)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_paper_recipe_has_the_settings_of_its_document(name):
    written = yaml.safe_load(path_of(name).read_text())
    task, run_args, args, model_args = parsed(name)
    for said in DOCUMENTS[name]:
        owner = next(one for one in (args, task.options, model_args, run_args) if hasattr(one, said.option))
        value = written.get(said.option, getattr(owner, said.option))
        assert getattr(value, "value", value) == said.value, said.statement
        assert said.explained in comment_of(name), said.statement
    stated = [said.option for said in DOCUMENTS[name]]
    assert len(set(stated)) == len(stated)


def test_every_task_has_a_document():
    assert set(DOCUMENTS) == {path.parent.name for path in RECIPES.rglob("paper.yaml")}


def test_brick_texts_are_pivots_and_offsets_in_the_documents_world():
    task, *_ = parsed("brick")
    (row,) = task.dataset("train", 1, 0)
    assert row["world"] == 20 and len(SIZES) == 14
    assert "`hxw @n (x,y,z)`" in row["prompt"][-1]["content"] and "at most 5" in row["prompt"][-1]["content"]
    lines = task.gold(row).splitlines()
    assert all(re.fullmatch(r"\d+x\d+ @\d+ \(-?[0-5],-?[0-5],-?[0-5]\)", line) for line in lines)


def test_theorys_comment_gives_the_documents_reward():
    task, *_ = parsed("theory")
    said = json.loads(re.search(r"--component_weights '(.*?)'", path_of("theory").read_text())[1])
    used = {key for key, value in component_weights(task, said).items() if value}
    assert used == {"anomalies", "exotics", "length"} and TOO_LONG == -300 and task.options.max_words == 512


def test_infills_reward_is_the_judge_alone():
    task, _, args, _ = parsed("infill")
    weights = component_weights(task, args.component_weights)
    assert {key: value for key, value in weights.items() if value} == {"judge": 1.0}


# ---- machine


CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MACHINE_RECIPES = [RECIPES / "machine" / f"{name}.yaml" for name in ("paper", "authors")]


def parsed_machine(path):
    return parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])


@pytest.mark.parametrize("path", MACHINE_RECIPES, ids=lambda path: path.stem)
def test_machine_one_pass_sees_nearly_ten_thousand_designs(path):
    task, run_args, args, _ = parsed_machine(path)
    passes = {"paper": 1, "authors": 36}[path.stem]
    assert run_args.cold_start_steps * run_args.cold_start_batch_size * 8 == passes * args.train_rows == passes * 9984
    rows = task.dataset("train", args.train_rows, args.seed)
    machines = len({row["gold"] for row in rows})
    assert len(rows) == 9984 and machines > 9900 and f"{machines:,} different machines" in path.read_text()
    assert len({task.request(row) for row in rows}) == 3000 and "3,000 requests" in path.read_text()
    held_out = task.dataset("test", None, args.seed)
    assert not {task.request(row) for row in rows} & {task.request(row) for row in held_out}


@pytest.mark.parametrize("path", MACHINE_RECIPES, ids=lambda path: path.stem)
def test_machine_rows_prompt_gold_score_and_constraint_agree(path, tmp_path):
    task, _, args, _ = parsed_machine(path)
    tokenizer = AutoTokenizer.from_pretrained(save_small("Qwen/Qwen2", tmp_path))
    for row in task.dataset("train", 4, args.seed):
        system, user = (message["content"] for message in row["prompt"])
        gold = task.gold(row)
        before, fence, machine = gold.rpartition("```json\n")
        blocks = json.loads(machine.removesuffix("\n```"))
        assert f"at most {row['max_blocks']} blocks" in user and len(blocks) <= row["max_blocks"]
        assert all(f"\n{block['id']}: " in system for block in blocks), "the manual names every block"
        score = task.score(row, gold)
        assert score.success and score.total >= row["goal"], "in the simulation"
        assert score == task.score(row, json.dumps(blocks)) and task.score(row, "no machine").total == 0
        if task.options.reasoning:
            assert task.options.scoring == "authors" and task.constraint(tokenizer) is None
            assert "First say what the blocks do" in user and "```json code block" in system and fence
            assert f"In all {len(blocks)} blocks, " in before
        else:
            assert task.options.scoring == "paper" and "nothing else" in system and not before
            state = task.constraint(tokenizer).start(row)
            for token in tokenizer.encode(gold):
                state.accept(token)
            state.accept(tokenizer.eos_token_id)
            assert state.finished, "the gold answer may be written under the constraint of these options"


@pytest.mark.parametrize("path", MACHINE_RECIPES, ids=lambda path: path.stem)
def test_machine_recipes_train_two_steps_of_a_small_qwen(path, tmp_path):
    """The recipe's own options, scaled down, with a Qwen2 model that has a chat template: cold start, then GRPO."""
    model = save_small("Qwen/Qwen2", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_ML
    tokenizer.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    small = {
        "model_name_or_path": model, "output_dir": tmp_path / "run", "use_cpu": True, "bf16": False,
        "dtype": "float32", "optim": "adamw_torch", "gradient_checkpointing": False, "lora_r": 4, "train_rows": 8,
        "cold_start_steps": 1, "cold_start_batch_size": 1, "num_generations": 4, "generation_batch_size": 4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_completion_length": 12,
        "max_steps": 2, "eval_before_and_after": False, "save_strategy": "no", "report_to": "none",
        "reward_workers": 0,
    }  # fmt: skip
    assert train.main(["--config", str(path), *flags(small)]) == 0
    logs = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    assert [log["step"] for log in logs if "reward" in log] == [1, 2]
    assert all(math.isfinite(log["loss"]) and log["reward"] >= 0 for log in logs if "reward" in log)
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert set(adapter["target_modules"]) == set(ALL_LINEAR) and adapter["r"] == 4
    assert (tmp_path / "run" / "cold_start" / "adapter_config.json").is_file()
