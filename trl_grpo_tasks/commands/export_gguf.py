"""`trl-grpo-tasks export-model`: the final model of a run as a GGUF file for llama.cpp and Ollama."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..report.run_folder import RunFolder, sampling_of
from ..task import check_choice
from .command_parser import CommandParser
from .help_screens import PROGRAM

TYPES = ("q8_0", "f16", "bf16", "f32")  # of --type; the first is the default
GGUF_FOLDER = "gguf"  # in the folder of the run
NO_CONVERTER = 3  # exit status
SCRIPT = "convert_hf_to_gguf.py"
PROGRAMS = (SCRIPT, "llama-convert-hf-to-gguf")  # names of the converter on PATH
VARIABLE = "LLAMA_CPP"  # environment variable: the folder of llama.cpp


def export_model(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "export-model",
        "RUN [--type TYPE] [--out FOLDER]",
        "Write the final model of a run as a GGUF file for llama.cpp and Ollama; an adapter is merged into its base "
        "model. If llama.cpp's converter is not found, the commands that do it are printed, and the exit status is 3.",
        ["trl-grpo-tasks export-model outputs/my_run --type f16"],
    )
    parser.add_argument("run_dir", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--type", default=TYPES[0], metavar="TYPE",
        help="type of the weights: q8_0 (default, 8 bits), f16, bf16 or f32",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", help="folder of the file (default: gguf, in that of the run)")
    known, _ = parser.parse_known(arguments)
    check_choice("type", known.type, TYPES)
    return export_gguf(known.run_dir, known.type, known.out)


def export_gguf(run_dir: str, kind: str, out: str | None) -> int:
    """Convert the final model of a run by llama.cpp's converter; an adapter is merged first. If there is no converter,
    print the commands that do it. Returns the exit status."""
    from ..models.loading import is_adapter, load_tokenizer, merged_folder
    from .final_model import check_final_model
    from .plan import check_writable
    from .quiet import quiet_third_party_logging

    quiet_third_party_logging()
    run = RunFolder.read(check_final_model(run_dir))
    folder = run.path / GGUF_FOLDER if out is None else Path(out)
    check_writable(folder, "--out")
    _check_convertible(run.path)
    converter = find_converter()
    source = merged_folder(run.path) if is_adapter(run.path) else run.path
    folder.mkdir(parents=True, exist_ok=True)
    name = run.path.absolute().name
    file = folder / f"{name}-{kind}.gguf"
    write_atomically(folder / "Modelfile", modelfile(run, load_tokenizer(str(source)), file.name))
    if converter is None:
        print(how_to_convert(source, file, kind))
        return NO_CONVERTER
    # A conversion that is interrupted leaves no file that looks complete.
    partial = file.with_suffix(".partial")
    command = [*converter, str(source), "--outfile", str(partial), "--outtype", kind]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or not partial.is_file():
        partial.unlink(missing_ok=True)
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        print(f"error: llama.cpp's converter failed ({said[-1]}); to see more: {shlex.join(command)}", file=sys.stderr)
        return 1
    partial.replace(file)
    print(f"{file}: {file.stat().st_size / 1e6:,.1f} MB")
    print(f"for Ollama: ollama create {shlex.quote(name.lower())} -f {shlex.quote(str(folder / 'Modelfile'))}")
    return 0


def find_converter() -> list[str] | None:
    """Return the words that start llama.cpp's converter, from $LLAMA_CPP, PATH or an installed package, or None.

    ValueError if $LLAMA_CPP is set and has no converter.
    """
    if given := os.environ.get(VARIABLE):
        path = Path(given).expanduser()
        script = path / SCRIPT if path.is_dir() else path
        if not script.is_file():
            raise ValueError(f"{VARIABLE}={given}: there is no {SCRIPT}; set it to a folder with llama.cpp's source")
        return [sys.executable, str(script)]
    for program in PROGRAMS:
        if found := shutil.which(program):
            return [found]
    return [sys.executable, "-m", Path(SCRIPT).stem] if find_spec(Path(SCRIPT).stem) is not None else None


def how_to_convert(source: Path, file: Path, kind: str) -> str:
    """The commands that get llama.cpp's converter and convert a model folder."""
    convert = ["python", f"llama.cpp/{SCRIPT}", str(source), "--outfile", str(file), "--outtype", kind]
    return f"""\
llama.cpp's converter, {SCRIPT}, was not found on PATH, in ${VARIABLE} or among the installed packages.
The model is ready for it; these commands convert it:
  git clone --depth 1 https://github.com/ggml-org/llama.cpp
  pip install gguf sentencepiece
  {shlex.join(convert)}
Later, with {VARIABLE}=llama.cpp set, '{PROGRAM} export-model' runs the converter itself."""


def modelfile(run: RunFolder, tokenizer: Any, file: str) -> str:
    """Ollama's Modelfile: sampling as in the run, and the prompt format, which Ollama cannot read from the file."""
    used = sampling_of(run.settings)
    lines = [f"FROM ./{file}"]
    parameters = {"temperature": used.get("temperature", 1.0), "num_predict": used.get("max_completion_length")}
    # Filters that are not given would be Ollama's defaults.
    parameters |= {"top_k": used.get("top_k") or 0, "top_p": used.get("top_p") or 1.0}
    parameters |= {"min_p": used.get("min_p") or 0.0, "repeat_penalty": 1.0}
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items() if value is not None]
    lines.append(f"PARAMETER stop {json.dumps(tokenizer.eos_token, ensure_ascii=False)}")
    if (template := _template(run, tokenizer)) is not None:
        lines.append(f'TEMPLATE """{template}"""')
    return "\n".join(lines) + "\n"


def _template(run: RunFolder, tokenizer: Any) -> str | None:
    """The prompts of the run with Ollama's placeholder for the user's text; None without an evaluation, whose prompts
    tell the form, or if the form cannot be written as a template."""
    before, after = run.before_and_after
    samples = (after or before or {"samples": []})["samples"]
    if not samples:
        return None
    place, prompt = "{{ .Prompt }}", samples[0]["row"]["prompt"]
    if isinstance(prompt, str):
        return place
    if prompt[-1].get("role") != "user":
        return None
    messages = [*prompt[:-1], {"role": "user", "content": place}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    bos = tokenizer.bos_token
    if bos and text.startswith(bos) and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        text = text.removeprefix(bos)  # which Ollama adds itself
    rest = text.replace(place, "")
    return None if text.count(place) != 1 or "{{" in rest or '"""' in rest else text


def _check_convertible(folder: Path) -> None:
    """Raise ValueError for models that llama.cpp cannot generate with."""
    from ..models.loading import model_config

    architecture = (model_config(str(folder)).architectures or [""])[0]
    if architecture.endswith("ForMaskedLM"):
        raise ValueError(f"{folder} is a masked language model, with which llama.cpp cannot generate")
    file = folder / "tokenizer.json"
    if file.is_file() and json.loads(file.read_text(encoding="utf-8"))["model"].get("type") == "WordLevel":
        raise ValueError(
            f"{folder} has the tokenizer of a tiny model, which llama.cpp does not know; train a model from "
            "the Hub, or a .gguf file"
        )
