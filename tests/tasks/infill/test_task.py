"""The infill task: gaps, fills, corruption, judges and pictures, with small models only."""

import json
import random
import re
import shutil
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.exhaustive import exhaustive_but
from tests.support.pt_file import CHARACTERS, judge_score, write_pt
from tests.support.training import config, resumed
from tests.support.walks import random_tokens
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.commands.check import check_task
from trl_grpo_tasks.commands.main import main as command
from trl_grpo_tasks.evaluation.evaluate import evaluate
from trl_grpo_tasks.models.loading import load_model, load_tokenizer
from trl_grpo_tasks.models.tiny import make_tokenizer, save_tiny
from trl_grpo_tasks.registry import get_task
from trl_grpo_tasks.rewards import classifier
from trl_grpo_tasks.rewards.classifier import FrozenClassifier, check_judge
from trl_grpo_tasks.rewards.components import component_weights
from trl_grpo_tasks.rewards.executor import RewardExecutor
from trl_grpo_tasks.tasks.infill import classifiers, data, fills, masking
from trl_grpo_tasks.tasks.infill.render import UNJUDGED, colour, picture, to_html
from trl_grpo_tasks.tasks.infill.task import JUDGE_SEED
from trl_grpo_tasks.training.cold_start import cold_start

SMALL = {"text_length": 16, "tiny_width": 16, "tiny_layers": 1, "tiny_heads": 2, "judge_width": 16}
CORPUS = "\n\n".join(
    f"the {a} {b} of the {c}" for a in ("old", "red", "big") for b in ("cat", "hat", "mat") for c in ("hill", "mill")
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "hill.txt"
    path.write_text(CORPUS)
    return str(path)


@pytest.fixture(scope="session")
def judged(corpus, judges_path, tmp_path_factory):
    """A task whose judge was made by the command. That which is only logged is untrained."""
    folder = tmp_path_factory.mktemp("judges")
    options = SMALL | {"corpus": corpus, "judge_steps": 150, "judges_folder": str(folder)}
    flags = {name: options[name] for name in ("corpus", "judge_steps", "text_length", "judge_width")}
    assert command(["tool", "infill", "prepare-judge", *words_of(flags | {"output_dir": folder / "a"})]) == 0
    judges = {"judge": str(folder / "a"), "held_out_judge": str(judges_path / "held_out")}
    return get_task("infill", options | judges)


# ---- gaps


@settings(max_examples=100)
@given(
    text=st.text(alphabet="ab c.", min_size=1, max_size=60).map(data.clean).filter(bool),
    schedule=st.sampled_from(list(masking.SCHEDULES)),
    ratio=st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
)
def test_schedules_choose_about_the_requested_number_of_places(text, schedule, ratio, seed):
    places = masking.choose_places(text, schedule, ratio, random.Random(seed))
    wanted = min(len(text), max(1, round(ratio * len(text))))
    assert places == sorted(set(places)) and places[0] >= 0 and places[-1] < len(text)
    if schedule == "words":
        chosen = set(places)
        for word in re.finditer(r"\S+", text):
            assert len(chosen & set(range(*word.span()))) in (0, len(word[0])), "a word was cut"
        assert len(places) <= wanted or len(masking.runs(places)) == 1
        assert not any(text[place] == " " for place in places)
    else:
        assert len(places) == wanted
    if schedule == "ends":
        kept = [place for place in range(len(text)) if place not in places]
        assert not kept or kept == list(range(kept[0], kept[-1] + 1)), "a hole in the middle"


@settings(max_examples=100)
@given(
    text=st.text(alphabet="abc d", min_size=1, max_size=40).map(data.clean).filter(bool),
    chosen=st.sets(st.integers(0, 39), min_size=1),
    policy=st.sampled_from(["masked", "causal"]),
    letters=st.text(alphabet="xyz", min_size=40, max_size=40),
)
def test_fills_round_trip(text, chosen, policy, letters):
    """Fills round-trip, also with everything or the ends masked; the oracle fills the places one by one."""
    places = sorted({place % len(text) for place in chosen})
    row = {"pieces": text, "places": places, "policy": policy}
    oracle = "".join(letters[places.index(i)] if i in places else c for i, c in enumerate(text))
    found = ["".join(oracle[place] for place in run) for run in masking.runs(places)]
    assert fills.read(row, fills.write(row, found)) == (found, "")
    assert "".join(part for part, _ in fills.parts(row, found)) == oracle
    assert sum(len(part) for part, is_fill in fills.parts(row, found) if is_fill) == len(places)
    assert fills.agreement(row, found) == 0 and fills.agreement(row, fills.gold_fills(row)) == 1


def test_windows_are_whole_words_of_a_passage():
    passages = data.read_passages(None, "text")
    weights = torch.tensor([len(p) for p in passages]).cumsum(0).tolist()
    for seed in range(200):
        text = data.window(passages, weights, 40, random.Random(seed))
        assert 0 < len(text) <= 40 and any(f" {text} " in f" {passage} " for passage in passages)


def test_the_built_in_corpus_is_small_and_names_its_source():
    assert data.BUILT_IN.stat().st_size < 1_000_000
    assert "public domain" in (data.BUILT_IN.parent / "SOURCE.md").read_text()
    task = get_task("infill")
    train, test = (task.dataset(split, 300, 0) for split in ("train", "test"))
    assert {row["schedule"] for row in train} == set(masking.SCHEDULES)
    assert {row["level"] for row in test} == {"0.1", "0.2", "0.35"}
    assert not {row["pieces"] for row in train} & {row["pieces"] for row in test}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"corpus": ""}, "no passage"),
        ({"corpus": "x\n\ny"}, "no passage"),
        ({"corpus": "a single passage, no more"}, "single passage"),
        ({"corpus": "/no/such/file.txt"}, "--corpus /no/such/file.txt: folder ./no. does not exist"),
        ({"corpus": "no such text"}, "neither a text file nor a Hub data set"),
        ({"policy": "diffusion"}, "choose from: causal, masked"),
        ({"masking": ["word"]}, r"did you mean 'words'\?"),
        ({"mask_ratios": [1.5]}, "at most 1"),
        ({"span_lengths": [3]}, "must be two numbers, the shortest and the longest"),
        ({"span_lengths": [0, 2]}, "must be two numbers"),
        ({"span_lengths": [4, 2]}, "must be two numbers"),
        ({"tiny_width": 18, "tiny_heads": 3, "judge_width": 20}, "--judge_width 20 must be a multiple of 8"),
        ({"tiny_heads": 0}, "--tiny_heads 0 must be at least 1"),
        ({"policy": "causal", "tokens_of": "bert"}, "requires --policy masked"),
    ],
)
def test_invalid_options_and_texts_are_reported(tmp_path, options, words):
    if "passage" in words:
        (tmp_path / "text.txt").write_text(options["corpus"])
        options = {"corpus": str(tmp_path / "text.txt")}
    with pytest.raises(ValueError, match=words):
        get_task("infill", options)


@pytest.mark.parametrize("options", [{"policy": "causal"}, {"mask_ratios": [1.0]}])
def test_every_variant_keeps_the_contract(options):
    check_task(get_task("infill", options))


def test_a_judge_that_decides_makes_valid_completions_a_success():
    task = get_task("infill")
    row = task.row_of("the c_t")
    judges = task.judges()
    for fill, value, success in (("a", 0.5, True), ("a", 0.49, False), ("at", 0.9, False)):  # the last does not fit
        score = judges["judge"].added_to(task.score(row, fill), value)
        assert score.success is success and score.components["judge"] == value and bool(score.reason) is not success
        assert not judges["held_out"].added_to(task.score(row, fill), 0.9).success
    gold = task.dataset("test", 1, 0)[0]
    assert judges["judge"].added_to(task.score(gold, task.gold(gold)), 0.1).success, "the original is right"


def test_a_users_text_needs_a_gap():
    task = get_task("infill")
    row = task.row_of("the c__ sat _")
    assert task.score(row, task.gold(row)).reason == "the original text is unknown"
    assert row["prompt"] == "the c<mask><mask> sat <mask>" and row["places"] == [5, 6, 12]
    assert task.filled(row, "at.") == "the cat sat ."
    assert task.filled(row, "at") is None and task.score(row, "at").reason == "there are 2 fills for 3 masks"
    with pytest.raises(ValueError, match="there is no gap"):
        task.row_of("the cat sat.")
    with pytest.raises(ValueError, match="there is no gap"):
        task.row_of("")


# ---- the causal policy


def test_the_constraint_gives_each_gap_its_length():
    """Random completions under the constraint are valid (oracle: Python's `re`)."""
    task = get_task("infill", {"policy": "causal"})
    tokenizer = make_tokenizer([*"abc ", "ab", "\n"], 64)
    constraint = task.constraint(tokenizer)
    row = task._with_prompt({"pieces": "ab cab", "places": [0, 1, 4], "level": "0.1", "schedule": "x"})
    assert row["prompt"][0]["content"].endswith("\n__ c_b")
    rng, seen = random.Random(0), set()
    for _ in range(50):
        text = tokenizer.decode(random_tokens(constraint, row, rng), skip_special_tokens=True)
        assert re.fullmatch(r"[^\n]{2}\n[^\n]{1}", text) and task.score(row, text).valid, text
        seen.add(text)
    assert len(seen) > 10
    assert "fills for 2 gaps" in task.score(row, "abc").reason
    assert task.score(row, "ab\nab").reason == "fill 2 has 2 characters; its gap needs 1"


# ---- judges


@settings(max_examples=60)
@given(text=st.text(alphabet="abcd e", min_size=1, max_size=40).map(data.clean).filter(bool), seed=st.integers(0, 99))
def test_corruption_changes_a_text_and_keeps_its_length(text, seed):
    spoiled = classifiers.Corruption(["abcd abcd dcba", "aabb ccdd e"]).spoil(text, random.Random(seed))
    assert spoiled != text and len(spoiled) == len(text)


def test_a_judge_distinguishes_real_from_corrupted_text_and_stays_frozen(judged, capsys):
    judge = judged.judges()["judge"]
    texts = [passage[: SMALL["text_length"]] for passage in CORPUS.split("\n\n")]
    corruption, rng = classifiers.Corruption(texts), random.Random(0)
    assert fmean(judge.judge(texts)) > 0.5 > fmean(judge.judge([corruption.spoil(text, rng) for text in texts]))
    [real] = judge.judge(texts[:1])
    model = judge._model
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    asked = []
    model.register_forward_hook(lambda *call: asked.append(1))
    assert judge.judge([texts[0], None]) == [real, 0.0] and not asked, "its scores were not cached"
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="must stay frozen"):
        judge.judge(["something new"])


def test_an_evaluation_loads_each_judge_once(judged, encoder_path, monkeypatch):
    loaded, load_judge = [], classifier.load_judge
    monkeypatch.setattr(classifier, "load_judge", lambda source: loaded.append(source) or load_judge(source))
    model, tokenizer = load_model(encoder_path, policy="masked"), load_tokenizer(encoder_path)
    with RewardExecutor(judged, 0) as executor:
        rows = judged.dataset("test", 6, 0)
        done = evaluate("x", model, tokenizer, judged, rows, executor=executor, num_samples=2, batch_size=4)
    assert sorted(loaded) == sorted([judged.options.judge, judged.options.held_out_judge])
    assert all(sample.score["components"].keys() >= {"judge", "held_out"} for sample in done.samples)


def test_a_judge_no_better_than_chance_is_not_saved(tmp_path, monkeypatch):
    # One passage to train on and one to test on, which is not corrupted: the judge says the same of all tested texts.
    (tmp_path / "corpus.txt").write_text("the cat sat down\n\nthe dog got away")
    monkeypatch.setattr(classifiers.Corruption, "spoil", lambda self, text, rng: text)
    task, said = get_task("infill", SMALL | {"corpus": str(tmp_path / "corpus.txt"), "judge_steps": 5}), []
    with pytest.raises(ValueError, match=r"50\.0% of held-out texts .*: it was not saved"):
        task.train_judge(tmp_path / "judge", False, JUDGE_SEED, said.append)
    assert "judge: 50.0% of 1024 held-out texts" in said[-1] and not (tmp_path / "judge").exists()


def test_a_judge_is_kept_and_never_overwrites_another_folder(judged, corpus, tmp_path, capsys, monkeypatch):
    made, said = Path(judged.options.judge), []
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    (tmp_path / "diary.txt").write_text("dear diary")
    judged.train_judge(made, False, JUDGE_SEED, said.append)
    assert not said, "it was trained again"
    other = get_task("infill", vars(judged.options) | {"judge_steps": 151})
    for task, folder, words in (
        (other, made, r"trained with other settings \(steps 150, not 151\)"),
        (judged, tmp_path, "is not empty and not a judge"),
    ):
        with pytest.raises(ValueError, match=words):
            task.train_judge(folder, False, JUDGE_SEED, said.append)
    flags = ["--output_dir", str(made), "--corpus", corpus, "--text_length", "16", "--judge_width", "16"]
    assert command(["tool", "infill", "prepare-judge", *flags, "--judge_steps", "150", "--held_out"]) == 2
    err = capsys.readouterr().err
    assert "trained with other settings (held_out False, not True, seed" in err and "--output_dir" in err
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]


def test_the_judges_of_a_run_do_not_depend_on_its_seed(corpus, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(classifiers, "train_judge", lambda *given, say, **settings: trained.append((given, settings)))
    task = get_task("infill", SMALL | {"corpus": corpus, "judges_folder": str(tmp_path)})
    task.prepare(0)
    task.prepare(1)
    (one, two), again = trained[:2], trained[2:]
    assert again == [one, two] and [given[0] for given, _ in (one, two)] == [tmp_path / "judge", tmp_path / "held_out"]
    assert not {*one[0][1]} & {*two[0][1]}, "the judges share passages"
    assert one[1]["seed"] != two[1]["seed"]


@pytest.mark.exhaustive
def test_two_runs_may_train_the_same_judge_at_the_same_time(judged, corpus, tmp_path):
    """The run that ends second keeps the judge of the first; a folder that is no such judge is left alone."""
    made, same, other = Path(judged.options.judge), tmp_path / "same", tmp_path / "other"

    def train(folder, other_run):
        judged.train_judge(folder, False, JUDGE_SEED, lambda said: other_run() if "classified" in said else None)

    train(same, lambda: shutil.copytree(made, same))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same"]
    with pytest.raises(OSError):
        train(other, lambda: (other.mkdir(), (other / "diary.txt").write_text("dear diary")))
    assert [path.name for path in other.iterdir()] == ["diary.txt"]


def test_missing_and_unsuitable_judges_are_reported(judged, bert_path, tmp_path):
    given = judged.options.judge
    for source, words in (
        (str(tmp_path / "none"), "the folder contains no model; create one with trl-grpo-tasks tool infill"),
        (bert_path, "BertForMaskedLM, which does not classify text"),
    ):
        with pytest.raises(ValueError, match=words):
            check_judge(source)
        with pytest.raises(ValueError, match=words):
            get_task("infill", {"judge": source}).prepare(0)
    with pytest.raises(ValueError, match="must be a different model"):
        get_task("infill", {"judge": given, "held_out_judge": given}).prepare(0)
    with pytest.raises(ValueError, match="'held_out' is only logged"):
        component_weights(judged, {"held_out": 1.0})


# ---- pictures


def test_fills_are_coloured_by_the_judge(judged):
    row = judged.row_of("the r__ cat <&> t_e")
    ((title, parts),) = judged.coloured(row, "edh")
    assert title.startswith("judge 0.") and [part for part, score in parts if score is not None] == ["ed", "h"]
    shown = judged.render(row, "edh")
    assert "&lt;&amp;&gt;" in shown and "title='judge 0." in shown
    files = judged.exports(row, "edh")
    assert files["sample.png"].startswith(b"\x89PNG") and files["sample.html"] == shown
    assert colour(0.0)[0] > colour(0.0)[1] and colour(1.0)[1] > colour(1.0)[0] and colour(UNJUDGED) == (110, 110, 110)
    assert "2 fills for 3 masks" in judged.render(row, "ed")
    assert len(picture([("long", [("x" * 300, None)])])) > len(picture([("short", [("x", None)])]))
    assert "<script>" not in to_html([("<script>", [("<script>", 0.2)])])


# ---- training


def infill_trainer(task, model, output_dir, **options):
    return TaskGRPOTrainer(
        model, args=config(output_dir, temperature=0.8, beta=0.1, train_rows=32, **options), task=task
    )


@pytest.fixture(scope="session")
def encoder_path(judged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    save_tiny(judged.tiny(), folder, seed=1)
    return str(folder)


def test_the_encoder_is_trained_by_the_frozen_judge_and_by_components_that_are_weighted(
    judged, encoder_path, tmp_path
):
    weights = {"component_weights": {"restored": 2.0}}
    trainer = infill_trainer(judged, encoder_path, tmp_path, max_steps=2, per_device_train_batch_size=64, **weights)
    judge = trainer.rewarding.rewards.executor.frozen_judges["judge"]
    judge.judge(["to load it"])
    before = {name: p.clone() for name, p in judge._model.named_parameters()}
    trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    for line in logs:
        parts = line["rewards/judge/mean"] + 2 * line["rewards/restored/mean"]
        assert line["reward"] == pytest.approx(parts, abs=1e-5)
        assert {"rewards/held_out/mean", "rewards/agreement/mean", "reward_std", "pg_loss", "kl_penalty"} <= {*line}
    assert any(line["rewards/restored/mean"] > 0 for line in logs), "nothing to reward"
    assert all(p.equal(before[name]) for name, p in judge._model.named_parameters()), "the judge was trained"
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not trained & {id(p) for p in judge._model.parameters()}


# ---- judges from .pt files


def test_a_judge_may_be_a_pt_file(tmp_path, judges_path):
    """It is converted once, scores as the file does, and must know the characters of the corpus."""
    state = write_pt(tmp_path / "scorer.pt", "sequence_scorer")
    corpus = tmp_path / "text.txt"
    corpus.write_text("To be, or not to be\n\nWhat's in a name?\n\nThe rest is silence.")
    options = {"corpus": str(corpus), "judge": str(tmp_path / "scorer.pt"), "judges_folder": str(tmp_path / "judges"),
               "held_out_judge": str(judges_path / "held_out"), "text_length": 16}  # fmt: skip
    task = get_task("infill", options)
    assert task._shown_judge is None and task.render(task.row_of("To b_"), "e"), "a picture without a judge"
    task.prepare(0)
    (folder,) = (tmp_path / "judges").iterdir()
    made = (folder / "model.safetensors").stat().st_mtime_ns
    task.prepare(0)
    assert (folder / "model.safetensors").stat().st_mtime_ns == made, "it was converted again"
    row = task.row_of("To be, o_ not")
    oracle = judge_score(state, [CHARACTERS.index(letter) for letter in "To be, or not"], len(CHARACTERS) + 1)
    assert task.judges()["judge"].score([row], ["r"]) == [pytest.approx(oracle, abs=1e-5)]
    assert task.user_options({"judge": "scorer.pt", "judges_folder": "elsewhere"}) == ["judges_folder"]
    write_pt(tmp_path / "scorer.pt", "sequence_scorer", seed=1)
    again = get_task("infill", options)
    again.prepare(0)
    assert again.judges()["judge"].score([row], ["r"]) != task.judges()["judge"].score([row], ["r"])
    for judge, words in (("none.pt", "this path does not exist"), ("scorer.pt", r"characters of the corpus: '5' 'é'")):
        corpus.write_text(corpus.read_text() + "\n\nAt 5 o'clock in the café")
        with pytest.raises(ValueError, match=words):
            get_task("infill", options | {"judge": str(tmp_path / judge)}).prepare(0)


def test_resuming_with_a_judge_is_bit_for_bit_the_same(judged, encoder_path, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "top_p": 0.95}
    make = partial(infill_trainer, judged, encoder_path, tmp_path, **options)
    assert len(list(resumed(make, tmp_path, (2,)))) == 1


def words_of(flags):
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


RUN = {"train_rows": 64, "eval_rows": 4, "samples": 2, "cold_start_steps": 3, "cold_start_batch_size": 8,
       "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 2, "reward_workers": 0,
       "logging_steps": 1, "use_cpu": "true", "report_to": "none"}  # fmt: skip


@pytest.mark.parametrize("policy", exhaustive_but(["masked"], ["masked", "causal"]))
def test_a_complete_run(judged, tmp_path, policy):
    """A masked model is trained with LoRA, a causal one as a whole; the model of the run then answers a request."""
    options = judged.options
    flags = {**RUN, **SMALL, "task": "infill", "output_dir": tmp_path / "run", "corpus": options.corpus,
             "judge": options.judge, "held_out_judge": options.held_out_judge, "policy": policy,
             "constrain": policy == "causal"}  # fmt: skip
    if policy == "masked":
        flags |= {"use_peft": True, "lora_target_modules": "all-linear", "beta": 0.1, "learning_rate": 1e-2}
    assert command(["train", *words_of(flags)]) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())["evaluations"]
    assert [evaluation["name"] for evaluation in results] == ["cold start", "GRPO"]
    for metrics in (evaluation["metrics"] for evaluation in results):
        assert metrics["valid"] == 1 and 0 < metrics["judge"] < 1 and 0 < metrics["held_out"] < 1
        assert metrics["reward"] == pytest.approx(metrics["judge"])
    if policy == "masked":
        folders = (tmp_path / "run" / "cold_start", tmp_path / "run")
        cold, end = (load_file(folder / "adapter_model.safetensors") for folder in folders)
        assert cold.keys() == end.keys() and any(not end[name].equal(value) for name, value in cold.items())
    assert "title='judge" in (tmp_path / "run" / "report.html").read_text()
    asked = {name: flags[name] for name in ("task", "corpus", "judge", "held_out_judge", "text_length", "policy")}
    asked |= {"text": "the r__ cat", "samples": 9, "out": tmp_path / "solved"}
    status = command(["solve", str(tmp_path / "run"), *words_of(asked)])
    lines = (tmp_path / "solved" / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    scores = [answer["score"] for answer in answers]
    assert scores == sorted(scores, reverse=True) and status == (0 if scores[0] >= 0.5 else 1)
    assert all(answer["success"] == (answer["score"] >= 0.5) for answer in answers), "the judge decides"


def test_the_cold_start_learns_gold_fills(judges_path, corpus, tmp_path):
    judges = {"judge": str(judges_path / "judge"), "held_out_judge": str(judges_path / "held_out")}
    task = get_task("infill", SMALL | judges | {"corpus": corpus, "mask_ratios": [0.1], "tiny_width": 32})
    untrained = str(tmp_path / "untrained")
    save_tiny(task.tiny(), untrained, seed=1)
    rows, tokenizer = task.dataset("train", 16, 0), load_tokenizer(untrained)
    settings = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    sizes = {"steps": 60, "batch_size": 16, "learning_rate": 1e-2, "seed": 1}
    trained = cold_start(untrained, task, rows, tmp_path / "cold", tokenizer=tokenizer, **sizes, **settings)
    shares = []
    for path in (untrained, trained):
        with RewardExecutor(task, 0) as executor:
            model, asked = load_model(path, policy="masked"), {"num_samples": 1, "temperature": 0}
            shares.append(evaluate("x", model, tokenizer, task, rows, executor=executor, **asked).metrics["agreement"])
    assert shares[1] > shares[0] + 0.3


def test_a_judge_with_one_output_uses_its_sigmoid(judged, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(
        judged.options.judge, num_labels=1, ignore_mismatched_sizes=True
    )
    model.config.problem_type = None
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(judged.options.judge)
    tokenizer.save_pretrained(tmp_path)
    text = "the red cat"
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    oracle = model.eval()(**inputs).logits[0, 0].sigmoid().item()
    assert FrozenClassifier("one", str(tmp_path), judged.filled).judge([text]) == [pytest.approx(oracle, abs=1e-6)]
