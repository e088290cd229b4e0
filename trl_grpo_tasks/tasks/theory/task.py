"""The theory task: complete a quantum field theory so that it is consistent and agrees with known particles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...constraints import OneSpelling
from ...task import Row, Score, Task, TinySpec, check_choice, check_one_of, check_text, option
from . import data
from .canonical import digest, rediscovered
from .constraint import check_prompt, theory_constraint
from .language import LanguageError, parse
from .latex import write_latex
from .relabel import smaller_requests
from .render import picture, to_html
from .reward import GOALS, LOWEST_SUM, SCORINGS, THRESHOLD_GEV, WORST, anomaly_sum, judge
from .sarah import write_sarah
from .words import VOCABULARY

EXAMPLE = "BOS GAUGE_GROUPS NUM_GAUGE num_1 GROUP group_1 SU_5"  # a request: the group SU(5); the rest is to be found


@dataclass(frozen=True)
class TheoryOptions:
    """Options of the theory task: prompts, curriculum, limits, and the embedded model's size."""

    start: str = option(
        "standard_model",
        f"Kind of prompt, i.e. which part of a theory is given: {', '.join(data.STARTS)}, or mixed.",
    )
    new_multiplets: int = option(4, "Maximum number of fermion multiplets to add to the Standard Model.")
    prompts_file: str | None = option(
        None, "File with one prompt per line, or JSON lines with 'prompt' and optionally 'gold'. Default: use --start."
    )
    goals: list[str] = field(
        default_factory=lambda: ["anomalies"],
        metadata={
            "help": f"Curriculum levels, each with its own success criterion: {', '.join(GOALS)}. Tests use the last."
        },
    )
    scoring: str = option(
        "full",
        "'full': the total described under Score. 'document', as in the requirement document: the sum of anomalies, "
        "exotics and length alone, where 'anomalies' is a sum over conditions instead of their mean.",
    )
    max_words: int = option(400, "Maximum length of a theory in words; longer ones fail.")
    threshold_gev: float = option(THRESHOLD_GEV, "Minimum mass of charged or coloured exotics, in GeV.")
    tiny_width: int = option(128, "Hidden size of the embedded model.")
    tiny_layers: int = option(4, "Number of layers of the embedded model.")
    tiny_heads: int = option(4, "Number of attention heads of the embedded model.")

    def __post_init__(self) -> None:
        check_choice("start", self.start, [*data.STARTS, "mixed"])
        check_choice("scoring", self.scoring, SCORINGS)
        for goal in self.goals:
            check_choice("goals", goal, GOALS)
        if not self.goals or list(self.goals) != [goal for goal in GOALS if goal in self.goals]:
            raise ValueError(f"--goals {' '.join(self.goals)}: name at least one of {' '.join(GOALS)}, in this order")
        least = 2 if self.start in ("one_given", "mixed") and self.prompts_file is None else 1
        if not least <= self.new_multiplets <= 7:
            given = f", because --start {self.start} gives one of them" if least == 2 else ""
            raise ValueError(f"--new_multiplets {self.new_multiplets} must be from {least} to 7{given}")
        if self.tiny_width % self.tiny_heads or self.tiny_width // self.tiny_heads % 2:
            raise ValueError(
                f"--tiny_width {self.tiny_width} must be an even multiple of --tiny_heads {self.tiny_heads}"
            )
        for name in ("max_words", "threshold_gev", "tiny_layers"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} {getattr(self, name)} must be greater than 0")


class TheoryTask(Task):
    """Generates the rest of a theory and scores its anomalies, particle content, masses and couplings.

    The total is from -13 (not a theory) to 4: 1 for cancelled anomalies, 2 for success, and 1 for a success that no
    other completion of the group found. With `--scoring document` it is from -500 to the number of conditions.
    """

    name: ClassVar[str] = "theory"
    version: ClassVar[str] = "4"
    description: ClassVar[str] = "Quantum field theories without anomalies and without light exotics"
    weights: Mapping[str, float] = SCORINGS["full"]
    defaults: ClassVar[Mapping[str, Any]] = {
        "constrain": True,
        "max_completion_length": 256,
        "num_generations": 16,
        "per_device_train_batch_size": 16,
        "temperature": 1.0,
        "cold_start_steps": 100,  # no pretrained model knows the language
    }
    tiny_defaults: ClassVar[Mapping[str, Any]] = {
        "new_multiplets": 3,
        "max_completion_length": 160,
        "train_rows": 512,
        "eval_rows": 56,  # of 63 that there are: the last ones take the longest to find
        "cold_start_steps": 60,
        "per_device_train_batch_size": 64,
        "max_steps": 30,
    }
    Options: ClassVar[type] = TheoryOptions

    def __init__(self, options: Any = None):
        super().__init__(options)
        self.levels = tuple(self.options.goals)
        self.weights = SCORINGS[self.options.scoring]
        self._rows = data.read_prompts(self.options.prompts_file) if self.options.prompts_file else None
        self._listed = None if self._rows is None else {row["prompt"] for row in self._rows["train"]}

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Return rows with a prompt, a level, and a `gold` completion if one is known."""
        if split not in ("train", "test"):
            raise ValueError(f"unknown split {split!r}; splits are: train, test")
        if self._rows is not None:
            rows = self._rows[split][:size]
        else:
            rows = data.generate(self.options.start, split, size, seed, self.options.new_multiplets)
        levels = self.levels if split == "train" else self.levels[-1:]
        # Repeat the rows of a short file, so that every level has a row.
        repeats = -(-len(levels) // max(1, len(rows))) if size is None else 1
        return [{**row, "level": levels[n % len(levels)]} for n, row in enumerate(rows * repeats)]

    def row_of(self, text: str) -> dict[str, Any]:
        """Return a row for a prompt, the beginning of a theory."""
        text = " ".join(text.split())
        if not text.startswith("BOS"):
            raise ValueError(f"{text[:80]!r} is not the beginning of a theory; write one, such as {EXAMPLE!r}")
        check_prompt(text)
        return {"prompt": text, "level": self.levels[-1]}

    def row_from(self, given: Row) -> dict[str, Any]:
        """Return a row whose prompt is the beginning of a theory."""
        row = super().row_from(given)
        if not isinstance(row["prompt"], str):
            raise ValueError("the 'prompt' of a row must be a text, the beginning of a theory, not chat messages")
        check_prompt(row["prompt"])
        row.setdefault("level", self.levels[-1])
        check_one_of(row, "level", GOALS)
        check_text(row, "gold")
        return row

    def score(self, row: Row, completion: str) -> Score:
        goal = GOALS[row.get("level", self.levels[-1])]
        text = f"{row['prompt']} {completion}"
        try:
            theory = parse(text)
        except LanguageError as error:
            worst = WORST | ({"anomalies": LOWEST_SUM} if self.options.scoring == "document" else {})
            components = {name: worst[name] for name in goal} | {"solved": 0.0}
            return self.make_score(components, valid=False, success=False, reason=str(error))
        words = len(text.split())
        found = judge(theory, words, self.options.max_words, self.options.threshold_gev)
        problems = [found.problems[name] for name in goal if name in found.problems]
        if not _adds_fermions(row["prompt"], completion, len(theory.groups)):
            problems.append("the completion adds no fermion to the prompt")
        key = digest(theory)
        components = {name: found.components[name] for name in goal} | {"solved": float(not problems)}
        if self.options.scoring == "document" and "anomalies" in goal:
            components["anomalies"] = anomaly_sum(found.anomalies)
        info = {
            "theory": key,
            "named": rediscovered(key),
            "words": words,
            "anomalies": {name: str(value) for name, value in found.anomalies.items() if value},
            "unbroken": found.vacuum.unbroken,
            "exotics": [[s.kind, s.colour, str(s.charge), round(mass, 3)] for s, mass in found.exotics[:20]],
            "problems": dict(found.problems),
        }
        return self.make_score(components, True, not problems, "; ".join(problems), info)

    def gold(self, row: Row) -> str:
        if not row.get("gold"):
            raise ValueError(
                "this prompt has no known completion; add a 'gold' to the file, or pass --cold_start_steps 0"
            )
        return row["gold"]

    def bad(self, row: Row) -> str:
        """Return the prompt again, a typical output of an untrained model."""
        return " " + row["prompt"]

    def canonical(self, row: Row, completion: str) -> str:
        try:
            return digest(parse(f"{row['prompt']} {completion}"))
        except LanguageError:
            return super().canonical(row, completion)

    def relabel(self, row: Row, completion: str) -> tuple[Row, str] | None:
        """Return the training row that asks for fewer new multiplets, and the part of the theory that answers it.

        The prompt must be one that `dataset` could return: of the training split, and in the file if there is one.
        """
        options = self.options
        limits = options.new_multiplets, options.max_words, options.threshold_gev
        for prompt, answer in smaller_requests(row["prompt"], completion, *limits):
            if not data.is_test(prompt) if self._listed is None else prompt in self._listed:
                return {"prompt": prompt, "gold": answer, "level": row.get("level", self.levels[-1])}, answer
        return None

    def group_components(
        self, rows: Sequence[Row], completions: Sequence[str], scores: Sequence[Score | None]
    ) -> dict[str, list[float | None]]:
        """Return, for each success, 1 divided by the number of completions in the group with the same theory."""
        keys = [score.info["theory"] if score and score.success else None for score in scores]
        counts = Counter(keys)
        return {"distinct": [0.0 if key is None else 1 / counts[key] for key in keys]}

    def constraint(self, tokenizer: Any) -> OneSpelling:
        return OneSpelling(tokenizer, theory_constraint(tokenizer))

    def tiny(self) -> TinySpec:
        """Return a small Llama with one token per word, including the space before it."""
        options = self.options
        tokens = ["BOS", *(f" {word}" for word in VOCABULARY)]
        return TinySpec(tokens, options.tiny_width, options.tiny_layers, options.tiny_heads, context=1024)

    def render(self, row: Row, completion: str) -> str | bytes:
        try:
            theory = parse(f"{row['prompt']} {completion}")
        except LanguageError as error:
            return to_html(row["prompt"], completion, str(error))
        return picture(theory, self.score(row, completion))

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """Return the picture and, if the text is a theory, a SARAH model file and a LaTeX document.

        `sarah.txt` has the reason if there is no SARAH file."""
        files = super().exports(row, completion)
        try:
            theory = parse(f"{row['prompt']} {completion}")
        except LanguageError:
            return files
        name = rediscovered(digest(theory)) or "Theory"
        try:
            files["sarah.m"] = write_sarah(theory)
        except ValueError as error:
            files["sarah.txt"] = f"{error}\n"
        return files | {"theory.tex": write_latex(theory, name)}


def _adds_fermions(prompt: str, completion: str, groups: int) -> bool:
    """Return whether the completion writes at least a part of some fermion."""
    if "FERMION" in completion.split():
        return True
    words = prompt.split()
    last = len(words) - 1 - words[::-1].index("FERMION") if "FERMION" in words else len(words)
    return 0 < len(words) - last < 4 + 3 * groups  # FERMION id GENERATIONS n, and three words for each group
