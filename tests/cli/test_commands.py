"""`anchorlens contexts`, `paper`, `across` and `faithfulness`: what they print and write."""

import json
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from shutil import copytree, ignore_patterns
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch

import anchorlens as al
from anchorlens.cli.trained_contexts import training_of
from anchorlens.errors import DataError, RunError
from anchorlens.experiments import analysis
from anchorlens.prompts import demonstration_sets
from anchorlens.prompts.documents import read_documents
from anchorlens.prompts.examples import BUNDLED
from anchorlens.prompts.sampled import prompts_of_draws
from tests.cli.conftest import saved
from tests.support.asked import ask
from tests.support.tiny_models import tiny_gpt2

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


PAPER = ["--tasks", "sentiment", "--queries", "11", "--seeds", "1", "--depth", "1", "--draws", "1"]
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


def test_no_record_is_an_error(failed: Any, paper_parts: Mock, into_folder: list[str]) -> None:
    message = "no result, or not all, for sentiment, figures: no"
    paper_parts.side_effect = RunError(message, {"a": al.Results()})
    error = failed("paper", *PAPER, *into_folder)
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
    (tmp_path / "sentiment").mkdir()
    for split in ("train", "test"):
        rows = [{"text": f"{split} {k}", "label": k % 2} for k in range(24)]
        (tmp_path / "sentiment" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done("paper", str(tmp_path), *PAPER, *into_folder)
    of_splits = paper_parts.call_args.args[1]["sentiment"]
    begun = [{example.text.split()[0] for example in examples} for examples in of_splits]
    assert begun == [{"train"}, {"test"}]


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
