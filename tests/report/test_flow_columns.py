"""Flows of a prompt as lines and as a graph, and of an answer, whose page shows each token's."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

import anchorlens as al
from anchorlens.errors import AnchorlensError, MetricError
from anchorlens.prompts import segment_names
from anchorlens.report import answer_flows, prompt_flows
from anchorlens.report.flow_columns import LEVELS
from anchorlens.results.depth import shallow_and_deep
from anchorlens.results.estimate import in_digits
from tests.support.tiny_models import questions


def drawn(figure: Any, panel: int, shape: tuple[int, ...]) -> Tensor:
    found, axis = torch.zeros(shape, dtype=torch.double), "x" if panel == 0 else "x2"
    for line in figure.data:
        if line.mode == "lines" and (line.xaxis or "x") == axis:
            for start in range(0, len(line.x), 3):
                assert line.x[start : start + 3] == (1, 0, None)
                key, query, _ = line.y[start : start + 3]
                assert found[query, key] == 0
                found[query, key] = float(line.customdata[start])
    return found


@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_lines_are_sums_of_saliency_over_layers_on_one_scale(model: Any) -> None:
    batch = questions(model, count=2)[0]
    flows: Any = al.plot_prompt(model, batch, 1)
    saliency = al.saliency(model, batch.prompt(1))[0].double().tril(-1)
    figure, ends = flows.figure(), shallow_and_deep(len(saliency))
    expected = torch.stack([saliency[end].sum(0) for end in ends])
    torch.testing.assert_close(flows.sums, expected, rtol=1e-6, atol=1e-6 * float(expected.max()))
    title = figure.layout.title.text
    assert batch.begins_with_bos == ("without those from BOS (" in title)
    if batch.begins_with_bos:
        of_bos = flows.sums[..., 0].sum() / flows.sums.sum()
        assert 0.01 < of_bos < 0.99 and f"BOS ({of_bos:.0%});" in title
    sums = flows.sums.clone()
    sums[..., 0] *= not batch.begins_with_bos
    lightest = float(sums.max()) / (2 * LEVELS)
    for panel in (0, 1):
        lines = drawn(figure, panel, expected.shape[1:])
        is_drawn = lines > 0
        shown = [float(in_digits(each)) for each in sums[panel][is_drawn]]
        assert lines[is_drawn].tolist() == shown
        assert sums[panel][~is_drawn].max() <= lightest * (1 + 1e-6)
    assert max({line.opacity for line in figure.data if line.mode == "lines"}) == 1
    in_legend = {line.name: line.opacity for line in figure.data if line.showlegend}
    assert len(in_legend) == 3 == len([line for line in figure.data if line.showlegend])
    for name, opacity in in_legend.items():
        assert opacity == max(line.opacity for line in figure.data if line.name == name)
    panels = [drawn(figure, panel, expected.shape[1:]) for panel in (0, 1)]
    left_out = 1 - sum(each.sum() for each in panels) / sums.sum()
    assert title.endswith(f"of the darkest hold {left_out:.0%}")
    names = [f"shallow: layer {ends[0].start}", f"deep: layer {ends[1].start}"]
    assert [title.text for title in figure.layout.annotations] == names
    texts = [trace for trace in figure.data if trace.mode == "text"]
    assert len(texts) == 4 and all(len(each.text) == len(flows.tokens) for each in texts)
    words = dict(zip(texts[0].textfont.color, texts[0].text, strict=True))
    assert len(words) == 3  # label words, the target, and others


@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_a_prompt_without_label_words_has_arcs_between_segments(model: Any) -> None:
    pieces: list[tuple[str | None, str]] = [("question", "Who wrote it?"), (None, "\n")]
    pieces += [("label", " Nobody knows"), ("end", " course.")]
    [batch] = al.build_segments(model.tokenizer, [pieces])
    loss = al.losses.span_cross_entropy("label")
    flows = al.plot_prompt(model, batch, loss=loss)
    texts = [text for *_, text in flows.parts]
    first = ["<bos>"] * batch.begins_with_bos
    assert texts == [*first, "Who wrote it?", "␣", "Nobody knows", "course."]
    saliency = al.saliency(model, batch, loss=loss)[0].double().tril(-1)
    parts = [k for k, (first, last, *_) in enumerate(flows.parts) for _ in range(first, last + 1)]
    of_parts = one_hot(torch.tensor(parts)).double()
    expected = (of_parts.T @ saliency @ of_parts).tril(-1)
    for layer, [arcs, *_] in enumerate(flows.layers):
        sums = torch.zeros_like(expected[0]).double()
        sums[arcs.queries, arcs.keys] = torch.tensor(arcs.sizes).double()
        torch.testing.assert_close(sums, expected[layer], rtol=1e-5, atol=1e-8)
    assert flows.start == int(expected.sum((1, 2)).argmax()) == (not batch.begins_with_bos)
    assert flows.data()["ends"] == "between parts" and "into a label word" not in flows.page()
    assert "question" in flows.fragment() and "Who wrote it?\n Nobody" in flows.query
    traces = flows.figure().data
    colors = [color for each in traces if each.mode == "text" for color in each.textfont.color]
    assert len(set(colors)) == 1 == len({line.name for line in traces if line.mode == "lines"})
    with pytest.raises(MetricError, match="give queries with labels, or another loss"):
        al.plot_prompt(model, batch)


def test_a_long_prompt_has_no_such_figure(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_flows, "MOST_TOKENS", 10)
    flows = al.plot_prompt(gpt2, questions(gpt2, count=1)[0])
    with pytest.raises(AnchorlensError, match="at most 10 tokens; got "):
        flows.figure()


# What circuit-tracer's viewer reads of a graph, with the types.
METADATA = {"slug": str, "scan": str, "transcoder_list": list, "prompt_tokens": list, "prompt": str}
CHOSEN = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}
NODE = {"node_id": str, "jsNodeId": str, "feature": int, "layer": str, "ctx_idx": int, "clerp": str}
NODE |= {"feature_type": str, "is_target_logit": bool, "reverse_ctx_idx": int}


def assert_has(fields: dict[str, Any], value: dict[str, Any]) -> None:
    assert {name: type(value.get(name)) for name in fields} == fields


def test_a_graph_has_the_flows_and_what_viewers_read(gpt2: Any) -> None:
    batch = questions(gpt2, count=2)[0]
    flows = al.plot_prompt(gpt2, batch, 1)
    graph = json.loads(json.dumps(flows.graph()))
    assert_has(METADATA, graph["metadata"])
    assert_has(CHOSEN, graph["qParams"])
    for node in graph["nodes"]:
        assert_has(NODE, node)
    assert graph["metadata"]["prompt_tokens"] == list(flows.tokens)
    nodes = {node["node_id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"])
    embedded = [node["ctx_idx"] for node in nodes.values() if node["feature_type"] == "embedding"]
    assert embedded == [*range(len(flows.tokens))]
    [last] = [node for node in nodes.values() if node["is_target_logit"]]
    assert last["ctx_idx"] == int(batch.target_positions[1]) - int(batch.starts[1])
    assert (last["layer"], last["clerp"]) == ("3", flows.heading)

    [expected] = al.saliency(gpt2, batch.prompt(1))
    start = batch.prompt(1).tokens.shape[1] - len(flows.tokens)
    for link in graph["links"]:
        source, target = nodes[link["source"]], nodes[link["target"]]
        layer = 0 if source["layer"] == "E" else int(source["layer"])
        assert int(target["layer"]) == layer + 1
        number = expected[layer, target["ctx_idx"] + start, source["ctx_idx"] + start]
        assert link["weight"] == pytest.approx(float(number), rel=1e-4)
    assert len(graph["links"]) > 50
    strongest = max(graph["links"], key=lambda link: link["weight"])["weight"]
    off_diagonal = expected * (1 - torch.eye(expected.shape[-1]))
    assert strongest == pytest.approx(float(off_diagonal.max()), rel=1e-4)


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


def test_what_reads_nothing_has_no_strongest(gpt2: Any, flows: al.records.StepFlowsRecord) -> None:
    alone = al.PromptBatch.from_segments(TOKENS, [[0, 1] + [-1] * 8], ["first", "answer"])
    page = al.plot_answer(al.step_flows(gpt2, alone, "answer"))
    assert page.positions == [1]
    assert {read.share for layer in page.layers for read in layer} == {0.0}
    [[_, _, read], *_] = reads(data_of(page.page()))
    empty = {"keys": [], "sizes": [], "share": 0, "shares": [0] * 3, "means": [None] * 3}
    assert read == empty | {"runs": [0] * 3}
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
