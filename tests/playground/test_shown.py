"""HTML of the playground: whatever a model wrote stays text, and is cut to a maximum length."""

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.report.test_page import Balance
from trl_grpo_tasks.evaluation.samples import Sample
from trl_grpo_tasks.evaluation.solution import Solution
from trl_grpo_tasks.playground import shown
from trl_grpo_tasks.playground.stream import Step

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;"
texts = st.one_of(st.text(max_size=30), st.sampled_from([EVIL, "</div>", '" onload="x', "\0\x1b[31m", "\ud800", ""]))
few = settings(max_examples=40)
OURS = {"div", "span", "p", "table", "tr", "th", "td", "code", "b", "i", "details", "summary", "img", "iframe", "h2"}


class Reader(Balance):
    """Fails also for a tag or an attribute that is not ours."""

    def handle_starttag(self, tag, attributes):
        assert tag in OURS, tag
        assert {name for name, _ in attributes} <= {"class", "style", "title", "alt", "src", "sandbox", "srcdoc"}
        super().handle_starttag(tag, attributes)

    handle_startendtag = handle_starttag


def text_of(page):
    return "".join(Reader(page).text)


def step(token, probability=0.5, allowed=9, written=None):
    written = token if written is None else written
    return Step(token, written, probability, allowed, allowed, 20, [(token, probability), ("other", 0.1)])


def solution(completions, score=None, reason="", unverifiable="", interpretation=""):
    made = Solution("x", {"interpretation": interpretation}, unverifiable)
    made.add([Sample({}, text, 1, score and dict(score), reason, {}, text) for text in completions])
    return made


def score(**changes):
    return {"components": {"match": 0.5}, "total": 0.5, "valid": True, "success": False, "info": {}} | changes


@few
@given(st.lists(st.tuples(texts, st.sampled_from([1, 9])), max_size=8))
def test_tokens_stay_text(tokens):
    steps = [step(token, 1.0 if allowed == 1 else 0.5, allowed) for token, allowed in tokens]
    text = text_of(shown.token_strip(steps))
    assert text == "".join(token for token, _ in tokens).encode(errors="replace").decode()
    for number in range(len(steps) + 2):
        text_of(shown.alternatives(steps, number))


@few
@given(texts, texts, texts, texts)
def test_verdicts_stay_text(completion, reason, fact, interpretation):
    told = score(info={fact: reason, "number": 1.23456789}, components={fact: 1.0})
    page = shown.verdict(solution([completion, "b"], told, reason, interpretation=interpretation), {"match": 1.0})
    assert "1.235" in text_of(page) and reason.encode(errors="replace").decode() in text_of(page)
    text_of(shown.verdict(solution([completion], None, reason), {}))
    text_of(shown.message(reason) + shown.plain_text(completion) + shown.heading(fact, reason, completion))


def test_verdict_words():
    def words(**options):
        return text_of(shown.verdict(solution(["a"], **options), {"match": 1.0}))

    assert words(score=score(success=True)).startswith("accepted")
    assert words(score=score(), reason="too short").startswith("not acceptedtoo short")
    assert words(score=score(valid=False)).startswith("not valid")
    assert words(reason="it crashed").startswith("could not be scoredit crashed")
    unknown = words(score=score(success=True), unverifiable="nobody knows")
    assert unknown.startswith("cannot be judgednobody knows") and "accepted" not in unknown
    assert words(score=score(), unverifiable="x is unknown", reason="is unknown").count("unknown") == 1
    assert words(score=score(), interpretation="a table").startswith("Understood as: a table")


@few
@given(texts.filter(lambda text: "#" not in text), texts)
def test_a_thought_is_folded_away_and_stays_text(thought, answer):
    told = [part.encode(errors="replace").decode() for part in (thought, answer)]
    assert text_of(shown.plain_text(f"{thought}####{answer}", ["####"])) == f"thought{told[0]}{told[1]}"
    assert text_of(shown.plain_text(thought, ["####"])) == told[0], "no marker: as it is"
    tokens = [thought, "##", "##", answer] if answer else [thought, "##", "##"]
    steps = [step(token, written="".join(tokens[: t + 1])) for t, token in enumerate(tokens)]
    assert text_of(shown.token_strip(steps[:2], ["####"])) == f"{told[0]}##", "while the model thinks"
    strip = shown.token_strip(steps, ["####"])
    assert text_of(strip) == f"thought{told[0]}####{told[1]}"
    hidden, _, seen = strip.partition("</details>")
    assert "<details><summary>thought</summary>" in hidden and text_of(f"<div>{seen}") == told[1]


def test_a_token_that_ends_the_marker_and_begins_the_answer_is_seen():
    steps = [step("so ", written="so "), step("## 4", written="so ## 4"), step("2", written="so ## 42")]
    assert shown.token_strip(steps, ["##"]).partition("</details>")[2].count("<span") == 2


def test_long_texts_are_cut():
    many = [step("x" * 1000)] * 3000
    assert len(shown.token_strip(many)) < 1_000_000 and "1500 earlier tokens" in shown.token_strip(many)
    assert len(shown.plain_text("x" * 10**6)) < 30_000
    large = solution(["x" * 10**6] * 3, score(info={f"f{n}": "y" * 10**5 for n in range(99)}), "z" * 10**6)
    assert len(shown.verdict(large, {})) < 20_000


def test_alternatives_name_what_was_allowed():
    text = text_of(shown.alternatives([step(" a\n", 0.25)], 1))
    assert "9 of 20 tokens were allowed" in text and "␣a\\n (drawn)0.25" in text and "and 7 less likely" in text
    filtered = Step("a", "a", 1.0, 9, 1, 20, [("a", 1.0)])
    assert "the sampling filters kept 1" in text_of(shown.alternatives([filtered], 1))
    assert "1 token was allowed" in text_of(shown.alternatives([step("a", 1.0, 1)], 1))


def test_pictures_prefer_the_film_and_html_gets_no_rights():
    assert "image/gif;base64,Z2lm" in shown.picture({"a.png": b"png", "film_1.gif": b"gif"})
    for width, height, kind in ((900, 300, "wide"), (900, 500, ""), (600, 100, "")):
        picture = io.BytesIO()
        Image.new("L", (width, height)).save(picture, "png")
        assert f'class="{kind}"' in shown.picture({"a.png": picture.getvalue()})
    page = shown.picture({"a.html": EVIL.encode(), "a.txt": b"x"})
    assert 'sandbox=""' in page and "<script" not in page and text_of(page) == ""
    assert shown.picture({"a.txt": b"x"}) == "" == shown.picture({"a.html": b"x" * (shown.LONGEST_PICTURE + 1)})
