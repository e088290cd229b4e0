"""The `paper` recipes against the requirement documents: what a document says, in our words, and what the option is.

The documents themselves are not part of the repository. Where a recipe differs on purpose, its comment says why.
"""

import json
import math
import re
from typing import Any, NamedTuple

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.commands.test_hub import SECRET
from tests.commands.test_push import contents, python, set_base
from tests.commands.test_recipes import HERE, HUB_DATA, flags, save_small
from tests.commands.test_train import metrics
from tests.support.exhaustive import exhaustive_but
from tests.support.hub_server import Hub
from tests.support.paths import RECIPES, ROOT
from tests.support.pt_file import write_pt
from tests.tasks.brick.test_hub import hanging_entries
from tests.tasks.brick.test_prompts import bricks_of
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.commands.arguments import parse
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.models.tiny import save_tiny
from trl_grpo_tasks.report.run_folder import OUTCOME_FILE
from trl_grpo_tasks.rewards.components import component_weights
from trl_grpo_tasks.task import MASK_TOKEN
from trl_grpo_tasks.tasks.brick.structure import SIZES
from trl_grpo_tasks.tasks.brick.structure import parse as parse_bricks
from trl_grpo_tasks.tasks.theory.reward import TOO_LONG
from trl_grpo_tasks.training.extras.moving_reference import MovingReference


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
        Says("the reward is the sum of three parts", "scoring", "full", "rewards success and distinct"),
        Says(
            "the best model has the highest mean reward", "best_by", "reward", "on held-out prompts, not on those of"
        ),
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
        Says("a periodic reference is copied every 500 iterations", "reference_update_freq", 500),
        Says("a moving average keeps 0.99 of the reference", "ema_alpha", 0.99),
        Says(GROUP_RELATIVE, "advantage_estimator", "grpo"),
        Says("the loss has no clipping", "epsilon", 0.2, "clipped at 0.2, which the document does not do"),
    ],
}


def path_of(name):
    return RECIPES / name / "paper.yaml"


def parsed(name, *changes, recipe="paper", **more):
    path = path_of(name).with_stem(recipe)
    written = yaml.safe_load(path.read_text())
    options = {"use_cpu": True, "bf16": False} | {key: file for key, file in HUB_DATA.items() if key in written}
    return parse(["--config", str(path), *flags(options | more), *changes])


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


# ---- brick

BRICK_DATA = ("structure_id", "object_id", "category_id", "captions", "bricks", "stability_scores")  # on the Hub


def brick_command(option):
    """The options of the line of brick/paper's comment that begins with this option."""
    return re.search(rf"^#   ({option} .*)$", path_of("brick").read_text(), re.MULTILINE)[1].split()


@pytest.mark.parametrize("changes", [[], brick_command("--text_form")], ids=["pivot", "BrickGPT's format"])
def test_bricks_prompt_gold_and_constraint_agree(changes, tmp_path):
    """For a published layout, with bricks that hang from later ones, anywhere in a world of 20."""
    write_brick_data(tmp_path)
    task, run_args, *_ = parsed("brick", "--brick_data", str(tmp_path), *changes)
    byte_level = AutoTokenizer.from_pretrained(save_small("llama", tmp_path / "model"))
    rows = task.dataset("train", None, 0)
    assert len(rows) == 2 and len(SIZES) == 14
    check_task(task, size=2, tokenizer=byte_level)
    for row in rows:
        instruction, _, caption = row["prompt"][-1]["content"].partition("\n\n### Input:\n")
        assert caption == row["caption"] and row["world"] == 20
        bricks = bricks_of(task.gold(row), instruction)  # as the prompt says, and nothing else
        assert sorted(bricks) == sorted(parse_bricks(row["gold"]).structure.bricks)
    is_pivot = not changes
    assert ("`hxw @n (x,y,z)`" in instruction and "at most 5 along" in instruction) == is_pivot
    assert (run_args.cold_start_steps > 0) == is_pivot, "the published model has seen its own format only"


def test_the_plain_sum_of_bricks_comment_is_the_documents():
    task, *_ = parsed("brick", *brick_command("--shape_weight"))
    used = {name: weight for name, weight in task.weights.items() if weight}
    assert used == {"stability": 1.0, "length": 1.0, "quality": 1.0}
    (row,) = task.dataset("train", 1, 0)
    score = task.score(row, "2x2 (9,9,0)\n")  # stands without friction; one of 100 bricks; all in order
    assert score.total == pytest.approx(1 + 1 / 100 + 1)


def test_bricks_page_explains_each_statement_of_the_document():
    page = (ROOT / "docs/tasks/brick.md").read_text()
    table = page.partition("| the document says | we do | why |")[2].partition("\n\n")[0]
    unexplained = [said.statement for said in DOCUMENTS["brick"] if f"`{said.option}`" not in table]
    assert not unexplained


def write_brick_data(folder):
    """The published data set as on the Hub: parquet files in data/, with all of its columns."""
    import pyarrow
    import pyarrow.parquet

    (folder / "data").mkdir(parents=True)
    entries = hanging_entries()
    assert tuple(entries[0]) == BRICK_DATA
    for split in ("train", "test"):
        rows = pyarrow.Table.from_pylist(entries if split == "train" else entries[:1])
        pyarrow.parquet.write_table(rows, folder / "data" / f"{split}-00000-of-00001.parquet")


@pytest.mark.exhaustive
def test_bricks_recipe_trains_the_adapter_on_the_hub(tmp_path):
    """The Hub has an adapter with the published settings on a small Llama. Only sizes of the recipe are changed."""
    base = save_small("meta-llama/Llama-3.2-1B-Instruct", tmp_path / "base")
    lora = LoraConfig(r=32, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
                      init_lora_weights=False)  # fmt: skip
    adapter = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora)
    adapter.save_pretrained(tmp_path / "adapter")
    set_base(tmp_path / "adapter", "meta-llama/Llama-3.2-1B-Instruct")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    write_brick_data(tmp_path / "bricks")
    small = {"brick_data": "bricks", "cold_start_steps": 2, "max_steps": 2, "per_device_train_batch_size": 8,
             "gradient_accumulation_steps": 2, "max_completion_length": 48, "eval_rows": 1, "samples": 2,
             "logging_steps": 1, "use_cpu": True, "bf16": False, "reward_workers": 0, "report_to": "none",
             "output_dir": "run"}  # fmt: skip
    with Hub(SECRET) as hub:
        hub.repos["AvaLovelace/BrickGPT"] = contents(tmp_path / "adapter")
        hub.repos["meta-llama/Llama-3.2-1B-Instruct"] = contents(base)
        recipe = [str(ROOT / "train.py"), "--config", "brick/paper"]
        done = python(hub, tmp_path, *recipe, *flags(small), token=SECRET)
    assert done.returncode == 0, done.stderr
    started, trained = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("run/cold_start", "run"))
    published = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert published.keys() == started.keys() == trained.keys()
    assert any((published[name] != started[name]).any() for name in started), "the cold start goes on from it"
    assert any((started[name] != trained[name]).any() for name in started), "and GRPO from the cold start"
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "meta-llama/Llama-3.2-1B-Instruct" and config["r"] == 32
    steps = [log for log in metrics(tmp_path / "run") if "kl" in log]
    assert len(steps) == 2 and abs(steps[0]["kl"]) < 1e-5, "the reference is the adapter as GRPO begins"
    assert any(name.endswith("load_factor/mean") for name in steps[0])
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    measured = [one["metrics"] for one in results["evaluations"]]
    assert {"valid", "published_stable", "mean_brick_stability", "min_brick_stability"} <= set(measured[-1])


def test_infills_reward_is_the_judge_alone():
    task, _, args, _ = parsed("infill")
    weights = component_weights(task, args.component_weights)
    assert {key: value for key, value in weights.items() if value} == {"judge": 1.0}


# ---- infill and prompts: rows, published files, stand-ins of the same kind, and steps

SHORT = HERE | {"train_rows": 16, "max_steps": 2, "logging_steps": 1}
TEXT = "\n\n".join(f"The {a} {b} of the hill, far away." for a in ("old", "red", "big") for b in ("cat", "hat"))


def logs_of_two_steps(name, folder, **options):
    """Train with a paper recipe and these options, and return the logs of its steps."""
    asked = SHORT | {"output_dir": folder / "run"} | options
    assert run.main(["--config", str(path_of(name)), *flags(asked)]) == 0
    return [line for line in metrics(folder / "run") if "loss" in line]


def test_infill_rows_prompt_gold_and_judged_text_agree():
    task, *_ = parsed("infill")
    for row in task.dataset("train", 50, 0):
        masked = [MASK_TOKEN if i in row["places"] else piece for i, piece in enumerate(row["pieces"])]
        assert row["prompt"] == "".join(masked) and task.constraint(None) is None
        assert len(task.gold(row)) == len(row["places"]) == row["prompt"].count(MASK_TOKEN)
        assert task.filled(row, task.gold(row)) == row["pieces"]


def test_infill_is_trained_from_a_generator_of_the_documents_kind(tmp_path, judges_path):
    """The document's generator and judge are .pt files over characters."""
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"corpus": tmp_path / "text.txt", "held_out_judge": judges_path / "held_out", "text_length": 24,
               "per_device_train_batch_size": 16, "judges_folder": tmp_path / "judges",
               "model_name_or_path": tmp_path / "generator.pt", "judge": tmp_path / "judge.pt"}  # fmt: skip
    write_pt(tmp_path / "generator.pt")
    write_pt(tmp_path / "judge.pt", "sequence_scorer")
    lines = logs_of_two_steps("infill", tmp_path, **options)
    assert len(lines) == 2 and lines[0]["kl"] == pytest.approx(0, abs=1e-5)
    for line in lines:
        assert line["reward"] == pytest.approx(line["rewards/judge/mean"], abs=1e-6) and 0 < line["reward"] < 1
        assert line["reward_std"] > 0 and line["rewards/valid/mean"] == 1
        assert line["sampling/logp_difference_max"] < 1e-3, "top_p and the temperature are in the log-probs"
    assert json.loads((tmp_path / "run" / "config.json").read_text())["architectures"] == ["EuroBertForMaskedLM"]


def test_prompts_reads_the_documents_file(tmp_path):
    """{"prompts": [text, ...]}: a text is a prompt, and --rewards scores it."""
    texts = [f"Explain how search number {i} works:" for i in range(20)]
    (tmp_path / "mine.json").write_text(json.dumps({"prompts": texts}))
    task, *_ = parsed("prompts", prompts_file=tmp_path / "mine.json", rewards="length", target_length=3)
    rows = task.dataset("train", None, 0) + task.dataset("test", None, 0)
    assert sorted(row["prompt"][-1]["content"] for row in rows) == sorted(texts)
    assert task.score(rows[0], "one two three").total == 1


def test_prompts_rows_prompt_gold_and_constraint_agree():
    task, *_ = parsed("prompts", prompts_file="example_prompts.json")
    rows = task.dataset("train", None, 0)
    check_task(task, size=len(rows))
    assert {"schema", "regex", "numeric"} <= {name for row in rows for name in row["rewards"]}


def test_prompts_trains_a_llama_and_counts_rollouts_for_the_reference(tmp_path, monkeypatch, capsys):
    """Two rollouts of two minibatches, each used twice, are eight steps, but two iterations of the reference."""
    updates = []
    monkeypatch.setattr(MovingReference, "update", lambda reference: updates.append(reference._update_freq))
    model = save_small("meta-llama/", tmp_path / "model")
    lines = logs_of_two_steps("prompts", tmp_path, model_name_or_path=model, prompts_file="example_prompts.json",
                              per_device_train_batch_size=8, generation_batch_size=16, max_completion_length=8,
                              max_steps=8, reference_mode="periodic")  # fmt: skip
    assert len(lines) == 8 and updates == [500], "before the second rollout; the first has nothing to follow"
    assert all({"loss", "pg_loss", "kl"} <= line.keys() for line in lines)
    assert re.search(r"^GRPO 1/8  reward .*  loss \S+  pg_loss \S+  kl \S+  ", capsys.readouterr().out, re.MULTILINE)


# ---- theory

THEORY_SMALL = {
    "tiny_width": 32, "tiny_layers": 1, "tiny_heads": 2, "train_rows": 24, "eval_rows": 3, "samples": 2,
    "cold_start_steps": 2, "cold_start_batch_size": 4, "num_generations": 8, "per_device_train_batch_size": 16,
    "max_steps": 2, "logging_steps": 1, "save_steps": 1, "warmup_steps": 0, "use_cpu": True, "report_to": "none",
    "reward_workers": 0,
}  # fmt: skip


def test_theorys_prompt_gold_and_constraint_agree(tmp_path):
    task, _, args, _ = parsed("theory")
    save_tiny(task.tiny(), tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert 8e6 < model.num_parameters() < 9e6, "the size of the document's model"
    check_task(task, args.seed, size=6, tokenizer=tokenizer)
    for row in task.dataset("train", 6, args.seed):
        gold = task.gold(row)
        assert tokenizer.decode(tokenizer.encode(row["prompt"], add_special_tokens=False)) == row["prompt"]
        assert len(tokenizer.encode(gold, add_special_tokens=False)) < args.max_completion_length
        assert len((row["prompt"] + gold).split()) <= task.options.max_words


def test_theorys_documents_reward_is_one_option():
    task, *_ = parsed("theory", scoring="document")
    used = {key: value for key, value in component_weights(task, None).items() if value}
    assert used == {"anomalies": 1, "exotics": 1, "length": 1} and TOO_LONG == -300 and task.options.max_words == 512
    assert "--scoring document" in comment_of("theory")


def test_theorys_best_model_can_be_turned_off():
    _, _, args, _ = parsed("theory", "--best_by", "", save_strategy="no")
    assert args.best_by is None and args.eval_strategy == "no"


@pytest.mark.exhaustive
def test_theorys_recipe_trains_two_steps_and_keeps_its_best_model(tmp_path):
    assert run.main(["--config", str(path_of("theory")), *flags(THEORY_SMALL | {"output_dir": tmp_path})]) == 0
    steps = [line for line in metrics(tmp_path) if "loss" in line]
    assert len(steps) == 2 and all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in steps)
    best = json.loads((tmp_path / OUTCOME_FILE).read_text())
    assert best["best_by"] == "reward" and best["model_step"] == best["best_step"] and len(best["evaluations"]) >= 2
    assert (tmp_path / "model.safetensors").is_file()


# ---- machine


CHAT_ML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MACHINE_RECIPES = ["paper", "authors"]


def test_machine_one_pass_sees_nearly_ten_thousand_designs():
    for recipe, passes in (("paper", 1), ("authors", 36)):
        task, run_args, args, _ = parsed("machine", recipe=recipe)
        seen = run_args.cold_start_steps * run_args.cold_start_batch_size * 8
        assert seen == passes * args.train_rows == passes * 9984
    rows = task.dataset("train", args.train_rows, args.seed)
    machines = len({row["gold"] for row in rows})
    assert len(rows) == 9984 and machines > 9900
    for recipe in MACHINE_RECIPES:
        text = path_of("machine").with_stem(recipe).read_text()
        assert f"{machines:,} different machines" in text and "3,000 requests" in text
    requests, held_out = (
        {task.request(row) for row in some} for some in (rows, task.dataset("test", None, args.seed))
    )
    assert len(requests) == 3000 and not requests & held_out


@pytest.mark.parametrize("recipe", exhaustive_but(["paper"], MACHINE_RECIPES))
def test_machine_rows_prompt_gold_score_and_constraint_agree(recipe, tmp_path):
    task, _, args, _ = parsed("machine", recipe=recipe)
    tokenizer = AutoTokenizer.from_pretrained(save_small("Qwen/Qwen2", tmp_path))
    check_task(task, args.seed, size=4, tokenizer=tokenizer)
    for row in task.dataset("train", 4, args.seed):
        system, user = (message["content"] for message in row["prompt"])
        gold = task.gold(row)
        before, fence, machine = gold.rpartition("```json\n")
        blocks = json.loads(machine.removesuffix("\n```"))
        assert f"at most {row['max_blocks']} blocks" in user and len(blocks) <= row["max_blocks"]
        assert all(f"\n{block['id']}: " in system for block in blocks), "the manual names every block"
        score = task.score(row, gold)
        assert score.total >= row["goal"], "in the simulation"
        assert score == task.score(row, json.dumps(blocks)) and task.score(row, "no machine").total == 0
        if task.options.reasoning:
            assert task.options.scoring == "authors" and task.constraint(tokenizer) is None
            assert "First say what the blocks do" in user and "```json code block" in system and fence
            assert f"In all {len(blocks)} blocks, " in before
        else:
            assert task.options.scoring == "paper" and "nothing else" in system and not before


@pytest.mark.exhaustive
def test_machines_recipe_trains_two_steps_of_a_small_qwen(tmp_path):
    """The recipe's own options, scaled down, with a Qwen2 model that has a chat template: cold start, then GRPO."""
    model = save_small("Qwen/Qwen2", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_ML
    tokenizer.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    small = HERE | {
        "model_name_or_path": model, "output_dir": tmp_path / "run", "dtype": "float32", "optim": "adamw_torch",
        "gradient_checkpointing": False, "lora_r": 4, "cold_start_steps": 1, "cold_start_batch_size": 1,
        "num_generations": 4, "generation_batch_size": 4, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1, "max_completion_length": 12, "max_steps": 2, "save_strategy": "no",
    }  # fmt: skip
    assert run.main(["--config", "machine/paper", *flags(small)]) == 0
    logs = metrics(tmp_path / "run")
    assert [log["step"] for log in logs if "reward" in log] == [1, 2]
    assert all(math.isfinite(log["loss"]) and log["reward"] >= 0 for log in logs if "reward" in log)
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert set(adapter["target_modules"]) == set(ALL_LINEAR) and adapter["r"] == 4
    assert (tmp_path / "run" / "cold_start" / "adapter_config.json").is_file()
