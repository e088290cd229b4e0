"""Atomic file writes, never through a link; YAML files; detection of model folders and misspelt paths."""

from __future__ import annotations

import difflib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

MODEL_FILES = ("config.json", "adapter_config.json")  # every model folder contains at least one of these
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".yaml", ".yml")
MOST_VALUES = 10_000  # of a YAML file
FILE_SUFFIXES = (*DATA_SUFFIXES, ".gguf", ".safetensors", ".bin", ".pt")


def write_atomically(path: Path, content: str | bytes, errors: str = "strict") -> None:
    """Write `content` to `path` through a temporary file of its own, so that readers, resumed runs and other writers
    never see a partial file. A link at `path` is replaced; what it points to stays as it is."""
    written = content.encode("utf-8", errors) if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:  # "x" does not follow a link either
            file.write(written)
        temporary.replace(path)
    except BaseException:  # most likely the disk is full
        with suppress(OSError):
            temporary.unlink()
        raise


def not_through_a_link(path: str, flags: int) -> int:
    """An `opener` for `open`: OSError if `path` is a link, which a downloaded folder can point to any file."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def read_table(path: str | Path) -> Any:
    """Return the content of a YAML file that belongs to the package."""
    import yaml

    return yaml.load(Path(path).read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_yaml(path: str | Path, option: str) -> Any:
    """Return the content of a YAML or JSON file that the user named with `option`; ValueError if it has none."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """Plain YAML keeps the last of two values of a name; here that is an error."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{option} {path}: {name} is given {names.count(name)} times; keep one")
            return super().construct_mapping(node, deep)

    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip()[:1] in ("{", "["):  # JSON may be indented by tabs, which YAML refuses
            text = text.replace("\t", " ")
        values = yaml.load(text, UniqueKeys)
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} {path} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{option} {path} is nested too deeply") from error
    # Count the values with YAML aliases expanded, which a small file can repeat without limit.
    count, left = 0, [values]
    while left:
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += 1
        if count + len(left) > MOST_VALUES:
            raise ValueError(f"{option} {path} holds more than {MOST_VALUES:,} values")
    return values


def model_file_in(folder: str | Path) -> str | None:
    """Return the name of the configuration file that marks `folder` as a model folder, or None if it is not one."""
    return next((name for name in MODEL_FILES if (Path(folder) / name).is_file()), None)


def from_pretrained(auto_class: Any, source: str, **options: Any) -> Any:
    """Load a configuration, tokenizer or model by an Auto class of transformers or PEFT.

    Python code that comes with a model is never run, and nobody is asked whether to run it.
    """
    try:
        return auto_class.from_pretrained(source, **options | {"trust_remote_code": False})
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"model {source!r} needs Python code of its own, which is never run here (--trust_remote_code has no "
            "effect); choose a model of an architecture that transformers implements"
        ) from error


def looks_local(text: str) -> bool:
    """Whether `text` is meant as a path on this machine rather than as an id on the Hub (owner/name)."""
    first, slash, _ = text.partition("/")
    return (
        text.startswith((".", "/", "~"))
        or text.endswith(FILE_SUFFIXES)
        or text.count("/") > 1
        or bool(slash and (first == "outputs" or Path(first).is_dir()))
    )


def check_local_path(text: str, option: str) -> None:
    """Raise ValueError if `text` looks like a local path and nothing is there: the Hub must not be asked for it; or if
    it is a .gguf file that is none."""
    path = Path(text).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        try:
            with open(path, "rb") as file:
                is_gguf = file.read(4) == b"GGUF"
        except OSError as error:
            raise ValueError(f"{option} {text}: {error.strerror}") from error
        if not is_gguf:
            raise ValueError(f"{option} {text} is not a GGUF file (it does not begin with GGUF); download it again")
    if path.exists() or not looks_local(text):
        return
    parent = next(folder for folder in (path.parent, *path.parent.parents) if folder.exists())
    missing = path if parent == path.parent else next(p for p in path.parents if p.parent == parent)
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(missing.name, names, n=1)
    hint = f" (did you mean {str(parent / near[0])!r}?)" if near else ""
    what = "this path" if missing == path else f"folder {str(missing)!r}"
    raise ValueError(f"{option} {text}: {what} does not exist{hint}")
