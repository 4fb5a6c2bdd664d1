"""Suppression of segments against plain transformers with masks of four axes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

import anchorlens as al
from anchorlens.errors import AnchorlensError, NotFiniteError, StoreError
from anchorlens.experiments import segment_suppression as experiment
from anchorlens.passes import forward
from anchorlens.prompts import edges, segment_names
from tests.support.asked import ask
from tests.support.measures import assert_same, does_not_run, hooks_on
from tests.support.tiny_models import questions, tiny_gemma3, tiny_gpt2

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
NAMES = ["question", "step", "answer"]
TOKENS = torch.tensor([[5, 9, 11, 3, 40, 7, 21, 8, 30], [0, 0, 17, 4, 25, 9, 60, 12, 33]])
MASK = torch.tensor([[1] * 9, [0, 0, *[1] * 7]])
# The step of the first prompt is scattered, and the second prompt has none.
SEGMENTS = [[0, 0, 1, -1, 0, 1, 2, -1, 2], [-1, -1, 0, 0, -1, 0, 2, -1, 2]]


@pytest.fixture
def batch() -> al.PromptBatch:
    return al.PromptBatch.from_segments(TOKENS, SEGMENTS, NAMES, attention_mask=MASK)


def plain_kl(weights: Any, tokens: Tensor, segments: list[int]) -> Tensor:
    """The matrix of one prompt without padding, with masks of four axes and loops."""
    count = len(tokens)

    def log_probs(allowed: Tensor) -> Tensor:
        mask = torch.zeros(count, count, dtype=torch.double)
        mask.masked_fill_(~allowed, torch.finfo(torch.double).min)
        with torch.no_grad():
            out = weights(tokens[None], attention_mask=mask[None, None], use_cache=False)
        return out.logits[0].log_softmax(-1)

    causal = torch.ones(count, count, dtype=torch.bool).tril()
    clean, result = log_probs(causal), torch.full((3, 3), torch.nan, dtype=torch.double)
    for s in range(3):
        inside = [j for j in range(count) if segments[j] == s]
        if not inside:
            continue
        allowed = causal.clone()
        for i in range(inside[-1] + 1, count):
            allowed[i, inside] = False
        suppressed = log_probs(allowed)
        for a in range(3):
            values = [
                kl_div(suppressed[t], clean[t], reduction="sum", log_target=True)
                for t in range(inside[-1] + 1, count - 1)
                if segments[t + 1] == a
            ]
            if values:
                result[a, s] = torch.stack(values).mean()
    return result


@pytest.mark.every_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_it_equals_plain_transformers(
    side: str, hooked: Any, byte_level: Any, batch: al.PromptBatch, kind_of_model: str
) -> None:
    model = hooked(tiny_gpt2(len(byte_level)).double(), byte_level)
    given = batch if side == "left" else batch.padded_right()
    record = ask(model, [given], al.SegmentSuppression(), **QUIET)
    weights: Any = tiny_gpt2(len(byte_level)).double()
    weights.set_attn_implementation("eager")
    prompts = zip(TOKENS, batch.segments, batch.attention_mask, strict=True)
    expected = [
        plain_kl(weights, row[mask], segments[mask].tolist()) for row, segments, mask in prompts
    ]
    stacked = torch.stack(expected)
    assert stacked[0].isfinite().tolist() == [[False] * 3, [False] * 3, [True, True, False]]
    assert stacked[1].isfinite().tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    assert (stacked[stacked.isfinite()] > 1e-3).all()
    # The processed weights of other kinds went through float32.
    tolerance = 1e-10 if kind_of_model == "bridge" else 2 * torch.finfo(torch.float32).eps
    options: dict[str, Any] = {"rtol": 0, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(record.kl_of_prompts, stacked, **options)
    torch.testing.assert_close(record.kl, stacked.nanmean(0), **options)


def test_nothing_changes_before_the_end_of_a_segment_or_without_edges(
    hooked: Any, sentencepiece_like: Any, batch: al.PromptBatch
) -> None:
    """The softmax of Gemma is NaN in rows of padding on the left, in float64."""
    model = hooked(tiny_gemma3(len(sentencepiece_like)).double(), sentencepiece_like)
    positions = batch.attention_mask
    clean = forward.logits_at(model, batch, positions)
    inside = edges.segment(batch, "question")
    last = torch.tensor([4, 5])
    after = positions & (torch.arange(9) > last[:, None])
    kl = experiment.kl_at(model, batch, positions, edges.between(after, inside), clean)
    assert (kl[~after] == 0).all() and (kl[after] > 0).all()
    none = edges.between(after, torch.zeros_like(after))
    assert not experiment.kl_at(model, batch, positions, none, clean).any()


def test_only_rows_that_are_compared_are_unembedded(
    gpt2: Any, batch: al.PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def note(model: Any, rows: Tensor) -> Any:
        seen.append(rows[0].tolist())
        return rows_hook(model, rows)

    rows_hook = forward.rows_hook
    monkeypatch.setattr(forward, "rows_hook", note)
    ask(gpt2, [batch], al.SegmentSuppression(), **QUIET)
    # One clean pass, one without the question, one without the step; nothing follows the answer.
    assert seen == [[5, 7], [5, 7], [7]]


def test_segments_are_names_or_functions(gpt2: Any) -> None:
    """Label words are a scattered segment. A function may be true under padding."""
    batches = questions(gpt2, 3, batch_size=2, padding_side="left")
    named = ask(gpt2, batches, al.SegmentSuppression(["label", "query"]), **QUIET)
    functions: Any = {
        "asked": lambda batch: batch.segments == segment_names.SEGMENTS.index("query"),
        "label": partial(edges.segment, name="label"),
        "rest": lambda batch: batch.segments == -1,
    }
    record = ask(gpt2, batches, al.SegmentSuppression(functions), **QUIET)
    assert record.axis_names("segment") == ("asked", "label", "rest")
    assert named.axis_names("segment") == ("label", "query")
    assert float(named.kl[1, 0]) > 0 and int(named.kl.isfinite().sum()) == 1
    torch.testing.assert_close(record.kl_of_prompts[:, 0, 1], named.kl_of_prompts[:, 1, 0])
    assert int(record.kl.isfinite().sum()) == 1


def test_means_are_over_prompts_and_then_over_sets() -> None:
    kl = torch.tensor([[[1.0]], [[3.0]], [[torch.nan]], [[8.0]], [[torch.nan]]])
    rows = al.Contributions({"kl": kl.double()}, torch.tensor([4, 4, 4, 2, 7]))
    assert al.records.SegmentSuppressionRecord.of(rows).kl.tolist() == [[5.0]]


def test_an_interrupted_run_goes_on(raw: Any, byte_level: Any, tmp_path: Path) -> None:
    model = raw(tiny_gpt2(len(byte_level)), byte_level)  # is prepared by the call
    batches = questions(model, 3, batch_size=1)
    options: dict[str, Any] = {"folder": tmp_path, "progress": False}
    asked = al.SegmentSuppression(["label", "query"])
    with pytest.warns(UserWarning, match="intervals of 3 prompts"):
        whole = ask(model, batches, asked, **options)
    low, high = whole.intervals["kl"][:, 1, 0]
    assert low < whole.kl[1, 0] < high
    [stored] = tmp_path.rglob("*1.safetensors")
    stored.unlink()
    with pytest.warns(UserWarning, match="intervals of 3 prompts"):
        assert_same(ask(model, batches, asked, **options), whole, 0)
    with pytest.raises(StoreError, match="another run"):
        ask(model, batches, al.SegmentSuppression(["label", "target"]), resamples=0, **options)


@pytest.mark.parametrize("fails_in", ["logits", "pass"])
def test_a_failure_leaves_no_trace(
    fails_in: str, hooked: Any, byte_level: Any, batch: al.PromptBatch
) -> None:
    weights: Any = tiny_gpt2(len(byte_level))
    model = hooked(weights, byte_level).train()
    before, passes = hooks_on(model), []
    if fails_in == "logits":
        with torch.no_grad():
            weights.transformer.wpe.weight[8 - 2] = torch.nan
        with pytest.raises(
            NotFiniteError, match=r"at the positions that were asked for, .*layer 0"
        ):
            ask(model, [batch], al.SegmentSuppression(), **QUIET)
    else:

        def fail_in_the_second_pass(*_: Any) -> None:
            passes.append(1)
            if len(passes) == 2:
                raise RuntimeError("stopped")

        handle = weights.transformer.h[1].register_forward_pre_hook(fail_in_the_second_pass)
        with pytest.raises(RuntimeError, match="stopped"):
            ask(model, [batch], al.SegmentSuppression(), **QUIET)
        handle.remove()
    assert hooks_on(model) == before
    assert model.training and all(p.requires_grad for p in weights.parameters())


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "segments are different names"),
        (["reply"], "there is no segment 'reply'"),
        ({"a": lambda b: b.tokens}, "'a' of segment_suppression must give a tensor of True"),
        (dict.fromkeys("ab", edges.query), "token 0 of prompt 0 is in the segments"),
        (["step"], "in no prompt a token of a segment is predicted after the end of a segment"),
    ],
)
def test_wrong_segments_are_an_error_before_any_pass(
    segments: Any, message: str, gpt2: Any, batch: al.PromptBatch
) -> None:
    with pytest.raises(AnchorlensError, match=message), does_not_run(gpt2):
        ask(gpt2, [batch], al.SegmentSuppression(segments), **QUIET)


def test_a_figure_has_a_row_and_a_column_for_each_segment(gpt2: Any, batch: al.PromptBatch) -> None:
    figure = ask(gpt2, [batch], al.SegmentSuppression(), **QUIET).plot()
    assert figure.layout.xaxis.ticktext == figure.layout.yaxis.ticktext == tuple(NAMES)
    assert figure.layout.yaxis.autorange == "reversed"
    rows = torch.tensor(figure.data[0].z)
    assert rows.isfinite().nonzero().tolist() == [[2, 0], [2, 1]]
    assert figure.data[0].texttemplate == "%{z:.2f}"
    # A figure of many segments stays readable.
    names = [f"step {number}" for number in range(90)]
    record = al.records.SegmentSuppressionRecord(
        kl=torch.ones(90, 90), kl_of_prompts=torch.ones(1, 90, 90), info={"segment_names": names}
    )
    figure = record.plot()
    assert figure.layout.xaxis.ticktext[:4] == ("step 0", "", "", "step 3")
    assert figure.data[0].texttemplate is None and figure.layout.height < 1300
