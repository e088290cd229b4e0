"""The infill task: fill the gaps of a text, at once or in several steps; a frozen judge model scores the result."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...files import check_local_path
from ...task import MASK_TOKEN, POLICIES, Row, Score, Task, TinySpec, check_choice, option
from . import fills
from .data import GAP, alphabet, cut, read_passages, window
from .masking import SCHEDULES, SPAN_LENGTHS, choose_places, runs

if TYPE_CHECKING:
    from ...constraints.base import Constraint
    from .tokens import ModelTokens

JUDGES = ("judge", "held_out")
JUDGE_SEED = 42  # independent of --seed, so that runs with different seeds have the same reward
JUDGE_HEADS = 4
REAL_FROM = 0.5  # the score from which the judge takes a text for real
DRAWS = 100  # attempts to draw a text that can be written in the tokens of a model
QUESTION = f"Write what is missing ({GAP} is one character each), a line for each gap."
GIVEN = "given"  # the `schedule` of rows whose gaps the user chose
UNKNOWN = "the original text is unknown"  # of such rows


@dataclass(frozen=True)
class InfillOptions:
    """Options of the infill task: texts, gaps, judges, and the embedded model's size."""

    corpus: str | None = option(
        None,
        "Text file with blank lines between passages, or Hub data set (owner/name). Default: the built-in novel.",
    )
    text_column: str = option("text", "Column of the Hub data set that contains the texts.")
    text_length: int = option(64, "Maximum length of a text in characters, or in tokens with --tokens_of.")
    test_fraction: float = option(0.1, "Fraction of the passages held out for testing.")
    masking: list[str] = option(
        [*SCHEDULES], f"Kinds of gaps, one of which is drawn for each row: {', '.join(SCHEDULES)}."
    )
    mask_ratios: list[float] = option(
        [0.1, 0.2, 0.35], "Fractions of a text that are missing; each is a level, from easy to hard."
    )
    span_lengths: list[int] = option(
        [*SPAN_LENGTHS], "Shortest and longest gap of --masking spans, in characters, or in tokens with --tokens_of."
    )
    policy: str = option("masked", "'masked': a masked LM fills the gaps. 'causal': a decoder writes them.")
    tokens_of: str | None = option(
        None, "Make gaps of this model's tokens instead of characters: Hub id or folder of a masked language model."
    )
    judge: str | None = option(
        None,
        "Judge whose score is the reward: folder, Hub id or .pt file. Default: one is trained in --judges_folder.",
    )
    held_out_judge: str | None = option(None, "Second judge, for monitoring only. Default: one is trained as well.")
    judges_folder: str = option("outputs/infill_judges", "Folder for judges that are trained or converted here.")
    judge_steps: int = option(400, "Training steps of automatically trained judges.")
    judge_width: int = option(128, "Hidden size of automatically trained judges.")
    tiny_width: int = option(128, "Hidden size of the embedded model.")
    tiny_layers: int = option(4, "Number of layers of the embedded model.")
    tiny_heads: int = option(4, "Number of attention heads of the embedded model.")


class InfillTask(Task):
    """Fills gaps in texts. The reward is the judge's probability that the filled text is real.

    A fill succeeds if the judge takes the text for real, or if it is the original. Agreement with the original and
    the score of a second judge, which training never sees, are only monitored.
    """

    name: ClassVar[str] = "infill"
    version: ClassVar[str] = "3"
    description: ClassVar[str] = "Fill the gaps of a text; a frozen judge scores how real it looks"
    weights: Mapping[str, float] = {"judge": 1.0, "held_out": 0.0, "agreement": 0.0, "restored": 0.0}
    watched = ("held_out",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_generations": 8,
        "temperature": 0.8,
        "beta": 0.1,
        "max_completion_length": 64,
    }
    tiny_defaults: ClassVar[Mapping[str, Any]] = {
        "text_length": 40,
        "mask_ratios": [0.05, 0.1, 0.2],
        "judge_steps": 800,
        "judge_width": 64,
        "tiny_width": 96,
        "tiny_layers": 3,
        "train_rows": 20000,
        "eval_rows": 150,
        "cold_start_steps": 400,
        "cold_start_batch_size": 64,
        "learning_rate": 3e-4,
        "per_device_train_batch_size": 256,
        "max_steps": 20,
        "reward_workers": 0,
    }
    Options: ClassVar[type] = InfillOptions
    tools: ClassVar[Mapping[str, Any]] = {
        "prepare-judge": "trl_grpo_tasks.tasks.infill.prepare_classifier:main",
    }

    def __init__(self, options: Any = None):
        super().__init__(options)
        _check_options(self.options)
        self.policy = self.options.policy
        self.levels = tuple(f"{ratio:g}" for ratio in sorted(self.options.mask_ratios))
        passages = read_passages(self.options.corpus, self.options.text_column)
        self._passages = cut(passages, self.options.test_fraction)

    @classmethod
    def user_options(cls, options: Mapping[str, Any]) -> list[str]:
        """The folder in which judges would be trained or converted. Judges that are there already are only read."""
        default = InfillOptions.judges_folder
        folder = str(options.get("judges_folder", default))
        absent = [name for name in JUDGES if not (Path(folder) / name / "config.json").is_file()]
        converts = any(_pt_file(options.get(name)) for name in ("judge", "held_out_judge"))
        return ["judges_folder"] if folder != default and (absent or converts) else []

    # ---- rows and their scores

    def dataset(self, split: str, size: int | None, seed: int) -> list[dict[str, Any]]:
        """Return `size` rows of a split; None gives one row per `text_length` characters of the split's passages."""
        if split not in self._passages:
            raise ValueError(f"unknown split {split!r}; splits are: train, test")
        passages = self._passages[split]
        weights = list(accumulate(map(len, passages)))
        if size is None:
            size = max(1, weights[-1] // self.options.text_length)
        return [self._row(passages, weights, random.Random(f"{seed}-{split}-{i}"), i) for i in range(size)]

    def _row(self, passages: Sequence[str], weights: Sequence[int], rng: random.Random, i: int) -> dict[str, Any]:
        level = self.levels[i % len(self.levels)]
        length, (shortest, longest), tokens = self.options.text_length, self.options.span_lengths, self._tokens
        pieces: str | list[str]
        for _ in range(DRAWS):
            if tokens is None:
                pieces, words = window(passages, weights, length, rng), None
            else:
                pieces, words = tokens.split(window(passages, weights, 8 * length, rng), length)
            schedule = rng.choice(self.options.masking)
            places: Any = choose_places(pieces, schedule, float(level), rng, (shortest, longest), words)
            if tokens is not None and words is not None:
                places = tokens.readable_places(pieces, places, words)
            if places:
                return self._with_prompt({"pieces": pieces, "places": places, "level": level, "schedule": schedule})
        raise ValueError(
            f"--tokens_of {self.options.tokens_of}: {DRAWS} texts of the corpus in a row cannot be written in its "
            "tokens with masks; choose a model whose vocabulary suits the corpus"
        )

    def _with_prompt(self, row: dict[str, Any]) -> dict[str, Any]:
        row = {**row, "policy": self.policy}
        if self.policy == "masked":
            if self._tokens is not None:
                return {"prompt": self._tokens.join(self._tokens.masked(row["pieces"], row["places"])), **row}
            return {"prompt": self._text(row, [MASK_TOKEN * len(run) for run in runs(row["places"])]), **row}
        shown = "".join(GAP if place in row["places"] else piece for place, piece in enumerate(row["pieces"]))
        return {"prompt": [{"role": "user", "content": f"{QUESTION}\n{shown}"}], **row}

    def row_of(self, text: str) -> dict[str, Any]:
        """Return a row for a text with one `_` per missing character, or per missing token with `tokens_of`. The
        original is unknown, so no fill agrees."""
        mask, unit = (MASK_TOKEN, "character") if self._tokens is None else (self._tokens.mask, "token")
        text = " ".join(text.replace(mask, GAP).split())
        if GAP not in text:
            raise ValueError(f"there is no gap in {text[:80]!r}: write one {GAP} for each missing {unit}")
        pieces = text if self._tokens is None else self._tokens.split_with_gaps(text)
        places = [place for place, piece in enumerate(pieces) if piece == GAP]
        return self._with_prompt({"pieces": pieces, "places": places, "level": self.levels[0], "schedule": GIVEN})

    def request(self, row: Row) -> str:
        """Texts are different requests, even if so much of them is missing that their prompts are equal."""
        return json.dumps([row["pieces"], row["places"]], ensure_ascii=False)

    def row_from(self, given: Row) -> dict[str, Any]:
        """Return a row with `pieces`, a text or a list of tokens, and `places`, which are missing; its prompt is made
        from them."""
        row = super().row_from(given)
        pieces, places = row.get("pieces"), row.get("places")
        kind = str if self._tokens is None else list
        is_text = isinstance(pieces, kind) and all(isinstance(piece, str) for piece in pieces)
        if not is_text or not pieces:
            raise ValueError(f"the 'pieces' of a row must be {'a text' if kind is str else 'a list of tokens'}")
        is_list = isinstance(places, list) and all(type(place) is int for place in places)
        if not is_list or not places or sorted({*places}) != places or not 0 <= places[0] <= places[-1] < len(pieces):
            raise ValueError(f"the 'places' of a row must be numbers from 0 to {len(pieces) - 1} in ascending order")
        return self._with_prompt({name: value for name, value in row.items() if name != "prompt"})

    def score(self, row: Row, completion: str) -> Score:
        found, problem = fills.read(row, completion)
        if problem:
            return self.make_score({"agreement": 0.0, "restored": 0.0}, False, False, problem)
        share = fills.agreement(row, found)
        reason = "" if share == 1 else f"{share:.0%} of the missing text matches the original"
        if row.get("schedule") == GIVEN:
            share, reason = 0.0, UNKNOWN
        components = {"agreement": share, "restored": fills.restored(row, found)}
        return self.make_score(components, True, share == 1, reason)

    def gold(self, row: Row) -> str:
        return fills.write(row, fills.gold_fills(row))

    def bad(self, row: Row) -> str:
        return fills.write(row, [("!" if set(gap) == {"?"} else "?") * len(gap) for gap in fills.gold_fills(row)])

    # ---- judges

    def prepare(self, seed: int, say: Any = print) -> None:
        """Check the judges that were given, and train the others unless they have been trained before."""
        from ...rewards.classifier import check_judge

        given = [self.options.judge, self.options.held_out_judge]
        if given[0] is not None and given[0] == given[1]:
            raise ValueError(f"--judge and --held_out_judge are both {given[0]}; the second must be a different model")
        for name, source in zip(JUDGES, given, strict=True):
            if file := _pt_file(source):
                self._convert_judge(file, self._sources[name])
            elif source is not None:
                check_judge(source)
        for name, source in zip(JUDGES, given, strict=True):
            if source is None:
                self.train_judge(Path(self.options.judges_folder) / name, name == "held_out", JUDGE_SEED, say)

    def _convert_judge(self, file: Path, folder: str) -> None:
        """Convert a checkpoint to a judge; ValueError if it is none, or if it cannot read the corpus."""
        from ...models.char_encoder import JUDGE, convert_pt
        from ...models.loading import converted, load_tokenizer

        check_local_path(str(file), "judge")
        vocabulary = load_tokenizer(converted(file, folder, partial(convert_pt, mode=JUDGE))).get_vocab()
        if lacking := [character for character in self._alphabet if character not in vocabulary]:
            raise ValueError(
                f"judge {file} has no token for these characters of the corpus: {' '.join(map(repr, lacking[:20]))}; "
                "choose the --corpus that it was trained on"
            )

    def train_judge(self, folder: str | Path, held_out: bool, seed: int, say: Any = print) -> None:
        """Train a judge into `folder`, on one half of the training passages, or on the other half if `held_out`."""
        from .classifiers import train_judge

        options = self.options
        train = self._passages["train"][int(held_out) :: 2]
        spec = TinySpec(
            self._alphabet, options.judge_width, 4 if held_out else 3, JUDGE_HEADS, 2 * options.text_length + 16
        )
        if not train:
            raise ValueError("the corpus has too few passages for two judges; pass --judge and --held_out_judge")
        settings = {"length": options.text_length * (1 if options.tokens_of is None else 5),
                    "steps": options.judge_steps, "seed": 2 * seed + held_out}  # fmt: skip
        origin = {"judge": 1, "corpus": options.corpus, "characters": sum(map(len, train)), "width": spec.hidden_size,
                  "held_out": held_out, "test_fraction": options.test_fraction, **settings}  # fmt: skip
        train_judge(folder, train, self._passages["test"], spec=spec, origin=origin, say=say, **settings)

    def judges(self) -> dict[str, Any]:
        from ...rewards.classifier import FrozenClassifier

        decides = {"judge": REAL_FROM}
        return {
            name: FrozenClassifier(name, source, self.filled, decides.get(name))
            for name, source in self._sources.items()
        }

    @cached_property
    def _sources(self) -> dict[str, str]:
        """The folder or Hub id of each judge; for a .pt file, the folder that `prepare` converts it into."""
        given = (self.options.judge, self.options.held_out_judge)
        folder = Path(self.options.judges_folder)
        found = {name: source or str(folder / name) for name, source in zip(JUDGES, given, strict=True)}
        for name, source in found.items():
            if (file := _pt_file(source)) and file.is_file():
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                found[name] = str(folder / f"{file.stem}_{digest[:12]}")
        return found

    def filled(self, row: Row, completion: str) -> str | None:
        """Return the text with its gaps filled, as judges read it; None if the completion does not fit."""
        found, problem = fills.read(row, completion)
        return None if problem else self._text(row, found)

    def _text(self, row: Row, found: Sequence[str]) -> str:
        parts = [part for part, _ in fills.parts(row, found)]
        if isinstance(row["pieces"], str):
            return "".join(parts)
        assert self._tokens is not None
        return self._tokens.join(" ".join(parts).split(" "))

    # ---- models, constraint and pictures

    def constraint(self, tokenizer: Any) -> Constraint | None:
        if self.policy == "masked":
            return None
        from .constraint import fills_constraint

        return fills_constraint(tokenizer)

    def tiny(self) -> TinySpec | None:
        """Return a model with one token per character; a causal one also needs room for the question and answer."""
        options = self.options
        if options.tokens_of is not None:
            return None
        tokens = self._alphabet
        context = options.text_length + 8
        if self.policy == "causal":
            tokens = sorted({*tokens, *QUESTION, "\n"})
            context = 4 * options.text_length + 2 * len(QUESTION)
        return TinySpec(tokens, options.tiny_width, options.tiny_layers, options.tiny_heads, context, self.policy)

    @cached_property
    def _alphabet(self) -> list[str]:
        return alphabet([*self._passages["train"], *self._passages["test"]])

    @cached_property
    def _tokens(self) -> ModelTokens | None:
        if self.options.tokens_of is None:
            return None
        from .tokens import ModelTokens

        return ModelTokens(self.options.tokens_of)

    def render(self, row: Row, completion: str) -> str:
        from .render import to_html

        return to_html(self.coloured(row, completion))

    def exports(self, row: Row, completion: str) -> dict[str, str | bytes]:
        """Return the coloured text as HTML and PNG."""
        from .render import picture, to_html

        lines = self.coloured(row, completion)
        return {"sample.html": to_html(lines), "sample.png": picture(lines)}

    def coloured(self, row: Row, completion: str) -> list[tuple[str, list[tuple[str, float | None]]]]:
        """Return a title and the filled text in parts, each fill with the judge's score.

        A fill's score is that of the original text with only this fill replaced, which shows the fills that the judge
        dislikes.
        """
        from .render import UNJUDGED

        found, problem = fills.read(row, completion)
        if problem:
            return [(problem, [(completion[:400], UNJUDGED)])]
        gold = fills.gold_fills(row)
        texts = [self._text(row, found)]
        texts += [self._text(row, [*gold[:i], fill, *gold[i + 1 :]]) for i, fill in enumerate(found)]
        scores = self._shown_judge.judge(texts) if self._shown_judge is not None else [UNJUDGED] * len(texts)
        coming = iter(scores[1:])
        parts = [(part, next(coming) if is_fill else None) for part, is_fill in fills.parts(row, found)]
        verdict = "no judge" if self._shown_judge is None else f"judge {scores[0]:.2f}"
        share = UNKNOWN if row.get("schedule") == GIVEN else f"{fills.agreement(row, found):.0%} as in the original"
        return [(f"{verdict}, {share}", parts)]

    @property
    def _shown_judge(self) -> Any:
        """The judge, or None if it has not been trained yet."""
        source = self._sources["judge"]
        is_given = source == self.options.judge and not _pt_file(source)
        return self._judge_to_show if is_given or (Path(source) / "config.json").is_file() else None

    @cached_property
    def _judge_to_show(self) -> Any:
        return self.judges()["judge"]


def _pt_file(source: str | None) -> Path | None:
    """Return the path if a judge is given as a .pt file."""
    return Path(source).expanduser() if source and source.endswith(".pt") else None


def _check_options(options: InfillOptions) -> None:
    if options.tokens_of:
        check_local_path(options.tokens_of, "--tokens_of")
    check_choice("policy", options.policy, POLICIES)
    for schedule in options.masking:
        check_choice("masking", schedule, SCHEDULES)
    if not options.masking or not options.mask_ratios:
        raise ValueError("--masking and --mask_ratios need at least one value each")
    for ratio in options.mask_ratios:
        if not 0 < ratio <= 1:
            raise ValueError(f"--mask_ratios {ratio} must be greater than 0 and at most 1")
    if len(options.span_lengths) != 2 or not 1 <= options.span_lengths[0] <= options.span_lengths[1]:
        given = " ".join(map(str, options.span_lengths))
        raise ValueError(f"--span_lengths {given} must be two numbers, the shortest and the longest, such as 2 6")
    if not 0 < options.test_fraction < 1:
        raise ValueError(f"--test_fraction {options.test_fraction} must be between 0 and 1")
    least_of = {"text_length": 4, "judge_steps": 1, "tiny_layers": 1, "tiny_heads": 1}
    for name, least in least_of.items():
        if getattr(options, name) < least:
            raise ValueError(f"--{name} {getattr(options, name)} must be at least {least}")
    for name, heads in (("judge_width", JUDGE_HEADS), ("tiny_width", options.tiny_heads)):
        width = getattr(options, name)
        if width < 1 or width % (2 * heads):  # rotary embeddings rotate pairs of channels within each head
            raise ValueError(f"--{name} {width} must be a multiple of {2 * heads}, twice the number of heads")
    if options.policy == "causal" and options.tokens_of:
        raise ValueError("--tokens_of requires --policy masked: a causal model writes characters")
