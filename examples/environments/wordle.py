"""Find a word from marks on the letters of earlier guesses.

    trl-grpo-tasks train examples/environments/wordle.py

A row is a word to find and a first guess, whose marks are part of the prompt. Held-out rows begin with guesses that
training never begins with. The known answers come from a solver that always writes a word that fits all marks.
"""

import html
import random
import string
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from trl_grpo_tasks import Environment, EnvironmentTask, Step
from trl_grpo_tasks.constraints import ChoiceTreeConstraint
from trl_grpo_tasks.task import TinySpec, option

COLOURS = {"+": "#6a6", "?": "#cb5", "-": "#999"}


def marks(guess, word):
    """Return `c+ a? t-` for the guess `cat`. A letter is marked ? only as often as the word has it elsewhere."""
    elsewhere, marked = Counter(w for g, w in zip(guess, word, strict=True) if g != w), []
    for g, w in zip(guess, word, strict=True):
        mark = "+" if g == w else "?" if elsewhere[g] else "-"
        elsewhere[g] -= mark == "?"
        marked.append(g + mark)
    return " ".join(marked)


class Game(Environment):
    """Solving is worth 1, and 0.1 less for each turn before; letters in their places are worth 0.2 together."""

    def start(self, row):
        self.word, self.turn, self.found = row["word"], 0, set()
        self.find(row["opening"])
        return marks(row["opening"], self.word)

    def step(self, action):
        self.turn += 1
        guess, size = action.strip().lower(), len(self.word)
        if guess not in WORDS[size]:
            return Step("This is no word of the list.", reason=f"the word was {self.word}")
        reward = 0.2 * self.find(guess) / size
        if guess == self.word:
            return Step("", reward + 1.1 - 0.1 * self.turn, done=True, success=True)
        return Step(marks(guess, self.word), reward, reason=f"the word was {self.word}")

    def find(self, guess):
        """Return how many letters this guess is the first to have in their places."""
        before = len(self.found)
        self.found |= {place for place, letter in enumerate(guess) if letter == self.word[place]}
        return len(self.found) - before


@lru_cache(1 << 16)
def best_guess(fitting):
    """Return the one of these words whose marks leave the fewest words on average."""
    return min(fitting, key=lambda guess: sum(n * n for n in Counter(marks(guess, word) for word in fitting).values()))


@dataclass(frozen=True)
class WordleOptions:
    letters: int = option(5, "Letters per word: 3, 4 or 5.")
    turns: int = option(5, "Guesses after the first one, which is given.")

    def __post_init__(self):
        if self.letters not in WORDS or self.turns < 1:
            raise ValueError(f"--letters must be one of {', '.join(map(str, WORDS))}, and --turns at least 1")


class Wordle(EnvironmentTask):
    name, version, description = "wordle", "1", "Find a word from marks on the letters of earlier guesses."
    Options = WordleOptions
    defaults = {"constrain": True, "max_completion_length": 256}
    tiny_defaults = {"letters": 3, "turns": 4, "max_completion_length": 32, "cold_start_steps": 120,
                     "cold_start_learning_rate": 2e-3, "learning_rate": 1e-3, "warmup_steps": 5, "max_steps": 60,
                     "per_device_train_batch_size": 512, "eval_rows": 128}  # fmt: skip

    def __init__(self, options=None):
        super().__init__(options)
        self.turns = self.options.turns
        self.words = WORDS[self.options.letters]
        self.rules = (
            f"Find a word of {self.options.letters} letters in {self.turns} turns. Each turn, write one word and "
            "nothing else. You are then told of each letter: + is in its place, ? belongs elsewhere, - is not in it."
        )

    def dataset(self, split, size, seed):
        openings = [word for place, word in enumerate(self.words) if (place % 5 == 0) == (split == "test")]
        games = [(opening, word) for opening in openings for word in self.words if opening != word]
        random.Random(f"{seed} {split}").shuffle(games)
        prompt = [{"role": "user", "content": self.rules}]
        return [self.opened({"prompt": prompt, "opening": a, "word": b}) for a, b in games[:size]]

    def environment(self):
        return Game()

    def turn_constraint(self, tokenizer):
        words = [(word, None) for word in self.words]
        return ChoiceTreeConstraint(tokenizer, lambda row: "word", lambda node: words, look_ahead=False)

    def gold(self, row):
        guesses = [row["opening"]]
        while guesses[-1] != row["word"]:
            told = [(guess, marks(guess, row["word"])) for guess in guesses]
            guesses.append(best_guess(tuple(w for w in self.words if all(marks(g, w) == m for g, m in told))))
        return self.conversation(row, guesses[1:])

    def bad(self, row):
        return self.conversation(row, [row["opening"]] * self.turns)

    def tiny(self):
        marked = [letter + mark for letter in string.ascii_lowercase for mark in COLOURS]
        tokens = [self.rules, *string.ascii_lowercase, *marked, *(f" {one}" for one in marked)]
        return TinySpec(tokens=tokens, hidden_size=96, layers=3, heads=3, context=128)

    def render_turn(self, row, turns):
        guess = turns[-1].strip().lower()
        told = marks(guess, row["word"]).split() if guess in self.words else [f"{c}-" for c in guess]
        return " ".join(f"<b style='background:{COLOURS[m]};padding:.2em'>{html.escape(c)}</b>" for c, m in told)


LIST = """
act age ago aid aim air ant bad bag bar bed bee big bit boy bug bus but can cap cow cry cup cut day dig dog dry due ear
eat egg end eye few fig fit fly fog gap gas gum gun hen hit hot ice ink job key net new odd old pen rag rib tea tie top
two web
able area army ball base bath best bird blue boat bone born burn bush cake call care cash cell chat city club coat code
cold cook crop data dawn deal debt dish down drum duty earn fire flow food foot form free full gate hair hand head hero
high hill hold hope huge iron join jump kind king lady lamp leaf life lift lion make meal mind nail name next nose note
open pack pain park plan play plus pond quiz rain read rich ride ring rock rope rose safe seat ship shop sick silk sing
size slow snow soap soft soil stop swim tall test time tiny town tune twin vast very warm west wild wind wine wing wood
above after again ahead album alive allow alone angle apple apron arena argue arrow aside asset awful baker basic beach
begin below bench black blend block board boost brain brand brave bread break brick bride brief broad brown cabin cable
camel candy cargo catch cause chain chalk charm cheek chest chief child class clean clear clerk climb cloth cloud coach
coast color couch count court cream cross crowd crown curve daily dairy depth diary draft dream drive earth eight enjoy
error essay every exact extra faint false fancy fault feast fence fever field fight final flash fleet float flood floor
flour fluid focus force forum found frame front frost giant given glass globe glory grace grand grass great greet guard
guest habit happy harsh heart heavy horse hotel humor image issue ivory jelly joint juice knife knock label layer learn
level light linen liver lodge loose magic major march maybe melon mercy meter minor model moral motor mouse never noble
noise north novel ocean olive onion opera orbit order organ other outer owner paper party pasta patch peace pearl phase
phone piano piece pilot pitch place plain plane plant plate point pound power price print prize proof proud queen radio
raise ranch ratio ready reply rider robot rough round route royal rural salad scale scene scent scope score sense serve
shade share sharp sheep sheet shell shine shirt shore short skill skirt sleep slice slope smell solve sound south speak
speed spend spice spoon sport staff stage stair start state stick still stone store storm story style sugar sunny sword
table taste thank theme thick thing third tiger today token topic total touch tower trace trail train treat trial tribe
trust uncle under upper urban usual value vital waste watch water wheel whole woman world worry write wrong youth zebra
"""
WORDS = {size: [word for word in LIST.split() if len(word) == size] for size in (3, 4, 5)}
