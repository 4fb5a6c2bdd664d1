"""The examples run, on a tiny model."""

import runpy
import sys
from collections import Counter
from itertools import pairwise
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
    # peft 0.21 asks transformers 5.24 by the old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def test_the_folder_has_examples() -> None:
    assert {*EXAMPLES} == {*WITH_MODEL, PREFIX_TUNING}


# Five sentiments of each class fit into the tiny model's context.
QUICK = ["--queries 12", "--draws 1", "--depth 2", "--rounds 1", "--steps 1", "--training 4"]
QUICK += ["--held-out 3", "--task sentiment", "--seeds 42 43", "--searches 1", "--shots 1 2"]


@pytest.mark.quick_cases("runs whole pages", "reasoning_steps", "own_hook")
@pytest.mark.parametrize("path", WITH_MODEL, ids=lambda path: path.stem)
def test_an_example_runs_and_writes_a_page(
    path: Path, monkeypatch: Any, shallow_folder: Path, tmp_path: Path, capsys: Any, quick: None
) -> None:
    text = path.read_text()
    known = [option.split() for option in QUICK]
    options = [word for option in known if f'"{option[0]}"' in text for word in option]
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
    return SimpleNamespace(**runpy.run_path(str(PREFIX_TUNING)))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


PUBLISHED = {
    "1": {"pretrained on sort up": "91 0", "fine-tuned on sort down": "0 85"},
    "2": {"pretrained on all": "25 ± 13 25 ± 12 24 ± 11 22 ± 7", "prefix for sort down": "90 ± 3"},
    "3": {
        "prefix for sort up, then +1": "93",
        "prefix for double histogram": "1",
        "LoRA of rank 1": "92.4",
        "as many parameters": "0.3",
    },
}


@pytest.mark.quick_cases("runs whole pages", "1")
@pytest.mark.parametrize("table", PUBLISHED)
def test_prefix_tuning_prints_the_rows_of_a_table_above_the_published_ones(
    table: str, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--table", table, "--scale", "0.0001", "--tests", "4"]
    monkeypatch.setattr(sys, "argv", [PREFIX_TUNING.name, *options])
    runpy.run_path(str(PREFIX_TUNING), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "0.0001 of the published steps" in lines[0]
    begin = next(number for number, line in enumerate(lines) if "mean m" in line)
    of_seeds = [line.split(" s: ")[1].split(":")[0] for line in lines[1 : begin - 1]]
    printed = [(line[:28].strip(), line[28:].split()) for line in lines[begin + 1 : -1]]
    rows = {name: cells for name, cells in printed if not name.startswith("published")}
    assert [*rows] == of_seeds
    below = {name: following for (name, _), following in pairwise(printed)}
    for name, expected in PUBLISHED[table].items():
        assert below[name][0].startswith("published, ") and " ".join(below[name][1]) == expected
    for name, (*_, stolen, residual_1, residual_2) in rows.items():
        assert (float(stolen) > 0) == ("prefix" in name or name == "as many parameters")
        wrong = max(float(residual_1), float(residual_2))
        assert wrong > 1e-6 if name.startswith("fine-tuned") else wrong < 1e-12
    assert rows and "prefix for sort down" in (tmp_path / "prefix_tuning.html").read_text()


def test_the_table_of_prefix_tuning_has_means_and_spreads_over_seeds(toy: Any, capsys: Any) -> None:
    rows = [{"random prefix": toy.Row([value, 0.0], 0.5, 1e-16, 1e-15)} for value in (1.0, 3.0)]
    toy.print_table(1, rows)
    assert "2.0 ± 1.4         0.0 ± 0.0     0.50    1e-16    1e-15" in capsys.readouterr().out


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
    # No token says that a digit stands there ten times.
    assert (train != train[:, :1]).any(1).all()
    assert int(toy.TASKS["double histogram"](train).max()) < 10


def test_prompts_are_followed_by_the_answers_of_tasks_in_turn(
    toy: Any, generator: torch.Generator
) -> None:
    [tokens] = toy.draw_batches([*toy.TASKS], 1, generator)
    for number, row in enumerate(tokens.tolist()):
        prompt, answer = row[:10], row[10:]
        expected = [
            sorted(prompt),
            sorted(prompt, reverse=True),
            [digit + 1 for digit in prompt],
            [digit + 2 for digit in prompt],
            [digit + 1 for digit in sorted(prompt)],
            [Counter(prompt)[digit] for digit in prompt],
        ]
        assert answer == expected[number % 6]


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


def test_prefixes_that_are_trained_together_are_those_that_are_trained_alone(
    toy: Any, generator: torch.Generator
) -> None:
    model = toy.new_model(heads=2, width=16, layers=2).double().eval()
    batches = [[*toy.draw_batches([task], 3, generator)] for task in ("sort up", "+1")]
    starts = torch.cat([toy.draw_prefix(model, 2, generator).double() for _ in batches])
    alone = [
        toy.trained_prefix(model, start, each, lr=0.1)
        for start, each in zip(starts.split(1), batches, strict=True)
    ]
    together = toy.trained_prefix(model, starts, map(torch.cat, zip(*batches, strict=True)), lr=0.1)
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-9)


@pytest.mark.slow("runs whole pages")
def test_lora_has_the_published_parameters_and_adds_matrices_of_rank_1(
    toy: Any, generator: torch.Generator
) -> None:
    model = toy.new_model(heads=4, width=256, layers=4).eval()
    tuned = toy.trained_lora(model, toy.draw_batches(["double histogram"], 2, generator))
    before, after = model.state_dict(), tuned.state_dict()
    changes = {k: after[k] - before[k] for k in before if not torch.equal(after[k], before[k])}
    assert before.keys() == after.keys() and len(changes) == 12
    assert all("c_fc.weight" in name or "c_proj.weight" in name for name in changes)
    assert {int(torch.linalg.matrix_rank(change, rtol=1e-3)) for change in changes.values()} == {1}
    assert sum(sum(change.shape) for change in changes.values()) == 12288
    assert toy.draw_prefix(model, 6, generator).numel() == 12288
