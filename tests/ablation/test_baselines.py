"""Tests of the baselines in the examples: calibration and the linear probe."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression

import anchorlens as al
from anchorlens.prompts.examples import sample_queries
from tests.support.measures import difference, is_shared
from tests.support.tiny_models import byte_level_tokenizer, questions, tiny_gpt2

EXAMPLES = Path(__file__).parents[2] / "examples"
reweighting = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "reweighting.py")))


def test_calibration_equals_values_by_hand() -> None:
    """p_cf is (0.74, 0.26), so class 0 is predicted from p = 0.74 on."""
    content_free = torch.tensor([[0.98, 0.02], [0.5, 0.5]])
    # With a mean of logarithms the threshold would be 0.875, without calibration 0.5.
    probabilities = torch.tensor([[0.45, 0.55], [0.7, 0.3], [0.78, 0.22], [0.9, 0.1]])
    assert reweighting.calibrated_labels(probabilities, content_free).tolist() == [1, 1, 0, 0]
    assert probabilities.argmax(1).tolist() == [1, 0, 0, 0]
    # A fair model is not changed.
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(50, 4, generator=generator)
    labels = reweighting.calibrated_labels(probabilities, torch.full((3, 4), 0.25))
    assert torch.equal(labels, probabilities.argmax(1))


def states_of(labels: torch.Tensor, seed: int) -> torch.Tensor:
    """States whose first three coordinates show the class; the other 17 are noise."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(labels), 20, generator=generator)
    states[:, :3] = 4 * torch.nn.functional.one_hot(labels, 3) + 0.1 * states[:, :3]
    return states


def test_the_probe_finds_the_class_only_if_the_states_show_it() -> None:
    labels, truth = torch.arange(60) % 3, torch.arange(90) % 3
    states, queries = states_of(labels, 0), states_of(truth, 1)
    assert torch.equal(reweighting.probed_labels(states, labels, queries), truth)
    of_noise = reweighting.probed_labels(states[:, 3:], labels, queries[:, 3:])
    assert 0.1 < float((of_noise == truth).double().mean()) < 0.6
    # It does not depend on the units of the states.
    states, queries, units = states[:, 1:], queries[:, 1:], torch.logspace(-3, 3, 19)
    predicted = reweighting.probed_labels(states * units, labels, queries * units)
    assert torch.equal(predicted, reweighting.probed_labels(states, labels, queries))


def hidden_states(weights: Any, tokens: list[int], layer: int) -> torch.Tensor:
    """Hidden state of plain transformers after a block, at the last token."""
    with torch.no_grad():
        outputs = weights(torch.tensor([tokens]), output_hidden_states=True)
    return torch.as_tensor(outputs.hidden_states[layer + 1][0, -1])


@pytest.mark.quick_cases("many passes", "right")
@pytest.mark.parametrize("side", ["left", "right"])
def test_target_states_equal_those_of_transformers(side: str) -> None:
    tokenizer = byte_level_tokenizer()
    weights = tiny_gpt2(len(tokenizer))
    model = al.load_model(tiny_gpt2(len(tokenizer)), tokenizer=tokenizer)
    batches = questions(model, 12, padding_side=side)
    [record] = al.run(model, batches, [reweighting.TargetStates(layer=1)], resamples=0).values()
    assert is_shared(record)
    for batch in batches:
        for row, index in enumerate(batch.index.tolist()):
            expected = hidden_states(
                weights, batch.tokens[row][batch.attention_mask[row]].tolist(), 1
            )
            assert difference(record.states[index], expected) < 1e-4


@pytest.mark.slow("many passes")
def test_correct_answers_equal_those_of_prompts_written_by_hand() -> None:
    """Plain transformers run each prompt from its text, and its own label decides."""
    tokenizer = byte_level_tokenizer()
    sizes = {"n_layer": 4, "n_positions": 1024}  # two thirds of 4 layers is not the last layer
    weights = tiny_gpt2(len(tokenizer), **sizes)
    model = al.load_model(tiny_gpt2(len(tokenizer), **sizes), tokenizer=tokenizer)
    task, pool = al.TASKS["sst2"], al.load_examples("sentiment", split="train")
    tests = al.load_examples("sentiment", split="test")
    answers = reweighting.correct_answers(model, task, pool, tests, 20, seed=3, rounds=1, lr=0.01)

    demos = al.sample_demonstrations(pool, shots=1, seed=3)
    rest = [example for example in pool if example not in demos]
    training = al.sample_demonstrations(rest, shots=4, seed=3)
    queries = sample_queries(tests, 20, seed=3)
    ids = [tokenizer(word)["input_ids"][0] for word in task.labels]

    def tokens(text: str, shots: list[al.Example] = demos) -> list[int]:
        lines = [task.demonstration(example.text, int(example.label or 0)) for example in shots]
        return list(tokenizer("\n".join([*lines, task.query(text)]))["input_ids"])

    def probabilities(text: str, shots: list[al.Example] = demos) -> torch.Tensor:
        with torch.no_grad():
            logits = weights(torch.tensor([tokens(text, shots)])).logits[0, -1, ids]
        return torch.as_tensor(logits.double().softmax(0))

    content_free = sum(probabilities(text) for text in ("N/A", "", "[MASK]")) / 3
    states = torch.stack(
        [hidden_states(weights, tokens(example.text), 2) for example in training]
    ).double()
    mean, std = states.mean(0), states.std(0, correction=0)
    probe = LogisticRegression(max_iter=1000).fit(
        (states - mean) / std, [example.label for example in training]
    )
    expected: dict[str, list[int]] = {name: [] for name in answers if name != "re-weighted"}
    for query in queries:
        vanilla = probabilities(query.text)
        state = (hidden_states(weights, tokens(query.text), 2) - mean) / std
        for name, answer in {
            "vanilla": vanilla.argmax(),
            "more shots": probabilities(query.text, [*demos, *training]).argmax(),
            "contextual calibration": (vanilla / content_free).argmax(),
            "linear probe": probe.predict(state[None])[0],
        }.items():
            expected[name].append(int(answer) == query.label)
    for name, correct in expected.items():
        assert answers[name].tolist() == correct, name
    one_class = [[query.label == label for query in queries] for label in (0, 1)]
    assert expected["contextual calibration"] not in one_class
    assert expected["linear probe"] not in one_class
