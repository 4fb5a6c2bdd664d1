"""The code of docs/other_tools.md gives other tools the shapes and types that they take.

The tools are no dependencies, so functions of the same names stand in for them and store what they
get.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import plotly.graph_objects as go
import pyarrow.parquet as parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

import anchorlens as al
from tests.support.measures import assert_same
from tests.support.printed_code import blocks_of

PAGE = Path(__file__).parents[1] / "docs" / "other_tools.md"

pytestmark = [
    pytest.mark.filterwarnings("ignore:in . of . sets:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Traced:
    """A model as nnsight traces it: a value of a trace is given out by ``save``."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.model.eval()

    @contextmanager
    def trace(self, inputs: dict[str, Any], output_attentions: bool = True) -> Iterator[None]:
        output = self.model(**inputs, output_attentions=output_attentions)
        self.output = SimpleNamespace(save=lambda: output)
        yield


METRICS = ("saliency_flows", "attention_aucroc")
VIEWS = ("attention_heads", "attention_patterns", "head_view", "model_view")


@pytest.fixture(scope="module")
def page(model_folder: Path, tmp_path_factory: Any) -> Iterator[Any]:
    """After the blocks of the page: its names, what ``own`` was in turn, what tools got."""
    views = {name: Mock(return_value=f"<div>{name}</div>") for name in VIEWS}
    wandb = MagicMock(Plotly=go.Figure, Table=lambda dataframe: dataframe, Html=str)
    stage = wandb.init.return_value.__enter__.return_value
    stage.summary = {}
    tools: dict[str, Any] = {
        "nnsight": SimpleNamespace(LanguageModel=Traced),
        "circuitsvis": SimpleNamespace(attention=SimpleNamespace(**views)),
        "bertviz": SimpleNamespace(**views),
        "polars": MagicMock(),
        "wandb": wandb,
    }
    load, load_plain = al.load_model, AutoModelForCausalLM.from_pretrained
    plain = lambda name, **options: load_plain(model_folder, **options)  # noqa: E731
    names, owns = dict[str, Any](__name__="page"), list[dict[str, Any]]()
    folder = tmp_path_factory.mktemp("other_tools")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(al, "load_model", lambda name: load(str(model_folder)))
        patch.setattr(AutoModelForCausalLM, "from_pretrained", plain)
        patch.chdir(folder)
        for name, tool in tools.items():
            patch.setitem(sys.modules, name, tool)
        for block in blocks_of(PAGE, "python"):
            exec(compile(block.code, PAGE.name, "exec"), names)
            owns += [dict(names.pop("own"))] if "own" in names else []
        yield SimpleNamespace(names=names, owns=owns, folder=folder, stage=stage, **views)


@pytest.mark.slow("imports other tools")
def test_circuitsvis_gets_the_heads_of_a_layer_and_bertviz_every_layer(page: Any) -> None:
    model, count = page.names["model"], int(page.names["prompt"].attention_mask.sum())
    views = page.attention_heads.call_args_list + page.attention_patterns.call_args_list
    assert len(views) == 2
    for call in views:
        tokens = call.kwargs["tokens"]
        assert call.kwargs["attention"].shape == (model.cfg.n_heads, count, count)
        assert len(tokens) == count and all(isinstance(token, str) for token in tokens)
    assert "attention_heads" in (page.folder / "saliency.html").read_text()
    of_layers = page.head_view.call_args_list + page.model_view.call_args_list
    assert len(of_layers) == 2
    for call in of_layers:
        attention, tokens = call.args
        assert isinstance(attention, tuple) and len(attention) == model.cfg.n_layers
        assert {tuple(layer.shape) for layer in attention} == {(1, model.cfg.n_heads, count, count)}
        assert len(tokens) == count


@pytest.mark.slow("imports other tools")
def test_patterns_sum_to_1_and_colours_reach_1_in_each_layer(page: Any) -> None:
    names = page.names
    sums = names["patterns"].sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    largest = names["colours"].amax((1, 2, 3))
    torch.testing.assert_close(largest, torch.ones_like(largest))
    heads_summed = al.saliency(names["model"], names["prompt"])[0]
    assert (names["saliency"].sum(1) >= heads_summed - 1e-6).all()


@pytest.mark.slow("a whole page runs")
def test_arrow_holds_every_number_of_the_records(page: Any) -> None:
    read = parquet.read_table(page.folder / "results.parquet").to_pandas()
    for name, record in page.names["results"].items():
        values = torch.cat([value.flatten().double() for value in record.tensors().values()])
        stored = torch.tensor(read[read["result"] == name]["value"].to_numpy())
        torch.testing.assert_close(stored, values, equal_nan=True, rtol=0, atol=0)
    labels = set(read[read["quantity"] == "share"]["flow"])
    assert labels == {"wp", "pq", "ww"}


@pytest.mark.slow("a whole page runs")
def test_weights_and_biases_gets_figures_tables_and_the_report(page: Any) -> None:
    calls = page.stage.log.call_args_list
    logged = {key: value for call in calls for key, value in call.args[0].items()}
    of_records = {f"{name} {kind}" for name in METRICS for kind in ("figure", "numbers")}
    assert set(logged) == {*of_records, "report"}
    frame = page.names["results"]["saliency_flows"].to_frame()
    assert logged["saliency_flows numbers"].shape == frame.shape
    assert (page.folder / "report.html").exists()
    assert 0 <= page.stage.summary["largest AUCROC"] <= 1


@pytest.mark.slow("many passes")
def test_passes_of_other_tools_give_the_records_of_a_run(page: Any) -> None:
    names, (first, second, traced) = page.names, page.owns
    assert [[*own] for own in page.owns] == [["attention_aucroc"], *[["saliency_flows"]] * 2]
    alone = al.run(names["model"], names["batches"][:1], [al.SaliencyFlows()], progress=False)
    for name, record in {**first, **second}.items():
        assert_same(replace(record, info={}), replace(names["results"][name], info={}), 1e-5)
    expected = replace(alone["saliency_flows"], info={})
    assert_same(replace(traced["saliency_flows"], info={}), expected, 1e-5)
