"""`trl-grpo-tasks play`: a local page on which a model answers requests."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .command_parser import FLAG, CommandParser
from .sampling_options import add_model, add_sampling_options, sampling_of, task_of_model

HOST = "127.0.0.1"


def play(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "play",
        "RUN_OR_MODEL [--port N] [--share] [--option value ...]",
        "Open a page on this machine: write a request, watch the tokens with what the constraint allows, see the "
        "verdict and the picture, compare with the model before training. Only this machine can reach the page, "
        "unless you give --share. For a run of a built-in task, the task and its options are the run's.",
        [
            "trl-grpo-tasks play outputs/demo",
            "trl-grpo-tasks play outputs/my_task --task my_task.py --port 8080",
        ],
    )
    add_model(parser)
    parser.add_argument("--port", type=int, default=7860, metavar="N", help="port of the page (default: 7860)")
    parser.add_argument(
        "--share", **FLAG, default=False,
        help="make a public address through Gradio's servers: anybody who knows it can use the page (default: false)",
    )  # fmt: skip
    add_sampling_options(parser)
    known, rest = parser.parse_known(arguments)
    model = known.model  # the page shows the Hub id of a model
    task = task_of_model(parser, known, rest, "play", arguments)
    sampling = sampling_of(known)
    from ..playground.models import Models, initial_model
    from .quiet import quiet_third_party_logging

    quiet_third_party_logging()
    from ..playground.page import import_gradio, launch, make_page
    from .interrupt import sigterm_as_ctrl_c

    # After SIGTERM too, the folder is removed and reward workers end.
    with sigterm_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="playground-") as folder:
        os.environ.setdefault(
            "GRADIO_TEMP_DIR", str(Path(folder) / "gradio")
        )  # which gradio reads when it is imported
        import_gradio()
        check_port(known.port)
        with Models(model, task, initial_model(model), folder, **sampling) as models:
            page = make_page(models)
            launch(page, HOST, known.port, known.share)
            page.block_thread()
    return 0


def check_port(port: int) -> None:
    """Raise ValueError if the page cannot listen on this port: loading a model takes long."""
    if not 1 <= port <= 65535:
        raise ValueError(f"--port {port} must be from 1 to 65535")
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError as error:
            raise ValueError(f"--port {port} cannot be used ({error.strerror}); choose another one") from error
