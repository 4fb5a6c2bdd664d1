"""Folding value biases leaves the logits as they are: every public call gives the same or refuses.

The calls are those of catalogue.py, where a new one has to be added.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.passes.forward import run_pass
from tests.references.architectures import BY_NAME
from tests.support import catalogue
from tests.support.catalogue import ALL, Scene, scene_of
from tests.support.measures import tensors_of
from tests.support.public import public
from tests.support.tiny_models import questions, raw_model, tiny_gpt2

# Few prompts: these warnings are tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
# Joint projections with biases; grouped keys and values with biases; attention that is replaced.
FOLDED = ("GPT-2", "Qwen2", "OPT")
CURE = "fold_value_biases=False"
# They run the others, and leave out what is refused; or scores that tie have no correlation.
LEFT_OUT = {"analysis", "across models", "faithfulness of answers"}
# Of GPT-2 in compatibility mode refused, with folded biases or without.
LEFT_OUT |= {"parts of scores"}
NO_NUMBERS = {"sample_prompts", "sites.random_heads", "sites.single_heads", "paper"}
READ_NO_VALUES = ("SegmentFlows of attention", "SaliencyFlows of attention", "plot_prefix_pattern")


def twin(name: str, tokenizer: Any, *, fold: bool) -> Any:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    weights = BY_NAME[name].build(len(tokenizer), **sizes).double()
    model = raw_model("processed", weights, tokenizer, fold=fold)
    return al.prepare_model(model)


def calls_here(s: Scene) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each metric in a run of its own, each weight, and what catalogue.py has no numbers of.

    A prefix is here that of the demonstrations, and in catalogue.py a context.
    """
    model, batches = s.model, s.batches
    options: dict[str, dict[str, Any]] = {"AnchorDistances": {"directions": 2}}
    options |= {"LabelHeads": {"draws": 1}, "SegmentAttention": {"apart": 1}}
    for name in sorted(metrics() | {"PrefixEffect"}):
        cut = partial(al.isolate_labels, model, site=0) if name == "Loyalty" else None
        metric = public()[name](**options.get(name, {}))
        yield name, partial(s.run, metric, hooks=cut)
    of_module = vars(al.weights)
    for name in ("SegmentFlows", "SaliencyFlows"):
        for weight in sorted(weights()):
            metric = public()[name](weight=of_module[weight])
            yield f"{name} of {weight}", partial(s.run, metric)

    def numbers(figure: Any) -> list[torch.Tensor]:
        drawn = [
            np.asarray(trace[axis])
            for trace in figure.data
            for axis in ("z", "x", "y")
            if axis in trace
        ]
        arrays = [each for each in drawn if np.issubdtype(each.dtype, np.floating)]
        return [torch.from_numpy(each.copy()) for each in arrays]

    of_head: dict[str, Any] = {"layer": 1, "head": 0}
    yield (
        "plot_prefix_pattern",
        lambda: numbers(al.PrefixEffect().plot_pattern(model, batches[0], **of_head)),
    )
    yield (
        "plot_prefix_directions",
        lambda: numbers(al.PrefixEffect().plot_directions(model, batches[0], **of_head)),
    )
    yield "plot_prompt", lambda: al.plot_prompt(model, batches[0].prompt(0)).layers
    yield (
        "detach_heads",
        lambda: al.target_logits(
            model, batches, hooks=lambda batch: al.detach_heads(model, 0), progress=False
        ),
    )


def kinds_of(parent: type) -> set[str]:
    classes = {name: value for name, value in public().items() if inspect.isclass(value)}
    return {
        name
        for name, value in classes.items()
        if issubclass(value, parent) and value not in (al.Metric, al.Question)
    }


def metrics() -> set[str]:
    return kinds_of(al.Metric)


def weights() -> set[str]:
    of_module = {name: value for name, value in vars(al.weights).items() if name[0] != "_"}
    return {
        name
        for name, value in of_module.items()
        if isinstance(value, al.weights.WithValues)
        or (inspect.isfunction(value) and "gradient" in inspect.signature(value).parameters)
    }


def given_a_model() -> set[str]:
    """The public functions that take a model, with the module in which they are public."""
    found = set()
    for name, value in public().items():
        functions = {name: value}
        if inspect.ismodule(value):
            own = {key: each for key, each in vars(value).items() if key[0] != "_"}
            functions = {
                f"{name}.{key}": each
                for key, each in own.items()
                if getattr(each, "__module__", "") == value.__name__
            }
        for key, each in functions.items():
            if inspect.isfunction(each):
                names = inspect.signature(each).parameters.keys()
                found |= {key} if names & {"model", "models"} else set()
    return found


def test_every_public_call_is_here() -> None:
    """By its name in the code of the calls; questions make passes of their own."""
    assert len(metrics()) > 8 and len(weights()) > 6
    files = Path(catalogue.__file__), Path(__file__)
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    called = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    needed = given_a_model() | kinds_of(al.Question) - metrics()
    missing = {
        name for name in needed if not any(f".{call}".endswith(f".{name}") for call in called)
    }
    assert missing == NO_NUMBERS


@pytest.mark.slow("whole models")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(f"folded {name}")) for name in FOLDED]
)
def test_a_folded_model_gives_the_same_numbers_or_is_refused(
    name: str, byte_level: Any, tmp_path: Path
) -> None:
    kept_model, folded_model = (twin(name, byte_level, fold=fold) for fold in (False, True))
    scenes = [scene_of(kept_model, tmp_path / "kept")]
    scenes.append(replace(scenes[0], model=folded_model, folder=tmp_path / "folded"))
    for scene in scenes:
        scene.folder.mkdir()
    calls = [each for each in ALL if each not in LEFT_OUT and not each.endswith("whole prompts")]
    kept, folded = (
        {call: partial(ALL[call], scene) for call in calls} | dict(calls_here(scene))
        for scene in scenes
    )
    wrong, refused = dict[str, str](), set[str]()
    for call, compute in folded.items():
        try:
            ours = tensors_of(compute())
        except ModelError as error:
            refused.add(call)
            if CURE not in str(error):
                wrong[call] = str(error)
            continue
        theirs = tensors_of(kept[call]())
        if not ours or (message := why_not_the_same(ours, theirs)):
            wrong[call] = message if ours else "no numbers"
    assert not wrong
    assert refused.isdisjoint(READ_NO_VALUES)
    assert refused >= {"SaliencyFlows", "PrefixEffect", "head effects", "replace_heads"}
    assert "effect of a context" in refused


def why_not_the_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """The number that differs by more than 1e-5 of its field, or of 1 (a KL may be small)."""
    if ours.keys() != theirs.keys():
        return f"other fields {sorted(ours.keys() ^ theirs.keys())}"
    for name in ours:
        if ".prefix." in name or not ours[name].numel():  # what a model caches is its own
            continue
        a, b = ours[name].double(), theirs[name].double()
        if not torch.equal(a.isnan(), b.isnan()):
            return f"{name} is NaN elsewhere"
        limit = 1e-5 * max(1.0, float(b.abs().nan_to_num(posinf=0).max()))
        difference = float((a - b).abs().nan_to_num().max())
        if difference > limit:
            return f"{name} differs by {difference:.2g}"
    return ""


@pytest.mark.slow("whole models")
@pytest.mark.every_kind
def test_a_model_that_is_folded_after_verification_is_refused(byte_level: Any) -> None:
    bridge = al.load_model(tiny_gpt2(len(byte_level)), tokenizer=byte_level)
    batch = questions(bridge, 3)[0]
    assert al.saliency(bridge, batch).any()
    bridge.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(ModelError, match="biases of this model are folded"):
        al.saliency(bridge, batch)


@pytest.mark.slow("whole models")
@pytest.mark.every_kind
def test_folded_attention_sinks_are_refused(raw: Any, byte_level: Any) -> None:
    """Rows of attention do not sum to 1 here. TransformerLens folds anyway, and logits change."""
    weights = BY_NAME["GPT-OSS"].build(len(byte_level), max_position_embeddings=512)
    folded = al.prepare_model(raw(weights, byte_level, fold=True))
    with pytest.raises(ModelError, match=r"folded .*attention sinks.*fold_value_biases=False"):
        run_pass(folded, questions(folded, 2)[0])
