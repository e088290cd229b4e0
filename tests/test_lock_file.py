"""requirements.lock and the Dockerfile agree with pyproject.toml, constraints.txt and the files of the repository."""

import fnmatch
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

ENVIRONMENT = {"python_version": "3.11", "python_full_version": "3.11.9", "sys_platform": "linux",
               "platform_machine": "x86_64", "platform_system": "Linux", "extra": ""}  # fmt: skip


def pins(name):
    """Package -> pinned version of a file, on x86 Linux with Python 3.11."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert requirement.url is None, line
            if requirement.marker is None or requirement.marker.evaluate(ENVIRONMENT):
                (specifier,) = requirement.specifier
                assert specifier.operator == "==", line
                found[canonicalize_name(requirement.name)] = specifier.version
    return found


def requirements(extra):
    """The requirements of the package with an extra; extras of extras are resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, found = list(project["dependencies"]) + list(project["optional-dependencies"][extra]), []
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name == project["name"]:
            wanted += [one for name in requirement.extras for one in project["optional-dependencies"][name]]
        elif requirement.marker is None or requirement.marker.evaluate(ENVIRONMENT):
            found.append(requirement)
    return found


def test_the_lock_file_has_what_the_package_requires():
    locked = pins("requirements.lock")
    for requirement in requirements("all"):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in requirements.lock; run 'make lock'"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {version}; run 'make lock'"


def test_the_lock_file_has_the_tested_versions():
    locked, tested = pins("requirements.lock"), pins("constraints.txt")
    different = {name: (locked[name], tested[name]) for name in locked.keys() & tested if locked[name] != tested[name]}
    assert not different, f"run 'make lock': {different}"


@pytest.mark.parametrize("name", ["constraints.txt", "requirements.lock"])
def test_every_package_is_pinned_once(name):
    lines = [Requirement(line) for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#"]
    for requirement in lines:
        same = [str(one.marker) for one in lines if one.name == requirement.name]
        assert len(set(same)) == len(same), requirement.name


def test_the_dockerfile_copies_files_that_are_there_and_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*", "everything is left out that is not named"
    copied = [name for words in re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
              for name in words.split()]  # fmt: skip
    assert {"requirements.lock", "pyproject.toml", "trl_grpo_tasks"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(fnmatch.fnmatch(f"!{name}", pattern) for pattern in ignored), f"{name} is in .dockerignore"
