"""The archive of distinct successes: counts against sets of the test's own, resuming, two processes."""

import json
import random
from collections import Counter

import pytest

from tests.support.toy import ToyTask
from tests.support.training import config, parameters, timeless, toy_trainer
from tests.training.test_trainer import FixedTrainer
from trl_grpo_tasks import TaskGRPOTrainer
from trl_grpo_tasks.training import canonical_forms
from trl_grpo_tasks.training.extras import archive as module
from trl_grpo_tasks.training.extras.archive import Answer, Archive


class LooseTask(ToyTask):
    """Succeeds with any text that has the letter of the prompt; the order of letters does not matter."""

    spec = "tests.training.test_archive:LooseTask"

    def score(self, row, completion):
        score = super().score(row, completion)
        return self.make_score(score.components, score.valid, row["letter"] in completion)

    def canonical(self, row, completion):
        return "".join(sorted(completion))


class Observed(TaskGRPOTrainer):
    """Keeps the row and the text of every completion that was sampled."""

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        if not hasattr(self, "rollouts"):
            self.rollouts = []
        record = self.latest_rollout
        texts = [(example["row"], text) for example, text in zip(record.examples, record.completions, strict=True)]
        self.rollouts.append((self.state.global_step, texts))
        return rewards


# Pairs of completions with equal rewards are frequent.
RESAMPLED = {"resample_rounds": 1, "num_generations": 2, "component_weights": {"match": 0, "short": 0, "success": 1}}
RESAMPLED |= {"constrain": True, "logging_steps": 2}


def lines_of(folder):
    return [json.loads(line) for line in (folder / "archive.jsonl").read_text().splitlines()]


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "training_metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("options", [{}, RESAMPLED], ids=["plain", "resampled"])
def test_counts_are_those_of_the_completions(tiny_path, tmp_path, options):
    given = {"max_steps": 5, "archive": 1000} | options
    trainer = Observed(tiny_path, args=config(tmp_path, **given), task=LooseTask())
    trainer.train()
    seen, first = Counter(), {}
    for step, texts in trainer.rollouts:
        for row, text in texts:
            if json.loads(row)["letter"] in text:
                key = (json.loads(row)["prompt"], tuple(sorted(text)))
                seen[key] += 1
                first.setdefault(key, step + 1)
    assert len(trainer.rollouts) > 5 or not options
    assert len(seen) > 5 and max(seen.values()) > 1
    found = lines_of(tmp_path)
    assert {(a["row"]["prompt"], tuple(a["canonical"])): a["seen"] for a in found} == seen
    assert {(a["row"]["prompt"], tuple(a["canonical"])): a["first_step"] for a in found} == first
    scores = [LooseTask().score(a["row"], a["completion"]) for a in found]
    totals = [float(score.success) if options else score.total for score in scores]  # as the weights say
    assert [a["total"] for a in found] == pytest.approx(totals) and totals == sorted(totals, reverse=True)
    log = metrics_of(tmp_path)
    last = max(line["step"] for line in log)
    if not options:  # with resampling, rollouts of a step are several
        for line in log:
            assert line["archive/distinct"] == sum(step <= line["step"] for step in first.values())
    assert log[-1]["archive/distinct"] == len(seen) and last == 5
    assert sum(line["archive/new"] for line in log) == len(seen)


def test_stored_answers_are_the_best_and_counts_stay_exact():
    generator = random.Random(0)
    archive, seen, order = Archive(5), Counter(), []
    for step in range(40):
        texts = [str(generator.randrange(60)) for _ in range(4)]
        archive.add([Answer("{}", "", text, text, float(int(text) % 10)) for text in texts], step)
        order += [text for i, text in enumerate(texts) if not seen[text] and text not in texts[:i]]
        seen.update(texts)
        best = sorted(order, key=lambda text: (-(int(text) % 10), order.index(text)))[:5]
        assert [answer["canonical"] for answer in archive.ranked()] == best
        assert [answer["seen"] for answer in archive.ranked()] == [seen[text] for text in best]
        assert archive.distinct == len(seen)
        copy = Archive(5)
        copy.load_state_dict(archive.state_dict())
        assert copy.ranked() == archive.ranked() and copy.distinct == archive.distinct
        archive = copy if step % 3 == 0 else archive
    smaller = Archive(2)
    smaller.load_state_dict(archive.state_dict())
    assert smaller.ranked() == archive.ranked()[:2] and smaller.distinct == len(seen)


def test_the_number_of_counted_answers_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST_COUNTED", 3)
    archive = Archive(10)
    archive.add([Answer("{}", "", text, text, 1.0) for text in "abcdea"], 1)
    assert archive.distinct == 3 and [(a["canonical"], a["seen"]) for a in archive.ranked()] == [
        ("a", 2), ("b", 1), ("c", 1)
    ]  # fmt: skip


def test_requests_are_told_apart_and_rows_of_one_request_are_not():
    archive = Archive(10)
    answers = [("1", "ab", "c", "c"), ("2", "a", "bc", "bc"), ("3", "ab", "d", "c")]  # row, request, completion, form
    archive.add([Answer(*answer, 1.0) for answer in answers], 1)
    assert [(answer["row"], answer["completion"], answer["seen"]) for answer in archive.ranked()] == [
        (1, "c", 2), (2, "bc", 1)
    ]  # fmt: skip
    assert archive.distinct == 2


class FaultyTask(ToyTask):
    calls = 0

    def canonical(self, row, completion):
        type(self).calls += 1
        if "a" in completion:
            raise RuntimeError("no form")
        while "b" in completion:
            pass
        return "same"


def test_forms_that_fail_or_take_too_long_are_texts(monkeypatch, capsys):
    monkeypatch.setattr(canonical_forms, "SECONDS_PER_FORM", 0.2)
    forms = canonical_forms.CanonicalForms(FaultyTask())
    texts = [" a", "c", "d", "b", " a", "c"]
    assert [forms.of("{}", text) for text in texts] == ["a", "same", "same", "b", "a", "same"]
    assert FaultyTask.calls == 4, "forms are cached"
    said = capsys.readouterr()
    assert (said.out + said.err).count("canonical of task 'toy' failed (RuntimeError: no form)") == 1


def test_a_faulty_canonical_does_not_stop_training(tiny_path, tmp_path):
    class Broken(LooseTask):
        def canonical(self, row, completion):
            raise RuntimeError("no form")

    toy_trainer(tiny_path, tmp_path, task=Broken(), max_steps=2, archive=10, own_successes=8,
                eval_strategy="steps", eval_steps=1).train()  # fmt: skip
    assert all(answer["canonical"] == answer["completion"].strip() for answer in lines_of(tmp_path))


class Unscored(LooseTask):
    def score(self, row, completion):
        return None if completion.startswith("b") else super().score(row, completion)


def test_completions_without_a_score_and_held_out_rows_are_not_archived(tiny_path, tmp_path):
    FixedTrainer.fixed = ["a", "ba", "cc", "ac", "ca", "bb", "a", "d"]
    trainer = FixedTrainer(tiny_path, args=config(tmp_path, archive=9), task=Unscored())
    examples = [trainer.train_dataset[0]] * 8
    trainer.model.train()
    trainer._generate_and_score_completions(examples)
    assert {answer["canonical"]: answer["seen"] for answer in trainer.extras["archive"].state.ranked()} == {
        "a": 2,
        "ac": 2,
    }
    trainer.model.eval()
    trainer._generate_and_score_completions(examples)
    assert sum(answer["seen"] for answer in trainer.extras["archive"].state.ranked()) == 4


def test_files_are_written_with_checkpoints_and_replace_older_ones(tiny_path, tmp_path, monkeypatch):
    (tmp_path / "archive.jsonl").write_text("of an earlier run\n")
    written = []

    def write(self, folder):
        written.append(self.distinct)
        real(self, folder)

    real = Archive.write
    monkeypatch.setattr(Archive, "write", write)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "archive": 100}
    trainer = toy_trainer(tiny_path, tmp_path, task=LooseTask(), **options)
    trainer.train()
    assert len(written) == 4 and written[0] == 0
    assert written[-1] == trainer.extras["archive"].state.distinct == len(lines_of(tmp_path))
    monkeypatch.setattr(Archive, "write", lambda self, folder: (tmp_path / "none" / "x").read_text())
    toy_trainer(tiny_path, tmp_path, task=LooseTask(), **options).train()  # a full disk does not end the run


def test_off_nothing_changes(tiny_path, tmp_path):
    logs, weights = [], []
    for name, options in (("off", {}), ("on", {"archive": 10})):
        trainer = toy_trainer(tiny_path, tmp_path / name, max_steps=3, **options)
        trainer.train()
        logs.append([timeless(line) for line in trainer.state.log_history])
        weights.append(parameters(trainer))
    assert not (tmp_path / "off" / "archive.jsonl").exists() and not any("archive/" in k for x in logs[0] for k in x)
    assert [{k: v for k, v in line.items() if "archive/" not in k} for line in logs[1]] == logs[0]
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())
