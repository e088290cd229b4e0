"""Decoding modes of the brick task: what each promises, with a model that writes bricks without looking."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config

from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.evaluation.evaluate import evaluate
from trl_grpo_tasks.evaluation.samples import Sample
from trl_grpo_tasks.evaluation.summary import summarise
from trl_grpo_tasks.models.loading import load_tokenizer
from trl_grpo_tasks.models.tiny import make_tokenizer, save_tiny
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.rollout import rollout
from trl_grpo_tasks.task import EditorError, TinySpec
from trl_grpo_tasks.tasks.brick import BrickOptions, BrickTask, editor
from trl_grpo_tasks.tasks.brick.editor import BrickEditor
from trl_grpo_tasks.tasks.brick.physics.stability import Analysis
from trl_grpo_tasks.tasks.brick.structure import SIZES, parse

WORLD, LAYERS = 4, 3
SMALL = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (1, 4))
TOKENS = [*(f"{h}x{w} (" for h, w in SIZES), *(f"{n}," for n in range(WORLD)), *(f"{n})\n" for n in range(WORLD)),
          *"0123456789x(,) aworld"]  # fmt: skip
ROW = {"prompt": "d", "caption": "a", "world": WORLD, "voxels": None, "gold": None, "loads": []}
LOADED = {**ROW, "loads": [{"grams": 150, "at": [1, 1]}]}
ROWS = [ROW] * 12 + [LOADED] * 12


def careless_text(rng):
    """Bricks at random: they collide, stick out and float."""
    places = [(*rng.choice(SMALL), *map(rng.randrange, (WORLD, WORLD, LAYERS))) for _ in range(rng.randint(2, 5))]
    return "".join("{}x{} ({},{},{})\n".format(*place) for place in places)


@pytest.fixture(scope="module")
def careless_path(tmp_path_factory):
    """A one-layer model that has learned how a line looks and nothing else."""
    folder = tmp_path_factory.mktemp("careless")
    save_tiny(TinySpec(TOKENS, hidden_size=32, layers=1, heads=2, context=256), folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rng = random.Random(0)
    for _ in range(120):
        prompts = [rng.choice(["d", "a, world 4\n"]) for _ in range(32)]  # of ROW, and of `generate` below
        texts = [f"{prompt}{careless_text(rng)}{tokenizer.eos_token}" for prompt in prompts]
        batch = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def loaded(careless_path):
    return AutoModelForCausalLM.from_pretrained(careless_path).eval(), load_tokenizer(careless_path)


def run(loaded, editor=None, constrain=False, rows=ROWS[::2], length=120, **options):
    task = BrickTask(BrickOptions(**options))
    constraint = task.constraint(loaded[1]) if constrain else None
    with RewardExecutor(task) as executor:
        return evaluate("a", *loaded, task, rows, executor=executor, num_samples=2, max_completion_length=length,
                        constraint=constraint, editor=editor)  # fmt: skip


def stands(sample):
    return sample.score["info"]["stable"]


def test_rejection_writes_no_wrong_line(loaded):
    """The model is wrong once in a few lines, so that 50 draws in vain do not happen."""
    result = run(loaded, "rejection", max_bricks=4)
    for sample in result.samples:
        if not sample.cut_off:
            assert sample.score["valid"] or not sample.completion.strip(), sample
        whole = parse(sample.completion[: sample.completion.rfind("\n") + 1], WORLD)
        assert not whole.problems and (not whole.lines or not whole.structure.problems(4))
    total = sum(sample.counts["rejections"] for sample in result.samples)
    assert total > len(result.samples) and result.metrics["rejections"] == pytest.approx(total / len(result.samples))
    assert sum(map(stands, result.samples)) < len(result.samples)  # floating bricks are not its business


def test_rollback_ends_with_what_stands(loaded):
    options = {"constrain": True, "attach": False}
    before, result = run(loaded, **options), run(loaded, "rollback", **options)
    stopped = [s for s in result.samples if s.counts["rollbacks"] < 100 and not s.cut_off]
    assert len(stopped) > len(result.samples) / 2
    assert all(s.score["valid"] and stands(s) for s in stopped)
    assert result.metrics["rollbacks"] > 0 and result.metrics["rollbacks_median"] >= 0
    assert sum(map(stands, result.samples)) > 1.3 * sum(map(stands, before.samples))


def test_rejection_samples_lines_from_their_conditional_distribution(loaded):
    """The first line of many, against the model's own distribution over all lines that fit."""
    model, tokenizer = loaded
    count, prompt = 3000, tokenizer.encode(ROW["prompt"])
    editor = BrickEditor([ROW] * count, tokenizer, "rejection", BrickOptions(max_bricks=9))
    lines = [f"{h}x{w} ({x},{y},{z})\n" for (h, w) in SIZES for x, y, z in itertools.product(range(WORLD), repeat=3)
             if x + h <= WORLD and y + w <= WORLD]  # fmt: skip
    spelled = [tokenizer.encode(line) for line in lines]
    with torch.no_grad():
        logps = model(input_ids=torch.tensor([prompt + ids for ids in spelled])).logits.log_softmax(2)
        given = torch.tensor(spelled)
        exact = logps[:, len(prompt) - 1 : -1].gather(2, given[:, :, None])[:, :, 0].sum(1).exp().double().numpy()
    torch.manual_seed(4)
    # the line and the token after it, since only then it is known to have been kept
    out = rollout(model, [prompt] * count, max_new_tokens=5, eos_token_ids=[tokenizer.eos_token_id], editor=editor)
    drawn = Counter(tokenizer.decode(ids[:4]) for ids in out.completion_ids)
    # what is left out are other spellings of a line, in more tokens, and texts without a brick
    found = np.array([drawn[line] for line in lines])
    assert found.sum() > 0.95 * count
    wanted = exact / exact.sum() * found.sum()
    usual = wanted >= 5
    chi2 = ((found - wanted)[usual] ** 2 / wanted[usual]).sum()
    assert usual.sum() > 40 and chi2 < usual.sum() + 4 * np.sqrt(2 * usual.sum())


# ---- the editor alone

SPANNING = make_tokenizer([*"0123456789x@(,)- \n", ")\n2x", ")\n1x1 (0,0,0)\n", "\n\n", "2x4 (", "0,0,"], 256)


def editor_of(rows=(ROW,), name="rollback", **options):
    return BrickEditor(list(rows), SPANNING, name, BrickOptions(**{"max_bricks": 20, **options}))


def kept_text(editor, text):
    """What is kept of a text that has ended; None: all."""
    ids = [*SPANNING.encode(text), SPANNING.eos_token_id]
    kept = editor.keep(0, ids, True)
    return None if kept is None else SPANNING.decode(ids[:kept])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("2x2 (0,0,0)\n2x2 (0,0,1)\n", None),
        ("2x2 (0,0,0)\n2x2 (0,0,1)", None),
        ("", ""),
        ("2x2 (0,0,0)\n1x1 (0,0,1)\n1x1 (0,0,3)\n", "2x2 (0,0,0)\n1x1 (0,0,1)\n"),  # the last floats
        ("1x1 (0,0,1)\n1x1 (3,3,0)\n", ""),  # the first does
        ("1x1 (0,0,1)\n1x1 (0,0,0)\n", None),  # it is connected later
        ("1x1 (0,0,1)\n1x1 (0,0,0)\n1x1 (3,3,3)\n", "1x1 (0,0,1)\n1x1 (0,0,0)\n"),
        ("1x1 (2,2,2)\n1x1 (0,0,1)\n1x1 (0,0,0)\n1x1 (2,2,0)\n", ""),  # cut at the first, nothing else is left
        ("1x1 (0,0,0)\n1x2 (0,0,0)\n1x1 (0,0,1)\n", "1x1 (0,0,0)\n"),  # collides
        ("1x1 (0,0,0)\n1x1 (0,0,0)\n1x1 (0,0,1)\n", ""),  # so does this, and one token ends both lines
        ("1x1 (0,0,0)\n\n\n1x1 (0,0,9)\n", "1x1 (0,0,0)\n\n\n"),  # outside
        ("1x1 (0,0,0)\n11 (\n1x1 (0,0,1)\n", "1x1 (0,0,0)\n"),
        ("1x1 (1,0,0)\n1x1 (0,0,0)\n1x1 (3,3,3)\n", "1x1 (1,0,0)\n1x1 (0,0,0)\n"),
        ("1x1 (1,0,0)\n2x2 (3,3,3)\n", "1x1 (1,0,0)\n2x"),  # the token that ends a line begins the next
        ("2x2 @0 (0,0,0)\n1x2 @1 (1,0,1)\n1x2 @2 (0,0,2)\n", "2x2 @0 (0,0,0)\n1x2 @1 (1,0,1)\n"),
    ],
)
def test_what_rollback_keeps(text, kept):
    editor = editor_of()
    assert kept_text(editor, text) == kept
    assert editor.counts(0) == {"rollbacks": 0 if kept is None else 1}


def test_there_are_only_so_many_rollbacks():
    editor = editor_of(max_rollbacks=2)
    assert [kept_text(editor, "1x1 (0,0,1)\n") for _ in range(3)] == ["", "", None]
    assert editor.counts(0) == {"rollbacks": 2}


def test_rollback_under_a_weight():
    """A weight on the end of a 1x4 that a 1x1 holds tears it off: what held it goes too, if it is what gives way."""
    text = "1x1 (0,0,0)\n1x4 (0,0,1)\n"
    assert kept_text(editor_of(), text) is None
    kept = kept_text(editor_of([{**ROW, "loads": [{"grams": 300, "at": [0, 3]}]}]), text)
    assert kept in ("", "1x1 (0,0,0)\n")
    # a prefix that does not reach below the weight does not carry it
    tower = "".join(f"2x2 (0,0,{z})\n" for z in range(3))
    beside = {**ROW, "loads": [{"grams": 300, "at": [0, 0]}]}
    assert kept_text(editor_of([beside]), tower) is None
    assert kept_text(editor_of([beside]), f"{tower}1x1 (3,3,3)\n") == tower
    # nothing is below it: nothing of this is known to be right
    unsupported = {**ROW, "loads": [{"grams": 1, "at": [3, 3]}]}
    assert kept_text(editor_of([unsupported]), tower) == ""
    assert kept_text(editor_of([unsupported]), f"{tower}11 (\n") == tower  # what comes next may carry it


def test_a_structure_is_cut_before_the_first_of_its_failing_bricks(monkeypatch):
    monkeypatch.setattr(editor, "analyse", lambda built, **_: Analysis(len(built) < 4, None, (1, 2)))
    assert kept_text(editor_of(), "".join(f"1x1 ({x},0,0)\n" for x in range(4))) == "1x1 (0,0,0)\n"


def test_a_solver_that_fails_takes_nothing_back(monkeypatch):
    def fail(*_, **__):
        raise editor.SolverError("it gave up")

    monkeypatch.setattr(editor, "analyse", fail)
    assert kept_text(editor_of(), "1x1 (0,0,1)\n") is None


def written(editor, text, ended=False):
    """What is kept of a text, token after token; stops where something is taken back."""
    ids = SPANNING.encode(text) + ([SPANNING.eos_token_id] if ended else [])
    for count in range(1, len(ids) + 1):
        kept = editor.keep(0, ids[:count], ended and count == len(ids))
        if kept is not None:
            return SPANNING.decode(ids[:kept])
    return None


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("2x2 (0,0,0)\n2x2 (0,0,1)\n", None),
        ("2x2 (0,0,3)\n", None),  # floats, which rejection does not look at
        ("2x2 (0,0,0)\n1x2 (1,1,0)\n", "2x2 (0,0,0)\n"),
        ("2x2 (0,0,0)\n2x2 (3,3,0)\n", "2x2 (0,0,0)\n2x"),
        ("2x3 (0,0,0)\n", ""),
        ("1x1 (0,0,0)\n\n1x1 (0,0,0", None),  # not a line yet
        ("1x1 (2,0,0)\n1x1 (0,0,0)\n1x1 (0,0,0)\n", "1x1 (2,0,0)\n1x1 (0,0,0)\n"),
        ("1x1 (0,0,0)\n" + "9" * 40, "1x1 (0,0,0)\n"),  # longer than any line
    ],
)
def test_what_rejection_keeps(text, kept):
    editor = editor_of(name="rejection")
    assert written(editor, text) == kept
    assert editor.counts(0) == {"rejections": 0 if kept is None else 1}


def test_rejection_looks_at_a_last_line_without_an_end():
    for text, kept in {"1x1 (0,0,0)\n1x1 (0": "1x1 (0,0,0)\n", "1x1 (0,0,0)\n1x1 (0,0,1)": None, "": None}.items():
        assert written(editor_of(name="rejection"), text, ended=True) == kept


def test_a_wrong_line_that_was_kept_is_not_held_against_the_next():
    editor = editor_of(name="rejection", max_brick_rejections=2)
    for _ in range(2):
        assert written(editor, "11 (\n") == ""
    assert written(editor, "11 (\n1x1 (0,0,0)\n") is None
    assert written(editor, "11 (\n1x1 (0,0,0)\n1x2 (0,0,0)\n") == "11 (\n1x1 (0,0,0)\n"
    assert editor.counts(0) == {"rejections": 3}


# ---- what surrounds it


def test_a_mode_that_a_model_cannot_do_is_said(loaded):
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=len(loaded[1])))
    with pytest.raises(EditorError, match=r"--editor rollback deletes generated tokens.*'gpt2' are not supported"):
        run((gpt2, loaded[1]), "rollback", rows=ROWS[:1], length=5)


def test_counts_are_averaged():
    samples = [Sample(ROW, "", 3, None, counts={"rollbacks": n}) for n in (0, 1, 1, 6)]
    metrics, _ = summarise(samples, 2)
    assert (metrics["rollbacks"], metrics["rollbacks_median"]) == (2, 1)


# ---- the commands


def said(capsys, *words):
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_solve_says_how_often_it_began_again(careless_path, tmp_path, capsys):
    code, out, _ = said(
        capsys, "solve", careless_path, "--all", "--task", "brick", "--text", "a, world 4", "--samples", "1",
        "--brick_data", "tests/data/stabletext2brick.jsonl", "--out", str(tmp_path), "--editor", "rejection+rollback",
    )  # fmt: skip
    (line,) = (line for line in out.splitlines() if line[2:4] == "1.")
    assert code == 0 and "rejections" in line and "rollbacks" in line and "stable True" in line


@pytest.mark.parametrize(("editor", "message"), [
    ("rejecting", "unknown --editor 'rejecting' (did you mean 'rejection'?); editors of task 'brick' are: rejection, "
                  "rollback, rejection+rollback\n"),
    ("rejection", "redundant with --constrain"),  # which is the task's default
])  # fmt: skip
def test_eval_says_what_editors_there_are_before_anything_is_loaded(tmp_path, capsys, editor, message):
    out = tmp_path / "out"
    code, _, err = said(capsys, "eval", "./none", "--task", "brick", "--out", str(out), "--editor", editor)
    assert code == 2 and not out.exists() and message in err


def test_eval_with_an_editor(careless_path, tmp_path, capsys):
    code, out, err = said(
        capsys, "eval", "--task", "brick", "--model_name_or_path", careless_path, "--output_dir", str(tmp_path),
        "--use_cpu", "true", "--brick_levels", "stack", "--eval_rows", "2", "--samples", "2", "--train_rows", "2",
        "--max_completion_length", "40", "--editor", "rejection+rollback", "--max_rollbacks", "3",
        "--constrain", "false",
    )  # fmt: skip
    assert code == 0, err
    assert "unconstrained, editor rejection+rollback, temperature 1" in out and "rollbacks_median" in out
    (evaluation,) = json.loads((tmp_path / "evaluation.json").read_text())["evaluations"]
    assert all(set(sample["counts"]) == {"rejections", "rollbacks"} for sample in evaluation["samples"])
    assert evaluation["metrics"]["rollbacks"] <= 3


LINES = st.lists(
    st.builds("{}x{} ({},{},{})".format, *[st.integers(1, 3)] * 2, *[st.integers(-1, 3)] * 3)
    | st.builds("1x2 @{} ({},0,1)".format, st.integers(0, 4), st.integers(-2, 2))
    | st.sampled_from(["", "x", "2x2 (0,0,0)"]),
    max_size=9,
)


@settings(max_examples=60)
@given(LINES, st.integers(1, 5))
def test_the_first_invalid_line_is_found_as_by_trying_every_prefix(lines, max_bricks):
    editor = editor_of(max_bricks=max_bricks)
    written = [line for line in lines if line.strip()]
    tried = [editor._wrong(0, "\n".join(written[:count])) for count in range(1, len(written) + 1)]
    right = next((count for count, wrong in enumerate(tried) if wrong), len(tried))
    assert editor._right_lines(parse("\n".join(written), WORLD)) == right
