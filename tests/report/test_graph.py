"""A prompt's flows as an attribution graph: its numbers, and the fields that viewers read."""

import json
from typing import Any

import pytest
import torch

import anchorlens as al
from tests.support.tiny_models import questions

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
