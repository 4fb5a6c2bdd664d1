"""Hooks: the patterns that they leave, their gradients, and their errors."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import HookError, PromptError
from anchorlens.models.hooked import Hook
from anchorlens.prompts import edges
from anchorlens.system import row_pieces
from tests.support.measures import logits_of, patterns_of
from tests.support.tiny_models import LONG_LABELS, questions, tiny_gpt2

pytestmark = pytest.mark.every_kind


@pytest.fixture
def batch(gpt2: Any) -> al.PromptBatch:
    return questions(gpt2, 4, batch_size=4, padding_side="left")[0]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("head", [0, 1])
def test_edges_are_cut_in_one_head(
    gpt2: Any, batch: al.PromptBatch, head: int, renormalize: bool
) -> None:
    """tests/models/test_matrix.py compares what follows from cuts with plain transformers."""
    cut, expected = edges.pq(batch) | edges.wp(batch), patterns_of(gpt2, batch, [])
    expected[:, 2, head] *= ~cut.table()
    if renormalize:
        expected[:, 2, head] /= expected[:, 2, head].sum(-1, keepdim=True)
    site = al.Site(-1, heads=head, renormalize=renormalize)
    ours = patterns_of(gpt2, batch, al.block_edges(gpt2, batch, cut, site))
    of_tokens = [each.movedim(3, 1)[batch.attention_mask] for each in (ours, expected)]
    torch.testing.assert_close(*of_tokens)


def test_a_layer_that_is_given_twice_has_one_hook(gpt2: Any, batch: al.PromptBatch) -> None:
    hooks = al.block_edges(gpt2, batch, edges.wp, [2, 1, -1])
    assert [name for name, _ in hooks] == [f"blocks.{k}.attn.hook_attn_scores" for k in (1, 2)]


def test_whole_words_isolates_all_tokens_of_a_label_word(gpt2: Any) -> None:
    demos = [al.Example("one two", 0), al.Example("three", 1)]
    batch = al.build_prompts(gpt2.tokenizer, LONG_LABELS, demos, ["four five"])[0]
    ends = zip(batch.label_positions[0].tolist(), batch.label_ends[0].tolist(), strict=True)
    words = [list(range(start, end + 1)) for start, end in ends]
    for whole in (False, True):
        hooks = al.isolate_labels(gpt2, batch, 0, whole_words=whole)
        diagonal = patterns_of(gpt2, batch, hooks)[0, 0, 0].diagonal().tolist()
        alone = [position for position, own in enumerate(diagonal) if position and own == 1]
        assert alone == [position for word in words for position in (word if whole else word[:1])]
    assert max(map(len, words)) > 1


def test_keep_bos_cuts_all_edges_but_the_one_to_bos(llama: Any, gpt2: Any) -> None:
    batch = questions(llama, 3, padding_side="left")[0]
    hooks = al.isolate_labels(llama, batch, al.Site(range(3), keep_bos=True))
    attended = (patterns_of(llama, batch, hooks) > 0).any(1).any(1)
    for row, positions, bos in zip(attended, batch.label_positions, batch.starts, strict=True):
        for position in positions.tolist():
            assert row[position].nonzero().flatten().tolist() == [int(bos), position]
    with pytest.raises(HookError, match="do not begin with a BOS"):
        al.isolate_labels(gpt2, questions(gpt2, 1)[0], al.Site(0, keep_bos=True))


def test_edges_of_other_prompts_than_those_that_run_are_refused(
    gpt2: Any, batch: al.PromptBatch
) -> None:
    of_one = al.block_edges(gpt2, questions(gpt2, 2)[0].prompt(0), edges.wp)
    sizes = r"for \d+ query and \d+ key positions, but the model runs \d+ queries over \d+ keys"
    with pytest.raises(HookError, match=sizes):
        logits_of(gpt2, batch, of_one)
    act: Any = al.block_edges(gpt2, batch, edges.wp)[0][1]
    with pytest.raises(HookError, match="edges are for 4 prompts, but the model runs 3"):
        act(torch.zeros(3, 2, *2 * batch.tokens.shape[1:]), None)


BLOCK: list[Callable[..., Any]] = [
    al.block_edges,
    lambda m, b, e: al.block_edges(m, b, e, al.Site(0, renormalize=False)),
    lambda m, b, e: al.scale_edges(m, b, e, 0.5),
    lambda m, b, e: al.scale_edges(m, b, e, 0.0, al.Site(heads=1)),
]


@pytest.mark.parametrize("piece", [row_pieces.PIECE, 5000])
@pytest.mark.parametrize("hooks", BLOCK)
def test_edges_to_later_tokens_and_padding_are_refused(
    gpt2: Any,
    batch: al.PromptBatch,
    hooks: Callable[..., Any],
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_pieces, "PIECE", piece)
    assert hooks(gpt2, batch, edges.every)
    everywhere = torch.ones_like(edges.wp(batch))
    transposed, padding = edges.pq(batch).transpose(1, 2), everywhere.tril(-1)
    of_padding = padding & batch.attention_mask[:, :, None]  # keys alone
    for wrong in (transposed, ~edges.wp(batch), everywhere.triu(1), padding, of_padding):
        with pytest.raises(PromptError, match="from a token to an earlier token"):
            hooks(gpt2, batch, wrong)


def test_edges_to_themselves_are_cut_only_after_the_softmax(
    gpt2: Any, batch: al.PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = torch.zeros_like(edges.wp(batch))
    last[:, -1, -1] = True
    for piece in (row_pieces.PIECE, 5000):
        monkeypatch.setattr(row_pieces, "PIECE", piece)
        with pytest.raises(HookError, match=r"itself cannot be cut .*diagonal out .*=False"):
            al.block_edges(gpt2, batch, last)
        after = al.block_edges(gpt2, batch, last, al.Site(0, renormalize=False))
        diagonal = patterns_of(gpt2, batch, after)[:, 0].diagonal(dim1=-2, dim2=-1)
        assert (diagonal[..., -1] == 0).all() and (diagonal[..., -2] > 0).all()


@pytest.mark.parametrize("hooks", BLOCK)
def test_hooks_without_an_edge_warn_that_they_do_nothing(
    gpt2: Any, batch: al.PromptBatch, hooks: Callable[..., Any]
) -> None:
    """As where queries and keys were exchanged: no anchor reads the target, which is later."""
    exchanged = edges.between(edges.anchors(batch), edges.target(batch))
    with pytest.warns(UserWarning, match="nothing is cut or scaled: no prompt of this batch"):
        hooks(gpt2, batch, exchanged)


Weighted = Callable[[Any, al.PromptBatch, Tensor], list[Hook]]
# Hooks of a tensor, its shape, the step of the differences, and the tolerance.
OF_TENSORS: dict[str, tuple[Weighted, tuple[int, ...], float, float]] = {
    "beta": (al.reweight_anchors, (3, 2, 2), 1e-4, 1e-6),
    "factor": (lambda m, b, f: al.scale_edges(m, b, edges.ww, f), (3, 2), 1e-5, 1e-5),
    "factor after the softmax": (
        lambda m, b, f: al.scale_edges(m, b, edges.ww, f, al.Site(renormalize=False)),
        (3, 2),
        1e-5,
        1e-5,
    ),
}


@pytest.mark.quick_cases("many passes", "factor")
@pytest.mark.parametrize("name", OF_TENSORS)
def test_gradients_of_tensors_equal_finite_differences(
    name: str, byte_level: Any, hooked: Any
) -> None:
    hooks, shape, size, tolerance = OF_TENSORS[name]
    model = hooked(tiny_gpt2(len(byte_level)).double(), byte_level)
    demos = [al.Example("one two", 0), al.Example("three", 1)]
    batch = al.build_prompts(model.tokenizer, LONG_LABELS, demos, [al.Example("four", 1)])[0]

    def loss(values: Tensor) -> Tensor:
        with model.hooks(fwd_hooks=hooks(model, batch, values)):
            logits = model(batch.tokens, attention_mask=batch.attention_mask.long())
        at_target = logits[torch.arange(len(batch)), batch.target_positions]
        return al.losses.label_cross_entropy(at_target, batch).sum()

    generator = torch.Generator().manual_seed(0)
    given = (0.5 + torch.rand(shape, dtype=torch.double, generator=generator)).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(given), given)
    numeric = torch.zeros_like(gradient)
    with torch.no_grad():
        for index in product(*map(range, shape)):
            step = torch.zeros_like(given)
            step[index] = size
            numeric[index] = (loss(given + step) - loss(given - step)) / (2 * size)
    torch.testing.assert_close(gradient, numeric, rtol=tolerance, atol=1e-8)
    assert (gradient != 0).all()


@pytest.mark.draws
def test_inputs_are_never_edited(gpt2: Any, batch: al.PromptBatch) -> None:
    length = batch.tokens.shape[1]
    cut, beta, pattern = edges.wp(batch), torch.randn(3, 2, 6), torch.rand(4, 2, length, length)
    factor, after = torch.rand(3, 2), al.Site(renormalize=False)
    fields = [value for value in vars(batch).values() if isinstance(value, Tensor)]
    given = [cut, beta, factor, pattern, *fields]
    copies = [tensor.clone() for tensor in given]
    hooks = [
        *al.block_edges(gpt2, batch, cut),
        *al.block_edges(gpt2, batch, cut, after),
        *al.scale_edges(gpt2, batch, cut, factor),
        *al.scale_edges(gpt2, batch, cut, factor, after),
        *al.isolate_labels(gpt2, batch, whole_words=True),
        *al.hooks.isolate_random(gpt2, batch, seed=0),
        *al.reweight_anchors(gpt2, batch, beta),
    ]
    for _, act in hooks:
        assert not torch.equal(act(pattern, hook=None), pattern)  # type: ignore[arg-type]
    logits_of(gpt2, batch, hooks)
    for tensor, copy in zip(given, copies, strict=True):
        assert torch.equal(tensor, copy)


def test_heads_by_layer_act_as_the_hooks_of_each_layer(gpt2: Any, batch: al.PromptBatch) -> None:
    factor, parts = torch.arange(6.0).view(3, 2) / 4, [al.Site(0, heads=1), al.Site(2)]
    site = al.Site(heads={0: [1], 2: [0], -1: 1})
    for make in (
        lambda where: al.block_edges(gpt2, batch, edges.wp, where),
        lambda where: al.scale_edges(gpt2, batch, edges.wp, factor, where),
        lambda where: al.detach_heads(gpt2, where),
    ):
        together: Any = make(site)
        single = [hook for part in parts for hook in make(part)]
        assert [name for name, _ in together] == [name for name, _ in single]
        if together[0][0].endswith("z"):
            assert [act.heads for _, act in together] == [(1,), (0, 1)]
            continue
        assert torch.equal(logits_of(gpt2, batch, together), logits_of(gpt2, batch, single))
    drawn = [al.sites.random_heads(gpt2, site, seed) for seed in range(20)]
    assert {len(each.heads_of(gpt2, 0)) for each in drawn} == {1}
    assert {each.heads_of(gpt2, 0)[0] for each in drawn} == {0, 1}
    assert all(each.heads_of(gpt2, 2) == [0, 1] and not each.heads_of(gpt2, 1) for each in drawn)
