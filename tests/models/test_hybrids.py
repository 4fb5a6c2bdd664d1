"""Models in which some layers have no attention: what is analysed, what is NaN, what is refused.

tests/models/test_matrix.py compares their numbers with plain transformers.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.cli.check import known
from anchorlens.errors import AnchorlensError, HookError, ModelError
from anchorlens.models.verify_hooks import carries_beside_attention
from anchorlens.passes.running import why_not_native
from anchorlens.passes.shortcuts import why_not_fused, why_not_shared
from tests.models.test_verify_hooks import SIZES
from tests.models.test_verify_hooks import made as of_transformers
from tests.references.architecture_row import LINE
from tests.references.architectures import BY_NAME, HYBRIDS
from tests.support.measures import difference, logits_of
from tests.support.tiny_models import boot, questions, randomize, tiny_llama

pytestmark = pytest.mark.every_kind

NAMES = [row.name for row in HYBRIDS if LINE not in row.refused]
ABLE, OTHERS = [1, 3], [0, 2]  # the layers with attention, and those without
QUIET: dict[str, Any] = {"resamples": 10, "progress": False}
METRICS = [
    al.SaliencyFlows(),
    al.AttentionAUCROC(),
    al.AnchorDistances(directions=1),
    al.LabelHeads(draws=2),
    al.SegmentFlows(),
    al.SegmentAttention(),
    al.Accuracy(),
]


def made(name: str, tokenizer: Any, **changes: Any) -> Any:
    weights = BY_NAME[name].build(len(tokenizer), max_position_embeddings=512, **changes)
    return al.prepare_model(boot(weights, tokenizer))


@pytest.fixture(scope="module")
def hybrid(byte_level: Any) -> Any:
    return made("Qwen3.5", byte_level)


@pytest.fixture(scope="module")
def batches(hybrid: Any) -> Any:
    return questions(hybrid, count=6, batch_size=3)


@pytest.fixture(scope="module")
def results(hybrid: Any, batches: Any) -> Any:
    return al.run(hybrid, batches, METRICS, **QUIET)


@pytest.fixture(scope="module")
def sweep(hybrid: Any, batches: Any) -> Any:
    return al.run(hybrid, batches, [sweep_of(hybrid)], **QUIET)["isolation"]


def test_layers_without_attention_are_nan_and_named(results: Any) -> None:
    seen = 0
    for record in results.values():
        assert record.info["layers_without_pattern"] == OTHERS and record.info["n_layers"] == 4
        for name, axes in record.axes().items():
            if "layer" not in axes:
                continue
            tensors = [(getattr(record, name), 0), (record.intervals.get(name), 1)]
            for values, before in tensors:
                if values is not None:
                    by_layer = values.movedim(before + axes.index("layer"), 0)
                    assert len(by_layer) == 4 and by_layer[OTHERS].isnan().all()
            if name != "kurtosis":  # NaN where prompts have few tokens
                assert not getattr(record, name).movedim(axes.index("layer"), 0)[ABLE].isnan().all()
            seen += 1
        assert not record.misfit()
    assert seen > 15


def test_the_command_that_checks_a_model_says_which_layers_have_attention(hybrid: Any) -> None:
    assert (
        known(hybrid)["attention_hooks"] == "verified in all 2 layers but [0, 2], which have none"
    )


def test_parts_of_scores_need_what_each_layer_adds(hybrid: Any, batches: Any) -> None:
    with pytest.raises(AnchorlensError, match=r"no hook point .*; load it without .* al.EdgeSweep"):
        al.run(hybrid, batches, [al.ScoreParts(3)], **QUIET)


def test_a_stored_record_keeps_its_gaps(results: Any, tmp_path: Any) -> None:
    record = results["saliency_flows"]
    same = al.Record.load(record.save(tmp_path / "flows.safetensors"))
    assert same.flows.isnan().all(1).tolist() == [True, False, True, False]
    assert same.info["layers_without_pattern"] == OTHERS


@pytest.mark.slow("whole models")
def test_recurrent_layers_of_zeros_leave_the_model_of_attention_alone(byte_level: Any) -> None:
    sizes: dict[str, Any] = {"max_position_embeddings": 512}
    whole = BY_NAME["Qwen3.5"].build(len(byte_level), **sizes)
    sizes |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    alone = BY_NAME["Qwen3.5"].build(len(byte_level), **sizes)
    weights = whole.state_dict()
    with torch.no_grad():
        for layer in OTHERS:
            weights[f"model.layers.{layer}.linear_attn.out_proj.weight"].zero_()
            weights[f"model.layers.{layer}.mlp.down_proj.weight"].zero_()
        for name, tensor in alone.state_dict().items():
            if name.startswith("model.layers."):
                _, _, number, rest = name.split(".", 3)
                name = f"model.layers.{ABLE[int(number)]}.{rest}"
            tensor.copy_(weights[name])
    ours, theirs = (
        al.run(model, questions(model, count=6, batch_size=3), [*METRICS, sweep_of(model)], **QUIET)
        for model in (al.prepare_model(boot(each, byte_level)) for each in (whole, alone))
    )
    for kind, record in ours.items():
        for field, value in record.tensors().items():
            require_same(record, field, value, getattr(theirs[kind], field), 0)
        assert record.intervals.keys() == theirs[kind].intervals.keys()
        for field, bounds in record.intervals.items():
            require_same(record, field, bounds, theirs[kind].intervals[field], 1)


def require_same(
    record: Any, field: str, here: torch.Tensor, there: torch.Tensor, before: int
) -> None:
    axes = record.axes()[field]
    if "layer" in axes:
        here = here.index_select(before + axes.index("layer"), torch.tensor(ABLE))
    if field in record.numbers_of_layers:
        there = torch.tensor(ABLE)[there.long()].to(there)
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5, equal_nan=True)


def sweep_of(model: Any) -> al.EdgeSweep:
    return al.EdgeSweep.isolation(al.sites.first_and_last(model, [1]), draws=2)


def cut_off(model: Any, batch: al.PromptBatch) -> tuple[float, float]:
    """What cutting all edges from demonstrations changes, and what these then still change."""
    read = al.edges.demonstrations(batch)
    later = batch.attention_mask & ~read
    hooks = al.block_edges(model, batch, al.edges.between(later, read))
    clean, cut = logits_of(model, batch, []), logits_of(model, batch, hooks)
    tokens = batch.tokens.clone()
    for row, inside in enumerate(read):
        tokens[row, inside] = tokens[row, inside].flip(0)
    other = replace(batch, tokens=tokens)
    return difference(cut, clean), difference(logits_of(model, other, hooks), cut)


@pytest.mark.slow("whole models")
def test_cut_attention_changes_the_answer_and_recurrent_layers_still_carry(
    hybrid: Any, batches: Any, byte_level: Any
) -> None:
    changed, carried = cut_off(hybrid, batches[0])
    assert changed > 1e-3 and carried > 1e-3
    plain = al.prepare_model(boot(tiny_llama(len(byte_level)), byte_level))
    changed, carried = cut_off(plain, questions(plain, count=3)[0])
    assert changed > 1e-3 and carried == 0
    assert carries_beside_attention(hybrid) and not carries_beside_attention(plain)


def test_a_sweep_says_that_it_cuts_the_attention_alone(sweep: Any, results: Any) -> None:
    assert sweep.info["not_cut"] == "layers 0, 2"
    sites = sweep.info["sites"]
    assert [site["layers"] for site in sites.values()] == [[1], [3]]
    assert "(layers 0, 2 still carry them)" in sweep.plot().layout.title.text
    [claim] = [each for each in al.claims({"isolation": sweep}) if "isolated" in each.measure]
    assert "the first layer with attention (layers 0, 2 still carry them)" in claim.measure
    assert not claim.reason.startswith("no number") and claim.estimate.value == sweep.label_gap[0]


@pytest.mark.slow("whole models")
def test_a_model_with_a_recurrent_path_in_each_layer_says_so_too(byte_level: Any) -> None:
    sizes: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64}
    sizes |= {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16, "head_dim": 8}
    sizes |= SIZES | {"num_key_value_heads": 2, "intermediate_size": 48}
    weights = of_transformers("FalconH1", vocab_size=3000, attn_implementation="eager", **sizes)
    model = al.prepare_model(boot(randomize(weights), byte_level))
    found = al.run(model, questions(model, count=3), [sweep_of(model)], resamples=0, progress=False)
    assert found["isolation"].info["not_cut"] == "parts beside the attention"
    assert "layers_without_pattern" not in found["isolation"].info


REFUSED: dict[str, tuple[Any, str]] = {
    "a site": (
        lambda model, batch: al.block_edges(model, batch, al.edges.wp, [0, 1]),
        r"layers \[0\] of .* have no attention to act on; those with attention are \[1, 3\]",
    ),
    "heads by layer": (
        lambda model, batch: al.detach_heads(model, al.Site(heads={2: 0})),
        r"layers \[2\] of .* have no attention",
    ),
    "too deep": (lambda model, batch: al.sites.first_and_last(model, [3]), "from 1 to 2 layers"),
    "beta": (
        lambda model, batch: al.reweight_anchors(model, batch, torch.ones(4, 4, 6)),
        r"layers \[0, 2\] of .* have no attention to re-weight; beta must be 0 there",
    ),
    "rollout": (
        lambda model, batch: al.run(model, [batch], [al.SegmentRollout()], **QUIET),
        r"which goes through the layers, needs an attention in every layer, and layers \[0, 2\]",
    ),
    "removal by edges": (
        lambda model, batch: al.removal.edges(model, batch, al.edges.demonstration(batch, 0)),
        r"carries tokens on beside its attention .*remove the text \(al\.removal\.text\)",
    ),
    "gradients of steps": (
        lambda model, batch: al.step_flows(model, batch.prompt(0), "query"),
        r"the gradient of each step needs an attention in every layer, and layers \[0, 2\]",
    ),
    "a compressed context": (
        lambda model, batch: al.compress(model, batch),
        r"layers \[0, 2\] store no keys and values, but carry on a state of their own",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_not_be_right_is_refused(what: str, hybrid: Any, batches: Any) -> None:
    refused, message = REFUSED[what]
    with pytest.raises((HookError, ModelError), match=message):
        refused(hybrid, batches[0])


def test_the_text_of_a_segment_can_be_removed(hybrid: Any, batches: Any) -> None:
    shorter, hooks = al.removal.text(hybrid, batches[0], al.edges.demonstration(batches[0], 0))
    assert not hooks and shorter.tokens.shape[1] < batches[0].tokens.shape[1]


def test_sites_count_layers_with_attention(hybrid: Any) -> None:
    assert al.Site().layers_of(hybrid) == ABLE
    assert al.Site(-1).layers_of(hybrid) == [3]
    assert list(al.sites.windows(hybrid, 2)) == ["layers 1 to 3"]


def test_shared_tokens_run_whole_with_the_reason(results: Any, hybrid: Any) -> None:
    reason = "layers [0, 2] store no keys and values, but carry on a state of their own"
    assert reason in why_not_shared(hybrid)
    assert results["saliency_flows"].info["shared_prefix"].startswith("off: ")


@pytest.mark.slow("whole models")
@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_run_gives_the_same_numbers(
    name: str, byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(name, byte_level)
    given = questions(model, count=4, batch_size=2)
    asked = [al.SaliencyFlows(), al.SegmentAttention(), al.SegmentFlows()]
    model.add_hook("blocks.0.hook_in", lambda resid, hook: None)  # so that no pass is native
    by_hooks = al.run(model, given, asked, **QUIET)
    model.reset_hooks()
    ways = [al.run(model, given, asked, **QUIET)]
    is_native = ways[0]["saliency_flows"].info["passes"] == "native"
    assert is_native == (not why_not_native(model))
    ways.append(al.run(model, given, asked[::2], gradient_checkpointing=True, **QUIET))
    if not why_not_fused(model):
        monkeypatch.setattr("anchorlens.runs.way.LARGE", 0)
        ways.append(al.run(model, given, asked, **QUIET))
        assert ways[-1]["saliency_flows"].info["attention"].startswith("fused")
    for way in ways:
        for kind, record in way.items():
            for field, value in record.tensors().items():
                expected = getattr(by_hooks[kind], field)
                torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-5, equal_nan=True)


@pytest.mark.slow("whole models")
def test_figures_say_which_layers_have_no_number(results: Any, hybrid: Any, batches: Any) -> None:
    for figure in (results["saliency_flows"].plot(), results["label_heads"].plot()):
        named = [shape for shape in figure.layout.shapes if shape.name == "no number"]
        assert {(shape.x0 + shape.x1) / 2 for shape in named} == {0, 2}
        assert sum(bool(shape.showlegend) for shape in named) == 1
    prompt = al.plot_prompt(hybrid, batches[0])
    assert prompt.layer_names() == ["1", "3"] and "attention in 2 of 4 layers" in prompt.source
    panels = [panel.text for panel in prompt.figure().layout.annotations]
    assert [panel.partition(",")[0] for panel in panels] == ["shallow: layer 1", "deep: layer 3"]


def test_saliency_and_effects_of_heads_have_gaps(hybrid: Any, batches: Any) -> None:
    maps = al.saliency(hybrid, batches[0])
    assert maps.isnan().flatten(2).all(2)[0].tolist() == [True, False, True, False]
    record = al.head_effects(hybrid, batches[:1], batches[1:], **QUIET)
    assert record.effect.isnan().all(1).tolist() == [True, False, True, False]
    # The mean outputs of a head, written by hand.
    cut = al.replace_heads(hybrid, batches[1], record.outputs, al.Site(3, heads=1))
    answers = batches[1].label_token_ids[batches[1].gold]
    clean, other = (
        logits_of(hybrid, batches[1], hooks)
        .double()
        .softmax(-1)
        .logit()
        .gather(1, answers[:, None])
        for hooks in ([], cut)
    )
    torch.testing.assert_close(record.effect[3, 1], (other - clean).mean(), rtol=1e-3, atol=1e-5)


def test_caches_of_a_hybrid(hybrid: Any, batches: Any, results: Any) -> None:
    metrics = [al.AttentionAUCROC()]
    names = al.caches.names_filter(metrics, hybrid, batches[0])
    assert names and not any(name.startswith(("blocks.0.", "blocks.2.")) for name in names)
    passes = [
        hybrid.run_with_cache(
            batch.tokens, attention_mask=batch.attention_mask.long(), names_filter=names
        )
        for batch in batches
    ]
    found = al.caches.from_caches(metrics, batches, passes, model=hybrid, resamples=0)
    expected = results["attention_aucroc"].aucroc
    torch.testing.assert_close(found["attention_aucroc"].aucroc, expected, equal_nan=True)
    with pytest.raises(AnchorlensError, match=r"has no 'blocks\.0\.attn\.hook_pattern'"):
        al.caches.from_caches(metrics, batches, passes, resamples=0)


def test_no_number_is_chosen_from_a_layer_without_attention(results: Any) -> None:
    scores = torch.tensor([[torch.nan] * 2, [0.1, 0.3], [torch.nan] * 2, [0.2, 0.4]]).double()
    record = al.records.RetrievalHeadsRecord(score=scores, raw=scores, found=scores)
    assert record.top(2).heads == {3: [1], 1: [1]}
    diagnosis = al.diagnose(results["anchor_distances"])
    assert int(diagnosis.layer) in ABLE
    for values in (diagnosis.correlation, diagnosis.p_value):
        assert values.isnan().tolist() == [True, False, True, False]


@pytest.mark.slow("whole models")
def test_cuts_while_a_hybrid_writes_without_a_cache(hybrid: Any, batches: Any) -> None:
    batch = batches[0].prompt(0)
    cut = al.block_edges(
        hybrid, batch, al.edges.between(al.edges.target(batch), batch.attention_mask)
    )
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "verbose": False}
    with hybrid.hooks(fwd_hooks=cut):
        written = hybrid.generate(
            batch.tokens, use_past_kv_cache=False, return_type="tokens", **options
        )
    expected = logits_of(hybrid, batch, cut).argmax(-1)
    assert written[0, -1] == expected[0]
