"""`anchorlens contexts` trains contexts, compares them, and writes results and a report."""

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import anchorlens as al
from anchorlens.cli.trained_contexts import training_of
from anchorlens.prompts.sampled import prompts_of_draws

SMALL = ["--queries", "6", "--training", "4", "--held-out", "3", "--steps", "1", "--draws", "1"]
COMMAND = ["contexts", "--task", "sentiment", "--length", "2", *SMALL]


def test_trainings_have_the_options_of_the_command(tmp_path: Path) -> None:
    options: Any = SimpleNamespace(steps=3, seed=7, quiet=True)
    assert training_of("soft prompt", options, tmp_path) == al.contexts.Training(
        steps=3, seed=7, folder=tmp_path / "soft_prompt", progress=False
    )


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings("ignore:intervals of")
def test_contexts_are_trained_compared_and_reported(
    done: Any, monkeypatch: Any, into_folder: list[str], tmp_path: Path
) -> None:
    def with_long_words(*given: Any, **options: Any) -> list[al.PromptBatch]:
        batches = prompts_of_draws(*given, **options)
        return [replace(batch, label_ends=batch.label_positions + 1) for batch in batches]

    monkeypatch.setattr("anchorlens.cli.work.prompts_of_draws", with_long_words)
    printed = done(*COMMAND, *into_folder, "--json", "--other-tokens")
    assert "the search starts from the first token of each label word" in printed.err
    record = al.records.ContextsRecord.load(tmp_path / "sentiment" / "contexts.safetensors")
    names = ["none", "demonstrations", "anchors only", "re-weighted"]
    assert list(record.info["contexts"]) == [*names, "soft prompt", "hard prompt", "prefix"]
    assert record.random_accuracy.shape == (1,) and record.info["control"] == "random_and_format"
    assert "no prefix from anchors: positions cannot be rebased" in printed.err
    assert "factors of the label words (5 of 7): 100%|" in printed.err
    (printed_values,) = json.loads(printed.out)["tasks"]
    values = printed_values["contexts"]
    assert values["kl"]["anchors only"]["value"] == float(record.kl[2])
    low, high = record.intervals["accuracy"][:, 2].tolist()
    assert values["accuracy"]["anchors only"]["interval"] == [low, high]
    prefix: Any = al.contexts.PrefixContext.load(tmp_path / "sentiment" / "prefix.safetensors")
    assert len(prefix.tokens) == 2 and len(prefix.training.losses) == 1
    hard_prompt = al.contexts.HardPrompt.load(tmp_path / "sentiment" / "hard_prompt.safetensors")
    assert printed_values["texts"] == {"hard prompt": hard_prompt.text}
    assert f"hard prompt: {hard_prompt.text!r}" in printed.err
    page = (tmp_path / "report.html").read_text()
    assert f"<td>{escape(hard_prompt.text)}</td>" in page
    assert ">Training, prefix</h3>" in page
    table = record.table()
    whole = table.loc["demonstrations"]  # known by definition, so that there is no interval
    names = ["gain over demonstrations", "label loyalty", "KL in nats"]
    assert [whole[name].removesuffix(" [0.00, 0.00]") for name in names] == ["0", "1", "0.00"]
    assert table["gain over the first"].iloc[0] == "0"
    assert printed_values["answer"]["sentence"].startswith("This cannot be told: the model")
    assert escape(printed_values["answer"]["limits"]) in page and "<strong>Next:</strong>" in page

    others = al.records.ContextsRecord.load(tmp_path / "sentiment" / "other_tokens.safetensors")
    scores = ("small keys", "large values", "heavy hitters", "most read")
    names = ["label words and format", *(f"{score}, one set" for score in scores)]
    assert list(others.info["contexts"]) == names
    assert others.kl[0] == record.kl[2] and (others.bytes_stored == record.bytes_stored[2]).all()
    assert others.kl.unique().numel() == 5 and others.random_kl.shape == (1,)
    assert "ms a query" not in others.table().columns
    gain = printed_values["other_tokens"]["gain_over_first"]["most read, one set"]
    assert gain["value"] == pytest.approx(float(others.accuracy[4] - others.accuracy[0]))
    assert ">Other tokens</h3>" in page and "heavy hitters, one set" in page


def test_contexts_too_long_for_the_model_are_refused_before_weights_are_loaded(
    call: Any, failed: Any, monkeypatch: Any, into_folder: list[str], tmp_path: Path
) -> None:
    """The longest that fits is given to the loading of the model, one more is not."""
    monkeypatch.setattr("anchorlens.cli.path.load_model", None)
    arguments = [*COMMAND, *into_folder]
    error = failed(*arguments, "--length", "600")
    assert "--length 600 is too long: the model's context is 512 tokens, and the longest" in error
    most = int(error.split()[-1])
    assert most < 512
    assert f"--length {most + 1} is too long" in failed(*arguments, "--length", str(most + 1))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        call(*arguments, "--length", str(most))
