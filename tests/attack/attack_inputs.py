"""Wrong values in the calls of the catalogue, and extreme ones in the functions that they call.

tests/test_arguments.py gives values of other types, and tests/test_refusals.py has the words of
the errors. The model, its hooks and the random state must be as before.
"""

import inspect
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError
from anchorlens.system.arguments import checked
from tests.attack import attack_scene
from tests.attack.attack_scene import INF, NAN, QUICK, QUIET
from tests.support import catalogue
from tests.support.catalogue import ALL, Scene, scene_of
from tests.support.measures import tensors_of

CHECKED: Any = checked(lambda: None)
# Together these calls make one of each public function that takes a model or prompts.
CALLED = [
    *("isolation", "steps", "trace", "accuracies", "diagnosis", "dependence on labels", "maps"),
    *("sweep of windows", "isolate_random", "scale_edges", "reweight_anchors", "replace_heads"),
    *("placed", "of tensors", "reweighting", "anchors of texts", "own context", "attribution"),
    *("faithfulness", "heads of demonstrations", "integrated", "text of a prompt", "analysis"),
    *("losses", "segments", "report", "head effects", "task vectors", "contexts", "peft"),
    *("effect of a context", "prefix", "hard prompt", "records"),
]
# One changes the model on purpose, one logs what happens in each of its models and goes on, and
# run_with_cache of TransformerLens keeps its hooks after an error.
NO_CALLS = {"prepared again", "across models", "caches on the CPU", "caches of whole prompts"}


@dataclass(frozen=True)
class OddScene(Scene):
    """A scene whose calls get other options too."""

    options: dict[str, Any] = field(default_factory=dict)

    @property
    def quiet(self) -> dict[str, Any]:
        return super().quiet | self.options


@cache
def right() -> OddScene:
    made = scene_of(attack_scene.scene().model, Path(tempfile.mkdtemp()), prompts=4, resamples=2)
    return OddScene(**vars(made))


@cache
def right_numbers(name: str) -> dict[str, Tensor]:
    return tensors_of(ALL[name](right()))


def wrong_values(rng: random.Random) -> None:
    """A call with a wrong value is refused, or has the right numbers, because it needs it not."""
    scene, name = right(), rng.choice(sorted(ALL.keys() - NO_CALLS))
    changed: dict[str, Any] = {"folder": Path(tempfile.mkdtemp())}
    if rng.random() < 0.6:
        batch = rng.choice(attack_scene.odd_batches(scene.batch))
        changed["batches"] = [batch, *scene.batches[1:]]
        attempt: Any = [
            key for key, value in vars(batch).items() if value is not vars(scene.batch)[key]
        ]
    else:
        options = [("hooks", each) for each in attack_scene.odd_hooks()]
        options += [("loss", each) for each in attack_scene.odd_losses()]
        options += [("resamples", -1), ("folder", "\0")]
        changed["options"] = dict(attempt := [rng.choice(options)])
    before = attack_scene.scene().state()
    ours = None
    try:
        ours = tensors_of(ALL[name](replace(scene, **changed)))
    except AnchorlensError:
        pass
    except Exception as error:
        raise AssertionError(f"{name} with another {attempt}: {error!r}") from error
    attack_scene.scene().check(before, f"{name} with another {attempt}")
    if ours is not None:
        assert all(
            torch.equal(ours[key].nan_to_num(), theirs.nan_to_num())
            for key, theirs in right_numbers(name).items()
        ), f"{name} with another {attempt}: other numbers, and no error"


VECTOR = torch.zeros(3)
EXAMPLES: list[Any] = [[], [al.Example("x")], [al.Example("x", -1)], [al.Example("x", 7)]]
SITES: list[Any] = [99, -99, [0, 99], [], range(0), al.Site(0, keep_bos=True)]
SITES += [al.Site(0, heads=heads) for heads in (99, -99, [0, 99], [])]
POSITIONS: dict[str, Any] = {
    **{"tokens": torch.arange(12).reshape(2, 6), "label_positions": [[1, 3], [1, 3]]},
    **{"label_classes": [[0, 1], [1, 0]], "label_token_ids": [5, 6], "gold": [0, 1]},
}
# Functions of the scene of attack_scene.py and a value, and values that are refused.
WRONG: list[tuple[Callable[[Any, Any], Any], list[Any]]] = [
    (lambda s, v: al.sample_demonstrations(v), EXAMPLES),
    (lambda s, v: al.sample_demonstrations(s.examples, v), [10_000]),
    (lambda s, v: al.sample_queries(v, 2), [[]]),
    (lambda s, v: al.sample_queries(s.examples, v), [10_000]),
    (lambda s, v: al.sample_queries(s.examples, 2, exclude=v(s)), [lambda s: s.examples]),
    (lambda s, v: al.load_examples(s.data, split=v), ["train", "nope"]),
    (lambda s, v: al.load_examples(s.data, text=v), ["nope", "", "label"]),
    (lambda s, v: al.load_examples(s.data, label=v), ["nope", "", "text"]),
    (lambda s, v: al.load_examples(s.data, classes=v), [[], [5, 6], ["a"]]),
    (lambda s, v: al.load_model(s.folder / v), ["", "x.gguf", "data.jsonl"]),
    (
        lambda s, v: al.scale_edges(s.model, s.batch, al.edges.wp, v, 0),
        [-1.0, NAN, INF, "x", None, True, VECTOR, torch.ones(3, 2) * NAN],
    ),
    (lambda s, v: al.isolate_labels(s.model, s.batch, v), SITES),
    (lambda s, v: al.detach_heads(s.model, v), SITES),
    (lambda s, v: al.edges.at(s.batch, v), [torch.full((3, 1), -999), VECTOR, VECTOR[None]]),
    (lambda s, v: al.edges.segment(s.batch, v), ["", "nope"]),
    (lambda s, v: s.batch.prompt(v), [99, -1, 1.5, "x"]),
    (lambda s, v: al.sites.first_and_last(s.model, v), [[0], [99], [-1], [1.5]]),
    (lambda s, v: al.sites.single_heads(s.model, v), SITES[:5]),
    (lambda s, v: al.reweight_anchors(s.model, s.batch, v), [VECTOR, torch.zeros(3, 2, 99)]),
    (
        lambda s, v: al.contexts.train_reweighting(
            s.model, s.batches, al.contexts.Training(steps=1, **QUIET), start=v
        ),
        [VECTOR, torch.zeros(3, 2, 99)],
    ),
    (
        lambda s, v: al.compress(s.model, s.batch, positions=lambda chosen: v(int(chosen.sum()))),
        [
            lambda count: (torch.zeros(1), 1),
            lambda count: (torch.arange(count) - 5, 3),
            lambda count: (torch.arange(count), -3),
            lambda count: (torch.arange(count), 10_000),
        ],
    ),
    (
        lambda s, v: al.contexts.reweight_demonstrations(s.model, s.batch, v),
        [VECTOR, torch.full((3, 2, 6), NAN)],
    ),
    (
        lambda s, v: al.prompts.text_anchor_prompts(
            s.tokenizer, s.task, **{"demonstrations": s.demos, "queries": s.queries} | v
        ),
        [
            *({"demonstrations": examples} for examples in EXAMPLES),
            *({"queries": []}, {"queries": [al.Example("x", 99)]}),
            *({"batch_size": size} for size in (0, -1)),
        ],
    ),
    (lambda s, v: al.metrics.compare_accuracies(v), [{}, {"a": torch.ones(0)}]),
    (lambda s, v: al.write_report(s.results, s.folder / v), ["", "no/x.html"]),
    (lambda s, v: al.write_report(v, s.folder / "report.html"), [{}]),
    (
        lambda s, v: al.PromptBatch.from_positions(**POSITIONS | v),
        [
            *({"tokens": torch.zeros(0, 6)}, {"label_classes": [[0.5, 1], [0, 1]]}),
            *({"label_token_ids": ids} for ids in ([5, 5], [], [-1, 5], [0.5, 1.0], [[5, 6]])),
            *({"label_token_ids": torch.tensor(ids)} for ids in (5, [[5, 6]])),
            {"gold": [0.5, 0.1]},
        ],
    ),
    (
        lambda s, v: al.run(s.model, s.batches, v, **QUICK),
        [
            *([], [al.Accuracy], [None]),
            *([al.AnchorDistances(directions=count)] for count in (0, -1, 10_000)),
            *([al.Loyalty(top=count)] for count in (0, -1, 10_000)),
        ],
    ),
    (
        lambda s, v: al.paper(
            s.model,
            {"trec": (s.examples, s.examples)},
            **QUIET | {"queries": 2, "seeds": [1], "depth": 1, "draws": 1} | v,
        ),
        [{"depth": 0}, {"depth": 99}, {"draws": 0}, {"parts": []}, {"parts": ["table 4"]}],
    ),
]


def check_wrong(call: Callable[[Any, Any], Any], values: list[Any]) -> None:
    scene, before = attack_scene.scene(), attack_scene.scene().state()
    for value in values:
        with pytest.raises(AnchorlensError):
            call(scene, value)
        scene.check(before, repr(value))


def check_extreme_values() -> None:
    """Give nothing in place of what is given, and numbers that no machine can count up to.

    Each is an error of the package or has a result, such as that of another seed.
    """
    for function, given in calls():
        for name, value in given.items():
            for extreme in extremes_of(value):
                with suppress(AnchorlensError):
                    function(**given | {name: extreme})


def calls() -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """A call of each public function that these of the catalogue make, with its arguments."""
    found: dict[str, Any] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        is_checked = event == "call" and frame.f_code is CHECKED.__code__
        if is_checked and frame.f_back.f_globals is vars(catalogue):
            function, args, kwargs = (frame.f_locals[key] for key in ("function", "args", "kwargs"))
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            found.setdefault(function.__qualname__, (checked(function), given))

    for name in CALLED:
        sys.setprofile(note)
        try:
            ALL[name](right())
        finally:
            sys.setprofile(None)
    return [*found.values()]


def extremes_of(value: Any) -> list[Any]:
    if isinstance(value, int) and not isinstance(value, bool):
        return [10**18, -(10**18)]
    if isinstance(value, Tensor):
        return [value[:0]]
    return [type(value)()] if isinstance(value, list | tuple | dict | str) else []
