"""The prompts of batches as plain lists, and the pieces of text that a prompt is made of."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

import anchorlens as al
from anchorlens.prompts.segment_names import PADDING, SEGMENTS


class Row(NamedTuple):
    """One prompt of a batch without its padding."""

    tokens: list[int]
    segments: list[str]
    words: list[tuple[int, int, int]]  # first token, last token, class
    query_start: int
    target: int
    gold: int | None
    demonstrations: int

    def inside(self, segment: str) -> list[int]:
        """The tokens of a segment."""
        both = zip(self.tokens, self.segments, strict=True)
        return [token for token, name in both if name == segment]


def rows(batches: Sequence[al.PromptBatch]) -> list[Row]:
    """The prompts of all batches in the order of their queries."""
    prompts = {}
    for batch in batches:
        for row, mask in enumerate(batch.attention_mask):
            start = int(mask.long().argmax())
            words = torch.stack([batch.label_positions, batch.label_ends, batch.label_classes], -1)
            assert mask[start : start + int(mask.sum())].all()
            assert ((batch.segments[row] == PADDING) == ~mask).all()
            prompts[int(batch.index[row])] = Row(
                tokens=batch.tokens[row, mask].tolist(),
                segments=[SEGMENTS[segment] for segment in batch.segments[row, mask]],
                words=[(p - start, end - start, k) for p, end, k in words[row].tolist()],
                query_start=int(batch.query_start[row]) - start,
                target=int(batch.target_positions[row]) - start,
                gold=None if batch.gold is None else int(batch.gold[row]),
                demonstrations=int(batch.demonstrations_id[row]),
            )
    assert sorted(prompts) == [*range(len(prompts))]
    return [prompts[index] for index in sorted(prompts)]


def pieces(task: al.Task, demos: list[al.Example], query: str) -> list[tuple[str, str, int]]:
    before, between, after = re.fullmatch(  # type: ignore[union-attr]
        r"(.*)\{text\}(.*)\{label\}(.*)", task.template, re.DOTALL
    ).groups()
    parts = [("other", task.instructions, -1)]
    for demo in demos:
        assert demo.label is not None
        parts += [("format", before, -1), ("text", demo.text, -1), ("format", between, -1)]
        parts += [("label", task.first_words[demo.label], demo.label)]
        parts += [("format", after + task.separator, -1)]
    return [*parts, ("query", before + query + between, -1)]
