"""A prompt, its answer and the score as HTML, all escaped; and the answer as a program, JSON or XML file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from ...task import Row, Score, fold_thought
from .reward import read_code, read_json
from .xml_reward import read_xml

LONGEST_SHOWN = 4_000
JSON_REWARDS = ("json", "schema", "fields")


def to_html(row: Row, completion: str, score: Score | None, thought_markers: Sequence[str] = ()) -> str:
    """Return one card: prompt, completion (with formatted JSON or code, thoughts folded), result and components."""
    prompt = row["prompt"]
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    parts = [f"<p><b>{_escape(message['role'])}</b>: {_escape(message['content'])}</p>" for message in chat]
    thought, answer = fold_thought(completion, thought_markers, _escape)
    shown = f"{thought}{_answer(row, answer)}"
    parts.append(f"<pre style='background:#f6f8fa;padding:8px;white-space:pre-wrap'>{shown}</pre>")
    if score is None:
        parts.append("<p style='color:#9a6700'>could not be scored</p>")
    else:
        colour, word = ("#1a7f37", "success") if score.success else ("#cf222e", "no success")
        validity = "" if score.valid else ", not valid"
        why = f": {_escape(score.reason)}" if score.reason else ""
        parts.append(f"<p style='color:{colour}'><b>{word}{validity}</b>{why}</p>")
        cells = "".join(
            f"<tr><td>{_escape(name)}</td><td style='text-align:right'>{value:.3f}</td></tr>"
            for name, value in {**score.components, "total": score.total}.items()
        )
        parts.append(f"<table>{cells}</table>")
    return f"<div style='font-family:sans-serif;border:1px solid #d0d7de;padding:8px'>{''.join(parts)}</div>"


def answer_files(row: Row, completion: str) -> dict[str, str | bytes]:
    """Return the program, JSON or XML in a completion as files, where the rewards of the row ask for one."""
    files: dict[str, str | bytes] = {}
    if "tests" in row["rewards"]:
        files["answer.py"] = read_code(completion).strip("\n") + "\n"
    if any(name in row["rewards"] for name in JSON_REWARDS):
        value, problem = read_json(completion)
        if problem in ("", "embedded"):
            files["answer.json"] = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if "xml" in row["rewards"] and (document := read_xml(completion).document) is not None:
        files["answer.xml"] = document + "\n"
    return files


def _answer(row: Row, completion: str) -> str:
    chosen: Any = row.get("rewards") or {}
    if any(chosen.get(name) is not None for name in JSON_REWARDS):
        value, problem = read_json(completion)
        if not problem:
            return _escape(json.dumps(value, indent=2, ensure_ascii=False))
    return _escape(completion if chosen.get("tests") is None else read_code(completion))


def _escape(text: str) -> str:
    text = text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + " ..."
    # Lone surrogates cannot be written to a file.
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))
