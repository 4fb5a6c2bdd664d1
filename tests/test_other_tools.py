"""The code of docs/other_tools.md gives other tools the shapes and types that they take.

The tools are no dependencies, so functions of the same names stand in for them and store what they
get.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pyarrow.parquet as parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

import anchorlens as al
from tests.support.measures import assert_same

PAGE = Path(__file__).parents[1] / "docs" / "other_tools.md"

pytestmark = [
    pytest.mark.filterwarnings("ignore:in . of . sets:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Calls:
    """What each function was called with."""

    def __init__(self) -> None:
        self.made: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def function(self, name: str, *names: str) -> Any:
        """A function that stores its arguments; ``names`` are those of positional ones."""

        def store(*values: Any, **named: Any) -> str:
            self.made[name].append(dict(zip(names, values, strict=False)) | named)
            return f"<div>{name}</div>"

        return store


class Saved:
    """A value of a trace, which a tool gives out after ``save``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> Any:
        return self.value


class Traced:
    """A model as nnsight traces it: its values exist after the block."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.model.eval()

    @contextmanager
    def trace(self, inputs: dict[str, Any], output_attentions: bool = True) -> Iterator[None]:
        output = self.model(**inputs, output_attentions=output_attentions)
        self.output = Saved(output)
        yield


class Stage:
    """What a run of Weights & Biases has."""

    def __init__(self, calls: Calls) -> None:
        self.log = calls.function("log", "values")
        self.summary: dict[str, float] = {}


@pytest.fixture(scope="module")
def page(model_folder: Path, tmp_path_factory: Any) -> Iterator[Any]:
    """The names after the blocks of the page ran from top to bottom, the calls, the folder."""
    calls = Calls()
    stage = Stage(calls)

    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        vars(made).update(members)
        patch.setitem(sys.modules, name, made)

    @contextmanager
    def opened(*values: Any, **named: Any) -> Iterator[Any]:
        calls.made["opened"].append({"values": values, **named})
        yield stage

    with pytest.MonkeyPatch.context() as patch:
        load = al.load_model
        patch.setattr(al, "load_model", lambda name: load(str(model_folder)))
        load_plain = AutoModelForCausalLM.from_pretrained
        patch.setattr(
            AutoModelForCausalLM,
            "from_pretrained",
            lambda name, **options: load_plain(model_folder, **options),
        )
        module("nnsight", LanguageModel=Traced)
        folder = tmp_path_factory.mktemp("other_tools")
        patch.chdir(folder)
        heads, patterns = "attention_heads", "attention_patterns"
        views = {heads: calls.function(heads), patterns: calls.function(patterns)}
        module("circuitsvis", attention=SimpleNamespace(**views))
        of_layers = ("attention", "tokens")
        module(
            "bertviz",
            head_view=calls.function("head_view", *of_layers),
            model_view=calls.function("model_view", *of_layers),
        )
        module("polars", from_arrow=lambda table: Frame(), col=lambda name: 0)
        module("wandb", init=opened, Plotly=go.Figure, Table=TableOf, Html=str)
        names: dict[str, Any] = {"__name__": "page"}
        blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), names)
            if "own" in names:
                calls.made["own"].append(dict(names.pop("own")))
        yield names, calls.made, folder, stage


class Frame:
    def filter(self, rows: Any) -> "Frame":
        return self

    def head(self) -> str:
        return ""


class TableOf:
    def __init__(self, dataframe: pd.DataFrame) -> None:
        self.dataframe = dataframe


@pytest.mark.slow("imports other tools")
def test_circuitsvis_gets_the_heads_of_a_layer_and_bertviz_every_layer(page: Any) -> None:
    names, calls, folder, _ = page
    model, count = names["model"], int(names["prompt"].attention_mask.sum())
    views = [*calls["attention_heads"], *calls["attention_patterns"]]
    assert len(views) == 3
    for call in views:
        assert call["attention"].shape == (model.cfg.n_heads, count, count)
        assert len(call["tokens"]) == count
        assert all(isinstance(token, str) for token in call["tokens"])
    assert "attention_heads" in (folder / "saliency.html").read_text()
    for call in (*calls["head_view"], *calls["model_view"]):
        assert isinstance(call["attention"], tuple)
        assert len(call["attention"]) == model.cfg.n_layers
        for layer in call["attention"]:
            assert layer.shape == (1, model.cfg.n_heads, count, count)
        assert len(call["tokens"]) == count


def test_patterns_sum_to_1_and_colours_reach_1_in_each_layer(page: Any) -> None:
    names, _, _, _ = page
    sums = names["patterns"].sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    largest = names["colours"].amax((1, 2, 3))
    torch.testing.assert_close(largest, torch.ones_like(largest))
    heads_summed = al.saliency(names["model"], names["prompt"])[0]
    assert (names["saliency"].sum(1) >= heads_summed - 1e-6).all()


def test_arrow_holds_every_number_of_the_records(page: Any) -> None:
    names, _, folder, _ = page
    read = parquet.read_table(folder / "results.parquet").to_pandas()
    for name, record in names["results"].items():
        values = torch.cat([value.flatten().double() for value in record.tensors().values()])
        stored = torch.tensor(read[read["result"] == name]["value"].to_numpy())
        torch.testing.assert_close(stored, values, equal_nan=True, rtol=0, atol=0)
    labels = set(read[read["quantity"] == "share"]["flow"])
    assert labels == {"wp", "pq", "ww"}


def test_weights_and_biases_gets_figures_tables_and_the_report(page: Any) -> None:
    names, calls, folder, stage = page
    logged = {key: value for call in calls["log"] for key, value in call["values"].items()}
    assert set(logged) == {
        "saliency_flows figure",
        "saliency_flows numbers",
        "attention_aucroc figure",
        "attention_aucroc numbers",
        "report",
    }
    frame = names["results"]["saliency_flows"].to_frame()
    assert logged["saliency_flows numbers"].dataframe.shape == frame.shape
    assert (folder / "report.html").exists()
    assert 0 <= stage.summary["largest AUCROC"] <= 1


@pytest.mark.slow("many passes")
def test_passes_of_other_tools_give_the_records_of_a_run(page: Any) -> None:
    names, calls, _, _ = page
    assert [[*own] for own in calls["own"]] == [["attention_aucroc"], *[["saliency_flows"]] * 2]
    first, second, traced = calls["own"]
    whole = {**first, **second}
    metrics = [al.SaliencyFlows()]
    alone = al.run(names["model"], names["batches"][:1], metrics, progress=False)
    for name, record in whole.items():
        assert_same(replace(record, info={}), replace(names["results"][name], info={}), 1e-5)
    expected = replace(alone["saliency_flows"], info={})
    assert_same(replace(traced["saliency_flows"], info={}), expected, 1e-5)
