"""Install this clone with the tested versions, and keep the packages that Colab brings where they are recent enough:

python notebooks/install.py brick,report
"""

import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
# Compiled packages that a running notebook may have imported already, and that fit the machine's drivers.
KEPT = ("torch", "numpy", "scipy", "matplotlib", "pillow")


def constraints(root: Path = ROOT) -> str:
    """The text of constraints.txt, with the installed version of each package in KEPT that meets the minimum."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for group in project["optional-dependencies"].values() for one in group)]
    minimums = {one.name: one.specifier for one in map(Requirement, wanted)}
    lines = []
    for line in (root / "constraints.txt").read_text().splitlines():
        name, _, tested = line.partition("==")
        if name in KEPT:
            installed = _installed(name)
            if installed is not None and minimums[name].contains(installed, prereleases=True):
                print(f"{name} {installed} is kept ({name}{minimums[name]} is needed)")
                line = f"{name}=={installed}"
            else:
                print(f"{name} {installed or 'is not installed'}: {tested} will be installed")
        lines.append(line)
    return "\n".join(lines) + "\n"


def main(extras: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(constraints())
        file.flush()
        command = [sys.executable, "-m", "pip", "install", "-q", "-c", file.name, f"{ROOT}[{extras}]"]
        subprocess.run(command, check=True)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1])
