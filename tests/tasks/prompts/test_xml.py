"""The reward `xml`: against hand-made documents, against libxml2 (lxml) as a second parser, and against attacks."""

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_tasks.tasks.prompts.xml_reward import read_xml, xml


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


@settings(max_examples=60)
@given(ELEMENTS.filter(lambda node: isinstance(node, tuple)))
def test_what_a_library_writes_is_well_formed_and_any_prefix_is_not(node):
    text = ElementTree.tostring(built(node), encoding="unicode")
    assert read_xml(text) == (text, 1.0, "")
    for end in range(1, len(text)):
        assert read_xml(text[:end]).value < 1


PIECES = ["<a>", "</a>", "<b c='d'>", "</b>", "<e/>", "text", "&amp;", "&", "<!-- x -->", "<![CDATA[<]]>", "]]>"]
MARKUP = st.lists(st.sampled_from(PIECES), max_size=8)


@settings(max_examples=150)
@given(st.one_of(st.text(), st.text("<>/ab='\"&;![]-?CDATA ", max_size=30), MARKUP.map("".join)))
def test_libxml2_agrees(text):
    etree = pytest.importorskip("lxml.etree", reason="needs lxml")
    answer = read_xml(text)
    if answer.document is not None:
        root = etree.fromstring(answer.document.encode(), etree.XMLParser(encoding="utf-8", recover=False))
        assert root is not None
    elif "```" not in text and text.isprintable() and text.strip():
        with pytest.raises(etree.XMLSyntaxError):
            etree.fromstring(text.strip().encode())
    assert 0 <= answer.value <= 1
