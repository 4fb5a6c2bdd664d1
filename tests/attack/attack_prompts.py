"""Random tasks and texts on many kinds of tokenizers: right positions, or an error with a reason.

The oracle does not use offsets. It reads what each token spells, and finds that in the prompt.
"""

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import anchorlens as al
from anchorlens.errors import PromptError
from tests.attack.attack_tokenizers import KINDS, made
from tests.support.plain_prompts import Row, pieces, rows

SIMPLE_LABELS = [" Positive", " Negative", " yes", " no", " Table", " 不好", " 7", " Ünï", " A b"]
ODD_LABELS = [
    *("Positive", "Pos", "no", "不", "😀", " 👩‍👩‍👧", "é", "e\u0301", "\u0301x", " שלום", "مرحبا"),
    *(" New York", "\nOK", "OK\n", "OK ", "  two", "<mask>", "<|user|>", " <end>", "ﬁt", "İi", "ß"),
    *("ΣΑΣ", "\u200dj", "\u00a0x", "123", "1", "-", "...", "Å", "Å", "한", "ㅎ", "\tx", "\ufeffa"),
    *("\u2028b", "x y z", "<s>", "[CLS]", "<unk>", "½", "a\u0300\u0301", "\u202eabc", "▁yes", "'s"),
]
SIMPLE_BETWEEN = ["\nSentiment:", " ->", " =", "\nAnswer Type:", " |"]
ODD_FORMAT = [
    *("", " ", "\n", ": ", "Review: ", "(", ")", "|", "###", "\n\n", "\u0301", "  ", "{", "}"),
    *("😀", "<|user|>", "<end>", "\t", "\r\n", "«", "x", "\u200b", "Sentiment: Positive", "e"),
    *("▁", "\u202e"),
]
PARTS = [
    *("", " ", "\n", " Positive", "Negative\n", "Sentiment:", "{text}{label}", "😀é", "e\u0301"),
    *("a fine film", "who? ", "naïve ", "שלום", " 日本語", "\u0301", "👩‍👩‍👧", "<mask>", "  "),
    *("x" * 40, "Å", "½", "ﬁ", "İ", "\u00a0", "▁", "\ufeff", "<s>", "[SEP]", "'s", "12345"),
    *("\t", "ΑΣ"),
]
# Their tokens spell the prompt byte for byte. For other kinds spaces are not compared.
EXACT = {
    *("byte-level", "byte-level, BOS", "byte-level, whole offsets", "byte-level, GPT-4's words"),
    *("byte-level, no words", "sentencepiece-like"),
}


class Case(NamedTuple):
    kind: str
    task: al.Task
    demos: list[al.Example]
    queries: list[al.Example]

    def __str__(self) -> str:
        return f"{self.kind}: {self.task!r}, demos={self.demos!r}, queries={self.queries!r}"


def characters(rng: random.Random) -> str:
    blocks = [(32, 127), (32, 127), (160, 0x250), (0x300, 0x370), (0x370, 0x400), (0x5D0, 0x5EA)]
    blocks += [(0x4E00, 0x4F00), (0xAC00, 0xAD00), (0x1F600, 0x1F640), (0x2000, 0x2070)]
    blocks += [(0xFB00, 7)]
    low, high = rng.choice(blocks)
    return "".join(chr(rng.randrange(low, max(high, low + 7))) for _ in range(rng.randrange(6)))


def text(rng: random.Random) -> str:
    count = range(rng.randrange(5))
    return "".join(rng.choice(PARTS) if rng.random() < 0.6 else characters(rng) for _ in count)


def piece(rng: random.Random, pool: Sequence[str]) -> str:
    drawn = rng.choice(pool) + (rng.choice(pool) if rng.random() < 0.3 else "")
    return drawn if rng.random() < 0.8 else drawn + characters(rng)


def task_of(rng: random.Random) -> al.Task:
    """Half of the tasks are usual. In the others each part is odd with probability 0.35."""
    odd = 0.0 if rng.random() < 0.5 else 0.35

    def draw(simple: Sequence[str], strange: Sequence[str]) -> str:
        return piece(rng, strange) if rng.random() < odd else rng.choice(simple)

    before = draw(["", "Review: ", "Q: ", "("], ODD_FORMAT)
    between = draw(SIMPLE_BETWEEN, ODD_FORMAT)
    after = draw(["", "", "|", "."], ODD_FORMAT)
    labels = [draw(SIMPLE_LABELS, ODD_LABELS) for _ in range(rng.randint(2, 4))]
    return al.Task(
        before + "{text}" + between + "{label}" + after,
        labels,
        separator=draw(["\n", "\n\n", "\n###\n"], ODD_FORMAT),
        instructions=draw(["", "", "Classify.\n\n"], ODD_FORMAT),
    )


def case_of(rng: random.Random) -> Case:
    kind, task = rng.choice([*KINDS]), task_of(rng)
    classes = [*range(len(task.labels))] * rng.randint(1, 2)
    rng.shuffle(classes)
    demos = [al.Example(text(rng), label) for label in classes]
    queries = [al.Example(text(rng), rng.choice(classes)) for _ in range(rng.randint(1, 4))]
    return Case(kind, task, demos, queries)


def fuzzed_prompts(rng: random.Random) -> None:
    try:
        case = case_of(rng)
        tokenizer = made(case.kind)
        alone = built(case, batch_size=1)
    except PromptError:
        return
    try:
        for query, row in zip(case.queries, rows(alone), strict=True):
            check_row(tokenizer, case, query, row, alone[0].label_token_ids.tolist())
        check_batches(case, alone, rng.randint(2, 4))
    except AssertionError as error:
        raise AssertionError(f"{error}\n{case}") from error


def built(case: Case, **options: Any) -> list[al.PromptBatch]:
    return al.build_prompts(made(case.kind), case.task, case.demos, case.queries, **options)


def check_batches(case: Case, alone: list[al.PromptBatch], size: int) -> None:
    for side in ("left", "right"):
        batches = built(case, batch_size=size, padding_side=side)
        assert rows(batches) == rows(alone), f"batches of {size}, padded on the {side}, differ"


def check_row(
    tokenizer: Any, case: Case, query: al.Example, row: Row, label_token_ids: list[int]
) -> None:
    parts = pieces(case.task, case.demos, query.text)
    whole = "".join(part for _, part, _ in parts)
    assert row.tokens == tokenizer(whole)["input_ids"], "the tokens are not those of the prompt"
    assert row.target == len(row.tokens) - 1, "the target is not the last token"
    assert row.segments[-1] == "target" and row.segments.count("target") == 1, "segments: target"
    assert len(row.segments) == len(row.tokens), "the segments do not cover the prompt"
    inside = {k for first, last, _ in row.words for k in range(first, last + 1)}
    labelled = {k for k, segment in enumerate(row.segments) if segment == "label"}
    assert labelled == inside, f"label segments at {labelled}, label words at {inside}"
    check_first_tokens(tokenizer, case.task, whole, row, label_token_ids)
    speller, before, words = Speller(case.kind), "", iter(row.words)
    assert speller.spell(row.tokens, whole), f"the oracle cannot spell {whole!r}"
    for _, part, label in parts:
        if label >= 0:
            first, last, label_class = next(words)
            assert label_class == label, f"class {label_class} instead of {label}"
            cut = [speller.normal(before), speller.normal(before + part)]
            ok = speller.normal(whole).startswith(cut[1]) and cut[1].startswith(cut[0])
            assert ok, f"normalised across the border of {part!r}"
            assert speller.spells(row.tokens[:first], cut[0]), f"tokens before {part!r}"
            assert speller.spells(row.tokens[first : last + 1], cut[1][len(cut[0]) :]), (
                f"tokens {row.tokens[first : last + 1]} of {part!r}"
            )
        before += part
    assert next(words, None) is None, "there are more label words than demonstrations"


def check_first_tokens(
    tokenizer: Any, task: al.Task, whole: str, row: Row, label_token_ids: list[int]
) -> None:
    for word, token in zip(task.first_words, label_token_ids, strict=True):
        tokens = tokenizer(whole + word)["input_ids"]
        after = tokens[len(row.tokens) :]
        assert tokens[: len(row.tokens)] == row.tokens, f"{word!r} changes the end of the prompt"
        assert after[0] == token, (
            f"{word!r} begins with {tokenizer.convert_ids_to_tokens(after[0])!r} after the prompt, "
            f"not with {tokenizer.convert_ids_to_tokens(token)!r}"
        )


class Speller:
    """Compares the bytes that tokens spell; leaves spaces out if the tokens do not spell them.

    Unknown tokens may spell anything.
    """

    def __init__(self, kind: str) -> None:
        self.tokenizer, self.kind = made(kind), kind
        self.exact = kind in EXACT
        self.of_bytes = kind.startswith("byte-level")
        self.core: Any = self.tokenizer.backend_tokenizer
        self.falls_back = kind.startswith(("sentencepiece", "Llama"))
        added = self.core.get_added_tokens_decoder()
        self.added = {number: str(token.content) for number, token in added.items()}

    def normal(self, written: str) -> bytes:
        """The bytes that a text becomes. Marks such as <s> are split off before normalising."""
        marks = "|".join(re.escape(name) for name in self.added.values())
        parts = re.split(f"({marks})", written) if marks else [written]
        if self.core.normalizer is not None:
            rule = self.core.normalizer.normalize_str
            parts = [part if k % 2 else rule(part) for k, part in enumerate(parts)]
        if not self.of_bytes:
            parts = [part.replace("▁", " ") for part in parts]
        return self.squashed("".join(parts))

    def squashed(self, written: str) -> bytes:
        if self.exact:
            return written.encode()
        if self.of_bytes or self.falls_back:
            return written.encode().translate(None, SPACES)
        return re.sub(r"[\s\x1c-\x1f\u200b]+", "", written).encode()

    def spell(self, tokens: list[int], written: str) -> bool:
        return self.spells(tokens, self.normal(written))

    def spells(self, tokens: list[int], expected: bytes) -> bool:
        ends = {0}  # positions at which the tokens read so far may end
        for token in tokens:
            if token == self.tokenizer.unk_token_id:
                ends = {*range(min(ends), len(expected) + 1)}
            else:
                spelled, may_be_added = self.spelled(token)
                if may_be_added:
                    ends = {further for end in ends for further in past_spaces(expected, end)}
                further = {end + len(spelled) for end in ends if expected.startswith(spelled, end)}
                ends = further | ends if may_be_added else further
            if not ends:
                return False
        return len(expected) in ends

    def spelled(self, token: int) -> tuple[bytes, bool]:
        """The bytes of a token, and whether the tokenizer may have added it, like a BOS."""
        name = str(self.tokenizer.convert_ids_to_tokens(token))
        if byte := re.fullmatch("<0x(..)>", name):
            return bytes.fromhex(byte[1]).translate(None, b"" if self.exact else SPACES), False
        if token in self.added:
            return self.squashed(name), True
        if self.of_bytes:
            data = bytes(BYTE_OF[symbol] for symbol in name)
            return data.translate(None, b"" if self.exact else SPACES), False
        name = name.removeprefix("##").removesuffix("</w>").replace("▁", " ")
        return self.squashed(name), False


SPACES = b" \t\n\r\x0b\x0c"


def past_spaces(written: bytes, end: int) -> list[int]:
    """Positions after none, some or all spaces at ``end``, because some marks take them in."""
    rest = written[end:].decode(errors="replace")
    count = len(rest) - len(rest.lstrip())
    return [end + len(rest[:k].encode()) for k in range(count + 1)]


def _bytes() -> dict[str, int]:
    """How byte-level tokenizers write each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + k): byte for k, byte in enumerate(rest)}


BYTE_OF = _bytes()
