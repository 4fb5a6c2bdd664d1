"""A native pass has the numbers of a pass with hooks at its points, and leaves nothing behind."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.models.head_outputs import layers_that_mix
from anchorlens.models.hooked import Hook, pattern_name, z_name
from anchorlens.models.native_pass import NativePass, Terms, mask_of
from anchorlens.models.twin import twin_of
from anchorlens.passes import running as choice
from anchorlens.passes.forward import run_pass
from anchorlens.passes.running import inside_run, twin_for, why_not_native
from tests.models.test_matrix import bridge, processed_bridge
from tests.references.architectures import ALL, BY_NAME
from tests.references.comparison import batch_of, precise, tokenizer, weights_of
from tests.support.measures import counted_layers
from tests.support.tiny_models import questions, tiny_gpt2
from tests.support.unchanged import found_anew

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
# Mostly because their attention does not call the interface of transformers.
HOOKED = (
    "BitNet",  # its norm of all heads before W_O: natively hook_z is of before it
    *("GPT-Neo", "Bloom", "MPT", "Falcon", "Falcon (ALiBi)", "XGLM"),
    *("DeepSeek V2", "DeepSeek V3"),  # their latent attention stores other keys and values
)
EVERY_CHANGE = ("GPT-2", "Gemma 3", "GPT-OSS")
# TransformerLens or transformers makes no right model.
REFUSED = ("Falcon (new decoder)", "CodeGen", "GPT")
NAMES = [
    pytest.param(row.name, marks=pytest.mark.xdist_group(row.name))
    for row in ALL
    if row.name in BY_NAME and hasattr(row, "config") and row.name not in REFUSED
]


def reads_of(model: Any, batch: al.PromptBatch, changes: Sequence[Hook]) -> dict[str, Tensor]:
    """Logits, and in each layer patterns, outputs of heads, dL/dA and the residual stream."""
    found = dict[str, Tensor]()

    def keep(name: str) -> Callable[..., None]:
        def act(tensor: Tensor, hook: Any) -> None:
            inside = batch.attention_mask
            if "pattern" in name:
                inside = inside[:, None, :, None] & inside[:, None, None]
            shape = (*inside.shape, *[1] * (tensor.ndim - inside.ndim))
            found[name] = (tensor.detach() * inside.view(shape)).flatten(2)

        return act

    layers = range(model.cfg.n_layers)
    points = [pattern_name(layer) for layer in layers]
    if not layers_that_mix(model):  # elsewhere nobody reads the outputs of heads
        points += [z_name(layer) for layer in layers]
    points += [f"blocks.{layer}.hook_resid_post" for layer in layers]
    slopes = [pattern_name(layer) for layer in layers]
    observers = [(point, keep(point)) for point in points]
    backward = [(point, keep(f"gradient of {point}")) for point in slopes]
    options: dict[str, Any] = {"observers": observers, "backward_hooks": backward}
    loss = al.losses.label_cross_entropy
    found["logits"] = run_pass(model, batch, hooks=changes, loss=loss, **options)
    return found


def changes_of(model: Any, batch: al.PromptBatch) -> dict[str, list[Hook]]:
    factor = torch.full((model.cfg.n_layers, model.cfg.n_heads), 0.5, dtype=torch.float64)
    after = al.Site(1, renormalize=False)
    return {
        "none": [],
        "cut": al.isolate_labels(model, batch, al.Site(heads=[0])),
        "two cuts": al.isolate_labels(model, batch, 0) + al.block_edges(model, batch, al.edges.tq),
        "other cuts in the next layer": al.isolate_labels(model, batch, 0)
        + al.block_edges(model, batch, al.edges.tq, al.Site(1)),
        "scaled": al.scale_edges(model, batch, al.edges.wp, factor),
        "scaled with a gradient and cut": al.scale_edges(
            model, batch, al.edges.wp, factor.clone().requires_grad_()
        )
        + al.block_edges(model, batch, al.edges.tq),
        "scaled after": al.scale_edges(model, batch, al.edges.wp, 0.5, after),
        "cut after": al.block_edges(model, batch, al.edges.wp, after),
        "detached": al.detach_heads(model, al.Site(1, heads=0)),
    }


@pytest.mark.quick_cases("whole models", "Falcon (ALiBi)", "Llama")
@pytest.mark.parametrize("name", NAMES)
def test_native_passes_have_the_numbers_of_hooked_passes(name: str) -> None:
    weights, batch = deepcopy(weights_of(name, torch.float64)), batch_of("right")
    with precise(torch.float64):
        model = bridge(weights, tokenizer())
        reason = why_not_native(model)
        assert bool(reason) == (name in HOOKED)
        if reason:
            return
        layers_that_mix(model)  # in a tiny pass, which is not counted
        kinds = {"none": []} if name not in EVERY_CHANGE else changes_of(model, batch)
        for kind, changes in kinds.items():
            assert_as_hooked(model, batch, kind, changes)


def assert_as_hooked(model: Any, batch: al.PromptBatch, kind: str, changes: Sequence[Hook]) -> None:
    with counted_layers(model) as calls:
        ours = reads_of(model, batch, changes)
    assert twin_for(model, batch, changes) is not None and calls[0] == 1
    with twin_of(model).kept_out():
        expected = reads_of(model, batch, changes)
    assert ours.keys() == expected.keys()
    for what, numbers in expected.items():
        error = (ours[what] - numbers).abs().max() / numbers.abs().max().clamp(min=1e-30)
        assert error < 1e-12, (kind, what)


def test_hooks_on_scores_act_one_after_the_other(exact_gpt2: Any) -> None:
    (batch,) = questions(exact_gpt2, 2)
    assert not why_not_native(exact_gpt2) and not layers_that_mix(exact_gpt2)
    kind = "scaled with a gradient and cut"
    assert_as_hooked(exact_gpt2, batch, kind, changes_of(exact_gpt2, batch)[kind])


def test_a_processed_bridge_is_not_native() -> None:
    model = processed_bridge(deepcopy(weights_of("GPT-2", torch.float32)), tokenizer())
    assert why_not_native(model) == "its weights are processed"


@dataclass(frozen=True)
class Reading(al.Metric):
    """Reads something, and contributes nothing of it."""

    read: Callable[[al.PromptBatch], Any]
    name: ClassVar[str] = "reading"
    record: ClassVar = al.records.AccuracyRecord

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        return {"it": self.read(batch)}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        return {"correct": torch.ones(len(batch)), "label_correct": torch.ones(len(batch))}


ELSEWHERE = Reading(lambda batch: al.reads.At("blocks.{}.hook_mlp_out", al.edges.target))
OWN: list[list[Hook]] = [
    [("blocks.0.attn.hook_pattern", lambda pattern, hook: pattern)],
    [("blocks.0.hook_mlp_out", lambda out, hook: None)],
]


@pytest.mark.parametrize("hooks", OWN)
def test_hooks_of_a_user_act_on_the_hooked_model(gpt2: Any, hooks: list[Hook]) -> None:
    (batch,) = questions(gpt2, 3)
    assert twin_for(gpt2, batch, hooks) is None
    assert twin_for(gpt2, batch, observers=OWN[1]) is None
    asked: list[str] = []

    def ask(pattern: Tensor, hook: Any) -> None:
        asked.append(f"{hook.layer()} {hook.ctx}")

    metric = Reading(lambda batch: al.reads.Hooks({}, [("blocks.1.attn.hook_pattern", ask)]))
    al.run(gpt2, [batch], [metric], **QUIET)
    assert asked == ["1 {}"]
    before = run_pass(gpt2, batch)
    with gpt2.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda resid, hook: resid * 0)]):
        assert twin_for(gpt2, batch) is None
        assert not torch.equal(run_pass(gpt2, batch), before)
    assert torch.equal(run_pass(gpt2, batch), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_that_see_no_key_stay_finite(gpt2: Any, dtype: torch.dtype) -> None:
    """Such are rows of padding beyond a window; beside the number in place of -inf a score is."""
    heads = torch.full((1, 2, 4, 12), 4.0, dtype=dtype)
    seen = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    seen[:, :, 3] = False
    mask = mask_of(lambda rows, keys: seen[:, :, rows, keys], 4)
    z = NativePass(twin_of(gpt2).parts).by_pattern(0, heads, -heads, heads, Terms(1.0, mask))
    assert z.isfinite().all()


def test_keys_that_a_prefix_hides_are_not_read(gpt2: Any) -> None:
    """Although the prompts after it have no padding."""
    (batch,) = questions(gpt2, 1)
    everything = al.compress(gpt2, batch, select=al.contexts.selection.everything)
    after = everything.query_pass(gpt2, batch)
    shown = after.logits(gpt2)
    assert after.prefix is not None
    after.prefix.attention_mask[:, 3] = False
    hidden = after.logits(gpt2)
    after.prefix.values[0][:, :, 3] += 9
    assert torch.equal(after.logits(gpt2), hidden) and not torch.equal(hidden, shown)


class NoEffect(al.Question):
    """A hook that does nothing moves no logits; ``seen`` notes whether passes are native."""

    name, record = "no effect", al.records.AccuracyRecord

    def __init__(self, hooks: Any, seen: list[bool]) -> None:
        self.hooks, self.seen = hooks, seen

    def further(self, model: Any, batches: Sequence[al.PromptBatch]) -> al.Further:
        return al.Further([self.hooks])

    def of_batch(self, passes: Any, batch: al.PromptBatch) -> dict[str, Tensor]:
        self.seen.append(twin_for(passes.model, batch) is not None)
        changed, clean = passes.logits(batch, self.hooks), passes.clean(batch)
        if passes.model.cfg.dtype.itemsize < 4:
            assert torch.equal(changed, clean)
        torch.testing.assert_close(changed, clean, rtol=0, atol=1e-5)
        return {name: torch.ones(len(batch)) for name in ("correct", "label_correct")}


def own_hook(batch: al.PromptBatch) -> list[Hook]:
    return [("blocks.0.hook_mlp_out", lambda out, hook: out)]


@pytest.mark.slow("whole models")
def test_a_record_says_how_its_passes_ran(byte_level: Any) -> None:
    model = al.load_model(tiny_gpt2(len(byte_level)), tokenizer=byte_level)
    (batch,) = questions(model, 3)

    def said(*asked: al.Question, hooks: Any = None) -> str:
        results = al.run(model, [batch], [al.Accuracy(), *asked], hooks=hooks, **QUIET)
        return str(results["accuracy"].info["passes"])

    def isolated(batch: al.PromptBatch) -> list[Hook]:
        return al.isolate_labels(model, batch, 0)

    changed = "with hooks: hooks of your own change the run"
    assert said() == said(hooks=isolated) == "native"
    assert said(hooks=own_hook) == changed
    assert said(NoEffect(own_hook, [])) == f"native, some {changed}"
    assert said(ELSEWHERE).startswith("with hooks: something is read at other points")
    with model.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda resid, hook: None)]):
        assert said() == "with hooks: there are hooks on the model"
    CHANGES["setting"](model)
    assert said().startswith("with hooks: the model changed since it was prepared")


def test_a_model_that_does_not_name_its_unembedding_runs_with_hooks(byte_level: Any) -> None:
    weights = tiny_gpt2(len(byte_level))
    weights.get_output_embeddings = lambda: None
    model = al.load_model(weights, tokenizer=byte_level)
    info = al.run(model, questions(model, 2), [al.SaliencyFlows()], **QUIET)["saliency_flows"].info
    assert (
        info["passes"]
        == "with hooks: its blocks or its unembedding are not modules of transformers"
    )


def swap_type(model: Any) -> None:
    module = model.blocks[1].mlp.original_component
    module.__class__ = type("Other", (type(module),), {})


def train(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].attn.q.original_component.weight.mul_(3)


def replace_method(module: Any) -> None:
    vars(module)["forward"] = type(module).forward.__get__(module)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights of a copy": train,
    "processed": lambda model: model.enable_compatibility_mode(disable_warnings=True),
    "folded": lambda model: model.process_weights(fold_ln=True),
    "compiled": lambda model: model.original_model.compile(backend="eager"),
    "compiled block": lambda model: model.blocks[1].original_component.compile(backend="eager"),
    "type": swap_type,
    "method of a wrapper": lambda model: replace_method(model.blocks[1].mlp),
    "method of a part": lambda model: replace_method(model.blocks[1].mlp.original_component),
    "method of the bridge": replace_method,
    "setting": lambda model: setattr(model.cfg, "eps", 0.5),
    "setting of a part": lambda model: setattr(model.blocks[0].ln1.original_component, "eps", 0.5),
    "window": lambda model: setattr(model.original_model.config, "n_positions", 77),
    "part": lambda model: model.blocks[2].mlp._modules.update(hook_out=torch.nn.Identity()),
}


@pytest.mark.quick_cases("whole models", "weights", "setting]")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changed_runs_with_hooks(name: str, byte_level: Any) -> None:
    """What a bridge and the model of transformers hold twice may be changed in one of them."""
    model = al.load_model(tiny_gpt2(len(byte_level)), tokenizer=byte_level)
    (batch,) = questions(model, 2)
    run_pass(model, batch)
    assert twin_for(model, batch) is not None
    with inside_run(model, True):
        assert twin_for(model, batch) is not None
        CHANGES[name](model)
        # Settings are read again by the next run.
        at_once = name.startswith(("weights", "processed", "folded", "method"))
        assert (twin_for(model, batch) is None) == at_once
    assert twin_for(model, batch) is None
    with inside_run(model, True):
        assert twin_for(model, batch) is None


def test_hooks_on_any_module_or_on_all_run_with_hooks(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)
    for register in (
        torch.nn.modules.module.register_module_forward_hook,
        gpt2.blocks[1].mlp.original_component.register_forward_hook,
        gpt2.hook_dict["blocks.1.hook_mlp_out"].register_forward_hook,
    ):
        assert twin_for(gpt2, batch) is not None
        handle = register(lambda *args: None)
        try:
            assert twin_for(gpt2, batch) is None
        finally:
            handle.remove()


@pytest.mark.slow("whole models")
def test_a_model_is_freed_although_a_hook_refers_to_it(byte_level: Any) -> None:
    model = al.load_model(tiny_gpt2(len(byte_level)), tokenizer=byte_level)
    (batch,) = questions(model, 2)
    run_pass(model, batch)
    model.original_model.register_forward_hook(lambda *args, model=model: None)
    model.blocks[0].mlp.original_component.register_forward_hook(lambda *a, model=model: None)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_between_passes_nothing_of_a_pass_or_of_the_model_is_kept(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 2)

    class Held:
        def __call__(self, tensor: Tensor, hook: Any) -> None:
            pass

    vars(gpt2.original_model)["held"], observer = Held(), Held()
    of_model, of_pass = weakref.ref(gpt2.original_model.held), weakref.ref(observer)
    with inside_run(gpt2, True):
        with inside_run(gpt2, True):  # as where a question starts a run of its own
            pass
        assert twin_of(gpt2).runs_here
        run_pass(gpt2, batch, observers=[(pattern_name(0), observer)])
        del gpt2.original_model.held, observer
        gc.collect()
        assert of_pass() is None
    gc.collect()
    assert of_model() is None


@pytest.mark.slow_cases("whole models", "Gemma 3", "OSS", "dtype1", "dtype2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EVERY_CHANGE)
def test_native_passes_round_as_hooked_passes_do(name: str, dtype: torch.dtype) -> None:
    weights, batch = deepcopy(weights_of(name, torch.float32)).to(dtype), batch_of("right")
    with precise(torch.float64):
        wide = bridge(deepcopy(weights).double(), tokenizer())
        exact = reads_of(wide, batch, [])
    model = bridge(weights, tokenizer())
    errors = list[dict[str, float]]()
    for is_native in (True, False):
        with twin_of(model).entered() if is_native else twin_of(model).kept_out():
            assert (twin_for(model, batch) is None) == (not is_native)
            found = reads_of(model, batch, [])
        squares = defaultdict[str, float](float)
        for what, numbers in exact.items():
            kind = what.rpartition(".")[-1] + " gradient" * what.startswith("gradient")
            share = (found[what].double() - numbers).norm() / numbers.norm()
            squares[kind] += float(share**2)
        errors.append({kind: square**0.5 for kind, square in squares.items()})
    native, hooked = errors
    assert native.keys() == hooked.keys() and len(native) >= 4
    for kind in native:
        assert 0 < native[kind] <= 2 * hooked[kind], (kind, native[kind], hooked[kind])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_that_are_compared_are_of_one_kind_in_low_precision(
    dtype: torch.dtype, byte_level: Any
) -> None:
    """Otherwise the rounding of one of them looks like an effect of its hooks."""
    model = al.load_model(tiny_gpt2(len(byte_level), n_layer=1).to(dtype), tokenizer=byte_level)
    batches = questions(model, 4, batch_size=2)
    assert not why_not_native(model)
    assert (twin_for(model, batches[0]) is None) == (dtype == torch.bfloat16)

    def scale_by_one(batch: al.PromptBatch) -> list[Hook]:
        return al.scale_edges(model, batch, al.edges.wp, 1.0)

    native, hooked = list[bool](), list[bool]()
    al.run(model, batches, [NoEffect(scale_by_one, native)], **QUIET)
    assert native == [True, True]
    if dtype == torch.float32:
        return

    asked = [al.SaliencyFlows(), NoEffect(own_hook, hooked)]
    flows = al.run(model, batches, asked, **QUIET)["saliency_flows"].per_prompt
    assert hooked == [False, False]
    with twin_of(model).kept_out():
        whole = al.run(model, batches, [al.SaliencyFlows()], **QUIET)["saliency_flows"].per_prompt
    assert torch.equal(flows, whole)

    class Beside(NoEffect):
        def further(self, model: Any, batches: Sequence[al.PromptBatch]) -> al.Further:
            return al.Further([self.hooks], metrics=[ELSEWHERE])

    al.run(model, batches, [Beside(scale_by_one, hooked)], **QUIET)
    assert hooked == [False] * 4

    class Unnamed(NoEffect):
        further = al.Question.further

    with pytest.raises(al.errors.RunError, match=r"bfloat16 one with hooks .* own .*further"):
        al.run(model, batches, [Unnamed(own_hook, [])], **QUIET)
    (left,) = questions(model, 3, padding_side="left")
    assert twin_for(model, left) is None
    with inside_run(model, True), pytest.raises(al.errors.MetricError, match="on the left"):
        twin_for(model, left)


def test_a_twin_that_computes_something_else_is_not_taken(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = NativePass.by_pattern

    def with_operands(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
        return lambda self, layer, query, key, *others: attend(
            self, layer, *change(query, key), *others
        )

    for change, reason in (
        (lambda query, key: (query * 1.001, key), "logits differ by"),
        (lambda query, key: (query * 2, key / 2), "numbers that are read differ by"),
        (lambda query, key: (query.detach(), key), "saliencies differ by"),
    ):
        monkeypatch.setattr(NativePass, "by_pattern", with_operands(change))
        with found_anew(gpt2):
            assert why_not_native(gpt2).startswith(reason)
    monkeypatch.undo()
    fails = Mock(side_effect=RuntimeError("no such attention"))
    monkeypatch.setattr(choice, "_shown", fails)
    with found_anew(gpt2):
        assert "no such attention" in why_not_native(gpt2)
