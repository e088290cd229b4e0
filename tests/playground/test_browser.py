"""The page in a headless Chromium without a network: ask, compare, best of k, infill, a phone."""

import importlib.util
import os
from urllib.parse import urlparse

import pytest

from tests.support.browser import BROWSER, needs_browser
from tests.support.paths import ROOT
from tests.support.played import save_infill_run, save_run
from tests.support.server_process import start

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
HAS_GRADIO = importlib.util.find_spec("gradio") is not None  # only the server imports it, which takes seconds
pytestmark = [
    pytest.mark.exhaustive,
    needs_browser,
    pytest.mark.skipif(not HAS_GRADIO, reason="needs gradio (pip install 'trl_grpo_tasks[play]')"),
]

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
WAIT = 120_000  # milliseconds
HERE = ("127.0.0.1", "localhost", "::1")
# Imported by Python when it starts: connections to other machines fail and are noted.
OFFLINE = f"""
import pathlib, socket

def check(host):
    if host not in {(*HERE, None, "")}:
        with open(pathlib.Path(__file__).with_name("tried"), "a") as file:
            print(host, file=file)
        raise OSError("there is no network")

def connect(self, address, connect=socket.socket.connect):
    if self.family != socket.AF_UNIX:
        check(address[0])
    return connect(self, address)

def getaddrinfo(host, *words, getaddrinfo=socket.getaddrinfo, **more):
    check(host)
    return getaddrinfo(host, *words, **more)

socket.socket.connect, socket.getaddrinfo = connect, getaddrinfo
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a page that was started in its own process without a network."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(OFFLINE)
    yield from served(save_run(folder / "run"), folder, str(folder / "site"))
    assert not (folder / "site" / "tried").exists(), "the server asked for another machine"


@pytest.fixture(scope="module")
def infill_address(tmp_path_factory):
    """The address of a page of task infill, with small judges."""
    folder = tmp_path_factory.mktemp("filled")
    yield from served(save_infill_run(folder / "infill"), folder)


def served(run, folder, *paths):
    """Yield the address of the page of a run, and stop it at the end. `paths` come first in PYTHONPATH."""
    words = ["play", run, "--port"]
    program = f"if __name__ == '__main__':\n    main([*{words}, sys.argv[1]])\n"  # reward workers import it too
    (folder / "app.py").write_text(f"import sys\nfrom trl_grpo_tasks.commands.main import main\n{program}")
    process, url = start(folder / "app.py", path="/config", PYTHONPATH=os.pathsep.join([*paths, str(ROOT)]))
    yield url
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser, address):
    """The loaded page on a phone. At the end: nothing was asked of another host, and the console holds no error."""
    tab = browser.new_page(viewport=PHONE)
    tab.set_default_timeout(WAIT)
    problems, elsewhere = [], []

    def route(asked):
        if urlparse(asked.request.url).hostname in HERE:
            return asked.continue_()
        elsewhere.append(asked.request.url)
        return asked.abort()

    tab.route(lambda url: url.startswith(("http", "ws")), route)
    tab.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(address)
    tab.wait_for_selector("#picture-after img")  # the page opens with an example
    yield tab
    tab.close()
    assert problems == [] and elsewhere == []


def ask(tab, text, button="#ask", panel="after"):
    tab.wait_for_selector(f"#verdict-{panel} .verdict")
    tab.fill("#request textarea", text)
    tab.eval_on_selector_all(".verdict", "all => all.forEach(one => one.classList.add('earlier'))")
    tab.click(button)
    tab.wait_for_selector(f"#verdict-{panel} .verdict:not(.earlier)")


def test_the_page_opens_with_an_answer_whose_verdict_and_picture_are_in_view(tab):
    assert len(tab.input_value("#request textarea")) > 3 and tab.locator("#tokens-after span").count() > 3
    tops = [tab.locator(name).bounding_box()["y"] for name in ("#verdict-after", "#picture-after", "#tokens-after")]
    assert tops == sorted(tops) and tops[0] < tab.viewport_size["height"]
    tab.set_viewport_size(DESKTOP)
    assert tab.locator("#picture-after img").bounding_box()["y"] < 600


def test_ask_look_back_and_download(tab, tmp_path):
    ask(tab, "a wall, 7 long, 3 high, world 8")
    assert "allowed" in tab.inner_text("#table-after") and "component" in tab.inner_text("#verdict-after")
    assert tab.locator("#tokens-after span").count() > 3 and tab.locator("#picture-after img").count() == 1
    shown = tab.inner_text("#table-after")
    tab.fill("#position-after input[type=number]", "1")
    tab.press("#position-after input[type=number]", "Enter")
    tab.wait_for_function("document.querySelector('#table-after').innerText.includes('Token 1:')")
    assert tab.inner_text("#table-after") != shown
    with tab.expect_download() as download:
        tab.click("#files-after")
    download.value.save_as(tmp_path / "answer.zip")
    assert (tmp_path / "answer.zip").read_bytes()[:2] == b"PK"
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing is cut off at the side"


def test_compare_best_of_k_example_and_mistake(tab):
    tab.get_by_label("both").check()
    ask(tab, "a wall, 7 long, 3 high, world 8")
    tab.wait_for_selector("#panel-before .verdict")
    assert tab.inner_text("#tokens-before") != tab.inner_text("#tokens-after")
    tab.get_by_label("after training").check()
    tab.click("#best")
    tab.wait_for_function("document.querySelector('#verdict-after').innerText.includes('samples in')")
    assert not tab.is_visible("#panel-before")
    tab.fill("#request textarea", "")
    tab.click("#example")
    tab.wait_for_function("document.querySelector('#request textarea').value.length > 3")
    tab.fill("#request textarea", '{"prompt": "<img src=x onerror=alert(1)>"')
    tab.click("#ask")
    tab.wait_for_function("document.querySelector('#status').innerText.includes('JSON')")


def test_the_picture_of_a_filled_text_fits_the_page(browser, infill_address):
    tab = browser.new_page(viewport=PHONE)
    tab.set_default_timeout(WAIT)
    tab.goto(infill_address)
    ask(tab, "the old c__ of the hill")
    assert tab.inner_text("#verdict-after").count("below 0.5") == 1
    inside = "document.querySelector('#picture-after .picture')"
    tab.wait_for_function(f"{inside}.querySelector('img').naturalWidth > 0")
    assert tab.evaluate(f"{inside}.scrollWidth <= {inside}.clientWidth"), "no part of the text is cut off"
    tab.close()
