"""The XML rewards: against hand-made documents, against libxml2 (lxml) as a second parser, and against attacks."""

import sys
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.prompt_files import from_rows, only_row
from trl_grpo_tasks.tasks.prompts.verdict import CannotJudgeError
from trl_grpo_tasks.tasks.prompts.xml_reward import read_xml, xml, xml_schema

XSD = """
<xs:schema xmlns:xs="http://www.w3.org/2001/XMLSchema">
  <xs:element name="list"><xs:complexType>
    <xs:sequence><xs:element name="item" type="xs:integer" maxOccurs="unbounded"/></xs:sequence>
    <xs:attribute name="unit" use="required"/>
  </xs:complexType></xs:element>
</xs:schema>"""
RELAX_NG = """
<element name="list" xmlns="http://relaxng.org/ns/structure/1.0">
  <attribute name="unit"/><oneOrMore><element name="item"><text/></element></oneOrMore>
</element>"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<a/>", 1),
        ('<?xml version="1.0"?>\n<a b="c">d<e/></a>', 1),
        ('<?xml version="1.0" encoding="utf-16"?><a>ü</a>', 1),  # the text is decoded already
        ("<!DOCTYPE html><html>x</html>", 1),
        ("Here it is:\n```xml\n<a/>\n```\nDone.", 1),
        ("<a/> I hope that helps", 0.5),
        ("<a/><b/>", 0.25),  # half of the text before the error, all elements closed
        ("<a><b>1</b><b>2</b>", 0.5 * 2 / 3),  # cut off: no error before the end, two of three elements closed
        ("<a><b></a></b>", 0),
        ("<a>1 < 2</a>", 0),
        ('<a b="1" b="2"/>', 0),
        ("no XML at all", 0),
        ("", 0),
        ("<a>" * 30_000, 0),
        ("<a>" * 10_000 + "</a>" * 10_000, 1),
        ("<a/>" + " " * 200_000, 0),
        ("<a>\ud800</a>", 0),
        ("<a>\0</a>", 0),
    ],
)
def test_well_formedness(text, value):
    verdict = xml({}, text)
    assert verdict.value == pytest.approx(value)
    assert bool(verdict.reason) == (value < 1)
    assert verdict.readable == (value == 1 or "around" in verdict.reason)


def test_the_further_a_broken_document_parses_the_more_it_gets():
    whole = "<list>" + "<item>1</item>" * 10 + "</list>"
    values = [xml({}, whole[:end] + "<&").value for end in (6, 20, 62, 146)]
    assert values == sorted(values) and len(set(values)) == 4 and values[-1] < 0.5


BOMB = '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;&x;">]><a>&y;</a>'
FILE = '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>'
PARAMETER = '<!DOCTYPE a [<!ENTITY % x SYSTEM "http://127.0.0.1:9/x.dtd"> %x;]><a/>'


@pytest.mark.parametrize("text", [BOMB, FILE, PARAMETER])
def test_entities_cannot_be_declared(text):
    verdict = xml({}, text)
    assert (verdict.value, verdict.readable) == (0, False)
    assert "declares an entity" in verdict.reason


NAMES = st.sampled_from(["a", "b", "list", "x.y", "_z"])
ATTRIBUTES = st.text("ab<&\"' ", max_size=4)
ELEMENTS = st.recursive(
    st.text("xyz é&<>\"'\n", max_size=5),
    lambda inner: st.tuples(NAMES, st.dictionaries(NAMES, ATTRIBUTES), st.lists(inner, max_size=3)),
    max_leaves=8,
)


def built(node, parent=None):
    """A generated tree as ElementTree elements; text goes to where ElementTree keeps it."""
    name, attributes, children = node
    element = ElementTree.Element(name, attributes)
    if parent is not None:
        parent.append(element)
    for child in children:
        if isinstance(child, tuple):
            built(child, element)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + child
        else:
            element.text = (element.text or "") + child
    return element


@settings(max_examples=150)
@given(ELEMENTS.filter(lambda node: isinstance(node, tuple)))
def test_what_a_library_writes_is_well_formed_and_any_prefix_is_not(node):
    text = ElementTree.tostring(built(node), encoding="unicode")
    assert read_xml(text) == (text, 1.0, "")
    for end in range(1, len(text)):
        assert read_xml(text[:end]).value < 1


PIECES = ["<a>", "</a>", "<b c='d'>", "</b>", "<e/>", "text", "&amp;", "&", "<!-- x -->", "<![CDATA[<]]>", "]]>"]
MARKUP = st.lists(st.sampled_from(PIECES), max_size=8)


@settings(max_examples=300)
@given(st.one_of(st.text(), st.text("<>/ab='\"&;![]-?CDATA ", max_size=30), MARKUP.map("".join)))
def test_libxml2_agrees(text):
    etree = pytest.importorskip("lxml.etree", reason="needs the extra xml")
    answer = read_xml(text)
    if answer.document is not None:
        root = etree.fromstring(answer.document.encode(), etree.XMLParser(encoding="utf-8", recover=False))
        assert root is not None
    elif "```" not in text and text.isprintable() and text.strip():
        with pytest.raises(etree.XMLSyntaxError):
            etree.fromstring(text.strip().encode())
    assert 0 <= answer.value <= 1


# ---- schemas


@pytest.fixture(autouse=True)
def _lxml(request):
    if "schema" in request.node.name:
        pytest.importorskip("lxml", reason="needs the extra xml")


@pytest.mark.parametrize(
    ("text", "by_xsd", "by_relax_ng"),
    [
        ('<list unit="kg"><item>1</item><item>2</item></list>', 1, 1),
        ('see <list unit="kg"><item>1</item></list>', 0.5, 0.5),
        ('<list unit="kg"><item>1</item><item>x</item><item>3</item></list>', 0.5 * 3 / 4, 1),
        ("<list><item>1</item></list>", 0.25, None),  # one of two elements is wrong
        ('<list unit="kg"/>', 0, 0),
        ("<other/>", 0, 0),
        ("<list>", 0, 0),
        ("<a>" * 1_000 + "</a>" * 1_000, 0, 0),
        ("<p:list/>", 0, 0),
    ],
)
def test_schema(text, by_xsd, by_relax_ng):
    for schema, value in ((XSD, by_xsd), (RELAX_NG, by_relax_ng)):
        verdict = xml_schema({"xml_schema": schema}, text)
        assert value is None or verdict.value == pytest.approx(value)
        assert bool(verdict.reason) == (verdict.value < 1)


def test_a_document_cannot_make_the_schema_check_read_files(tmp_path):
    other = tmp_path / "other.xsd"
    other.write_text('<xs:schema xmlns:xs="http://www.w3.org/2001/XMLSchema"><xs:element name="other"/></xs:schema>')
    hint = f'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:noNamespaceSchemaLocation="{other.as_uri()}"'
    assert xml_schema({"xml_schema": XSD}, f"<other {hint}/>").value == 0
    assert xml_schema({"xml_schema": XSD}, f'<list unit="kg" {hint}><item>1</item></list>').value == 1


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("<a>", "not well-formed"),
        ("\ud800", "not Unicode"),
        ("<a/>", "must be an XSD"),
        (BOMB, "declares an entity"),
        (XSD.replace('type="xs:integer"', 'type="xs:number"'), "not a valid schema"),
        (XSD.replace("</xs:schema>", '<xs:include schemaLocation="x.xsd"/></xs:schema>'), "<include>"),
        ('<externalRef href="x.rng" xmlns="http://relaxng.org/ns/structure/1.0"/>', "<externalRef>"),
    ],
)  # fmt: skip
def test_schemas_with_mistakes_are_reported(tmp_path, schema, message):
    row = {"prompt": "p", "xml_schema": schema, "rewards": ["xml_schema"]}
    with pytest.raises(ValueError, match=rf"row 1: column 'xml_schema' .*{message}"):
        from_rows(tmp_path, [row])
    with pytest.raises(CannotJudgeError, match=message):
        xml_schema(row, "<a/>")


def test_a_schema_without_lxml_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lxml", None)
    with pytest.raises(ValueError, match=r"needs lxml: pip install 'trl_grpo_tasks\[xml\]'"):
        from_rows(tmp_path, [{"prompt": "p", "xml_schema": RELAX_NG + " ", "rewards": ["xml_schema"]}])


def test_xml_in_a_task(tmp_path):
    task = from_rows(tmp_path, [{"prompt": "p", "gold": "<a>1</a>", "rewards": ["xml"]}])
    row = only_row(task)
    assert task.score(row, "<a>1</a>").success
    assert not task.score(row, "<a>1<a>").valid
    assert task.exports(row, "Well: <a>1</a>")["answer.xml"] == "<a>1</a>\n"
    assert "answer.xml" not in task.exports(row, "none")
