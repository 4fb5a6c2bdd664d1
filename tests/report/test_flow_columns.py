"""Figure 1, the flows of a prompt as lines between tokens, and as an attribution graph."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

import anchorlens as al
from anchorlens.errors import AnchorlensError, MetricError
from anchorlens.report import prompt_flows
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
