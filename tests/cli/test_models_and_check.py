"""`anchorlens models` prints the tested architectures; `anchorlens check` tries a model."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import transformers

import anchorlens as al
from anchorlens.cli import check
from anchorlens.cli.architectures import table_of_architectures
from anchorlens.errors import MetricError, ModelError, PromptError
from anchorlens.passes.provide import need_gradient, reads_of
from tests.cli.test_cli import call, error_of
from tests.support.tiny_models import randomize

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "benchmarks/architecture_table.py"))


def test_the_page_of_architectures_is_written_from_the_data_of_the_package() -> None:
    table = table_of_architectures()
    assert TABLES["page"](table) == (ROOT / "docs/architectures.md").read_text()
    data = (ROOT / "anchorlens/data/architectures.json").read_text()
    assert TABLES["json_of"](table) == data


def test_the_table_holds_what_the_tests_measured() -> None:
    case = {"architecture": "A", "special": "b", "line": "4.3", "kind": "bridge", "native": True}
    case |= {"versions": {"torch": "2"}, "dtype": "float32", "differences": {"logits": 1.4e-6}}
    exact = case | {"dtype": "float64", "differences": {"logits": 2e-15}}
    refused = case | {"architecture": "B", "refused": "no mask"}
    assert TABLES["table_of"]([case, exact, refused]) == {
        "versions": {"torch": ["2"]},
        "architectures": [
            {
                "name": "A",
                "special": "b",
                "cells": {"4.3 bridge": ["1e-6", "2e-15"]},
                "hooks": "native",
            },
            {
                "name": "B",
                "special": "b",
                "cells": {"4.3 bridge": "refused: no mask"},
                "hooks": "native",
            },
        ],
        "quantities": {"logits": {"4.3 bridge": ["1e-6", "2e-15"]}},
    }


def test_models_prints_the_architectures(monkeypatch: Any, capsys: Any) -> None:
    assert call(monkeypatch, "models") == 0
    printed = capsys.readouterr()
    assert "GPT-J" in printed.out and "refused: cannot split its joint" in printed.out
    assert "Next: anchorlens check MODEL" in printed.err
    assert call(monkeypatch, "models", "gpt-j") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line.strip() and line[0] != " "]
    assert {*names} == {"architecture", "GPT-J"}
    assert max(map(len, lines)) <= 80
    assert call(monkeypatch, "models", "LLAMA", "--json") == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["architectures"]]
    assert "Llama" in names and all("llama" in name.lower() for name in names)
    assert call(monkeypatch, "models", "nothing") == 1
    assert "no tested architecture has 'nothing' in its name" in error_of(capsys.readouterr())


@pytest.mark.slow("whole commands")
def test_check_says_what_works(monkeypatch: Any, model_folder: Path, capsys: Any) -> None:
    assert call(monkeypatch, "check", str(model_folder), "--json", "--quiet") == 0
    found = json.loads(capsys.readouterr().out)
    wanted = {"layers": 6, "heads": 2, "context": "512 tokens", "dtype": "float32"}
    wanted |= {"attention_hooks": "verified in all 6 layers", "begins_with_BOS": False}
    wanted |= {"saliency_flows": "yes", "attention_aucroc": "yes", "anchor_distances": "yes"}
    wanted |= {"attention": "of TransformerLens", "attention_sinks": False}
    wanted |= {"isolation": "yes, runs of the last layer skip 5 layers"}
    assert found.items() >= wanted.items()
    assert "tokens of each prompt, run once for all" in found["shared_demonstrations"]
    assert found["compression"].startswith("yes, ")


def saved(weights: Any, tokenizer: Any, folder: Path) -> str:
    randomize(weights).save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return str(folder)


def tiny_opt(vocab_size: int) -> Any:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=16,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
        )
    )


@pytest.mark.slow("whole commands")
def test_check_names_wrapped_attention_and_prompts_that_are_too_long(
    monkeypatch: Any, byte_level: Any, tmp_path: Path, capsys: Any
) -> None:
    model = saved(tiny_opt(len(byte_level)), byte_level, tmp_path)
    assert call(monkeypatch, "check", model) == 1
    captured = capsys.readouterr()
    assert f"{model} cannot be analysed\n" in captured.out
    assert "of transformers, wrapped in 2 layers" in captured.out
    assert "but the model's context is 64" in " ".join(captured.out.split())
    assert f"no analysis works on {model}: " in error_of(captured)
    assert "Next:" not in captured.out


def raising(error: Exception) -> Any:
    def raise_error(*_: Any, **__: Any) -> None:
        raise error

    return raise_error


@pytest.mark.slow("whole commands")
def test_check_prints_its_table_if_a_metric_fails(
    monkeypatch: Any, shallow_folder: Path, capsys: Any
) -> None:
    """A pass that is not finite ends one metric; the other analyses are still tried."""

    def run_without_gradients(model: Any, batches: Any, metrics: Any, **options: Any) -> Any:
        if any(need_gradient(reads_of(metric, batches[0])) for metric in metrics):
            raise ModelError("the loss is not finite")
        return al.run(model, batches, metrics, **options)

    monkeypatch.setattr(check, "run", run_without_gradients)
    assert call(monkeypatch, "check", str(shallow_folder)) == 0
    printed = capsys.readouterr().out
    assert f"{shallow_folder} can be analysed in part\n" in printed
    assert "no: the loss is not finite" in printed
    assert "no:" not in printed.partition("attention aucroc")[2]


@pytest.mark.slow("whole commands")
def test_check_prints_its_table_if_no_metric_works(
    monkeypatch: Any, shallow_folder: Path, capsys: Any
) -> None:
    def run_no_metric(model: Any, batches: Any, questions: Any, **options: Any) -> Any:
        if any(isinstance(question, al.Metric) for question in questions):
            raise MetricError("the pass is not finite")
        return al.run(model, batches, questions, **options)

    monkeypatch.setattr(check, "run", run_no_metric)
    assert call(monkeypatch, "check", str(shallow_folder), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    metrics = {"saliency_flows", "attention_aucroc", "anchor_distances"}
    assert {name for name, status in found.items() if str(status).startswith("no: ")} == metrics
    assert found["shared_demonstrations"] == "not tried"


@pytest.mark.slow("whole commands")
def test_a_model_without_prompts_cannot_be_analysed(
    monkeypatch: Any, shallow_folder: Path, capsys: Any
) -> None:
    monkeypatch.setattr(check, "build_prompts", raising(PromptError("words clash")))
    assert call(monkeypatch, "check", str(shallow_folder)) == 1
    captured = capsys.readouterr()
    assert f"{shallow_folder} cannot be analysed\n" in captured.out
    assert error_of(captured) == f"error: no analysis works on {shallow_folder}: words clash"


@pytest.mark.slow("whole commands")
def test_check_refuses_a_model_with_dead_hooks_or_of_another_kind(
    monkeypatch: Any, byte_level: Any, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr("anchorlens.models.load.wrap_attention", lambda attention: False)
    config = transformers.MambaConfig(
        vocab_size=len(byte_level), hidden_size=16, num_hidden_layers=2
    )
    for name, weights, message in (
        (
            "opt",
            tiny_opt(len(byte_level)),
            "layers [0, 1]: an edit of the scores does not reach the pattern",
        ),
        ("mamba", transformers.MambaForCausalLM(config), "have no attention pattern to hook"),
    ):
        model = saved(weights, byte_level, tmp_path / name)
        assert call(monkeypatch, "check", model) == 1
        captured = capsys.readouterr()
        assert message in error_of(captured)
        assert captured.out == ""
