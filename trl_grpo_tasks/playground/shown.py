"""HTML of the playground: tokens, alternatives, verdicts and pictures. What a model or a user wrote is escaped and
cut to a maximum length."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..constraints.think import split_thought
from ..evaluation.solution import Answer, Solution
from ..task import fold_thought, folded
from .stream import Step

TOKENS_SHOWN = 1500  # the last ones of a longer completion
LONGEST_TEXT = 20_000  # characters of a completion
LONGEST_CELL = 300  # characters of a reason, a fact or a token
LONGEST_PICTURE = 1_000_000  # characters of a picture that is HTML
SHORT_PICTURE = 500  # characters of HTML that need little height, such as a prompt with its answer
FACTS_SHOWN = 30
ANSWERS_SHOWN = 5
NARROW = 704  # pixels; a picture of at most this width can be read on a phone without scrolling

STYLE = """
.tokens{white-space:pre-wrap;overflow-wrap:anywhere;font-family:ui-monospace,Menlo,Consolas,monospace;
font-size:.85rem;max-height:16rem;overflow-y:auto;padding:.6rem;border:1px solid var(--border-color-primary);
border-radius:.5rem;min-height:3rem}
.tokens span{border-radius:.2rem}.tokens .forced{opacity:.55}
.play table,.play tr{border:0!important}
.play table{border-collapse:collapse;font-size:.85rem;width:100%;table-layout:fixed}
.play td,.play th{padding:.15rem .4rem!important;text-align:left;overflow-wrap:anywhere;border:0!important;
border-bottom:1px solid var(--border-color-primary)!important}
.play th:first-child{width:44%}
.play .bar{display:inline-block;height:.7rem;background:#2a6fdb;border-radius:.2rem;margin-right:.4rem;
vertical-align:middle}
.play code{font-family:ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap}
.verdict{display:inline-block;border-radius:1rem;padding:.1rem .8rem;border:1px solid currentColor;font-weight:600}
.verdict.good{color:#16835a}.verdict.bad{color:#c2452f}.verdict.open{color:#5d6878}
.picture{overflow-x:auto}.picture img{max-width:100%;height:auto;display:block;margin:0 auto;border-radius:.4rem}
.picture img.wide{max-width:none;width:max(100%,44rem)}
.picture iframe{width:100%;height:24rem;border:1px solid var(--border-color-primary);border-radius:.4rem;
background:#fff}
.picture iframe.short{height:8rem}
"""


def token_strip(steps: Sequence[Step], thought_markers: Sequence[str] = ()) -> str:
    """Return the tokens of a completion, each coloured by its probability; forced tokens are grey. A thought is folded
    away when a marker has ended it."""
    last = steps[-TOKENS_SHOWN:]
    answers = [split_thought(step.written, thought_markers)[1] for step in last]
    thought = sum(not answer for answer in answers) if answers and answers[-1] is not None else 0
    left = len(steps) - TOKENS_SHOWN
    note = f"<i>{left} earlier tokens are not shown</i>\n" if left > 0 else ""
    above = folded(_coloured(last[:thought])) if thought else ""
    return f'<div class="tokens">{note}{above}{_coloured(last[thought:])}</div>'


def _coloured(steps: Sequence[Step]) -> str:
    parts, forced = [], ""
    for step in steps:
        if step.is_forced:
            forced += step.token
            continue
        parts += [_forced(forced)] * bool(forced)
        forced = ""
        told = f"probability {step.probability:.3g}, {step.allowed} allowed"
        # From red (unlikely) to green (likely), translucent on light and dark pages.
        colour = f"hsl({120 * step.probability:.0f} 70% 45% / .28)"
        parts.append(f'<span style="background:{colour}" title="{told}">{_text(step.token)}</span>')
    return "".join([*parts, _forced(forced)] if forced else parts)


def alternatives(steps: Sequence[Step], number: int) -> str:
    """Return a table of the likeliest tokens at position `number`, counted from 1."""
    if not 1 <= number <= len(steps):
        return ""
    step = steps[number - 1]
    allowed = "1 token was allowed" if step.is_forced else f"{step.allowed:,} of {step.outputs:,} tokens were allowed"
    filtered = f"; the sampling filters kept {step.kept:,}" if step.kept != step.allowed else ""
    rows = [
        (
            f"<code>{_visible(name)}</code>{' (drawn)' if name == step.token else ''}",
            f'<span class="bar" style="width:{60 * probability:.1f}%"></span>{probability:.3g}',
        )
        for name, probability in step.alternatives
    ]
    left = step.kept - len(rows)
    note = f"<p>and {left:,} less likely</p>" if left > 0 else ""
    told = f"<p>Token {number}: {allowed}{filtered}.</p>"
    return f'<div class="play">{told}{_table(("token", "probability"), rows)}{note}</div>'


def plain_text(text: str, thought_markers: Sequence[str] = ()) -> str:
    """Return a completion in the form of `token_strip`, without probabilities."""
    thought, answer = fold_thought(text, thought_markers, partial(_text, longest=LONGEST_TEXT))
    return f'<div class="tokens">{thought}{_text(answer, LONGEST_TEXT)}</div>'


def verdict(solution: Solution, weights: Mapping[str, float]) -> str:
    """Return what the verifier says about the best answer, and a table of the other answers."""
    best = solution.answers[0]
    kind, words = _judged(best, solution.unverifiable)
    parts = [f'<p><span class="verdict {kind}">{words}</span></p>']
    if solution.interpretation:
        parts.insert(0, f"<p>Understood as: {_text(solution.interpretation)}</p>")
    reason = best.sample.reason if best.sample.reason not in solution.unverifiable else ""
    parts += [f"<p>{_text(one)}</p>" for one in (solution.unverifiable, reason) if one]
    score = best.sample.score
    if score is not None:
        flags = {name: float(score[name]) for name in ("valid", "success") if weights.get(name)}
        parts_of_total = {**score["components"], **flags}.items()
        rows = [(_text(name), f"{value:.4g}", f"{weights.get(name, 0):g}") for name, value in parts_of_total]
        parts.append(
            _table(("component", "value", "weight"), [*rows, ("<b>total</b>", f"<b>{score['total']:.4g}</b>", "")])
        )
        facts = [(_text(name), _text(value)) for name, value in list(score["info"].items())[:FACTS_SHOWN]]
        if facts:
            parts.append(f"<details><summary>Facts</summary>{_table(('fact', 'value'), facts)}</details>")
    if solution.samples > 1:
        parts.append(f"<p>{solution.samples} samples in {solution.seconds:.1f} s: {_text(solution.stopped)}.</p>")
        parts.append(_table(("answer", "score", "drawn"), map(_row, solution.answers[:ANSWERS_SHOWN])))
    return f'<div class="play">{"".join(parts)}</div>'


def picture(files: Mapping[str, bytes]) -> str:
    """Return the film or else the picture among the files that a task exports; "" if there is neither."""
    for suffix in ("gif", "png"):
        for name, content in files.items():
            if name.endswith(f".{suffix}"):
                # A wide table or plot is scrolled where the page is narrow. A PNG has its size in bytes 16 to 23.
                width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
                is_wide = suffix == "png" and width > max(2 * height, NARROW)
                source = f"data:image/{suffix};base64,{base64.b64encode(content).decode()}"
                return f'<div class="picture"><img class="{"wide" * is_wide}" alt="the answer" src="{source}"></div>'
    for name, content in files.items():
        if name.endswith(".html") and len(content) <= LONGEST_PICTURE:
            # A task draws what a model wrote, so that its HTML gets neither scripts nor access to the page.
            page = html.escape(content.decode(errors="replace"), quote=True)
            kind = "short" * (len(content) <= SHORT_PICTURE)
            frame = f'<iframe class="{kind}" sandbox="" title="the answer" srcdoc="{page}"></iframe>'
            return f'<div class="picture">{frame}</div>'
    return ""


def heading(task: str, description: str, model: str) -> str:
    """Return the head of the page."""
    return (
        f"<h2>{_text(task)} playground</h2><p>{_text(description.rstrip('.'))}. Model: <code>{_text(model)}</code></p>"
    )


def message(text: str) -> str:
    """Return an error or a note to the user."""
    return f'<p class="play">{_text(text, 1000)}</p>' if text else ""


def _judged(answer: Answer, unverifiable: str) -> tuple[str, str]:
    score = answer.sample.score
    if score is None:
        return "open", "could not be scored"
    if unverifiable:
        return "open", "cannot be judged"
    if answer.success:
        return "good", "accepted"
    return "bad", "not accepted" if score["valid"] else "not valid"


def _row(answer: Answer) -> tuple[str, ...]:
    score = answer.sample.score
    total = "none" if score is None else f"{score['total']:.4g}"
    reason = answer.sample.reason or ("accepted" if answer.success else "")
    text = " ".join(answer.completion.split())
    return f"<code>{_text(text, 60)}</code><p>{_text(reason)}</p>", total, str(answer.drawn)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{one}</th>" for one in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _forced(text: str) -> str:
    return f'<span class="forced" title="no other token was allowed">{_text(text, LONGEST_TEXT)}</span>'


def _visible(text: str) -> str:
    """Show spaces and control characters, which would be invisible in a table."""
    return _text("".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in text))


def _text(value: Any, longest: int = LONGEST_CELL) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = text.encode(errors="replace").decode()  # half a surrogate pair could not be sent to the browser
    return html.escape(text if len(text) <= longest else f"{text[:longest]} ...")
