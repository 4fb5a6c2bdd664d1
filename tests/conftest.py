"""Which tests run, in which process, with which models; what every test must leave as it was.

Models are imported where they are used: the process that only hands out tests needs none.
"""

import gc
import logging
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SHARED: dict[Any, Any] = {}
LINE = ".".join(version("transformer-lens").split(".")[:2])
KINDS = ("bridge", "processed", "hooked-transformer")
# The architectures of `make test`: positions that are learned, rotated, ALiBi; key heads, windows,
# latent attention, sinks; and a model of TransformerLens itself. `make test-all` has a quarter of
# the others, by the number of the commit, and compares all of them after a change of these paths.
COMMON = {
    "Toy",
    "GPT-2",
    "Llama",
    "Gemma 3",
    "GPT-NeoX (Pythia)",
    "Falcon (ALiBi)",
    "DeepSeek V3",
    "GPT-OSS",
}
TOUCH_ALL_ROWS = (
    *("anchorlens/models", "anchorlens/passes", "tests/models", "tests/references"),
    *("constraints.txt", "requirements"),
)

# Searching for garbage takes a third of the time in which tests are imported; they leave little.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """CONTRIBUTING.md says which kinds of model and which architectures a run has."""
    add = parser.addoption
    add("--kind", choices=KINDS, action="append", help="what the tests hook; several if repeated")
    add("--rows", choices=("all", "due"), default="all", help="which architectures: all, or a part")
    add("--seconds", type=float, help="processor time that a test may take, if it is not slow")
    add("--matrix-results", metavar="FILE", help="add what test_matrix.py measures, as JSON lines")


class RaisedLog(logging.Handler):
    """Makes an error of a fallback that the package did not expect, and logs with its traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            raise AssertionError(record.getMessage()) from record.exc_info[1]


def pytest_collection_finish(session: pytest.Session) -> None:
    import torch

    # pytest-xdist 3.8 adds the group to the name by an attribute that pytest 9.2 does not read.
    in_groups = all("@" in item.nodeid for item in session.items)
    if hasattr(session.config, "workerinput") and not in_groups:
        raise pytest.UsageError(
            "pytest-xdist does not keep the tests of a file in one process with this pytest, so "
            "that every fixture would be made several times; install the pinned versions of both"
        )
    # On models this small several threads wait for each other, up to eight times as long.
    torch.set_num_threads(1)
    logger = logging.getLogger("anchorlens")
    logger.setLevel(logging.DEBUG)  # at which own mistakes are logged
    logger.addHandler(RaisedLog())
    # What was imported stays: searching it for garbage takes a sixth of the time.
    gc.collect()
    gc.freeze()
    gc.enable()


def kinds_of(config: pytest.Config) -> list[str]:
    return config.getoption("kind") or ["bridge"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What differs by kind of model is tested on each kind that was asked for."""
    kinds = kinds_of(metafunc.config)
    differs = metafunc.definition.get_closest_marker("every_kind") is not None
    if differs and "kind_of_model" in metafunc.fixturenames and kinds != ["bridge"]:
        metafunc.parametrize("kind_of_model", kinds, indirect=True, scope="session")


def kind_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("kind_of_model") if callspec else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what would be repeated, and say which tests stay in one process."""
    selected: list[pytest.Item] = []
    rest: list[pytest.Item] = []
    for item in items:
        (selected if is_selected(config, item) else rest).append(item)
    config.hook.pytest_deselected(items=rest)
    for item in selected:
        if reason := why_slow(item):
            item.add_marker(pytest.mark.slow(reason))
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {kind_of(item) or ''}"))
    # Groups of few and short tests go last, so that all processes end at the same time.
    items[:] = sorted(selected, key=lambda item: item.path.stem.endswith("_matrix"))


def why_slow(item: pytest.Item) -> str:
    """Why one case of a test is slow, though the test is not."""
    if row_of(item) not in (None, *COMMON):
        return "one of many architectures"
    for mark in item.iter_markers():
        if mark.name in ("slow_cases", "quick_cases"):
            (reason, *ids), case = mark.args, item.name.partition("[")[2]
            is_among = any(each in case for each in ids)
            if is_among == (mark.name == "slow_cases"):
                return str(reason)
    return ""


def row_of(item: pytest.Item) -> str | None:
    """The architecture, where a test of tests/models runs for each."""
    if item.path.parent.name != "models" or not hasattr(item, "callspec"):
        return None
    values = [*item.callspec.params.values()]
    return next((value for value in values if isinstance(value, str) and value in rows()), None)


def is_due(item: pytest.Item, row: str) -> bool:
    """Whether `make test-all` has this test of an architecture.

    An architecture whose turn it is has all its tests. After a change that may touch all, bridges
    of the others are compared with plain transformers.
    """
    is_compared = item.path.stem == "test_matrix" and "bridge" in item.name
    return rows()[row] or (is_compared and LINE.startswith("4.") and all_are_touched())


@cache
def rows() -> dict[str, bool]:
    from tests.references.architectures import BY_NAME

    turn = int(_git("rev-list", "--count", "HEAD") or 0) % 4
    return {name: name in COMMON or number % 4 == turn for number, name in enumerate(BY_NAME)}


@cache
def all_are_touched() -> bool:
    """A change may be of several commits. Where there is no history all are touched."""
    changed = _git("log", "-10", "--format=", "--name-only").split()
    return not changed or any(path.startswith(TOUCH_ALL_ROWS) for path in changed)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def is_selected(config: pytest.Config, item: pytest.Item) -> bool:
    """A test runs on a bridge of the newest line; one marked ``every_kind`` on the others too."""
    if item.get_closest_marker("published_table") and not config.getoption("--matrix-results"):
        return False
    row = row_of(item)
    if row and config.getoption("--rows") == "due" and not is_due(item, row):
        return False
    kind = kind_of(item) or "bridge"
    if LINE.startswith("4.") and kind == "bridge":
        return "bridge" in kinds_of(config)
    # Every kind is compared in tests/models, for every architecture. Elsewhere the two kinds that
    # differ most are enough: the newest bridge, and a HookedTransformer, with one small model.
    values = [*item.callspec.params.values()] if hasattr(item, "callspec") else []
    left_out = {"llama"}
    if item.path.parent.name != "models":
        left_out |= {"gemma3", "bridge", "processed"}
    is_repeated = item.get_closest_marker("every_kind") is not None
    return is_repeated and left_out.isdisjoint(map(str, values)) and kind in kinds_of(config)


@pytest.fixture(scope="session")
def kind_of_model(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "bridge")


@pytest.fixture(scope="session")
def raw(kind_of_model: str) -> Callable[..., Any]:
    """(weights, tokenizer, fold=False) to a model of the kind that the tests run on, unprepared."""
    from tests.support.tiny_models import raw_model

    return partial(raw_model, kind_of_model)


@pytest.fixture(scope="session")
def hooked(kind_of_model: str) -> Callable[..., Any]:
    """(weights, tokenizer) to a prepared model of that kind; a bridge as al.load_model gives it."""
    from tests.support.tiny_models import hooked_model

    return partial(hooked_model, kind_of_model)


@pytest.fixture(scope="session")
def byte_level() -> Any:
    from tests.support.tiny_models import byte_level_tokenizer

    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def sentencepiece_like() -> Any:
    from tests.support.tiny_models import sentencepiece_like_tokenizer

    return sentencepiece_like_tokenizer()


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece_like"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Each of the two in turn."""
    return request.getfixturevalue(request.param)


def tiny(request: pytest.FixtureRequest, name: str) -> tuple[Any, Any]:
    from tests.support import tiny_models

    kind = "byte_level" if name == "gpt2" else "sentencepiece_like"
    tokenizer = request.getfixturevalue(kind)
    return getattr(tiny_models, f"tiny_{name}")(len(tokenizer)), tokenizer


def shared(request: pytest.FixtureRequest, name: str, exact: bool = False) -> Any:
    """A model that all tests of this process share, or one that this test may change."""
    from anchorlens.models.facts import take_over

    key = (name, exact, request.getfixturevalue("kind_of_model"))
    is_own = request.node.get_closest_marker("changes_model") is not None
    if key in SHARED and not is_own:
        return SHARED[key]
    weights, tokenizer = tiny(request, name)
    hooked = request.getfixturevalue("hooked")
    model = hooked(weights.double() if exact else weights, tokenizer)
    if key in SHARED:  # to find out what is possible takes half a second
        take_over(model, SHARED[key])
    if not is_own:
        SHARED[key] = model
    return model


@pytest.fixture
def gpt2(request: Any, hooked: Any) -> Any:
    return shared(request, "gpt2")


@pytest.fixture
def llama(request: Any, hooked: Any) -> Any:
    return shared(request, "llama")


@pytest.fixture
def gemma3(request: Any, hooked: Any) -> Any:
    return shared(request, "gemma3")


@pytest.fixture(params=["gpt2", "gemma3"])
def model(request: pytest.FixtureRequest, hooked: Any) -> Any:
    """Each of the two in turn; a module or a test may have other models of this name."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def exact_gpt2(request: Any, hooked: Any) -> Any:
    return shared(request, "gpt2", exact=True)


@pytest.fixture(params=["gpt2", "gemma3"])
def exact_model(request: pytest.FixtureRequest, hooked: Any) -> Any:
    """Each of the two in turn, in float64."""
    return shared(request, request.param, exact=True)


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerLens installs torchvision for some models, which breaks an environment."""
    run = subprocess.Popen.__init__

    def guarded(process: Any, args: Any, *others: Any, **options: Any) -> None:
        words = args.split() if isinstance(args, str) else [*map(str, args)]
        if "pip" in words and "install" in words:
            raise AssertionError(f"a test runs an installer: {words}")
        run(process, args, *others, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", guarded)


@pytest.fixture(autouse=True)
def nothing_takes_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models share tokens too, which would take them longer on any device."""
    from anchorlens.runs import way

    monkeypatch.setattr(way, "WORK_OF_A_START", {"cpu": 0, "cuda": 0})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The models of a test's fixtures are as they were after it, and so is the global state.

    A test that changes them on purpose says so with the marks ``changes_model`` and ``draws``.
    """
    from torch.nn import Module

    from tests.support.unchanged import changed, global_state, state_of, without_global_draws

    models = {id(m): m for m in getattr(item, "funcargs", {}).values() if isinstance(m, Module)}
    if item.get_closest_marker("changes_model"):
        models = {}
    states = [(model, state_of(model)) for model in models.values()]
    with_python = item.config.getoption("jaxtyping_packages", None) is None
    before, started = global_state(with_python), processor_time()
    with without_global_draws():
        yield
    seconds, limit = processor_time() - started, item.config.getoption("--seconds")
    if limit and seconds > limit and not item.get_closest_marker("slow"):
        pytest.fail(f"it took {seconds:.1f} s of processor time: mark it slow, or cut it", False)
    changes = [change for model, state in states for change in changed(state, state_of(model))]
    if changes:
        SHARED.clear()
    with_model = "kind_of_model" in getattr(item, "fixturenames", ())
    if with_model and not item.get_closest_marker("draws"):
        changes += changed(before, global_state(with_python))
    if changes:
        pytest.fail("the test left something changed:\n" + "\n".join(changes[:5]), pytrace=False)


def processor_time() -> float:
    """Seconds, of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: Any) -> Path:
    """A model as a user has it: weights and tokenizer in a local folder."""
    return saved_model(tmp_path_factory.mktemp("tiny-gpt2"), n_layer=6)


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: Any) -> Path:
    """A model with few layers, for tests in which a command runs several times."""
    return saved_model(tmp_path_factory.mktemp("shallow-gpt2"), n_layer=3)


def saved_model(folder: Path, n_layer: int) -> Path:
    from tests.support.tiny_models import byte_level_tokenizer, randomize, tiny_gpt2

    tokenizer = byte_level_tokenizer()
    weights: Any = tiny_gpt2(len(tokenizer), n_layer=n_layer, n_embd=16)
    randomize(weights, seed=0)  # with which it answers both words of the sentiments
    weights.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Analyses take less time: one model of random weights, and few resamples."""
    from tests.support.quick_analyses import quick_analyses

    quick_analyses(monkeypatch)


@pytest.fixture
def patches_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts into the package to stop or count a run does not make it another run."""
    monkeypatch.setattr("anchorlens.runs.identity.changed", lambda *_: {})


@pytest.fixture
def coarse_default() -> Any:
    """A context in which tensors of no named type have a coarse one, as where a user sets it."""

    import torch

    @contextmanager
    def inside() -> Iterator[None]:
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    return inside
