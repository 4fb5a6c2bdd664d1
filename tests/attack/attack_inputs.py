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

import torch
from torch import Tensor

from anchorlens.errors import AnchorlensError
from anchorlens.system.arguments import checked
from tests.attack import attack_scene
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
        right_fields = vars(scene.batch)
        attempt: Any = [key for key, each in vars(batch).items() if each is not right_fields[key]]
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
