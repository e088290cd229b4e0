"""The models of a playground: a model, and the one that its training started from."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..evaluation.solver import Solver
from ..files import looks_local, model_file_in
from ..models.loading import TINY
from ..report.run_folder import sampling_of, settings_of
from ..task import Task

AFTER, BEFORE = "after training", "before training"


def initial_model(model: str) -> str | None:
    """Return the folder or Hub id of the model that the training of a run started from: after the cold start if there
    was one. None for a model that is not the folder of a run, and if its revision is not on the Hub any more."""
    if not (settings := settings_of(model)):
        return None
    for name in ("cold_start", "base_model"):
        if model_file_in(Path(model) / name):
            return str(Path(model) / name)
    used = settings.get("model", {})
    name, revision = used.get("name"), used.get("revision") or "main"
    if name in (None, TINY):
        return None
    if revision == "main" or looks_local(name) or Path(name).exists():
        return str(name)
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, revision=revision)  # a Hub id alone would mean its newest revision
    except OSError:
        return None


class Models(ExitStack):
    """The solver of a model, and that of its initial model, which is loaded when it is first asked for. At the end,
    their reward workers are stopped.

    `sampling` are arguments of `Solver.from_pretrained`, for both models.
    """

    def __init__(self, model: str, task: Task, before: str | None, folder: str | Path, **sampling: Any):
        super().__init__()
        self.name, self.task = model, task
        # The folder of the initial model has no settings, so both models take those of the run.
        given = {name: value for name, value in sampling.items() if value is not None}
        self._sampling = sampling_of(settings_of(model)) | given
        self._places = {AFTER: (model, Path(folder))} | ({BEFORE: (before, Path(folder) / "before")} if before else {})
        self._solvers: dict[str, Solver] = {}
        self.solver(AFTER)

    @property
    def choices(self) -> list[str]:
        """The models that can be asked."""
        return list(self._places)

    def solver(self, which: str) -> Solver:
        """Return the solver of one of `choices`; ValueError if its model cannot be loaded."""
        if which not in self._solvers:
            model, folder = self._places[which]
            solver = Solver.from_pretrained(model, self.task, folder=folder, **self._sampling)
            self._solvers[which] = self.enter_context(solver)
        return self._solvers[which]
