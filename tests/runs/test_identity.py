"""The identity of a value changes with everything that decides a number, and with nothing else."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ProcessError, StoreError
from anchorlens.passes.forward import run_pass
from anchorlens.runs import study
from anchorlens.runs.by_value import identity_of
from anchorlens.runs.installed import changed
from anchorlens.runs.study import Study
from anchorlens.system import processes
from anchorlens.system.digest_file import read_with_digest, to_bytes_with_digest
from tests.support.asked import ask
from tests.support.stored_runs import Logits
from tests.support.tiny_models import questions
from tests.support.trained_contexts import same, split, trained

EXAMPLES = al.load_examples("questions")
QUIET: dict[str, Any] = {"progress": False, "resamples": 0}


def value_of(source: str) -> Any:
    """The ``value`` of a user's module with this source, under the same name each time."""
    module = ModuleType("notebook")
    exec(source, vars(module))
    return module.value


# <first|second> is what differs: one character, name or value that decides another number.
MAKE = "def make(c):\n return lambda x: x * c\nvalue = make"
PARTIAL = "from functools import partial\ndef f(x, k): pass\nvalue = partial"
WITH_K = "class A:\n def __init__(self, k): self.k = k\n def f(self): pass\nvalue = A"
DIFFERENT = {
    "a constant": "value = lambda x: x * <1.0|0.2>",
    "a constant of an inner function": "def value(x):\n return (lambda y: y * <1.0|2.0>)(x)",
    "an operation": "value = lambda x, y: x <+|-> y",
    "an attribute": "value = lambda x: x.<sum|mean>()",
    "a default": "def value(x, k=<5|120>): pass",
    "a default by keyword": "def value(x, *, k=<5|6>): pass",
    "a closure": f"{MAKE}(<1|2>)",
    "a global": "c = <1|2>\nvalue = lambda x: x * c",
    "a global of a called function": "c = <1|2>\ndef f(x): return x * c\nvalue = lambda x: f(x)",
    "a global of an inner function": (
        "c = <1|2>\ndef value(x):\n def inner(): return c\n return inner()"
    ),
    "an option of a partial": f"{PARTIAL}(f, k=<1|2>)",
    "the function in a partial": f"{PARTIAL}(lambda x, k: <x|-x>, k=1)",
    "a function behind a decorator of a library": (
        "import torch\n@torch.no_grad()\ndef value(x): return x * <1.0|2.0>"
    ),
    "a field of an object": f"{WITH_K}(<5|120>)",
    "a method": "class A:\n def reads(self): return <1|2>\nvalue = A()",
    "a method of the parent": (
        "class P:\n def reads(self): return <1|2>\nclass A(P): pass\nvalue = A()"
    ),
    "a subclass with the name of its parent": (
        "from anchorlens import SaliencyFlows\n"
        "<|class SaliencyFlows(SaliencyFlows): pass\n>value = SaliencyFlows()"
    ),
    "a bound method of an object": f"{WITH_K}(<1|2>).f",
    "a slot": "class A:\n __slots__ = ('k',)\nvalue = A()\nvalue.k = <1|2>",
    "a property": "class A:\n @property\n def k(self): return <1|2>\nvalue = A()",
    "the optimizer in a lambda": "import torch\nvalue = lambda p: torch.optim.<SGD|Adam>(p, lr=1)",
    "a tensor": "import torch\nt = torch.arange(3.)<| + 1e-6>\nvalue = lambda x: x * t",
    "the type of a number": "value = <1|1.0>",
    "a flag for a number": "value = <1|True>",
    "a text for a number": "value = <1|'1'>",
    "the order of a list": "value = <[1, 2]|[2, 1]>",
    "a list for a tuple": "value = <[1, 2]|(1, 2)>",
    "a weight of a module": (
        "import torch\ntorch.manual_seed(<0|1>)\nvalue = torch.nn.Linear(2, 2)"
    ),
    "a number of an array": "import numpy as np\nvalue = np.arange(3.)<| * 2>",
    "the handler of an error": (
        "def value(x):\n< try:\n  x()\n  x()| x()\n try:\n  x()>\n except KeyError: pass"
    ),
}


def both(source: str) -> tuple[Any, Any]:
    """The values of a source with the first and with the second of what differs."""
    first, second = (re.sub(r"<(.*?)\|(.*?)>", rf"\{n}", source, flags=re.S) for n in (1, 2))
    return value_of(first), value_of(second)


@pytest.mark.parametrize("source", DIFFERENT.values(), ids=DIFFERENT)
def test_what_decides_a_number_changes_the_identity(source: str) -> None:
    with torch.random.fork_rng():
        (first, second), (again, _) = both(source), both(source)
    assert identity_of(first).digest != identity_of(second).digest
    # The same source in another module is the same value, although each object is another one.
    assert identity_of(again) == identity_of(first)
    assert identity_of(first).unknown == ()


def test_a_helper_in_a_file_of_the_user_counts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    # Of another length: Python takes a compiled file of the same second and length for the new one.
    for constant in (1, 22, 1):
        (tmp_path / "my_helpers.py").write_text(
            f"def scale(x): return x * {constant}\nother = {constant}"
        )
        sys.modules.pop("my_helpers", None)
        for source in (
            "import my_helpers\nvalue = lambda x: my_helpers.scale(x)",
            "from my_helpers import scale\nvalue = lambda x: scale(x)",
        ):
            digests.append(identity_of(value_of(source)).digest)
    assert digests[:2] == digests[4:]
    assert not set(digests[:2]) & set(digests[2:4])


NOT_COMPARED = (
    "from dataclasses import dataclass, field\n@dataclass\nclass A:\n"
    " k: int = field(compare=False)\n"
)
SAME = {
    "another line": "<|\n\n# why\n>value = lambda x: x",
    "another name of a module": "import torch\n<|y = 3\n>value = lambda x: torch.mean(x)",
    "the order of a set": "value = <{'a', 'b', 'c'}|{'c', 'b', 'a'}>",
    "a field that is not compared": f"{NOT_COMPARED}value = A(<1|2>)",
    "a value that holds itself": "value = []\nvalue.append(value)",
    "functions that call each other": "def f(x): return g(x)\ndef g(x): return f(x)\nvalue = f",
}


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_what_decides_nothing_does_not_change_the_identity(source: str) -> None:
    first, second = both(source)
    assert identity_of(first) == identity_of(second)


UNKNOWN = {
    "a file": "value = lambda x: open('factor.txt')",
    "a file by a path": "from pathlib import Path\nvalue = lambda x: Path('f').read_text()",
    "stored tensors": "import torch\nvalue = lambda x: x * torch.load('f')",
    "a table on disk": "import pandas as pd\nvalue = lambda x: pd.read_csv('f')",
    "the environment": "import os\nvalue = lambda x: os.environ['K']",
    "a lock": "import threading\nl = threading.Lock()\nvalue = lambda x: l",
    "a generator": "value = (x for x in 'ab')",
    "a module that does not exist": "def value(x):\n import no_such_module",
    "a helper that is imported inside": "def value(x):\n import math\n return math.pi",
    "a name without a value": "value = lambda x: x * c",
    "a table": "import pandas as pd\nvalue = pd.DataFrame({'a': [1]})",
    "a function behind functools.cache": "import functools\nvalue = functools.cache(lambda x: x)",
    "what a cached property stored": (
        "import functools\nclass A:\n @functools.cached_property\n def k(self): return 1\n"
        "value = A()\nvalue.k"
    ),
}


@pytest.mark.parametrize("source", UNKNOWN.values(), ids=UNKNOWN)
def test_what_cannot_be_seen_is_unknown(source: str) -> None:
    assert identity_of(value_of(source)).unknown


@pytest.mark.slow("many passes")
def test_every_process_gives_the_same_identity(capsys: Any) -> None:
    """Also with another order of the hashes of texts, which differ in each process."""
    source = (
        "import anchorlens as al, torch\n"
        "from anchorlens.runs.by_value import identity_of\n"
        "f = lambda b: (al.edges.pq(b), {'x', 'y', 'z'}, frozenset('abc'))\n"
        "print(identity_of([f, al.SaliencyFlows(), al.contexts.hard_prompts.PEZ, al.TASKS]).digest)"
    )
    exec(source, {})
    other = subprocess.run(
        [sys.executable, "-c", source],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == capsys.readouterr().out


# What follows are the cases of an attack: each gave the numbers of the first call again.


@dataclass(frozen=True, eq=False, kw_only=True)
class HitRecord(al.Record):
    hit: Float[Tensor, ""]


class TopHit(al.Metric):
    """A metric as a plain class, whose repr has no k, and whose rows of 0 and 1 often agree."""

    name = "top_hit"

    def __init__(self, k: int) -> None:
        self.k = k

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        gold = batch.label_token_ids[batch.gold][:, None]
        return {"hit": (seen.logits.topk(self.k).indices == gold).any(1).float()}

    def result(self, rows: Any) -> HitRecord:
        return HitRecord(hit=rows["hit"].mean())


def late(factor: float) -> Callable[[al.PromptBatch], Any]:
    """Hooks whose factor changes numbers from the second batch on."""

    def hooks(batch: al.PromptBatch) -> Any:
        acts = int(batch.index.min()) >= 2
        return [("blocks.0.hook_resid_post", lambda x, hook: x * factor if acts else x)]

    return hooks


@pytest.mark.slow("many passes")
def test_other_metrics_and_hooks_are_refused_also_where_the_first_batch_agrees(
    gpt2: Any, tmp_path: Path
) -> None:
    batches = questions(gpt2, count=4, batch_size=2)

    def hit(k: int) -> float:
        options = QUIET | {"folder": tmp_path / "metric"}
        return float(al.run(gpt2, batches, [TopHit(k)], **options)["top_hit"].hit)

    first = hit(5)
    assert hit(5) == first
    with pytest.raises(StoreError, match=r"another run.* top_hit: stored"):
        hit(120)

    def accuracy(factor: float) -> Tensor:
        options = QUIET | {"folder": tmp_path / "hooks", "hooks": late(factor)}
        return al.run(gpt2, batches, [Logits()], **options)["logits"].logits

    stored = accuracy(1.0)
    assert torch.equal(accuracy(1.0), stored)
    with pytest.raises(StoreError, match=r"another run.* hooks: stored"):
        accuracy(0.2)


@dataclass(frozen=True, eq=False, kw_only=True)
class LargestRecord(al.Record):
    largest: Float[Tensor, " prompt"]


def largest(factor: float) -> al.Question:
    """A question of the user, whose code holds a factor from the second batch on."""

    class Largest(al.Question):
        name = "largest"

        def of_batch(self, passes: Any, batch: al.PromptBatch) -> dict[str, Tensor]:
            scale = factor if int(batch.index.min()) >= 2 else 1.0
            return {"x": scale * passes.logits(batch).amax(1).cpu()}

        def result(self, rows: Any) -> LargestRecord:
            return LargestRecord(largest=rows["x"])

    return Largest()


@pytest.mark.slow("many passes")
def test_an_experiment_of_the_user_whose_code_changed_is_refused(gpt2: Any, tmp_path: Path) -> None:
    """Its options are the same, and so are the rows of the first batch."""
    batches = questions(gpt2, count=4, batch_size=2)

    def asked(factor: float) -> Tensor:
        record = ask(gpt2, batches, largest(factor), folder=tmp_path / "asked", **QUIET)
        values: Tensor = record.largest
        return values

    def collected(factor: float) -> Tensor:
        def of_batch(batch: al.PromptBatch) -> dict[str, Tensor]:
            scale = factor if int(batch.index.min()) >= 2 else 1.0
            return {"x": scale * run_pass(gpt2, batch).amax(1).cpu()}

        options: dict[str, Any] = {"folder": tmp_path / "collected", **QUIET}
        with Study(gpt2, batches, {"experiment": "x"}, **options) as study:
            return study.collect(of_batch)["x"]

    changed = "holds 'largest' of another run", "was computed by another function"
    for rows, message in zip((asked, collected), changed, strict=True):
        first = rows(1.0)
        assert torch.equal(rows(1.0), first)
        with pytest.raises(StoreError, match=message):
            rows(2.0)


@pytest.mark.slow("many passes")
def test_rows_of_hooks_that_read_a_file_are_computed_again(gpt2: Any, tmp_path: Path) -> None:
    """The file changes what the second batch gives, so that the first tells nothing."""
    batches, file = questions(gpt2, count=4, batch_size=2), tmp_path / "factor.txt"

    def hooks(batch: al.PromptBatch) -> Any:
        factor = float(file.read_text()) if int(batch.index.min()) >= 2 else 1.0
        return [("blocks.0.hook_resid_post", lambda x, hook: x * factor)]

    def logits(folder: Path | None) -> Tensor:
        options = QUIET | {"folder": folder, "hooks": hooks}
        return al.run(gpt2, batches, [Logits()], **options)["logits"].logits

    for factor in ("1.0", "0.2"):
        file.write_text(factor)
        with pytest.warns(UserWarning, match="computed again .*the attribute 'read_text'"):
            stored = logits(tmp_path / "rows")
        assert torch.equal(stored, logits(None))


def test_processes_with_other_hooks_are_refused(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes get hooks that differ by a constant; their settings are exchanged here."""
    sent: list[dict[str, str]] = []
    monkeypatch.setattr(study, "is_single_process", lambda: False)
    monkeypatch.setattr(study, "require_equal_settings", sent.append)
    for factor in (1.0, 1.0, 0.2):
        with Study(gpt2, questions(gpt2, 2), {"hooks": late(factor)}, **QUIET):
            pass
    assert sent[0] == sent[1] and sent[0]["hooks"] != sent[2]["hooks"]
    monkeypatch.setattr(processes, "gather_from_processes", lambda *_: [sent[0], sent[2]])
    with pytest.raises(ProcessError, match="hooks: process 0"):
        processes.require_equal_settings(sent[0])


def optimizer_of(lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def loss_of(sign: float) -> Callable[[Tensor, al.PromptBatch], Tensor]:
    return lambda logits, batch: sign * al.losses.label_cross_entropy(logits, batch)


@pytest.mark.slow("many passes")
@pytest.mark.changes_model
def test_a_training_with_another_function_of_the_same_name_is_refused(
    gpt2: Any, tmp_path: Path
) -> None:
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "optimizer": ({"optimizer": optimizer_of(0.01)}, {"optimizer": optimizer_of(50.0)}),
        "loss": ({"loss": loss_of(1.0)}, {"loss": loss_of(-1.0)}),
    }
    for name, (first, second) in changes.items():
        folder = tmp_path / name
        expected = trained(gpt2, folder=folder, **first)
        assert same(trained(gpt2, folder=folder, **first), expected)
        with pytest.raises(StoreError, match=f"of a training with another {name}"):
            trained(gpt2, folder=folder, **second)
    with (
        gpt2.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: x * 0.5)]),
        pytest.raises(StoreError, match="another hooks on the model"),
    ):
        trained(gpt2, folder=tmp_path / "loss", **changes["loss"][0])


@pytest.mark.slow("many passes")
def test_a_search_with_another_noise_or_tokenizer_is_refused(gpt2: Any, tmp_path: Path) -> None:
    batches, held_out = split(gpt2)
    methods = []  # kept, so that the equal function of a second call lies at another address

    def search(noise: float, tokenizer: Any = None) -> Any:
        method = replace(al.contexts.hard_prompts.PEZ, noise=lambda step, steps: noise)
        methods.append(method)
        training = al.contexts.Training(steps=1, folder=tmp_path, progress=False)
        options: dict[str, Any] = {"start": [300], "length": 2, "tokenizer": tokenizer}
        return al.train_hard_prompt(
            gpt2, batches, training, held_out=held_out, method=method, **options
        )

    first = search(0.1)
    assert torch.equal(search(0.1).tokens, first.tokens)
    with pytest.raises(StoreError, match="another context"):
        search(0.2)
    other = copy.deepcopy(gpt2.tokenizer)
    other.add_tokens(["another"])
    with pytest.raises(StoreError, match="another context"):
        search(0.1, other)


@pytest.mark.quick_cases("many passes", "another file")
@pytest.mark.parametrize("contents", ["folder", "another file", "optimizer", "parameter.0"])
def test_a_file_that_is_no_training_is_refused(gpt2: Any, tmp_path: Path, contents: str) -> None:
    trained(gpt2, folder=tmp_path)
    path = tmp_path / "training.safetensors"
    header, tensors = read_with_digest(path)
    if contents == "folder":
        path.unlink()
        path.mkdir()
    elif contents == "another file":
        path.write_bytes(to_bytes_with_digest({"record": "Beta"}, tensors))
    else:
        path.write_bytes(to_bytes_with_digest(header, tensors | {contents: torch.zeros(1)}))
    with pytest.raises(StoreError, match=r"training\.safetensors"):
        trained(gpt2, folder=tmp_path)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.nn.GELU, "forward"),
        (torch.nn.Module, "_call_impl"),
        (torch.nn.functional, "gelu"),
        (torch.Tensor, "softmax"),
        (al.Accuracy, "contributions"),
    ],
)
def test_what_is_put_on_a_known_class_is_seen(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not changed()
    monkeypatch.setattr(owner, name, lambda *args, **options: None)
    assert [key.rpartition(" ")[2] for key in changed()] == [f"{owner.__name__}.{name}"]


def test_texts_and_modules_decide_no_number() -> None:
    source = (
        "def f(x):\n '<first|second>'\n return x * 2\nclass A:\n def f(self): 1\nvalue = f, A()"
    )
    first, second = (value_of(source.replace("<first|second>", word)) for word in ("a", "b c"))
    type(second[1]).__module__ = "elsewhere"
    assert identity_of(first) == identity_of(second)


@pytest.mark.parametrize(
    ("source", "equal"),
    [
        ("def value(x, k=2):\n assert k > 0, f'a {k} of {len(x)}'\n return x * k", True),
        (
            "def value(x, k=2):\n assert 0 < k < 3\n assert x and k, 'm'\n return x",
            True,
        ),
        ("def value(x, k=2):\n while k < 9:\n  assert k, 'no'\n  k += 1\n return x * k", True),
        ("def value(x):\n if x:\n  assert x > 2\n else:\n  x = 3\n return x", True),
        ("def value(x):\n assert x.mul_(2) is not None\n return x", False),
        ("def value(x):\n assert (k := 2)\n return x * k", False),
    ],
)
def test_asserts_that_only_compare_decide_nothing(source: str, equal: bool) -> None:
    """``python -O`` leaves asserts out."""
    values = []
    for optimize in (0, 1):
        module = ModuleType("notebook")
        exec(compile(source, "<source>", "exec", optimize=optimize), vars(module))
        values.append(identity_of(module.value))
    assert (values[0] == values[1]) is equal
