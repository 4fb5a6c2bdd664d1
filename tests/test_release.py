"""What a release says of itself agrees: versions, dates, addresses, links, what workflows call."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.with_shapes

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URLS = PROJECT["urls"]
WORKFLOWS = sorted((ROOT / ".github").rglob("*.yml"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_versions_and_dates_agree() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    log = (ROOT / "CHANGELOG.md").read_text()
    [newest, *_] = re.findall(r"^## \[(\S+)\] - (\S+)$", log, re.MULTILINE)
    assert newest[0] == PROJECT["version"] == str(cited["version"])
    assert newest[0] == importlib.metadata.version("anchorlens")
    # A release has a date, and a version that is not released has none.
    assert newest[1] == str(cited.get("date-released", "unreleased"))


def test_there_is_one_address_of_the_source_and_one_of_the_documentation() -> None:
    source, documentation = URLS["Source"], URLS["Documentation"]
    assert URLS["Changelog"] == f"{source}/blob/main/CHANGELOG.md"
    assert URLS["Issues"] == f"{source}/issues"
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["repository-code"], cited["url"]) == (source, documentation)
    assert f"site_url: {documentation}\n" in (ROOT / "mkdocs.yml").read_text()
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *WORKFLOWS, ROOT / "mkdocs.yml"]
    for path in (*files, ROOT / "pyproject.toml"):
        found = re.findall(r"https://[^\s\"')>]*anchorlens[^\s\"')>]*", path.read_text())
        of_files = source.replace("github.com", "raw.githubusercontent.com")
        others = [url for url in found if not url.startswith((source, documentation, of_files))]
        assert not others, path.name


def test_links_of_the_readme_work_in_a_clone_and_are_absolute_on_a_package_index() -> None:
    in_clone = LINK.findall((ROOT / "README.md").read_text())
    local = [link.partition("#")[0] for link in in_clone if not link.startswith("https://")]
    assert len(local) > 15 and all((ROOT / link).exists() for link in local)
    on_index = LINK.findall(str(importlib.metadata.metadata("anchorlens").json["description"]))
    version = f"v{PROJECT['version']}"
    images = f"{URLS['Source'].replace('github.com', 'raw.githubusercontent.com')}/{version}"
    for before, after in zip(in_clone, on_index, strict=True):
        folder = images if before.endswith(".png") else f"{URLS['Source']}/blob/{version}"
        assert after == (before if before.startswith("https://") else f"{folder}/{before}")


def test_what_workflows_call_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    called = set()
    for path in WORKFLOWS:
        assert isinstance(yaml.safe_load(path.read_text()), dict)
        called |= set(re.findall(r"\bmake ([a-z-]+)", path.read_text()))
    assert called >= {"test", "test-oldest", "test-browser", "test-newest", "docs"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in called)


@pytest.mark.parametrize(
    ("tag", "changed", "status"),
    [
        ("v0.1.0", "2026-12-01", 0),
        ("v0.1.0", "unreleased", 1),
        ("v0.1.1", "2026-12-01", 1),
        ("v0-1.0", "2026-12-01", 1),
    ],
)
def test_a_release_is_only_made_of_the_tag_of_its_version(
    tag: str, changed: str, status: int, tmp_path: Path
) -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    [check, *_] = [each["run"] for each in release["jobs"]["build"]["steps"] if "run" in each]
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [0.1.0] - {changed}\n")
    named = os.environ | {"GITHUB_REF_NAME": tag}
    assert subprocess.run(["bash", "-ec", check], cwd=tmp_path, env=named).returncode == status
