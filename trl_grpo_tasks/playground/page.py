"""The page of the playground, made with Gradio. It loads nothing from other hosts, and nothing is sent to them."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..evaluation.answer_files import write_files, write_table
from ..evaluation.samples import Completion
from ..evaluation.solution import Solution
from ..task import Row, Task
from . import shown
from .models import AFTER, BEFORE, Models
from .stream import Step, stream

BOTH = "both"
LONGEST_REQUEST = 50_000  # characters
MOST_BYTES = 2**20  # of the body of an HTTP request
MOST_SAMPLES = 64
UPDATE_SECONDS = 0.1  # between two updates of the page while tokens are sampled
ANSWERS_KEPT = 32  # answers whose files are kept
EXAMPLES = 64  # held-out rows that examples are chosen from


def import_gradio() -> Any:
    """Return the module gradio, with its telemetry switched off; ImportError with a hint if it is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # which gradio reads when it is imported
    try:
        import gradio
    except ImportError as error:
        raise ImportError("the playground needs Gradio: pip install 'trl_grpo_tasks[play]'") from error
    return gradio


@dataclass(frozen=True)
class Panel:
    """The components that show the answer of one model."""

    column: Any
    verdict: Any
    picture: Any
    files: Any
    strip: Any
    position: Any
    table: Any
    steps: Any  # the steps of the answer, by which `position` finds what to show

    @property
    def components(self) -> list[Any]:
        return list(vars(self).values())


class Player:
    """Answers the requests of a page. Each method yields changes: component -> new value."""

    def __init__(self, gradio: Any, models: Models, request: Any, status: Any, panels: Mapping[str, Panel]):
        self._gradio, self._models, self._status, self._panels = gradio, models, status, panels
        self._lock = threading.Lock()
        self._folders: deque[tempfile.TemporaryDirectory[str]] = deque()
        text = example(models.task, 0)
        self._opening: dict[Any, Any] = {request: text}
        for changes in self.ask(text, AFTER, models.solver(AFTER).seed):
            self._opening |= changes
        self._opening_folders = list(self._folders)  # they are kept as long as the page
        self._folders.clear()

    def opening(self) -> dict[Any, Any]:
        """The page when it is opened: an example with its answer, which was sampled once, for all visitors."""
        return self._opening

    def ask(self, text: str, which: str, seed: float | None) -> Iterator[dict[Any, Any]]:
        """Sample one answer of each chosen model, and show its tokens as they are drawn."""
        yield from self._shown(which, lambda name: self._ask_one(name, request_of(text), _whole(seed)))

    def best(self, text: str, which: str, seed: float | None, samples: float) -> Iterator[dict[Any, Any]]:
        """Sample up to `samples` answers of each chosen model, and show the best one."""
        count = max(1, min(_whole(samples), MOST_SAMPLES))
        yield from self._shown(which, lambda name: self._best_one(name, request_of(text), _whole(seed), count))

    def _shown(self, which: str, answers: Callable[[str], Iterator[dict[Any, Any]]]) -> Iterator[dict[Any, Any]]:
        """Empty the page, and show the answer of each chosen model or why there is none."""
        names = [BEFORE, AFTER] if which == BOTH else [which]
        yield self._emptied(names)
        try:
            for name in names:
                yield from answers(name)
        except (ValueError, ImportError, OSError) as error:  # those that `main` reports in one line
            yield {self._status: shown.message(str(error))}

    def _best_one(self, name: str, request: str | Row, seed: int, samples: int) -> Iterator[dict[Any, Any]]:
        solver, panel = self._models.solver(name), self._panels[name]
        solver.seed = seed
        yield {self._status: shown.message("sampling ...")}
        solution = self._alone(solver, request, samples)
        strip = shown.plain_text(solution.answers[0].completion, self._models.task.thought_markers)
        yield {panel.strip: strip, **self._judged(panel, solution)}

    def _ask_one(self, name: str, request: str | Row, seed: int) -> Iterator[dict[Any, Any]]:
        solver, panel = self._models.solver(name), self._panels[name]
        row = solver.row_of(request)
        steps: list[Step] = []
        next_update = 0.0
        tokens = stream(solver.sampler, row, seed)
        while (step := self._alone(next, tokens, None)) is not None:
            steps.append(step)
            if time.monotonic() >= next_update:
                yield {**self._tokens(panel, steps), self._status: shown.message(f"token {len(steps)} ...")}
                next_update = time.monotonic() + UPDATE_SECONDS
        yield {
            **self._tokens(panel, steps),
            panel.steps: steps,
            panel.position: self._gradio.update(maximum=max(2, len(steps)), value=len(steps), visible=len(steps) > 1),
            self._status: shown.message("scoring ..."),
        }
        solution = Solution(request, row, solver.task.unverifiable(row))
        solution.add(self._alone(solver.score, row, [Completion(steps[-1].written, len(steps))]))
        yield self._judged(panel, solution)

    def _alone(self, function: Callable[..., Any], *words: Any) -> Any:
        """Call a function that uses a model. A request that was stopped may still be in such a call."""
        with self._lock:
            return function(*words)

    def _tokens(self, panel: Panel, steps: list[Step]) -> dict[Any, Any]:
        strip = shown.token_strip(steps, self._models.task.thought_markers)
        return {panel.strip: strip, panel.table: shown.alternatives(steps, len(steps))}

    def _judged(self, panel: Panel, solution: Solution) -> dict[Any, Any]:
        """The verdict on the best answer, its picture and its files."""
        task = self._models.task
        answer = {"row": solution.row, "completion": solution.answers[0].completion}
        if len(self._folders) == ANSWERS_KEPT:
            self._folders.popleft().cleanup()
        self._folders.append(tempfile.TemporaryDirectory(prefix="playground-"))
        files = Path(self._folders[-1].name) / "answer"
        problems = write_files(task, [answer], files)
        write_table([answer], files)
        return {
            panel.verdict: shown.verdict(solution, self._models.solver(AFTER).weights),
            panel.picture: shown.picture({file.name: file.read_bytes() for file in files.iterdir()}),
            panel.files: self._gradio.update(value=shutil.make_archive(str(files), "zip", files), visible=True),
            self._status: shown.message("; ".join(problems)),
        }

    def _emptied(self, names: Sequence[str]) -> dict[Any, Any]:
        """The page without the last answers; it shows the panels of these models."""
        update = self._gradio.update
        changes = {self._status: shown.message("starting ...")}
        for name, panel in self._panels.items():
            changes |= dict.fromkeys((panel.strip, panel.table, panel.verdict, panel.picture), "")
            changes |= {panel.column: update(visible=name in names), panel.steps: []}
            changes |= {panel.position: update(visible=False), panel.files: update(visible=False)}
        return changes


def request_of(text: str) -> str | Row:
    """Return a request as it was typed, or the row if it is the JSON of one; ValueError if it is none of them."""
    text = (text or "").strip()
    if not text:
        raise ValueError("the request is empty; write one, or press Example")
    if len(text) > LONGEST_REQUEST:
        raise ValueError(f"the request has {len(text):,} characters; at most {LONGEST_REQUEST:,} are read")
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a request that begins with {{ is a row in JSON, but this is none: {error}") from error


def example(task: Task, number: int | None = None) -> str:
    """Return a request that means a held-out row, a random one or that of this number: a text if the task reads one as
    this row, otherwise the row."""
    rows = task.dataset("test", EXAMPLES, 0)
    row = random.choice(rows) if number is None else rows[number]
    prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    for text in (prompt, *(value for value in row.values() if isinstance(value, str))):
        try:
            if task.row_of(text)["prompt"] == row["prompt"]:
                return text
        except ValueError:
            continue
    return json.dumps(row, ensure_ascii=False)


def make_page(models: Models) -> Any:
    """Return the page as Gradio's `Blocks`."""
    gradio, task = import_gradio(), models.task
    # Files of answers are deleted an hour after they were made.
    with gradio.Blocks(title=f"{task.name} playground", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gradio.HTML(shown.heading(task.name, task.description, Path(models.name).name))
        request = gradio.Textbox(
            label="Request", lines=2, max_lines=6, max_length=LONGEST_REQUEST, elem_id="request",
            placeholder="What the model is to make, in the words of the task; or a row of the task as JSON",
        )  # fmt: skip
        with gradio.Row():
            ask = gradio.Button("Ask", variant="primary", elem_id="ask", min_width=100)
            best = gradio.Button("Best of k", elem_id="best", min_width=100)
            other = gradio.Button("Example", elem_id="example", min_width=100)
            stop = gradio.Button("Stop", elem_id="stop", min_width=100)
        with gradio.Row():
            can_compare = len(models.choices) > 1
            which = gradio.Radio(
                [*models.choices, BOTH], value=AFTER, label="Model", visible=can_compare, elem_id="which", scale=2,
            )  # fmt: skip
            seed = gradio.Number(
                label="Seed", value=models.solver(AFTER).seed, precision=0, minimum=0, maximum=2**31 - 1, min_width=100
            )
            samples = gradio.Slider(1, MOST_SAMPLES, 8, step=1, label="k: samples at most", min_width=200)
        status = gradio.HTML(elem_id="status")
        with gradio.Row():
            panels = {name: _panel(gradio, name, can_compare) for name in reversed(models.choices)}
        player = Player(gradio, models, request, status, panels)
        outputs = [status, *(component for panel in panels.values() for component in panel.components)]
        # One request at a time: they share the model.
        shared = {"outputs": outputs, "concurrency_id": "model", "concurrency_limit": 1, "api_visibility": "private",
                  "show_progress": "hidden"}  # fmt: skip
        asked = gradio.on([ask.click, request.submit], player.ask, [request, which, seed], **shared)
        searched = best.click(player.best, [request, which, seed, samples], **shared)
        page.load(player.opening, None, [request, *outputs], api_visibility="private", show_progress="hidden")
        stop.click(None, None, None, cancels=[asked, searched], api_visibility="private")
        other.click(lambda: example(task), None, request, api_visibility="private")
        for panel in panels.values():
            panel.position.input(
                shown.alternatives, [panel.steps, panel.position], panel.table, api_visibility="private",
                show_progress="hidden",
            )  # fmt: skip
    return page


def _panel(gradio: Any, name: str, can_compare: bool) -> Panel:
    """The verdict and the picture side by side where there is room, and the tokens below them."""
    key = name.split()[0]
    with gradio.Column(visible=name == AFTER, min_width=320, elem_id=f"panel-{key}") as column:
        gradio.HTML(f"<h3>{name.capitalize()}</h3>", visible=can_compare)
        with gradio.Row():
            with gradio.Column(min_width=320):
                verdict = gradio.HTML(elem_id=f"verdict-{key}")
            with gradio.Column(min_width=320):
                picture = gradio.HTML(elem_id=f"picture-{key}")
                files = gradio.DownloadButton("Download the files", visible=False, elem_id=f"files-{key}")
        strip = gradio.HTML(elem_id=f"tokens-{key}")
        position = gradio.Slider(1, 2, 1, step=1, label="Token", visible=False, elem_id=f"position-{key}")
        table = gradio.HTML(elem_id=f"table-{key}")
    return Panel(column, verdict, picture, files, strip, position, table, gradio.State([]))


class RequestLimit:
    """ASGI middleware that refuses uploads, which the page does not need, and large bodies before they are read."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.exceptions import HTTPException
        from starlette.responses import PlainTextResponse

        read = 0

        async def limited() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MOST_BYTES:  # a body that did not state its length
                raise HTTPException(413)
            return message

        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if scope["method"] == "POST" and scope["path"].rstrip("/").endswith("/upload"):
            refusal = PlainTextResponse("this page takes no files", 403)
        elif not length.isdigit() or int(length) > MOST_BYTES:
            refusal = PlainTextResponse(f"at most {MOST_BYTES:,} bytes are read", 413)
        else:
            return await self._app(scope, limited, send)
        await refusal(scope, receive, send)


def launch(page: Any, host: str, port: int | None, share: bool = False) -> str:
    """Start to serve the page, and print and return its address; `page.block_thread()` waits for Ctrl+C.

    Without a port, it is GRADIO_SERVER_PORT or a free one from 7860. `share` makes a public address through Gradio's
    servers.
    """
    gradio = import_gradio()
    from starlette.middleware import Middleware

    # Fonts of the system: those of Gradio's own themes come from another host.
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    page.queue(max_size=32)
    _, address, public = page.launch(
        server_name=host,
        server_port=port,
        share=share,
        prevent_thread_lock=True,
        quiet=True,
        theme=theme,
        css=shown.STYLE,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        app_kwargs={"middleware": [Middleware(RequestLimit)]},
    )
    print(f"page: {public or address} (Ctrl+C stops it)", flush=True)
    return public or address


def _whole(value: float | None) -> int:
    return max(0, int(value or 0))
