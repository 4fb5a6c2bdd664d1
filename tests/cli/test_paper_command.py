"""`anchorlens paper` writes its files, resumes if stopped, and prints one line for a mistake."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import anchorlens as al
from anchorlens.errors import RunError
from anchorlens.prompts import demonstration_sets
from anchorlens.prompts.examples import BUNDLED
from tests.cli.conftest import saved
from tests.support.tiny_models import tiny_gpt2

QUICK = ["--queries", "11", "--seeds", "1", "--depth", "1", "--draws", "1"]
FIGURES = [*("saliency_flows", "attention_aucroc", "anchor_distances", "isolation", "diagnosis")]


@pytest.mark.slow("whole commands")
@pytest.mark.filterwarnings(
    *("ignore:.*in . of . sets", "ignore:.*in layers", "ignore:.*some p", "ignore:.*intervals of"),
    "ignore:a prompt has",
)
def test_paper_writes_records_tables_and_report(done: Any, byte_level: Any, tmp_path: Path) -> None:
    weights = tiny_gpt2(len(byte_level), n_layer=2, n_positions=400)
    model = saved(weights, byte_level, tmp_path / "model")
    quick = ["--queries", "11", "--seed", str(-(2**70)), "--depth", "1", "--draws", "1"]
    arguments = ["--tasks", "emotions", "--appendix", "--out", str(tmp_path), *quick]
    with pytest.warns(UserWarning, match="for emotions, letters as labels: a prompt has 875 tok"):
        printed = done("paper", "--model", model, *arguments).out
    tables = (tmp_path / "tables.txt").read_text()
    assert tables in printed and "GPT2-XL in the paper\n" in tables
    titles = [block.partition(".")[0] for block in tables.split("\n\n")]
    assert titles[:3] == ["Table 1", "Table 2", "Table 3"]
    assert "emotions: Does the model use its label words as anchors?" in printed
    assert "\nemotions (two shots), isolation\n" in printed
    stored = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("emo*/*.safetensors")}
    records = {
        "emotions": [*FIGURES, "accuracies", "contexts", "times"],
        "emotions (two shots)": FIGURES,
        "emotions (other settings)": ["isolation", "5_directions", "10_directions"],
    }
    assert stored == {f"{task}/{n}.safetensors" for task, names in records.items() for n in names}
    record = al.Record.load(tmp_path / "emotions" / "accuracies.safetensors")
    assert record.info["methods"][0] == "vanilla" and record.info["seeds"] == [-(2**70)]
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["tasks"] == ["emotions"] and settings["appendix"] is True
    page = (tmp_path / "report.html").read_text()
    assert all(f">{task}</h2>" in page for task in records)
    assert page.count(">Diagnosis</h3>") == 2 and "GPT2-XL in the paper" in page


def test_a_command_without_any_record_is_an_error(
    failed: Any, paper_parts: Mock, into_folder: list[str]
) -> None:
    message = "no result, or not all, for sentiment, figures: no"
    paper_parts.side_effect = RunError(message, {"a": al.Results()})
    error = failed("paper", "--tasks", "sentiment", *into_folder, *QUICK)
    assert "for sentiment, figures: no" in error


@pytest.mark.slow("whole commands")
def test_emocontext_runs_only_if_it_is_named(
    done: Any, monkeypatch: Any, paper_parts: Mock, into_folder: list[str]
) -> None:
    of = {name: bundle for bundle, name in BUNDLED.items()}
    load: Any = lambda name, split: al.load_examples(of[name])  # noqa: E731
    monkeypatch.setattr(demonstration_sets, "load_examples", load)
    done("paper", *into_folder)
    done("paper", *into_folder, "--tasks", "sst2, emo")
    tasks = [[*call.args[1]] for call in paper_parts.call_args_list]
    assert tasks == [["sst2", "trec", "agnews"], ["sst2", "emo"]]
    assert paper_parts.call_args.kwargs["parts"] == ("figures", "table 1", "table 2", "table 3")


@pytest.mark.slow("whole commands")
def test_data_can_be_a_folder(
    done: Any, paper_parts: Mock, into_folder: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sst2").mkdir()
    for split in ("train", "test"):
        rows = [{"text": f"{split} {k}", "label": k % 2} for k in range(24)]
        (tmp_path / "sst2" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done("paper", "--tasks", "sst2", str(tmp_path), *into_folder, *QUICK)
    of_splits = paper_parts.call_args.args[1]["sst2"]
    begun = [{example.text.split()[0] for example in examples} for examples in of_splits]
    assert begun == [{"train"}, {"test"}]
