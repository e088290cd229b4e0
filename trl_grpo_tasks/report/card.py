"""The model card of a run: README.md with the metadata header for the Hub, results, samples and usage."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..models.loading import MERGED_FOLDER, TINY
from ..task import Task
from .gallery import ROWS_SHOWN, Pictures, Sample, choose, pairs, prompt_of, requests_of, spread, typical_samples
from .run_folder import RunFolder, duration, is_number, shown_metrics
from .templating import code, in_table, render
from .usage import changed_options, usage

CARD_FILE = "README.md"
PICTURE_FILE = "samples.png"
COLUMNS = 4  # prompts in the picture
SIDE = 320  # pixels of a sample in the picture
SETTINGS = (
    "max_steps", "num_train_epochs", "learning_rate", "beta", "num_generations", "generation_batch_size",
    "temperature", "max_completion_length", "fill_steps", "advantage_estimator", "pass_k", "constrain",
    "component_weights", "reference_mode", "kl_target", "entropy_coef", "curriculum", "replay_size",
    "own_successes", "relabel", "guard", "guard_floor", "best_by", "loss_type", "epsilon", "seed",
)  # fmt: skip


def write_card(
    run_dir: str | Path,
    task: Task,
    name: str | None = None,
    *,
    pictures: Pictures | None = None,
    merged: bool = False,
    folder: str | Path | None = None,
) -> Path:
    """Write README.md and, if the task renders PNG pictures, samples.png into a run folder; return the card's path.

    `name` is the model's repository on the Hub, if it has or will have one. `pictures` may be those of the report, so
    that they are not drawn again. With `merged`, the card is that of the adapter merged into its base model. `folder`
    is where the files are written, if not into the run folder; the card then does not mention merged weights there.
    """
    from huggingface_hub import ModelCard

    run = RunFolder.read(run_dir)
    name = name or run.path.absolute().name
    model = run.settings.get("model", {})
    # While the run has only saved checkpoints, its folder does not contain the adapter yet.
    adapter = _adapter_base(run.path) or (model.get("name") if model.get("use_peft") else None)
    base = model.get("name") if merged and model.get("name") == TINY else adapter or model.get("name")
    adapter = None if merged else adapter
    out = run.path if folder is None else Path(folder)
    has_picture = _write_picture(run, Pictures(task) if pictures is None else pictures, out / PICTURE_FILE)
    latest = run.latest_evaluation
    prompt = latest["samples"][0]["row"]["prompt"] if latest and latest["samples"] else None
    text = render(
        "card.md",
        name=name,
        run=run,
        task=task,
        base=base,
        adapter_of=adapter,
        is_base_on_hub=is_on_hub(base),
        merged_folder=MERGED_FOLDER if folder is None and (run.path / MERGED_FOLDER).is_dir() else None,
        header=_header(run, task, name, base, adapter is not None).to_yaml(),
        metrics=_shown_metrics(run.evaluations[-1]["metrics"]) if run.evaluations else {},
        made=len(run.evaluations[-1]["samples"]) if run.evaluations else 0,
        requests=len(requests_of(run.evaluations[-1])) if run.evaluations else 0,
        picture=PICTURE_FILE if has_picture else None,
        typical=[] if has_picture or latest is None else [_as_text(one) for one in typical_samples(latest, 3)],
        training=_training(run, task),
        **usage(name, run, task, adapter, prompt),
    )
    card = ModelCard(text)
    path = out / CARD_FILE
    write_atomically(path, card.content, errors="replace")
    return path


def _header(run: RunFolder, task: Task, name: str, base: str | None, is_adapter: bool) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    kind = "fill-mask" if task.policy == "masked" else "text-generation"
    results = [
        EvalResult(
            task_type=kind,
            dataset_type=task.name,
            dataset_name=f"{task.name} {task.version}, held-out prompts",
            metric_type=metric.replace("@", "_at_"),
            metric_name=metric,
            metric_value=round(value, 4),
        )
        for metric, value in _shown_metrics((run.latest_evaluation or {"metrics": {}})["metrics"]).items()
    ]
    return ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        base_model=base if is_on_hub(base) else None,
        pipeline_tag=kind,
        tags=["trl", "grpo", "trl-grpo-tasks", task.name, *(["lora"] if is_adapter else [])],
        model_name=name.split("/")[-1],  # the Hub requires it together with results
        eval_results=results or None,
        ignore_metadata_errors=False,
    )


def _as_text(sample: Sample) -> dict[str, str]:
    reason = sample.get("reason") or ""
    verdict = code(reason[:400]) if reason.strip() else "*no success*"
    if (sample["score"] or {}).get("success"):
        verdict = "*success*"
    return {"prompt": prompt_of(sample, 400), "completion": sample["completion"][:1500], "verdict": verdict}


def _training(run: RunFolder, task: Task) -> dict[str, Any]:
    """Return the lines of the table about the training."""
    settings = run.settings
    training = settings.get("training", {})
    lines = {
        "cold start": f"{n} supervised steps" if (n := settings.get("run", {}).get("cold_start_steps")) else None,
        "steps": run.last_step or None,
        "final model": run.final_model,
        "training time": duration(run.seconds) if run.seconds is not None else None,
        "hardware": settings.get("machine"),
        **{f"`{name}`": in_table(json.dumps(training[name])) for name in SETTINGS if _is_set(training, name)},
        **{f"`{name}`": in_table(json.dumps(value)) for name, value in changed_options(run, task).items()},
        "versions": ", ".join(f"{name} {number}" for name, number in settings.get("versions", {}).items()) or None,
    }
    return {name: value for name, value in lines.items() if value is not None}


def _is_set(training: Mapping[str, Any], name: str) -> bool:
    """Whether an option is worth a line: 0, false and null mean "off", except for numbers that are always used."""
    return bool(training.get(name)) or (name in training and name in ("beta", "temperature", "seed"))


def _write_picture(run: RunFolder, pictures: Pictures, path: Path) -> bool:
    """Write samples.png and return whether it was written. Tasks that render HTML or cannot render have none."""
    (before, after), latest = run.before_and_after, run.latest_evaluation
    if latest is None or not latest["samples"]:
        return False
    if before is not None and after is not None and (found := pairs(before, after)):
        chosen = choose(choose(found, ROWS_SHOWN), COLUMNS)  # among those in the report
        shown = [[pair.before for pair in chosen], [pair.after for pair in chosen]]
    else:
        shown = [spread(typical_samples(latest, ROWS_SHOWN), COLUMNS)]
    drawn = [[pictures.drawn(sample) for sample in line] for line in shown]
    if not all(isinstance(picture, bytes) for line in drawn for picture in line):
        return False
    return _sheet(drawn, path)


def _sheet(drawn: Sequence[Sequence[Any]], path: Path) -> bool:
    """Write PNG pictures as a grid into one file; return whether it was written."""
    try:
        from PIL import Image, ImageOps
    except ImportError:  # a task may render PNG without Pillow; the card then has no picture
        return False
    page = Image.new("RGB", (SIDE * max(map(len, drawn)), SIDE * len(drawn)), "white")
    for y, line in enumerate(drawn):
        for x, picture in enumerate(line):
            image = ImageOps.contain(Image.open(io.BytesIO(picture)).convert("RGB"), (SIDE, SIDE))
            page.paste(image, (SIDE * x + (SIDE - image.width) // 2, SIDE * y + (SIDE - image.height) // 2))
    page.save(png := io.BytesIO(), "PNG")
    write_atomically(path, png.getvalue())
    return True


def _shown_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: metrics[name] for name in shown_metrics([metrics]) if is_number(metrics[name]) and name != "seconds"}


def _adapter_base(folder: Path) -> str | None:
    config = folder / "adapter_config.json"
    return json.loads(config.read_text())["base_model_name_or_path"] if config.is_file() else None


def is_on_hub(model: str | None) -> bool:
    """Tell whether `model` can be a Hub id: neither a local path nor the tiny model."""
    if not model or model == "tiny" or model.endswith(".gguf") or Path(model).exists():
        return False
    return model.count("/") <= 1 and not model.startswith(("/", ".", "~"))
