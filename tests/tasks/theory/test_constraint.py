"""The constraint for theories: everything it allows parses, it allows all good theories, and it is fast."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tokenizer_makes import byte_level
from tests.support.walks import allowed_tokens, allows, random_tokens
from trl_grpo_tasks.constraints import replay
from trl_grpo_tasks.constraints.base import only_token
from trl_grpo_tasks.models.tiny import make_tokenizer
from trl_grpo_tasks.tasks.theory import TheoryTask, examples
from trl_grpo_tasks.tasks.theory.constraint import check_prompt, theory_constraint
from trl_grpo_tasks.tasks.theory.data import STARTS
from trl_grpo_tasks.tasks.theory.language import parse, write
from trl_grpo_tasks.tasks.theory.terms import with_all_terms
from trl_grpo_tasks.tasks.theory.words import VOCABULARY

SM = write(examples.named("standard_model"))
SM_PROMPT = SM[: SM.index(" INTERACTIONS")].replace("NUM_MULTIPLETS num_5", "NUM_MULTIPLETS num_8")
PROMPTS = ["BOS", "BOS GAUGE_GROUPS NUM_GAUGE num_1", "BOS GAUGE_GROUPS NUM_GAUGE num_4", SM_PROMPT]


@pytest.fixture(scope="module")
def words():
    spec = TheoryTask().tiny()
    return make_tokenizer(spec.tokens, spec.context)


def completion(constraint, tokenizer, prompt, rng):
    """The text of a random completion."""
    return tokenizer.decode(random_tokens(constraint, {"prompt": prompt}, rng), skip_special_tokens=True)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_everything_allowed_is_a_complete_theory(prompt):
    """The pieces of a byte-level tokenizer do not match the words of the language; for words see test_language.py."""
    tokenizer, rng = byte_level(), random.Random(prompt)
    constraint = theory_constraint(tokenizer)
    for _ in range(4):
        text = prompt + completion(constraint, tokenizer, prompt, rng)
        theory = parse(text)  # the parser checks ids, counts, duplicates and gauge invariance
        assert write(theory) == text
        assert with_all_terms(theory) == theory


@pytest.mark.parametrize("name", examples.NAMES)
def test_every_named_theory_can_be_generated(name, words):
    constraint = theory_constraint(words)
    text = write(examples.named(name))
    cuts = [1, 4, len(text.split()) // 2]
    for cut in cuts:
        prompt = " ".join(text.split()[:cut])
        check_prompt(prompt)
        ids = [*words.encode(text[len(prompt) :], add_special_tokens=False), words.eos_token_id]
        assert allows(constraint, {"prompt": prompt}, ids)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), start=st.sampled_from(list(STARTS)))
def test_every_gold_answer_is_accepted(seed, start):
    prompt, gold = STARTS[start](random.Random(seed), 5)
    check_prompt((prompt + gold).removesuffix(" END"))


def allowed_words(constraint, tokenizer, text):
    """The words that may follow a prompt of whole words."""
    ids = allowed_tokens(constraint.start({"prompt": text}), constraint.vocab_size)
    return {token.strip() for token in tokenizer.convert_ids_to_tokens(ids)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("BOS GAUGE_GROUPS NUM_GAUGE num_2 GROUP group_1 SU_3 GROUP group_2", {"SU_3", "SU_2", "U_1"}),
        ("BOS GAUGE_GROUPS NUM_GAUGE num_2 GROUP group_1 U_1 GROUP", {"group_2"}),
        (SM[: SM.index(" INTERACTIONS")], {"INTERACTIONS"}),  # five were counted, five are there
        (SM_PROMPT, {"FERMION"}),  # scalars come before fermions
        (SM[: SM.index(" INTERACTIONS")] + " INTERACTIONS", {"YUKAWA"}),  # no mass is gauge invariant
        (SM[: SM.index(" YUKAWA")] + " YUKAWA multiplet_02", {"multiplet_03"}),
        (SM[: SM.index(" YUKAWA")] + " YUKAWA multiplet_02 multiplet_03", {"SCALAR"}),
        (SM.removesuffix(" END"), {"END"}),
        (SM[: SM.index(" component_02")], {"component_01", "component_02"}),
    ],
)
def test_what_may_follow(text, expected, words):
    assert allowed_words(theory_constraint(words), words, text) == expected


def test_no_multiplet_occurs_twice(words):
    """The last number that would repeat a multiplet is disallowed, unless the generations differ."""
    constraint = theory_constraint(words)
    numbers = "REP group_1 antifund REP group_2 singlet CHARGE group_3"
    like_up = f"{SM_PROMPT} FERMION multiplet_07 GENERATIONS num_{{}} {numbers}"
    assert {"q_-2/3", "q_1/3"} & allowed_words(constraint, words, like_up.format(3)) == set()
    assert {"q_-2/3", "q_1/3"} <= allowed_words(constraint, words, like_up.format(1))
    assert len(allowed_words(constraint, words, like_up.format(1))) == 31


def test_a_group_with_few_fields_has_no_dead_end(words):
    """SU(2) alone has twelve fermions (three representations, one to four generations): all twelve can be written."""
    constraint = theory_constraint(words)
    groups = "BOS GAUGE_GROUPS NUM_GAUGE num_1 GROUP group_1 SU_2 SYMMETRY_BREAKING NUM_VEVS num_0"
    text = f"{groups} MULTIPLETS NUM_MULTIPLETS num_twelve FERMION multiplet_01 GENERATIONS"
    for seed in range(5):
        theory = parse(text + completion(constraint, words, text, random.Random(seed)))
        assert len({(f.numbers, f.generations) for f in theory.fermions}) == 12


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("BOS GAUGE", "word 2 of the prompt is 'GAUGE'; allowed here: GAUGE_GROUPS"),
        ("Once upon a time", "word 1 of the prompt is 'Once'; allowed here: BOS"),
        ("BOS GAUGE_GROUPS NUM_GAUGE num_1 ", "single spaces"),
        ("BOS  GAUGE_GROUPS", "single spaces"),
        (SM, "the prompt is a complete theory, which leaves nothing to generate"),
        (SM_PROMPT + " INTERACTIONS", "'INTERACTIONS'; allowed here: FERMION"),
        ("", "a prompt must be words of the language"),
    ],
)
def test_invalid_prompts_are_reported_with_the_word(prompt, message):
    with pytest.raises(ValueError, match=message):
        check_prompt(prompt)


def test_three_quarters_of_an_extensions_tokens_are_forced(words):
    constraint, rng, row, shares = theory_constraint(words), random.Random(0), {"prompt": SM_PROMPT}, []
    for _ in range(20):
        masks = replay(constraint, row, random_tokens(constraint, row, rng))
        shares.append(np.mean([only_token(mask) is not None for mask in masks]))
    assert 0.7 < np.mean(shares) < 0.82


def test_every_word_is_one_token(words):
    assert len(words) == len(VOCABULARY) + len(["<pad>", "<eos>", "<unk>", "\n", "BOS"])
    assert len(words.encode(SM, add_special_tokens=False)) == len(SM.split())
