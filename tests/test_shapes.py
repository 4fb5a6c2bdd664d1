"""Every public call, with shapes and types of each signature checked at run time.

It runs only where the package is imported with these checks:

    pytest tests/test_shapes.py --jaxtyping-packages=anchorlens,beartype.beartype
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest

from tests.support.catalogue import ALL, Scene, scene_of
from tests.support.tiny_models import byte_level_tokenizer, hooked_model, tiny_gpt2

TIMES = 3
CALLS = [  # in two processes
    pytest.param(name, marks=pytest.mark.xdist_group(f"shapes {number % 2}"))
    for number, name in enumerate(ALL)
]


@pytest.fixture(scope="module")
def inner_functions_are_checked_a_few_times() -> Iterator[None]:
    """A function inside another is checked the first times that it is made.

    To make the checks takes half of all time otherwise: one such function is made 20,000 times.
    """
    made, check = Counter[Any](), jaxtyping.jaxtyped

    def jaxtyped(*given: Any, **options: Any) -> Any:
        decorate = check(*given, **options)

        def checked(function: Callable[..., Any]) -> Any:
            code = getattr(function, "__code__", None)
            made[code] += code is not None
            return function if made[code] > TIMES else decorate(function)

        return decorate if given else checked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping, "jaxtyped", jaxtyped)
        yield


@pytest.fixture(scope="module")
def scene(
    request: pytest.FixtureRequest,
    tmp_path_factory: Any,
    inner_functions_are_checked_a_few_times: None,
) -> Scene:
    if request.config.getoption("jaxtyping_packages", None) is None:
        pytest.skip("shapes are checked with --jaxtyping-packages=anchorlens,beartype.beartype")
    tokenizer = byte_level_tokenizer()
    model = hooked_model("bridge", tiny_gpt2(len(tokenizer), n_layer=2), tokenizer)
    return scene_of(model, tmp_path_factory.mktemp("shapes"), prompts=4, resamples=5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_shapes_and_types_of_its_signatures(
    name: str, scene: Scene, quick: None
) -> None:
    ALL[name](scene)
