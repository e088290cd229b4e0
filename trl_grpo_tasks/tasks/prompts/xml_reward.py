"""The reward `xml`: well-formedness by expat. Nothing that a document refers to is read: entities are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from xml.parsers import expat

from .verdict import LONGEST_TEXT, Verdict, fenced, is_encodable


class XmlAnswer(NamedTuple):
    """The XML in a completion. `document` is None if it is not well-formed; `value` and `reason` say how far it is."""

    document: str | None
    value: float
    reason: str


def xml(row: Mapping[str, Any], completion: str) -> Verdict:
    """Check that the completion is a well-formed XML document, bare or fenced; half credit with text around it."""
    answer = read_xml(completion)
    return Verdict(answer.value, answer.reason, readable=answer.document is not None)


def read_xml(completion: str) -> XmlAnswer:
    """Find the XML document in a completion.

    The value is 1 for a document and nothing else, 0.5 for a document with other text around it. A broken document
    gets half of the share of the text before its first error, times the share of elements that were closed by then.
    """
    if len(completion) > LONGEST_TEXT:
        return XmlAnswer(None, 0.0, f"the answer is longer than {LONGEST_TEXT} characters")
    if not is_encodable(completion):
        return XmlAnswer(None, 0.0, "the answer contains characters that are not Unicode text")
    block = fenced(completion, ("xml",))
    text = (completion if block is None else block).strip()
    progress, problem = _parse(text)
    if not problem:
        return XmlAnswer(text, 1.0, "")
    start, end = text.find("<"), text.rfind(">") + 1
    if 0 <= start < end and (start, end) != (0, len(text)) and not _parse(text[start:end])[1]:
        return XmlAnswer(text[start:end], 0.5, "there is other text around the XML")
    return XmlAnswer(None, 0.5 * progress, f"the answer is not well-formed XML: {problem}")


def _parse(text: str) -> tuple[float, str]:
    """Return how much of `text` is well-formed before its first error, from 0 to 1, and the error or ""."""
    parser = expat.ParserCreate()
    opened: list[str] = []
    closed: list[str] = []

    def refuse_entity(*_: Any) -> None:
        raise ValueError("it declares an entity, which is not allowed")

    parser.StartElementHandler = lambda name, _: opened.append(name)
    parser.EndElementHandler = closed.append
    parser.EntityDeclHandler = refuse_entity
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        reached = parser.ErrorByteIndex / max(1, len(text.encode()))
        return reached * len(closed) / max(1, len(opened)), f"{error}"
    except ValueError as error:
        return 0.0, f"{error}"
    return 1.0, ""
