"""Key-value caches of every architecture: shared demonstrations, contexts, peft, written text."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.contexts.compressed import compressed_contexts
from anchorlens.errors import ModelError
from anchorlens.metrics.question import no_hooks
from anchorlens.models.kv_cache import entries_of_cache, layers_of_entries
from anchorlens.models.native_attention import is_native
from anchorlens.passes.forward import run_pass
from anchorlens.runs import way
from anchorlens.runs.passes import Passes
from tests.models.test_matrix import LINE, cases, hooked
from tests.references import plain
from tests.references.comparison import batch_of, cut_layers, precise, weights_of
from tests.references.toys import TOYS
from tests.support.measures import assert_same, centred, difference, is_shared
from tests.support.peft_oracle import peft_logits, saved_by_peft
from tests.test_cuts_while_writing import check_against_whole_passes

pytestmark = [
    pytest.mark.filterwarnings("ignore:in layers", "ignore:some pairs of classes have no prompts"),
    pytest.mark.filterwarnings("ignore:in .* of .* sets"),
]
# Bridges of these models do not run from a cache.
NO_CACHE = {row.name for row in TOYS}
# Nothing can be dropped from these caches. The index in the cache gives the distance between a
# query and a key, or the chunk of a key.
NEVER_CUT = ("Bloom", "MPT", "Falcon (ALiBi)", "Llama 4")
# These keys cannot get new positions. Positions are learned, or keys are rotated in a separate part
# (latent attention), as one tensor with others, or before any hook point.
NEVER_MOVED = {"GPT-2", "GPT-Neo", "OPT", "OPT (norms after)", "GPTBigCode", "XGLM", "HunYuan"}
NEVER_MOVED |= {"Llama 4", "DeepSeek V2", "DeepSeek V3", "JetMoe"}
NEVER_MOVED |= {row.name for row in TOYS if row.options["positional_embedding_type"] == "standard"}
# What a bridge does with a cache is much the same on both lines, so it is tested on the newest.
# These are tested on both, because transformers names the cache in another way from 5.24 on.
ON_BOTH = {"GPT-2", "GPT-J", "GPT-NeoX (Pythia)", "Bloom", "Llama", "Mistral", "Qwen2", "Qwen3"}
ON_BOTH |= {"Gemma 2", "Phi", "Phi-3", "DeepSeek V3"}
KIND = "bridge" if LINE.startswith("4.") else "HookedTransformer"
LIMIT = 1e-8 if KIND == "bridge" else 1e-6  # of a HookedTransformer as in test_matrix.py
CASES = cases(KIND)
CASES += [
    pytest.param(
        name,
        "bridge",
        id=f"{name}-bridge",
        marks=[pytest.mark.xdist_group(name), pytest.mark.every_kind],
    )
    for name in sorted(ON_BOTH)
    if KIND != "bridge"
]


@pytest.mark.quick_cases("whole models", "Toy")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_cache_gives_the_results_of_whole_prompts(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64: rounding in float32 is as large as what a wrong cache may change."""
    model, batch = hooked(name, torch.float64, kind), batch_of("left")
    if name in NO_CACHE and kind == "bridge":
        decided = way.way_of(model, [batch.padded_right()], [no_hooks])
        assert "no run from a key-value cache" in decided.shared_prefix
        with pytest.raises(ModelError, match=r"from a key-value cache.*takes no key-value cache"):
            al.compress(model, batch)
        return
    with precise(torch.float64):
        check_sharing(model, batch, monkeypatch)
        check_cut(name, kind, model, batch)
        check_moved(name, kind, model, batch)
        if name in ON_BOTH:
            check_written(name, model)


@pytest.mark.slow("whole models")
def test_layers_read_the_entries_that_the_configuration_says() -> None:
    model = hooked("Gemma 4 (shared)", torch.float32, "bridge")
    assert [*entries_of_cache(model)] == [0, 1, 2, 1, 2]
    assert layers_of_entries(model) == [0, 1, 2]
    assert [*entries_of_cache(hooked("Gemma 4", torch.float32, "bridge"))] == [0, 1, 2]


@pytest.mark.slow("whole models")
def test_cuts_act_while_attention_of_transformers_writes_beyond_its_window() -> None:
    model = hooked("Gemma 4 (shared)", torch.float64, "bridge")
    assert is_native(model.blocks[0].attn)
    with precise(torch.float64):
        check_against_whole_passes(model, 1e-10)


def check_sharing(model: Any, batch: al.PromptBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = list(results_of(model, batch))
    with monkeypatch.context() as patch:
        patch.setattr(way, "shared_lengths", lambda *of: {})
        patch.setattr(Passes, "why_not_late", lambda passes, of: dict.fromkeys(of, "off"))
        whole = list(results_of(model, batch))
    skipped, in_whole = (
        each[-1].info["sites"]["last"]["skipped_layers"] for each in (shared, whole)
    )
    if len(set(entries_of_cache(model))) < model.cfg.n_layers:
        assert skipped == "no start at layer 4, after which keys of layer 2 are read"
    else:
        assert skipped == model.cfg.n_layers - 1
    assert in_whole == "off"
    for ours, theirs in zip(shared, whole, strict=True):
        assert is_shared(ours)
        assert not is_shared(theirs)
        assert_same(ours, theirs, LIMIT)


def results_of(model: Any, batch: al.PromptBatch) -> Iterator[al.Record]:
    """Yield the record of flows with isolated label words, and of a sweep.

    What metrics read in the clean run is compared in test_reads_matrix.py.
    """
    options: dict[str, Any] = {"resamples": 0, "progress": False}
    layers, _ = cut_layers(model.cfg.n_layers)

    def isolated(batch: al.PromptBatch) -> Any:
        return al.isolate_labels(model, batch, layers)

    flows = [al.SaliencyFlows(), al.Loyalty()]
    yield from al.run(model, [batch], flows, hooks=isolated, **options).values()
    sites = {"first": al.Site(layers), "last": al.Site(-1)}
    sweep = al.EdgeSweep.isolation(sites, draws=1)
    yield from al.run(model, [batch], [sweep], **options).values()


def some_positions(demonstrations: al.PromptBatch) -> Tensor:
    """Select no texts, and leave a gap that is shorter than a sliding window."""
    selected = al.contexts.selection.anchors_and_format(demonstrations)
    selected[-8:-5] = False
    return selected


def tail(demonstrations: al.PromptBatch) -> Tensor:
    """Select all but the leading tokens, which leaves no gap."""
    return torch.arange(demonstrations.tokens.shape[1]) >= 11


def check_cut(name: str, kind: str, model: Any, batch: al.PromptBatch) -> None:
    """A context of everything equals the whole prompt; others equal a prompt with masked edges."""
    whole = run_pass(model, batch)
    everything = al.compress(model, batch, select=al.contexts.selection.everything)
    assert difference(everything.logits(model, batch), whole) < LIMIT
    context = al.compress(model, batch, select=some_positions)
    assert context.is_cut == (name not in NEVER_CUT and kind == "bridge")
    logits = context.logits(model, batch)
    # A first context without a gap does not show at which positions keys stand.
    for first in (al.contexts.selection.everything, tail):
        _, second = compressed_contexts(model, batch, [first, some_positions])
        assert torch.equal(second.logits(model, batch), logits)
    masked = cut_in_transformers(name, model, context)
    assert difference(centred(logits), centred(masked)) < LIMIT
    assert difference(centred(whole), centred(masked)) > 1e-3
    apart = al.compress(model, batch, select=some_positions, separately=True)
    masked_apart = cut_in_transformers(name, model, apart)
    assert difference(centred(apart.logits(model, batch)), centred(masked_apart)) < LIMIT
    # In a model of one layer the query reads the same keys and values.
    assert model.cfg.n_layers == 1 or difference(centred(masked), centred(masked_apart)) > 1e-3


def cut_in_transformers(name: str, model: Any, context: al.contexts.CompressedContext) -> Tensor:
    """Logits of whole prompts with masks, for a context; each demonstration is a line."""
    weights, right = weights_of(name, torch.float64), batch_of("right")
    count = len(context.selected)
    lines = (right.label_ends[0] + 2).tolist() if context.info["separately"] else []
    expected = []
    for prompt in plain.prompts_of(right):
        length = prompt.tokens.shape[1]
        cut = torch.zeros(length, length, dtype=torch.bool)
        cut[count:, (~context.selected).nonzero().flatten()] = True
        for end in lines:
            cut[end:count, :end] = True
        expected.append(plain.with_cut_masks(weights, prompt, cut, range(model.cfg.n_layers)))
    return torch.stack(expected)


def check_moved(name: str, kind: str, model: Any, batch: al.PromptBatch) -> None:
    """A context without a gap gives the same logits when it moves as far as the query does."""
    if name in NEVER_CUT or kind != "bridge":
        # Of everything only the position of the query can show it.
        for select in (tail, al.contexts.selection.everything):
            with pytest.raises(ModelError, match="positions cannot be restarted"):
                al.compress(model, batch, select, positions=al.contexts.placement.restarted)
    if name in NEVER_MOVED:
        with pytest.raises(ModelError, match="positions cannot be rebased"):
            al.compress(model, batch, positions=al.contexts.placement.rebased)
        return
    context = al.compress(model, batch, positions=al.contexts.placement.rebased)
    assert context.is_cut and context.query_position == int(context.selected.sum())
    moved, still = (
        al.compress(model, batch, tail, positions=positions)
        for positions in (al.contexts.placement.rebased, al.contexts.placement.as_in_prompt)
    )
    assert moved.query_position == len(moved.selected) - 11
    assert still.query_position == len(still.selected)
    # Some rotations are read from a table in float32 (GPT-J).
    assert difference(moved.logits(model, batch), still.logits(model, batch)) < 1e-6


def check_written(name: str, model: Any) -> None:
    """Each token of a text written from the cache is the likeliest one of plain transformers."""
    trace = al.trace_generation(model, "Where to? ->", max_new_tokens=4, stop_at_eos=False)
    tokens = trace.batch.tokens
    with torch.no_grad():
        logits = weights_of(name, torch.float64)(tokens, use_cache=False).logits[0, -5:-1]
    assert tokens[0, -4:].tolist() == logits.argmax(-1).tolist()
    expected = -logits.log_softmax(-1).gather(1, tokens[0, -4:, None])[:, 0]
    assert difference(trace.flows.loss, expected) < LIMIT


# Contexts that are no adapters of peft.
UNLIKE = {
    **dict.fromkeys(("Gemma 4", "Gemma 4 (global keys)"), "keys and values of one shape in every"),
    "Gemma 4 (shared)": "with 5 layers caches them in 3",
    **dict.fromkeys(("DeepSeek V2", "DeepSeek V3"), "has latent attention"),
}


@pytest.mark.quick_cases("whole models", "Llama")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "kind"), cases("bridge"))
def test_peft_and_a_context_give_the_same_logits(name: str, kind: str, tmp_path: Any) -> None:
    if name in NO_CACHE:
        pytest.skip("it has no contexts")
    model, batch = hooked(name, torch.float32, kind), batch_of("right")
    weights, ours = weights_of(name, torch.float32), tmp_path / "ours"
    context = al.compress(model, batch, select=al.contexts.selection.everything)
    if name in UNLIKE:
        with pytest.raises(ModelError, match=UNLIKE[name]):
            al.contexts.context_to_peft(context, model, ours)
        return
    al.contexts.context_to_peft(context, model, ours)
    assert difference(peft_logits(weights, ours, batch), context.logits(model, batch)) < 1e-5
    # peft does not find the sizes of MPT and XGLM by itself, and takes wrong ones of Falcon.
    _, heads, _, d_head = context.prefix.keys[0].shape
    sizes = {"num_layers": model.cfg.n_layers, "num_attention_heads": heads}
    theirs = saved_by_peft(weights, tmp_path / "theirs", 3, **sizes, token_dim=heads * d_head)
    prefix = al.contexts.context_from_peft(theirs, model, batch)
    assert difference(prefix.logits(model, batch), peft_logits(weights, theirs, batch)) < 1e-5
