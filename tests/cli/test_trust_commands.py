"""`anchorlens across` and `anchorlens faithfulness`: tables, report, results, and resuming."""

import json
from html import unescape
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch

import anchorlens as al
from anchorlens.errors import DataError
from anchorlens.experiments import analysis
from anchorlens.prompts.documents import read_documents
from tests.cli.conftest import saved
from tests.support.asked import ask
from tests.support.tiny_models import tiny_gpt2

QUICK = ["--queries", "12", "--depth", "1", "--draws", "2"]
WARNED = pytest.mark.filterwarnings(*("ignore:.*no result", "ignore:in .", "ignore:.* failed"))


@pytest.mark.slow("whole commands")
@WARNED
def test_across_prints_and_reports_each_model_and_resumes(
    done: Any, failed: Any, monkeypatch: Any, shallow_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(analysis, "with_random_models", lambda *given, **_: given[3])  # seconds
    empty = tmp_path / "no weights"
    copytree(shallow_folder, empty, ignore=ignore_patterns("*.safetensors"))
    arguments = ["across", str(shallow_folder), str(empty), "--task", "sentiment", *QUICK]
    arguments += ["--out", str(tmp_path)]
    printed = done(*arguments)
    record = al.records.AcrossModelsRecord.load(tmp_path / "claims.safetensors")
    assert f"\n\n{record}\n\nreport: {tmp_path}/report.html" in printed.out
    first = " ".join(printed.out.partition("\n\n")[0].split())
    assert first.startswith("sentiment: In which models are label words anchors? This cannot be ")
    assert "Next: the flows of the task:\n  anchorlens run --model" in printed.out
    assert max(map(len, str(record).splitlines())) <= 80
    assert record.info["models"] == [shallow_folder.name, "no weights"]
    text = " ".join(printed.out.split())
    assert record.info["missing"]["no weights"].startswith("failed: ") and "failed: " in text
    assert record.table().iloc[1, 1] == "? no number: the model failed"
    model = al.load_model(shallow_folder)
    batches = al.sample_prompts(model, "sentiment", queries=12)
    claims = al.claims(al.analyse(model, batches, depth=1, draws=2, progress=False))
    numbers = [claim.estimate.value for claim in claims]
    assert numbers == pytest.approx(record.number[0].tolist(), nan_ok=True)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "The paper&#39;s claims in 2 models" in page and ">Claims</h3>" in page
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["model"][1] == str(empty) and settings["queries"] == 12

    rows = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rows-*")}
    first = json.loads(done(*arguments, "--json", "--quiet").out)["tasks"][0]["claims"][0]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rows-*")} == rows
    assert rows and (first["model"], first["value"]) == (shallow_folder.name, numbers[0])
    error = failed("across", str(empty), *arguments[3:], "--fresh")
    assert error == "error: no model could be analysed; the table says why"
    assert not [*tmp_path.rglob("rows-*")]


def test_across_stores_the_task_of_a_data_file_and_names_it_in_its_command(
    call: Any, monkeypatch: Any, shallow_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("anchorlens.cli.work.across_models", Mock(side_effect=KeyboardInterrupt))
    data, model = tmp_path / "mine.csv", str(shallow_folder)
    rows = (f"it is {label} {n},{label}" for n in range(9) for label in ("good", "poor"))
    data.write_text("\n".join(["text,label", *rows]))
    told = call("across", model, model, "--data", str(data), "--out", str(tmp_path), *QUICK)
    assert told.status == 130
    assert f"  anchorlens across {model} {model} --out {tmp_path} --queries 12 " in told.err
    assert f" --task {tmp_path / 'mine.toml'} " in told.err
    assert (tmp_path / "mine.toml").exists()


def test_models_that_cannot_be_read_are_one_error_before_any_is_loaded(
    call: Any, monkeypatch: Any, shallow_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("anchorlens.cli.work.across_models", None)
    models = [str(shallow_folder), "no/such model", "none.gguf"]
    arguments = ["--task", "sentiment", "--queries", "12", "--out", str(tmp_path)]
    told = call("across", *models, *arguments)
    first, *models = told.err.splitlines()[-3:]
    assert told.status == 1 and first.startswith("error: 2 of 3 models cannot be analysed; ")
    assert "there is no folder 'no/such model'" in models[0]
    assert models[1] == "  - none.gguf: there is no file none.gguf"


def test_two_segments_have_no_rank_correlation_which_is_said_before_weights_are_loaded(
    call: Any, monkeypatch: Any, into_folder: list[str], capsys: Any
) -> None:
    monkeypatch.setattr("anchorlens.cli.path.load_model", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        call("faithfulness", *into_folder, "--task", "sentiment")
    noted = " ".join(capsys.readouterr().err.split())
    assert "there are 2 segments, and a rank correlation (LDS) needs 3" in noted
    assert "--shots 2 gives two demonstrations of each class" in noted


ROWS: list[dict[str, Any]] = [
    {"question": "Who?", "documents": ["Anna is here.", "Peter is there.", "It is late."]},
    {"question": "Where?", "documents": ["Anna is here.", "Peter is there.", "It is early."]},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_documents_are_read_from_each_kind_of_file(name: str, tmp_path: Path) -> None:
    path, rows = tmp_path / name, [row | {"answer": " me"} for row in ROWS]
    if name.endswith("csv"):
        lines = ["Anna is here.\nPeter is there.\nIt is late.", json.dumps(rows[1]["documents"])]
        pd.DataFrame(rows).assign(documents=lines).to_csv(path, index=False)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(json.dumps(rows) if name.endswith("json") else "\n".join(lines))
    prompts = read_documents(path)
    assert prompts is not None and len(prompts) == 2
    assert prompts[0] == [
        ("document 1", "Anna is here.\n"),
        ("document 2", "Peter is there.\n"),
        ("document 3", "It is late.\n"),
        ("question", "Question: Who?\nAnswer:"),
        ("answer", " me"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": ["a"]}, "row 2 of .* has 1 documents, and row 1 has 3"),
        ({"documents": []}, "row 2 of .* lacks documents"),
        ({"documents": ["a", "", "b"]}, "row 2 of .* lacks documents"),
        ({"documents": ["a", 3, "b"]}, "row 2 of .* lacks documents"),
        ({"question": " "}, "row 2 of .* lacks documents, a question or an answer"),
        ({"answer": "me"}, "row 1 of .* lacks documents, a question or an answer"),
    ],
)
def test_rows_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROWS[0], ROWS[1] | change]))
    with pytest.raises(DataError, match=message):
        read_documents(path)
    path.write_text(json.dumps([{"text": "a", "label": "b"}]))
    assert read_documents(path) is None


@pytest.fixture
def positive_folder(byte_level: Any, tmp_path: Path) -> Path:
    """A model that most often says " Positive", and says it again."""
    weights = tiny_gpt2(len(byte_level), n_layer=2)
    with torch.no_grad():
        (token,) = byte_level(" Positive")["input_ids"]
        weights.transformer.wte.weight[token] *= 2
        weights.transformer.ln_f.bias += 5 * weights.transformer.wte.weight[token]
    return Path(saved(weights, byte_level, tmp_path / "positive"))


@pytest.mark.slow("whole commands")
@pytest.mark.parametrize("has_answers", [False, True])
def test_faithfulness_explains_what_the_model_writes(
    done: Any, failed: Any, positive_folder: Path, tmp_path: Path, has_answers: bool
) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    answer = " ".join(["Positive"] * 24)  # so many tokens are written
    rows = [{**row, **({"answer": answer} if has_answers else {})} for row in ROWS]
    data.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["faithfulness", str(data), "--model", str(positive_folder), "--subsets", "6"]
    arguments += ["--out", str(out)]
    printed = done(*arguments)
    record = al.records.FaithfulnessRecord.load(out / "documents" / "faithfulness.safetensors")
    said, _, rest = printed.out.partition("\n\n")
    assert said.startswith("documents: Which scores say what the answer loses without a segment?")
    assert "Random scores have" in " ".join(said.split()) and "\nNext: " in rest
    lines = rest.splitlines()
    assert lines[0] == "documents, faithfulness [95 % intervals]"
    assert max(map(len, lines[: lines.index("")])) <= 80
    assert [*record.info["segment_names"]] == ["document 1", "document 2", "document 3"]
    note = "the model writes the answers, which are then explained"
    assert (f"{note}: ' {answer}', ..." in printed.err) != has_answers
    model = al.load_model(positive_folder)
    for number, row in enumerate(ROWS):
        text = "".join(f"{document}\n" for document in row["documents"])
        ids = model.tokenizer(f"{text}Question: {row['question']}\nAnswer: {answer}")["input_ids"]
        with torch.no_grad():
            log_probs = model(torch.tensor([ids]))[0].log_softmax(-1)
        expected = log_probs[-25:-1].max(-1).values.sum()
        assert float(record.log_prob[number]) == pytest.approx(float(expected), abs=1e-3)
    page = unescape((out / "report.html").read_text("utf-8"))
    assert ">Faithfulness</h3>" in page and "best possible" in page
    first: Any = record.rests_on()
    assert first.index.tolist() == [0, 1]
    for number, told in zip(first.index, first.itertuples(), strict=True):
        question = f"Question: {ROWS[number]['question']} Answer:"
        assert told.text == ROWS[number]["documents"][int(told.segment[-1]) - 1]
        rests = f'Prompt {number}, "{question}": the answer "{answer[:59]}…" rests '
        assert f"<li>{rests}" in page and rests in " ".join(said.split())
        rest = f'on {told.segment}, "{told.text}": without it, its log-odds fall by '
        assert told.score == "one by one" and rest in page
    error = failed(*arguments, "--shots", "2")
    assert "has documents and no demonstrations, so leave out --shots" in error


@pytest.mark.slow("whole commands")
@WARNED
@pytest.mark.parametrize("removal", ["edges", "text"])
def test_faithfulness_of_a_task_is_that_of_the_question(
    done: Any, into_folder: list[str], shallow_folder: Path, removal: str
) -> None:
    arguments = [*into_folder, "--queries", "3", "--subsets", "5", "--top", "2"]
    arguments += ["--json", "--quiet", "--task", "questions"]
    arguments += ["--remove-text"] if removal == "text" else []
    told = json.loads(done("faithfulness", *arguments).out)["tasks"][0]
    assert "Scores explain the predicted label, right or wrong: the" in told["answer"]["limits"]
    values, model = told["faithfulness"], al.load_model(shallow_folder)
    batches = al.sample_prompts(model, "questions", queries=3)
    asked = al.Faithfulness(subsets=5, top=2, remove=getattr(al.removal, removal))
    expected = ask(model, batches, asked, progress=False)
    found = [score["value"] for score in values["drop"].values()]
    assert found == pytest.approx(expected.drop.tolist(), abs=1e-5)

    # tests/test_known_answers.py compares it with plain transformers.
    rests = expected.rests_on().reset_index().to_dict("records")
    for row, known in zip(told["rests_on"], rests, strict=True):
        assert row["value"] == pytest.approx(known["value"], abs=1e-4)
        assert row | {"value": 0} == known | {"value": 0}
