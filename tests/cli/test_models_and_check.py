"""`anchorlens models` prints the tested architectures; `anchorlens check` tries a model."""

import json
import runpy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import transformers

import anchorlens as al
from anchorlens.cli import check
from anchorlens.cli.architectures import table_of_architectures
from anchorlens.errors import MetricError, PromptError
from anchorlens.passes.provide import need_gradient, reads_of
from tests.cli.conftest import saved
from tests.support.tiny_models import randomize

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "benchmarks/architecture_table.py"))


def test_the_page_of_architectures_is_written_from_the_data_of_the_package() -> None:
    table = table_of_architectures()
    assert TABLES["page"](table) == (ROOT / "docs/architectures.md").read_text()
    assert TABLES["json_of"](table) == (ROOT / "anchorlens/data/architectures.json").read_text()


def test_the_table_holds_what_the_tests_measured() -> None:
    case = {"architecture": "A", "special": "b", "line": "4.3", "kind": "bridge", "native": True}
    case |= {"versions": {"torch": "2"}, "dtype": "float32", "differences": {"logits": 1.4e-6}}
    exact = case | {"dtype": "float64", "differences": {"logits": 2e-15}}
    refused = case | {"architecture": "B", "refused": "no mask"}
    cells = {"4.3 bridge": ["1e-6", "2e-15"]}
    of_a: dict[str, Any] = {"name": "A", "special": "b", "cells": cells, "hooks": "native"}
    assert TABLES["table_of"]([case, exact, refused]) == {
        "versions": {"torch": ["2"]},
        "architectures": [of_a, of_a | {"name": "B", "cells": {"4.3 bridge": "refused: no mask"}}],
        "quantities": {"logits": cells},
    }


def test_models_prints_the_architectures(done: Any, failed: Any) -> None:
    printed = done("models")
    assert "GPT-J" in printed.out and "refused: cannot split its joint" in printed.out
    assert "Next: anchorlens check MODEL" in printed.err
    lines = done("models", "gpt-j").out.splitlines()
    names = [line.split()[0] for line in lines if line.strip() and line[0] != " "]
    assert {*names} == {"architecture", "GPT-J"}
    assert max(map(len, lines)) <= 80
    table = json.loads(done("models", "LLAMA", "--json").out)
    names = [row["name"] for row in table["architectures"]]
    assert "Llama" in names and all("llama" in name.lower() for name in names)
    assert "no tested architecture has 'nothing' in its name" in failed("models", "nothing")


@pytest.mark.slow("whole commands")
def test_check_says_what_works(done: Any, model_folder: Path) -> None:
    found = json.loads(done("check", str(model_folder), "--json", "--quiet").out)
    wanted = {"layers": 6, "heads": 2, "context": "512 tokens", "dtype": "float32"}
    wanted |= {"attention_hooks": "verified in all 6 layers", "begins_with_BOS": False}
    wanted |= {"saliency_flows": "yes", "attention_aucroc": "yes", "anchor_distances": "yes"}
    wanted |= {"attention": "of TransformerLens", "attention_sinks": False}
    wanted |= {"isolation": "yes, runs of the last layer skip 5 layers"}
    assert found.items() >= wanted.items()
    assert "tokens of each prompt, run once for all" in found["shared_demonstrations"]
    assert found["compression"].startswith("yes, ")


def tiny_opt(vocab_size: int) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"ffn_dim": 16, "word_embed_proj_dim": 16, "max_position_embeddings": 64}
    config = transformers.OPTConfig(vocab_size=vocab_size, **sizes)
    return randomize(transformers.OPTForCausalLM(config))


@pytest.mark.slow("whole commands")
def test_check_names_wrapped_attention(call: Any, byte_level: Any, tmp_path: Path) -> None:
    model = saved(tiny_opt(len(byte_level)), byte_level, tmp_path)
    told = call("check", model)
    assert told.status == 1 and f"no analysis works on {model}: " in told.error
    assert f"{model} cannot be analysed\n" in told.out and "Next:" not in told.out
    assert "of transformers, wrapped in 2 layers" in told.out
    assert "but the model's context is 64" in " ".join(told.out.split())


@pytest.mark.slow("whole commands")
@pytest.mark.parametrize("fails", ["gradients", "every metric"])
def test_check_prints_its_table_if_metrics_fail(
    done: Any, monkeypatch: Any, shallow_folder: Path, fails: str
) -> None:
    def run(model: Any, batches: Any, asked: Any, **options: Any) -> Any:
        metrics = [each for each in asked if isinstance(each, al.Metric)]
        if fails == "gradients":
            metrics = [each for each in metrics if need_gradient(reads_of(each, batches[0]))]
        if metrics:
            raise MetricError("the loss is not finite")
        return al.run(model, batches, asked, **options)

    monkeypatch.setattr(check, "run", run)
    if fails == "gradients":
        printed = done("check", str(shallow_folder)).out
        assert f"{shallow_folder} can be analysed in part\n" in printed
        assert "no: the loss is not finite" in printed
        assert "no:" not in printed.partition("attention aucroc")[2]
    else:
        found = json.loads(done("check", str(shallow_folder), "--json").out)
        no = {name for name, status in found.items() if str(status).startswith("no: ")}
        assert no == {"saliency_flows", "attention_aucroc", "anchor_distances"}
        assert found["shared_demonstrations"] == "not tried"


@pytest.mark.slow("whole commands")
def test_a_model_without_prompts_is_told(call: Any, monkeypatch: Any, shallow_folder: Path) -> None:
    monkeypatch.setattr(check, "sample_prompts", Mock(side_effect=PromptError("words clash")))
    told = call("check", str(shallow_folder))
    assert told.status == 1 and f"{shallow_folder} cannot be analysed\n" in told.out
    assert told.error == f"error: no analysis works on {shallow_folder}: words clash"


@pytest.mark.slow("whole commands")
@pytest.mark.parametrize("kind", ["dead hooks", "another kind"])
def test_check_refuses_a_model_with_dead_hooks_or_of_another_kind(
    call: Any, monkeypatch: Any, byte_level: Any, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setattr("anchorlens.models.verify_hooks.wrap_attention", lambda attention: False)
    size, message = len(byte_level), "have no attention pattern to hook"
    config = transformers.MambaConfig(vocab_size=size, hidden_size=16, num_hidden_layers=2)
    weights: Any = transformers.MambaForCausalLM(config)
    if kind == "dead hooks":
        weights = tiny_opt(size)
        message = "layers [0, 1]: an edit of the scores does not reach the pattern"
    told = call("check", saved(weights, byte_level, tmp_path))
    assert told.status == 1 and message in told.error and told.out == ""
