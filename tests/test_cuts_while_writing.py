"""Cuts while the model writes, compared with whole passes whose scores are cut by hand."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import HookError, PromptError
from anchorlens.models.hooked import Hook, scores_name
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.prompts import edges
from anchorlens.prompts.batch import in_longer_rows
from tests.references.plain import everything_in_float64
from tests.support.measures import difference
from tests.support.tiny_models import LONG_LABELS

pytestmark = pytest.mark.every_kind

N_WRITTEN = 5


def prompts(model: Any, *lengths: int) -> al.PromptBatch:
    """Prompts of random tokens, padded on the left."""
    longest = max(lengths)
    generator = torch.Generator().manual_seed(longest)
    tokens = torch.randint(5, len(model.tokenizer), (len(lengths), longest), generator=generator)
    mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths])
    return al.PromptBatch.from_segments(tokens, attention_mask=mask)


def some_edges(batch: al.PromptBatch, length: int = 0) -> Tensor:
    """Random edges, of which the last token has some, and none from a token to itself."""
    tokens = in_longer_rows(batch, max(length, batch.tokens.shape[1])).attention_mask
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand((*tokens.shape, tokens.shape[1]), generator=generator) < 0.4
    return (chosen & tokens[:, None] & tokens[:, :, None]).tril(-1)


def write(model: Any, batch: al.PromptBatch, hooks: list[Hook], **options: Any) -> Any:
    """Tokens, and logits [prompt, step, token]."""
    with frozen_in_eval_mode(model), model.hooks(fwd_hooks=hooks):
        written = model.generate(
            batch.tokens,
            max_new_tokens=N_WRITTEN,
            **{"do_sample": False, "stop_at_eos": False, "verbose": False} | options,
            return_type="tokens",
            output_logits=True,
        )
    return written.sequences, torch.stack(list(written.logits), 1)


def by_hand(model: Any, tokens: Tensor, cut: Tensor, layers: list[int], heads: Any) -> Tensor:
    """Logits of the last tokens, each from a pass over all tokens before it, without a cache."""
    logits = []
    for length in range(tokens.shape[1] - N_WRITTEN, tokens.shape[1]):

        def edit(scores: Tensor, hook: Any, length: int = length) -> Tensor:
            edited = scores.clone()
            for prompt, of_prompt in enumerate(cut):
                for query in range(length):
                    row = of_prompt[min(query, len(of_prompt) - 1)]
                    for key in row[:length].nonzero().flatten().tolist():
                        edited[prompt, heads, query, key] = torch.finfo(scores.dtype).min
            return edited

        hooks = [(scores_name(layer), edit) for layer in layers]
        with torch.no_grad():
            logits.append(model.run_with_hooks(tokens[:, :length], fwd_hooks=hooks)[:, -1])
    return torch.stack(logits, 1)


def check_against_whole_passes(model: Any, limit: float) -> None:
    for length in (21, 30):  # of the windows, one of 24 tokens becomes too short meanwhile
        batch = prompts(model, length)
        cut, site = some_edges(batch), al.Site(heads={0: [0], 2: [0]})
        tokens, logits = write(model, batch, al.block_edges(model, batch, cut, site))
        expected = by_hand(model, tokens, cut, [0, 2], 0)
        assert difference(logits, expected) < limit
        assert torch.equal(tokens[:, -N_WRITTEN:], expected.argmax(-1))
        assert difference(logits, by_hand(model, tokens, cut & False, [], 0)) > 1e-3


def test_writing_under_cuts_equals_whole_passes_cut_by_hand(exact_model: Any) -> None:
    with everything_in_float64():  # float32 inside differs between processors
        check_against_whole_passes(exact_model, 1e-10)


def test_writing_under_cuts_in_float32_equals_whole_passes(llama: Any) -> None:
    check_against_whole_passes(llama, 1e-5)


def test_batches_padded_on_the_left_write_under_cuts(model: Any) -> None:
    """Each prompt under its own cuts, with the logits that it has alone; also without a cache."""
    if not hasattr(model, "original_model"):
        pytest.skip("a HookedTransformer writes without a mask")
    batch = prompts(model, 12, 30)
    cut = some_edges(batch)
    options: dict[str, Any] = {"attention_mask": batch.attention_mask.long()}
    for site in (al.Site(1), al.Site(1, renormalize=False)):
        hooks = al.block_edges(model, batch, cut, site)
        _, logits = write(model, batch, hooks, **options)
        for number, cache in enumerate((True, False)):
            alone = batch.prompt(number)
            own = cut[number : number + 1][:, batch.attention_mask[number]]
            own = own[:, :, batch.attention_mask[number]]
            cut_alone = al.block_edges(model, alone, own, site)
            expected = write(model, alone, cut_alone, use_past_kv_cache=cache)[1]
            assert difference(logits[number], expected[0]) < 1e-5
    assert difference(logits, write(model, batch, [], **options)[1]) > 1e-3


def test_edges_of_a_longer_length_act_on_what_is_written(gpt2: Any) -> None:
    batch = prompts(gpt2, 9)
    table = some_edges(batch, length=9 + N_WRITTEN)
    assert table[0, 9:, 9:].any()
    for cache in (True, False):
        hooks = al.block_edges(gpt2, batch, lambda batch: table)
        tokens, logits = write(gpt2, batch, hooks, use_past_kv_cache=cache)
        assert difference(logits, by_hand(gpt2, tokens, table, [0, 1, 2], slice(None))) < 1e-5
    short = al.block_edges(gpt2, batch, table[:, :-2, :-2])
    with pytest.raises(HookError, match=r"for a text of 12 tokens, but .* until it has 13"):
        write(gpt2, batch, short)
    wrong = torch.zeros_like(table)
    wrong[0, 10, 12] = True
    with pytest.raises(PromptError, match="from a token to an earlier token"):
        al.block_edges(gpt2, batch, wrong)


def test_scaled_edges_and_isolated_labels_act_while_the_model_writes(gpt2: Any) -> None:
    demos = [al.Example("one two", 0), al.Example("three", 1)]
    batch = al.build_prompts(gpt2.tokenizer, LONG_LABELS, demos, ["four five"])[0]
    cut = edges.every(batch) & some_edges(batch)
    for hooks, table in (
        (al.scale_edges(gpt2, batch, cut, 0.0, 1), cut.table()),
        (al.isolate_labels(gpt2, batch, 1), edges.wp(batch).table()),
    ):
        tokens, logits = write(gpt2, batch, hooks)
        assert difference(logits, by_hand(gpt2, tokens, table, [1], slice(None))) < 1e-5


def test_what_is_written_after_padding_is_refused(gpt2: Any) -> None:
    batch = prompts(gpt2, 9, 7).padded_right()
    hooks = al.block_edges(gpt2, batch, some_edges(batch))
    with pytest.raises(HookError, match=re.escape("give batch.padded_left(), or edges of the lon")):
        write(gpt2, batch, hooks)


def test_a_pass_that_does_not_continue_the_prompts_is_refused(gpt2: Any) -> None:
    """Other prompts that are longer, and hooks that did not act in the prompts."""
    batch = prompts(gpt2, 9)
    hooks = al.block_edges(gpt2, batch, some_edges(batch))
    message = r"make the hooks of the prompts that run\. If .* from the pass over the prompts on"
    for length in (8, 10, 12):
        with pytest.raises(HookError, match=message):
            gpt2.run_with_hooks(prompts(gpt2, length).tokens, fwd_hooks=hooks)
    gpt2.run_with_hooks(batch.tokens, fwd_hooks=hooks)
    with pytest.raises(HookError, match=message):
        gpt2.run_with_hooks(prompts(gpt2, 11).tokens, fwd_hooks=hooks)


def test_a_trace_has_cuts_while_writing_and_in_its_flows(exact_model: Any) -> None:
    pieces = [("document", "The museum opens at ten. "), ("question", "When does it open? At")]

    def cut(batch: al.PromptBatch) -> list[Hook]:
        first = edges.segment(batch, "document")
        return al.block_edges(exact_model, batch, edges.between(edges.target(batch), first), 1)

    options: dict[str, Any] = {"max_new_tokens": N_WRITTEN, "stop_at_eos": False}
    trace = al.trace_generation(exact_model, pieces, hooks=cut, **options)
    whole, read = trace.batch, trace.flows.read
    (prompt,) = al.build_segments(exact_model.tokenizer, [pieces])
    length, row = prompt.tokens.shape[1], torch.zeros_like(prompt.tokens, dtype=torch.bool)
    row[edges.segment(prompt, "document")] = True
    table = torch.zeros(1, length, length, dtype=torch.bool)
    table[0, -1] = row
    logits = by_hand(exact_model, whole.tokens, table, [1], slice(None))[0]
    assert logits.argmax(-1).tolist() == whole.tokens[0, length:].tolist()
    losses = -logits.log_softmax(-1).gather(1, whole.tokens[0, length:, None])[:, 0]
    assert difference(trace.flows.loss, losses) < 1e-6
    assert (read[:, 1, 0] == 0).all() and (read[:, [0, 2], 0] > 0).all()
    listed = al.trace_generation(exact_model, pieces, hooks=cut(prompt), **options)
    assert torch.equal(listed.batch.tokens, whole.tokens)
    other = al.trace_generation(exact_model, pieces, **options)
    assert not torch.equal(other.flows.loss, trace.flows.loss)


def test_a_trace_refuses_hooks_of_other_prompts_and_of_whole_ones(gpt2: Any) -> None:
    hooks = al.block_edges(gpt2, prompts(gpt2, 9), edges.every)
    with pytest.raises(HookError, match="made for other prompts than those that run"):
        al.trace_generation(gpt2, "Who wrote it?", hooks=hooks)
    zeros = torch.zeros(3, 2, 12)
    with pytest.raises(HookError, match="cannot act while the model writes; give hooks that cut"):
        al.trace_generation(
            gpt2, "Who wrote it?", hooks=lambda batch: al.replace_heads(gpt2, batch, zeros)
        )
