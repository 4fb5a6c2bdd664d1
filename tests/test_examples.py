"""The examples run, on a tiny model."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITH_MODEL = [path for path in EXAMPLES if '"--model"' in path.read_text()]
PREFIX_TUNING = ROOT / "examples" / "prefix_tuning.py"  # it trains a model of its own

pytestmark = [
    pytest.mark.filterwarnings("ignore:in . of . sets:UserWarning"),
    pytest.mark.filterwarnings("ignore:some pairs:UserWarning"),
]


def test_the_folder_has_examples() -> None:
    assert {*EXAMPLES} == {*WITH_MODEL, PREFIX_TUNING}


@pytest.mark.parametrize("path", WITH_MODEL, ids=lambda path: path.stem)
def test_an_example_runs_and_writes_a_page(
    path: Path, monkeypatch: Any, shallow_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    text = path.read_text()
    options = ["--queries", "12"] if "--queries" in text else []
    options += ["--draws", "1"] if "--draws" in text else []
    options += ["--depth", "2"] if "--depth" in text else []
    options += ["--rounds", "1"] if "--rounds" in text else []
    options += ["--steps", "1", "--training", "4", "--held-out", "3"] if "--steps" in text else []
    # Five sentiments of each class fit into the tiny model's context.
    options += ["--task", "sentiment", "--seeds", "42", "43"] if '"--task"' in text else []
    options += ["--searches", "1"] if '"--searches"' in text else []
    options += ["--shots", "1", "2"] if '"--shots"' in text else []
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(path.parent)  # as `python examples/...` has it
    transfers = "print_transfer" in text  # from a model to itself, by two names
    models = [str(shallow_folder), *([f"{shallow_folder}/."] if transfers else [])]
    monkeypatch.setattr(sys, "argv", [path.name, "--model", *models, *options])
    runpy.run_path(str(path), run_name="__main__")
    assert list(tmp_path.glob("*.html"))
    if transfers:
        printed = capsys.readouterr().out
        assert "SST-2: PEZ               88.12 ± 0.15\n" in printed
        [first, second] = [
            [line.split(name)[1].split() for line in printed.splitlines() if f"{name} " in line]
            for name in models
        ]
        assert len(first) == 2 * 3 and first == second


@pytest.fixture(scope="module")
def toy() -> Any:
    """The names that the example of prefix tuning defines."""
    return SimpleNamespace(**runpy.run_path(str(PREFIX_TUNING)))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (
            "1",
            {
                "pretrained on sort up": ["(0.91)", "(0.00)"],
                "fine-tuned on sort down": ["(0.00)", "(0.85)"],
                "random prefix": [],
                "prefix for sort down": ["(0.00)", "(0.00)"],
            },
        ),
        (
            "2",
            {
                "pretrained on all": ["(0.31)", "(0.19)", "(0.30)", "(0.16)"],
                "random prefix": [],
                "prefix for sort up": ["(0.94)", "(0.00)", "(0.00)", "(0.00)"],
                "prefix for sort down": ["(0.00)", "(0.84)", "(0.00)", "(0.01)"],
                "prefix for +1": ["(0.00)", "(0.00)", "(1.00)", "(0.00)"],
                "prefix for +2": ["(0.00)", "(0.00)", "(0.00)", "(1.00)"],
            },
        ),
    ],
)
def test_prefix_tuning_prints_the_rows_of_a_table(
    table: str, rows: dict[str, list[str]], monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--table", table, "--scale", "0.0001", "--tests", "20"]
    monkeypatch.setattr(sys, "argv", [PREFIX_TUNING.name, *options])
    runpy.run_path(str(PREFIX_TUNING), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "0.0001 of the published steps" in lines[0]
    printed = {line[:24].strip(): line[24:].split() for line in lines[3:-1]}
    assert [*printed] == [*rows]
    for name, published in rows.items():
        assert [cell for cell in printed[name] if "(" in cell] == published
        stolen, *residuals = map(float, printed[name][-3:])
        assert (stolen > 0) == ("prefix" in name)
        fine_tuned = name.startswith("fine-tuned")
        assert all((value > 1e-6) if fine_tuned else (value < 1e-12) for value in residuals)
    assert "prefix for sort down" in (tmp_path / "prefix_tuning.html").read_text()


def test_a_prompt_is_of_the_same_split_in_every_process(
    toy: Any, generator: torch.Generator
) -> None:
    train, test = (toy.draw_digits(3000, generator, test=test) for test in (False, True))
    assert not toy.is_test(train).any()
    assert toy.is_test(test).all()
    digits = torch.randint(8, (4000, 10), generator=generator)
    assert toy.is_test(digits).double().mean().item() == pytest.approx(0.25, abs=0.03)
    constant = torch.arange(8)[:, None].expand(8, 10)  # 0000000000 to 7777777777
    assert toy.is_test(constant).nonzero().flatten().tolist() == [0, 1, 7]


def test_prompts_are_followed_by_the_answers_of_tasks_in_turn(
    toy: Any, generator: torch.Generator
) -> None:
    [tokens] = toy.draw_batches(["sort up", "sort down", "+1", "+2"], 1, generator)
    for number, row in enumerate(tokens.tolist()):
        prompt, answer = row[:10], row[10:]
        expected = [
            sorted(prompt),
            sorted(prompt, reverse=True),
            [digit + 1 for digit in prompt],
            [digit + 2 for digit in prompt],
        ]
        assert answer == expected[number % 4]


def test_answers_without_a_prefix_are_those_of_generate(
    toy: Any, generator: torch.Generator
) -> None:
    model = toy.new_model(heads=2, width=16).eval()
    model.transformer.wte.weight.data *= 50  # so that answers differ by prompt
    digits = toy.draw_digits(8, generator)
    expected = model.generate(
        digits, attention_mask=torch.ones_like(digits), max_new_tokens=10, do_sample=False
    )
    answers = toy.answers(toy.Run(model, toy.draw_prefix(model, 0, generator)), digits)
    assert len({*map(tuple, answers.tolist())}) > 1
    torch.testing.assert_close(answers, expected[:, 10:])


def test_training_moves_a_copy_and_nothing_else(toy: Any, generator: torch.Generator) -> None:
    model = toy.new_model(heads=2, width=16).eval()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    [tokens] = toy.draw_batches(["sort up"], 1, generator)
    start = toy.draw_prefix(model, 2, generator)
    given = start.clone()

    @torch.no_grad()
    def loss(model: Any, prefix: torch.Tensor) -> float:
        logits = toy.run_after(prefix, model, tokens[:, :-1]).logits[:, 9:]
        return float(cross_entropy(logits.flatten(0, 1), tokens[:, 10:].flatten()))

    prefix = toy.trained_prefix(model, start, [tokens] * 5)
    tuned = toy.trained_model(model, [tokens] * 5)
    assert loss(model, prefix) < loss(model, start)
    none = toy.draw_prefix(model, 0, generator)
    assert loss(tuned, none) < loss(model, none)
    torch.testing.assert_close(start, given, rtol=0, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    assert all(w.grad is None and w.requires_grad for w in model.parameters())
    assert not model.training and not tuned.training and not prefix.requires_grad
