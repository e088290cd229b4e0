"""The XML rewards: well-formedness by expat, and conformance with an XSD or RELAX NG schema by lxml.

Nothing that a document or a schema refers to is read: entity declarations are refused, and so are schemas that refer
to other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from xml.parsers import expat

from .verdict import LONGEST_TEXT, CannotJudgeError, Verdict, fenced, is_encodable

XSD = "http://www.w3.org/2001/XMLSchema"
RELAX_NG = "http://relaxng.org/ns/structure/1.0"
_LOCATION_HINTS = [f"{{{XSD}-instance}}{name}" for name in ("schemaLocation", "noNamespaceSchemaLocation")]
_REFERRING = [
    *(f"{{{XSD}}}{name}" for name in ("include", "import", "redefine", "override")),
    *(f"{{{RELAX_NG}}}{name}" for name in ("include", "externalRef")),
]


class XmlAnswer(NamedTuple):
    """The XML in a completion. `document` is None if it is not well-formed; `value` and `reason` say how far it is."""

    document: str | None
    value: float
    reason: str


def xml(row: Mapping[str, Any], completion: str) -> Verdict:
    """Check that the completion is a well-formed XML document, bare or fenced; half credit with text around it."""
    answer = read_xml(completion)
    return Verdict(answer.value, answer.reason, readable=answer.document is not None)


def xml_schema(row: Mapping[str, Any], completion: str) -> Verdict:
    """Check that the completion is XML that matches the row's `xml_schema`.

    Otherwise the value is half of the share of elements without an error. Text around the document halves the value.
    """
    document, value, reason = read_xml(completion)
    if document is None:
        return Verdict(0.0, reason, readable=False)
    share, problem = _conforms(str(row["xml_schema"]), document)
    return Verdict(value * share, problem or reason)


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


@lru_cache(maxsize=256)
def xml_validator(schema: str) -> Any:
    """Return lxml's validator for the text of an XSD or RELAX NG schema. ValueError if there is a mistake in it."""
    try:
        from lxml import etree
    except ImportError as error:
        raise ValueError("needs lxml: pip install 'trl_grpo_tasks[xml]'") from error
    problem = _parse(schema)[1] if is_encodable(schema) else "it contains characters that are not Unicode text"
    if problem:
        raise ValueError(f"is not well-formed XML: {problem}")
    root = etree.fromstring(schema.encode(), _lxml_parser())
    if (referring := next(root.iter(*_REFERRING), None)) is not None:
        raise ValueError(
            f"contains <{etree.QName(referring).localname}>, but a schema must not refer to other files; copy what it "
            "needs into it"
        )
    kinds = {XSD: etree.XMLSchema, RELAX_NG: etree.RelaxNG}
    namespace = etree.QName(root).namespace
    if namespace not in kinds:
        raise ValueError(f"must be an XSD ({XSD}) or a RELAX NG schema ({RELAX_NG}); its namespace is {namespace}")
    try:
        return kinds[namespace](root)
    except etree.LxmlError as error:
        raise ValueError(f"is not a valid schema: {error}"[:300]) from error


def _lxml_parser() -> Any:
    from lxml import etree

    # The encoding replaces the one that a document declares, because the text was decoded before.
    return etree.XMLParser(encoding="utf-8", resolve_entities=False, load_dtd=False, no_network=True, huge_tree=False)


def _conforms(schema: str, document: str) -> tuple[float, str]:
    """Return 1 and "", or half of the share of elements without an error and the first error."""
    try:
        validator = xml_validator(schema)
    except ValueError as error:
        raise CannotJudgeError(f"the row's xml_schema {error}") from error
    from lxml import etree

    try:
        root = etree.fromstring(document.encode(), _lxml_parser())
    except etree.XMLSyntaxError as error:  # libxml2 limits depth and sizes, and rejects prefixes without a namespace
        return 0.0, f"{error}"[:200]
    if isinstance(validator, etree.XMLSchema):
        for element in root.iter("*"):
            for hint in _LOCATION_HINTS:  # libxml2 would read the files that a document names here
                element.attrib.pop(hint, None)
    if validator.validate(root):
        return 1.0, ""
    errors = list(validator.error_log)
    wrong = {error.path for error in errors}
    share = max(0.0, 1 - len(wrong) / sum(1 for _ in root.iter("*")))
    return share / 2, f"{errors[0].message}"[:200] if errors else "the XML does not match the schema"
