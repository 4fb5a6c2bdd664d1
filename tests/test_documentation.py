"""The code of the README and of the documentation runs as printed, on a tiny model."""

import doctest
import importlib
import inspect
import re
import runpy
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
import typer
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoProcessor

import anchorlens as al
from anchorlens.cli import commands
from anchorlens.report.claims import Verdict
from tests.support.docstrings import failed_docstrings
from tests.support.image_models import image_model
from tests.support.printed_code import FENCE, MODULES, ROOT, blocks_of, run_page
from tests.support.public import public

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

pytestmark = [
    pytest.mark.filterwarnings("ignore:in . of . sets:UserWarning"),
    pytest.mark.filterwarnings("ignore:some pairs:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_code(language: str) -> list[Any]:
    """The pages with blocks of this language; another file runs those of other tools."""
    pages = [page for page in PAGES if blocks_of(page, language)]
    if language == "python":  # tests/devices runs the README
        pages = [page for page in pages if page.name not in ("other_tools.md", "README.md")]
    return [pytest.param(page, id=name_of(page)) for page in pages]


@pytest.fixture(scope="module")
def load_tiny(model_folder: Path) -> Callable[..., Any]:
    load, models = al.load_model, dict[str, Any]()

    def load_tiny(name: str, **options: Any) -> Any:
        if name not in models and "llava" in str(name):
            weights, processor = image_model("LLaVA")
            models[name] = load(weights, tokenizer=processor.tokenizer)
        elif name not in models:
            models[name] = load(str(model_folder))
        return models[name]

    return load_tiny


MOST_QUERIES = 12  # on pages with more, so that their code takes seconds


@pytest.fixture
def reader(monkeypatch: Any, tmp_path: Path, load_tiny: Any, model_folder: Path) -> Iterator[None]:
    """What a reader has: a model of any name, a folder to write into, a browser for figures."""
    load_plain = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda name: image_model("LLaVA")[1])
    sample, sample_prompts = al.sample_queries, al.sample_prompts

    def few(pool: Any, count: int, *given: Any, **options: Any) -> Any:
        return sample(pool, min(count, MOST_QUERIES), *given, **options)

    def few_prompts(*given: Any, queries: int = MOST_QUERIES, **options: Any) -> Any:
        return sample_prompts(*given, queries=min(queries, MOST_QUERIES), **options)

    plain = lambda name, **options: load_plain(str(model_folder), **options)  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", plain)
    monkeypatch.setattr(al, "load_model", load_tiny)
    monkeypatch.setattr(al, "sample_queries", few)
    monkeypatch.setattr(al, "sample_prompts", few_prompts)
    monkeypatch.setattr(go.Figure, "show", lambda figure: None)
    monkeypatch.chdir(tmp_path)
    state = torch.random.get_rng_state()
    yield
    torch.random.set_rng_state(state)
    PartialState._reset_state()  # a page on several processes makes it


@pytest.mark.quick_cases(
    "runs whole pages", "docs/metrics.md", "docs/prefix_tuning.md", "docs/tutorials/own_task.md"
)
@pytest.mark.parametrize("page", with_code("python"))
def test_the_code_of_a_page_runs(page: Path, reader: None, quick: None) -> None:
    run_page(page)


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES])
def test_all_code_of_a_page_is_found(page: Path) -> None:
    """A fence that is indented, or has no language, would not run."""
    text = page.read_text()
    assert len(re.findall(r"^\s*```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))
    assert all(language for language, _ in FENCE.findall(text))


def commands_of(page: Path) -> list[list[str]]:
    """The arguments of each call of ``anchorlens`` in the shell blocks of a page."""
    calls = []
    for block in blocks_of(page, "sh"):
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition("|")[0], comments=True)
            starts = [k for k, word in enumerate(words) if word.split("/")[-1] == "anchorlens"]
            calls += [words[starts[0] + 1 :]] if starts else []
    return [call for call in calls if call]


@pytest.mark.parametrize("page", [p for p in with_code("sh") if commands_of(p.values[0])])
def test_the_commands_of_a_page_have_their_options(page: Path) -> None:
    """Arguments are read as by a call, but nothing runs."""
    group: Any = typer.main.get_command(commands.app)
    for words in commands_of(page):
        context = group.make_context("anchorlens", list(words), resilient_parsing=True)
        name, command, rest = group.resolve_command(context, words)
        command.make_context(name, rest, parent=context)


def test_the_task_file_on_the_page_of_the_command_is_read(tmp_path: Path) -> None:
    [block] = blocks_of(ROOT / "docs" / "command.md", "toml")
    (tmp_path / "reviews.toml").write_text(block.code)
    (tmp_path / "reviews.csv").write_text("review,verdict\nA joy,pos\nDull,neg\n")
    task, examples = al.prompts.read_task(tmp_path / "reviews.toml")
    assert task == al.Task("Review: {text}\nGood?{label}", [" no", " yes"])
    assert examples.pool == [al.Example("A joy", 1), al.Example("Dull", 0)]


DEFINITIONS = ROOT / "docs" / "definitions.md"


def metrics_of(page: Path) -> list[str]:
    return re.findall(r"`al\.(\w+)`", page.read_text().partition("\n## ")[0])


@pytest.mark.parametrize("metric", metrics_of(DEFINITIONS))
def test_the_definition_of_a_metric_is_complete(metric: str) -> None:
    text = inspect.getdoc(public()[metric]) or ""
    words = re.findall(r"^(Range|How to read|Pitfalls|Source):\n    ", text, re.MULTILINE)
    assert words == ["Range", "How to read", "Pitfalls", "Source"]
    assert re.search(r"^\$\$$", text, re.MULTILINE), "no formula"
    assert len(metrics_of(DEFINITIONS)) >= 15


def test_the_readme_is_short_and_begins_with_code_and_its_result() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 120
    block, of_hooks = blocks_of(readme, "python")
    assert "run_with_hooks" in of_hooks.code and len(of_hooks.code.splitlines()) <= 8
    assert len([*filter(str.strip, block.code.splitlines())]) <= 7
    [printed] = blocks_of(readme, "text")
    verdicts = [line.partition(":")[0] for line in printed.code.splitlines() if line[0] != " "]
    assert len(verdicts) == 6 and {*verdicts} <= {*map(str, Verdict)}


def test_fourteen_recipes_are_short_and_have_their_results() -> None:
    page = ROOT / "docs" / "cookbook.md"
    _, *recipes = blocks_of(page, "python")
    assert len(recipes) == len(blocks_of(page, "text")) == 14
    for block in recipes:
        assert len([*filter(str.strip, block.code.splitlines())]) <= 10, block.line


PICTURE = re.compile(r"\]\((?:\.\./)*(images/\S+?)\)")


def test_pictures_are_made_by_the_code_above_them() -> None:
    theme = runpy.run_path(str(ROOT / "docs" / "theme" / "pictures.py"))
    pages = [page for page in PAGES if page.name != "README.md"]
    made = {picture for page in pages for picture, _ in theme["pictures"](page)}
    shown = {picture for page in pages for picture in PICTURE.findall(page.read_text())}
    files = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs/images").rglob("*.*")}
    assert len(shown) > 20
    assert shown == made | theme["DIAGRAMS"] | theme["MEASURED"] == files


def test_a_tutorial_begins_with_the_picture_of_its_result() -> None:
    pages = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    pages += [ROOT / "docs" / f"{name}.md" for name in ("metrics", "own_question", "own_context")]
    for page in pages:
        before, _, _ = page.read_text().partition("```")
        assert PICTURE.search(before), f"{page.name} shows no result before its code"


def public_names() -> dict[str, str]:
    folders = {"TASKS": "prompts"}
    for name, value in public().items():
        module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "")
        if module.count(".") > 1 or module == "anchorlens.hooks" or name == "AnchorlensError":
            folders.setdefault(name, module.split(".")[1])
    return folders


def test_each_public_name_is_on_a_reference_page_of_its_folder() -> None:
    """Of a folder with many names each kind has a page, such as ``metrics_segments.md``."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    on_pages = [
        (name, page.stem.split("_")[0])
        for page in pages
        for name in re.findall(r"^::: anchorlens\.(?:\w+\.)?(\w+)$", page.read_text(), re.MULTILINE)
    ]
    # All errors are on one page, most of them as members of their module.
    on_pages.remove(("errors", "errors"))
    assert sorted(on_pages) == sorted(public_names().items())


def test_the_first_reference_page_links_the_others() -> None:
    folder = ROOT / "docs" / "reference"
    links = re.findall(r"\]\((\w+\.md)\)", (folder / "index.md").read_text())
    assert sorted(links) == sorted({page.name for page in folder.glob("*.md")} - {"index.md"})


def test_docstrings_have_no_roles_of_another_tool() -> None:
    """They would be shown as they are, and read badly in ``help``."""
    files = (ROOT / "anchorlens").rglob("*.py")
    assert not [path.name for path in files if re.search(r":\w+:`", path.read_text())]


@pytest.mark.slow("every example")
@pytest.mark.filterwarnings("ignore")
def test_examples_of_docstrings_give_what_they_say() -> None:
    """tests/devices runs them on a simulated device, too."""
    assert failed_docstrings("cpu") == {}


def test_docstrings_have_many_examples_and_skip_none() -> None:
    modules = map(importlib.import_module, MODULES)
    tests = [test for module in modules for test in doctest.DocTestFinder().find(module)]
    examples = [example for test in tests for example in test.examples]
    assert len(examples) > 40
    assert not any(doctest.SKIP in example.options for example in examples)
