"""What the page of an answer shows of each token, against saliency with the loss of this token."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import MetricError
from anchorlens.prompts import segment_names
from anchorlens.report import answer_flows
from tests.support.tiny_models import questions

EVIL = "</script><script>alert('a & b')</script>"
TOKENS = torch.tensor([[5, 9, 11, 3, 40, 7, 21, 8, 30, 14]])
SEGMENTS = [0, 0, 0, -1, 1, 1, 2, 2, 2, 2]
POSITIONS = [6, 7, 8, 9]
RUNS = [(0, 3), (3, 4), (4, 6), (6, 10)]  # of one segment


def prompt() -> al.PromptBatch:
    return al.PromptBatch.from_segments(TOKENS, [SEGMENTS], ["question", "step", "answer"])


@pytest.fixture
def flows(gpt2: Any) -> al.records.StepFlowsRecord:
    return al.step_flows(gpt2, prompt(), "answer")


def data_of(page: str) -> Any:
    [text] = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def reads(data: Any) -> Iterator[tuple[int, int, Any]]:
    for layer, of_layer in enumerate(data["layers"], start=-1):
        for step, read in enumerate(of_layer):
            yield step, layer, read


def assert_rounded(shown: list[float], exact: list[float]) -> None:
    """Numbers that are the exact ones up to three digits and the rounding of float32."""
    assert shown == pytest.approx(exact, rel=6e-3, abs=1e-9)


def test_numbers_are_the_saliency_of_the_loss_of_each_token(exact_gpt2: Any) -> None:
    flows = al.step_flows(exact_gpt2, prompt(), "answer")
    data = data_of(al.plot_answer(flows).page())
    assert data["names"] == ["all", "0", "1", "2"]
    maps = {}
    for step, position in enumerate(POSITIONS):

        def predicts(batch: al.PromptBatch, row: int = position - 1) -> Any:
            return torch.arange(10)[None] == row

        loss = al.losses.next_token_cross_entropy(predicts)
        maps[step] = al.saliency(exact_gpt2, prompt(), loss=loss)[0]
    for step, layer, read in reads(data):
        row = POSITIONS[step] - 1
        of_layer = maps[step].sum(0) if layer < 0 else maps[step][layer]
        weights = of_layer[row, :row]
        assert read["keys"] == weights.argsort(descending=True).tolist()
        assert_rounded(read["sizes"], weights.sort(descending=True).values.tolist())
        assert read["share"] == 1
        runs = [sum(float(x) for x in weights[first:end]) for first, end in RUNS]
        assert read["runs"] == pytest.approx(runs, rel=1e-5)
        in_order = [*range(3), -1]  # tokens without a segment come last
        inside = [[k for k in range(row) if SEGMENTS[k] == part] for part in in_order]
        assert_rounded(read["shares"], [float(weights[k].sum() / weights.sum()) for k in inside])
        for mean, keys in zip(read["means"], inside, strict=True):
            assert (mean is None) == (not keys)
            if mean is not None:
                assert_rounded([mean], [float(weights[keys].mean())])
        if layer >= 0:
            means = [torch.nan if mean is None else mean for mean in read["means"][:3]]
            assert means == pytest.approx(flows.read[step, layer].tolist(), rel=6e-3, nan_ok=True)
    assert [step["loss"] for step in data["steps"]] == flows.loss.tolist()
    assert [step["position"] for step in data["steps"]] == POSITIONS


def test_weights_below_0_count_by_their_size(gpt2: Any) -> None:
    flows = al.step_flows(gpt2, prompt(), "answer", weight=al.weights.signed)
    page = al.plot_answer(flows).page()
    assert "blue bars are weights below 0" in page
    for step, layer, read in reads(data_of(page)):
        of_step = flows.read_of_tokens[step].double()
        weights = of_step.sum(0) if layer < 0 else of_step[layer]
        keys = weights.abs().argsort(descending=True)[: POSITIONS[step] - 1]
        assert read["keys"] == keys.tolist()
        assert_rounded(read["sizes"], weights[keys].tolist())
        assert sum(read["shares"]) == pytest.approx(1, abs=0.01)
        assert_rounded(read["shares"][:1], [float(weights[:3].abs().sum() / weights.abs().sum())])


def test_a_long_text_has_the_strongest_tokens_and_says_their_share(
    flows: al.records.StepFlowsRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_flows, "STORED", 2 * 4 * 4)  # two for each step and layer
    for step, layer, read in reads(data_of(al.plot_answer(flows).page())):
        if layer >= 0:
            weights = flows.read_of_tokens[step, layer]
            strongest = weights.topk(2).values
            assert_rounded(read["sizes"], strongest.tolist())
            assert_rounded([read["share"]], [float(strongest.sum() / weights.sum())])
    monkeypatch.setattr(answer_flows, "STORED", 1)
    page = al.plot_answer(flows)
    assert {len(read.keys) for layer in page.layers for read in layer} == {1}
    assert sum(page.layers[0][3].shares) == pytest.approx(1, abs=0.01)  # of all tokens


def test_the_second_token_of_a_text_reads_nothing(gpt2: Any) -> None:
    alone = al.PromptBatch.from_segments(TOKENS, [[0, 1] + [-1] * 8], ["first", "answer"])
    page = al.plot_answer(al.step_flows(gpt2, alone, "answer"))
    assert page.positions == [1]
    assert {read.share for layer in page.layers for read in layer} == {0.0}
    [[_, _, read], *_] = reads(data_of(page.page()))
    empty = {"keys": [], "sizes": [], "share": 0, "shares": [0] * 3, "means": [None] * 3}
    assert read == empty | {"runs": [0] * 3}


def test_tokens_without_weight_are_not_the_strongest(flows: al.records.StepFlowsRecord) -> None:
    only_one = torch.zeros_like(flows.read_of_tokens)
    only_one[:, 1, 2] = 0.5
    page = al.plot_answer(replace(flows, read_of_tokens=only_one))
    keys = [[read.keys for read in of_layer] for of_layer in page.layers]
    assert keys == [[[2]] * 4, [[]] * 4, [[2]] * 4, [[]] * 4]


def test_segments_and_tokens_are_those_of_the_record(gpt2: Any, tmp_path: Path) -> None:
    batch = questions(gpt2, 3)[0].prompt(1)
    assert al.plot_answer(al.step_flows(gpt2, batch, "query")).names == segment_names.SEGMENTS
    some = al.step_flows(gpt2, batch, "query", segments={"labels": al.edges.anchors})
    page = al.plot_answer(type(some).load(some.save(tmp_path / "flows.safetensors")))
    assert page.names == ("labels", "no segment")
    marked = [position for position, segment in enumerate(page.segments) if segment == 0]
    assert marked == batch.label_positions[0].tolist()
    assert "".join(page.tokens) == gpt2.tokenizer.decode(batch.tokens[0])


def test_texts_are_escaped_in_every_page(flows: al.records.StepFlowsRecord, tmp_path: Path) -> None:
    info = {**flows.info, "tokens": [EVIL] * 10, "segment_names": [EVIL, "b", "c"], "weight": EVIL}
    page = al.plot_answer(replace(flows, info=info))
    assert len(repr(page)) <= 200
    path = al.write_report({"steps": flows, EVIL: page}, tmp_path / "report.html")
    for text in (page.page(), path.read_text(), page._repr_html_()):
        assert EVIL not in text
    assert data_of(page.page())["tokens"] == [EVIL] * 10
    assert page._repr_html_().count("<") == 2  # one frame, and all else inside its attribute
    report = path.read_text()
    assert report.count("function viewOfAnswer") == 1
    assert "<td>read_of_tokens" not in report and "<td>output_saliency" in report


def test_what_cannot_be_shown_is_an_error(flows: al.records.StepFlowsRecord) -> None:
    broken = flows.read_of_tokens.clone()
    broken[0, 0, 0] = torch.nan
    with pytest.raises(MetricError, match="have no texts of tokens"):
        al.plot_answer(replace(flows, info={**flows.info, "tokens": None}))
    with pytest.raises(MetricError, match="the flows are not finite"):
        al.plot_answer(replace(flows, read_of_tokens=broken))
