"""Word-to-word prompts: where their answers stand, and numbers against positions given by hand."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import anchorlens as al
from anchorlens.errors import DataError, PromptError
from tests.support.measures import assert_same

SHOWN = [("hot", "cold"), ("big", " small"), ("up", "down"), ("fast", "slow")]
ASKED = [("old", "new"), ("left", "right"), ("tiny", "small")]
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


def by_hand(tokenizer: Any, words: list[str]) -> al.PromptBatch:
    """The prompts from the tokens of their parts; the tokenizer of the tests adds no BOS."""

    def tokens_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    shown, positions = list[int](), list[int]()
    for x, y in SHOWN:
        shown += tokens_of(f"{x} ->")
        positions.append(len(shown))
        shown += tokens_of(f" {y.strip()}") + tokens_of("\n")
    rows = [torch.tensor([*shown, *tokens_of(f"{x} ->")]) for x, _ in ASKED]
    return al.PromptBatch.from_positions(
        pad_sequence(rows, batch_first=True),
        attention_mask=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True) > 0,
        label_positions=[positions] * len(ASKED),
        label_classes=[[words.index(f" {y.strip()}") for _, y in SHOWN]] * len(ASKED),
        label_token_ids=[tokens_of(word)[0] for word in words],
        gold=[words.index(f" {y}") for _, y in ASKED],
    )


@pytest.mark.filterwarnings("ignore:in 1 of 1 sets")
def test_numbers_are_those_of_positions_given_by_hand(exact_gpt2: Any) -> None:
    [batch] = al.build_pairs(exact_gpt2, SHOWN, ASKED)
    words = [" cold", " small", " down", " slow", " new", " right"]
    hand, order = by_hand(exact_gpt2.tokenizer, words), batch.index.argsort()
    assert batch.labels == tuple(words)
    for name in ("label_positions", "label_classes", "attention_mask", "gold", "target_positions"):
        assert torch.equal(getattr(batch, name)[order], getattr(hand, name)), name
    assert torch.equal((batch.tokens * batch.attention_mask)[order], hand.tokens)
    asked = [al.SaliencyFlows(), al.AttentionAUCROC(), al.Accuracy()]
    ours, theirs = (al.run(exact_gpt2, [each], asked, **QUIET) for each in (batch, hand))
    for name, record in ours.items():
        assert_same(record, theirs[name], 1e-9)


def test_each_seed_draws_pairs_and_all_batches_have_the_same_words(gpt2: Any) -> None:
    batches: Any = al.sample_pairs(gpt2, [*SHOWN, *ASKED[:2]], queries=2, shots=3, seeds=(1, 2))
    assert len({batch.labels for batch in batches}) == 1
    sets = torch.cat([batch.demonstrations_id for batch in batches])
    assert sets.unique(return_counts=True)[1].tolist() == [2, 2]
    for batch in batches:
        for gold, shown in zip(batch.gold.tolist(), batch.label_classes.tolist(), strict=True):
            assert gold not in shown and len(shown) == 3


def test_white_space_of_a_template_is_kept(gpt2: Any) -> None:
    [batch] = al.build_pairs(gpt2, SHOWN[:2], ASKED[:1], "{x}:{y}; ")
    text = gpt2.tokenizer.decode(batch.tokens[0])
    assert text == "hot:cold; big: small; old:" and batch.labels == ("cold", " small", "new")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: al.build_pairs(m, SHOWN, ASKED, "{text} {y}"), PromptError, "has {x} and then"),
        (lambda m: al.build_pairs(m, SHOWN, ASKED, "{y} {x}"), PromptError, "has {x} and then"),
        (lambda m: al.build_pairs(m, [], ASKED), PromptError, "no demonstration for the labels"),
        (lambda m: al.sample_pairs(m, "animals"), DataError, "antonyms, capitals, plurals, past"),
        (lambda m: al.sample_pairs(m, SHOWN, queries=3, shots=2), DataError, "there are 4 pairs"),
        (lambda m: al.sample_pairs(m, "past", seeds=[]), DataError, "different whole numbers"),
    ],
)
def test_what_cannot_be_written_is_refused(gpt2: Any, call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(gpt2)


def test_bundled_pairs_differ_in_both_words() -> None:
    path = Path(al.__file__).parent / "data" / "pairs.toml"
    for name, pairs in tomllib.loads(path.read_text("utf-8")).items():
        for words in zip(*pairs, strict=True):
            assert len({*words}) == len(pairs) >= 30, name
