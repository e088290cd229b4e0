"""Evaluations, repair turns and saved tokenizers write the prompts of training, and score the texts that it scores."""

import pytest
from transformers import AutoTokenizer

from tests.support.toy import ToyTask
from tests.support.toy_repair import AdvisingToy
from tests.support.training import config
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.constraints.turns import TurnsForm, chat_observation
from trl_grpo_tasks.evaluation import sampler as sampling
from trl_grpo_tasks.evaluation.sampler import CompletionSampler
from trl_grpo_tasks.models.loading import load_tokenizer, set_template_variables
from trl_grpo_tasks.models.tiny import PLAIN_CHAT_TEMPLATE
from trl_grpo_tasks.playground.stream import stream

# As in Qwen3: without thinking, the prompt ends with an empty block of thoughts, here "xx". The template begins with
# white space that counts, and reads its variable in a macro.
TEMPLATE = (
    "\n  {% macro thoughts() %}{% if enable_thinking is defined and enable_thinking is false %}xx{% endif %}"
    "{% endmacro %}{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}d{{ thoughts() }}{% endif %}"
)
OFF = {"enable_thinking": False}
CHAT = [{"role": "user", "content": "a1x"}]


class ChatTask(AdvisingToy):
    spec = None

    def dataset(self, split, size, seed):
        rows = super().dataset(split, size, seed)
        return [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]


@pytest.fixture
def tokenizer(tiny_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def written(tokenizer, **variables):
    return tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False, **variables)


def test_variables_become_defaults_of_the_template(tokenizer, tmp_path):
    plain, off = written(tokenizer), written(tokenizer, **OFF)
    assert off == f"{plain}xx"
    set_template_variables(tokenizer, OFF)
    set_template_variables(tokenizer, OFF)
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert written(one) == off and written(one, enable_thinking=True) == plain
    assert tokenizer.chat_template.count("set enable_thinking") == 1
    set_template_variables(tokenizer, {"enable_thinking": True})  # the newest comes first
    assert written(tokenizer) == plain
    tokenizer.chat_template = {"default": "{{ text }}", "tool_use": ""}
    set_template_variables(tokenizer, {"text": 'it\'s "a"\n', "more": {"list": [1, None]}})
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == 'it\'s "a"\n'


@pytest.mark.parametrize("name", ["add_generation_prompt", "tools", "not a name"])
def test_what_is_no_variable_of_a_template_is_refused(tokenizer, name):
    with pytest.raises(ValueError, match=f"chat_template_kwargs: '{name}' is not a variable"):
        set_template_variables(tokenizer, {name: 1})


def test_evaluations_feedback_and_the_saved_tokenizer_have_the_prompts_of_training(
    tokenizer, tiny_path, tmp_path, monkeypatch
):
    off = written(tokenizer, **OFF)
    args = config(
        tmp_path, chat_template_kwargs=OFF, rollout="fast", repair_turns=2, constrain=True, max_completion_length=24
    )
    trainer = TaskGRPOTrainer(tiny_path, args=args, task=ChatTask(), processing_class=tokenizer)
    trainer.model.train()
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    row, rollout, seen = trainer.latest_rollout.rows[0], sampling.rollout, []
    assert tokenizer.decode(trainer.latest_rollout.prompt_ids[0]) == off

    def recorded(model, ids, **options):
        seen.extend(ids)
        return rollout(model, ids, **options)

    monkeypatch.setattr(sampling, "rollout", recorded)
    CompletionSampler(trainer.model.eval(), tokenizer, 1.0, 5, None).sample([row])
    assert seen == trainer.latest_rollout.prompt_ids[:1]
    assert chat_observation(tokenizer, TurnsForm())[1].endswith("dxx")
    assert trainer.generation.constraint.form(row).tail.endswith("dxx")
    trainer.save_model(str(tmp_path / "saved"))
    assert written(load_tokenizer(str(tmp_path / "saved"))) == off


def test_a_tokenizer_that_parses_responses_leaves_reasoning_out_everywhere(tiny_path, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": "",
        "fields": {
            "reasoning_content": {"open": "x", "close_pattern": "x", "content": "text"},
            "content": {"close_pattern": "$", "content": "text"},
        },
    }
    texts = ["xbxaa", "aaa", "xaxa", "b"]
    ids = [[*tokenizer.convert_tokens_to_ids(list(text)), tokenizer.eos_token_id] for text in texts]
    args = config(tmp_path, max_completion_length=6)
    trainer = TaskGRPOTrainer(tiny_path, args=args, task=ChatTask(), processing_class=tokenizer)
    trainer._generate_single_turn = lambda prompts, *more, **options: (ids[: len(prompts)], None)
    trainer.model.train()
    trainer._generate_and_score_completions([trainer.train_dataset[0]] * 4)
    trained, row = trainer.latest_rollout.completions, trainer.latest_rollout.rows[0]
    assert trained == ["aa", "aaa", "a", "b"]
    sampler = CompletionSampler(trainer.model.eval(), tokenizer, 1.0, 6, None)
    monkeypatch.setattr(sampling, "rollout", lambda *_, **__: type("Done", (), {"completion_ids": ids}))
    assert [one.text for one in sampler.sample([row] * 4)] == trained
    for seed in range(8):
        steps = list(stream(sampler, row, seed))
        last = sampler.text_of(row, [], tokenizer.convert_tokens_to_ids([step.token for step in steps]))
        assert steps[-1].written == last
    plain = ToyTask().dataset("train", 1, 0)
    monkeypatch.setattr(sampling, "rollout", lambda *_, **__: type("Done", (), {"completion_ids": ids[:1]}))
    assert sampler.sample(plain)[0].text == "xbxaa", "the text of a plain prompt is no response"
