"""The versions that the package accepts are those that are tested, at both ends."""

import importlib.metadata
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from tests.test_architecture import NODES, modules_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ACCEPTED = {
    canonicalize_name(required.name): required
    for text in [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    for required in [Requirement(text)]
}
# Too large to be installed twice.
INSTALLED_ONCE = {"torch"}


def pins(file: str) -> dict[str, Version]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in lines}


OLDEST, NEWEST = pins("requirements/oldest.txt"), pins("constraints.txt")


def bounds(name: NormalizedName) -> dict[str, Version]:
    return {bound.operator: Version(bound.version) for bound in ACCEPTED[name].specifier}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_dependency_has_a_tested_version_at_both_ends(name: NormalizedName) -> None:
    accepted, newest = bounds(name), NEWEST[name]
    assert set(accepted) == {">=", "<"}
    assert name in INSTALLED_ONCE or accepted[">="] == OLDEST[name]
    assert accepted[">="] <= newest
    # The next major version is not accepted before it is tested.
    assert newest < accepted["<"] <= Version(str(newest.major + 1))


def test_what_development_needs_has_bounds_that_fit_the_constraints() -> None:
    development = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [*development["dependency-groups"].values(), development["build-system"]["requires"]]
    for required in (Requirement(text) for texts in groups for text in texts):
        assert {bound.operator for bound in required.specifier} == {">=", "<"}, required.name
        name = canonicalize_name(required.name)
        # What builds is installed anew for each build.
        assert name.startswith("hatch") or required.specifier.contains(NEWEST[name]), name


def test_the_oldest_versions_are_older_than_those_of_the_constraints() -> None:
    assert all(OLDEST[name] <= NEWEST[name] for name in OLDEST if name in NEWEST)


@pytest.mark.slow("many passes")
def test_what_the_package_imports_is_a_dependency() -> None:
    distributions = importlib.metadata.packages_distributions()
    imported = {
        canonicalize_name(name)
        for _, node in NODES
        for module in modules_of(node)
        for name in distributions.get(module.partition(".")[0], [])
    }
    # Triton comes with PyTorch for CUDA, and is only imported where it is found.
    assert imported - {"anchorlens", "triton"} <= set(ACCEPTED)


def test_the_pythons_of_the_classifiers_are_those_that_are_accepted_and_tested() -> None:
    prefix = "Programming Language :: Python :: 3."
    minors = [int(text[len(prefix) :]) for text in PROJECT["classifiers"] if prefix in text]
    assert minors == list(range(min(minors), max(minors) + 1))
    assert PROJECT["requires-python"] == f">=3.{min(minors)}"
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    [matrix] = re.findall(r"python-version: (\[.*\])", ci)
    assert matrix == str([f"3.{minor}" for minor in minors]).replace("'", '"')
