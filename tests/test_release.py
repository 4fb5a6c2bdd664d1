"""What a release says of itself agrees: versions, dates, addresses, links, what workflows call."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOLS = PYPROJECT["project"], PYPROJECT["tool"]
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
    readme = (ROOT / "README.md").read_text()
    in_clone = LINK.findall(readme)
    local = [link.partition("#")[0] for link in in_clone if not link.startswith("https://")]
    assert len(local) > 15 and all((ROOT / link).exists() for link in local)
    version = f"v{PROJECT['version']}"
    # As the build does: what is installed may be of an earlier README.
    for each in TOOLS["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        replacement = each["replacement"].replace("v$HFPR_VERSION", version)
        readme = re.sub(each["pattern"], replacement, readme)
    images = f"{URLS['Source'].replace('github.com', 'raw.githubusercontent.com')}/{version}"
    for before, after in zip(in_clone, LINK.findall(readme), strict=True):
        folder = images if before.endswith(".png") else f"{URLS['Source']}/blob/{version}"
        assert after == (before if before.startswith("https://") else f"{folder}/{before}")
    # The build takes a file named by `readme` by itself, but not one that is put together.
    assert "/README.md" in TOOLS["hatch"]["build"]["targets"]["sdist"]["include"]
    built = str(importlib.metadata.metadata("anchorlens").json["description"])
    assert all(link.startswith("https://") for link in LINK.findall(built)) and len(built) > 3000


def test_what_workflows_call_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    called = set()
    for path in WORKFLOWS:
        text = path.read_text()
        assert isinstance(yaml.safe_load(text), dict)
        called |= set(re.findall(r"\bmake ([a-z-]+)", text))
        assert all((ROOT / local).exists() for local in re.findall(r"uses: (\./\S+)", text))
    assert called >= {"test", "test-all", "test-browser", "test-newest", "docs"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in called)


@pytest.mark.parametrize(
    ("tag", "wrong", "old", "new"),
    [
        ("v0.1.0", "", "", ""),
        ("v0.1.1", "", "", ""),
        ("v0-1.0", "", "", ""),
        ("v0.1.0", "pyproject.toml", "0.1.0", "0.1.1"),
        ("v0.1.0", "CITATION.cff", "0.1.0", "0.1.1"),
        ("v0.1.0", "CHANGELOG.md", "0.1.0", "0.1.1"),
        ("v0.1.0", "CHANGELOG.md", "12-01", "12-02"),
        ("v0.1.0", "CHANGELOG.md, CITATION.cff", "2026-12-01", "unreleased"),
    ],
)
def test_a_release_is_only_made_of_the_tag_of_its_version_and_date(
    tag: str, wrong: str, old: str, new: str, tmp_path: Path
) -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    [check, *_] = [each["run"] for each in release["jobs"]["build"]["steps"] if "run" in each]
    for name, text in {
        "pyproject.toml": '[project]\nversion = "0.1.0"\n',
        "CITATION.cff": "version: 0.1.0\ndate-released: 2026-12-01\n",
        "CHANGELOG.md": "# Changelog\n\n## [0.1.0] - 2026-12-01\n",
    }.items():
        (tmp_path / name).write_text(text.replace(old, new) if name in wrong else text)
    named = os.environ | {"GITHUB_REF_NAME": tag}
    done = subprocess.run(["bash", "-ec", check], cwd=tmp_path, env=named)
    assert (done.returncode == 0) == (tag == "v0.1.0" and not wrong)
