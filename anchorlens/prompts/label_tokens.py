"""The first token of each label word after a query, where the model predicts it.

A tokenizer reads the end of a query and the label word together: "stage 1" and the label "1" become
"stage 11". Whether it does depends on the query, so every query is tried.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from ..errors import PromptError
from .examples import Example
from .tasks import Task
from .tokens import encode


class LabelTokens:
    """The first token of each label word, which must be the same after all queries."""

    def __init__(self, tokenizer: Any, task: Task) -> None:
        self._tokenizer = tokenizer
        self._task = task
        self._words = [*chain.from_iterable(task.words)]
        self._written: list[str] = []  # the words as they stand after the first query
        self._first_end = ""
        self._tokens: list[int] = []

    @property
    def by_class(self) -> list[list[int]]:
        """The first tokens of the words of each class, once a query was added."""
        tokens = iter(self._tokens)
        return [[next(tokens) for _ in words] for words in self._task.words]

    def add(
        self,
        index: int,
        demos: Sequence[Example],
        query: str,
        *,
        text: str,
        tokens: list[int],
        end: str,
    ) -> None:
        """Check that each label word has its token after a query.

        Args:
            index: Index of the query, for errors.
            demos: Demonstrations of the query.
            query: Text of the query.
            text: The whole prompt.
            tokens: Tokens of the prompt.
            end: The end of the prompt, which belongs to the query.

        Raises:
            PromptError: A label word changes the tokens of the prompt, begins with another token
                than after the first query, or with that of another word.
        """
        if not self._tokens:
            self._written = [self._written_after(demos, query, word) for word in self._words]
            self._tokens = self._tokens_after(index, text, tokens, end)
            self._first_end = end
            self._check_different()
            return
        # A chat template is a program that is run for each query with one of the words, in turn:
        # to run it with every word takes longer than the model for conversations with many turns.
        k = index % len(self._words)
        written = self._written_after(demos, query, self._words[k])
        if written != self._written[k]:
            raise PromptError(
                f"the chat template writes label word {self._words[k]!r} as {written!r} after "
                f"query {index}, but as {self._written[k]!r} after query 0; leave one out, or give "
                "another template (in Python options={'chat_template': '...'})"
            )
        after = self._tokens_after(index, text, tokens, end)
        for word, expected, got in zip(self._words, self._tokens, after, strict=True):
            if expected != got:
                names = self._tokenizer.convert_ids_to_tokens([expected, got])
                raise PromptError(
                    f"label word {word!r} begins with the token {names[0]!r} after query 0 "
                    f"({self._first_end[-20:]!r}), but with {names[1]!r} after query {index} "
                    f"({end[-20:]!r}); end the template before {{label}} with a word or a colon, "
                    "so that all queries end alike, or leave one of the two out"
                )

    def _written_after(self, demos: Sequence[Example], query: str, word: str) -> str:
        return self._task.written_word(self._tokenizer, demos, query, word)

    def _tokens_after(self, index: int, text: str, tokens: list[int], end: str) -> list[int]:
        """The first token of each word after one query."""
        alone, *longer = self._tokenizer(
            [end, *(end + word for word in self._written)], add_special_tokens=False
        )["input_ids"]
        # The demonstrations are long, so they are left out where the tokens of the query do not
        # depend on them. The first token may, because it begins the text here: some tokenizers
        # put a space there.
        if len(alone) < 2 or tokens[1 - len(alone) :] != alone[1:]:
            alone = tokens
            special = self._task.adds_special_tokens
            longer = [
                encode(self._tokenizer, text + word, adds_special_tokens=special)[0]
                for word in self._written
            ]
        for word, ids in zip(self._words, longer, strict=True):
            if len(ids) == len(alone) or ids[: len(alone)] != alone:
                same = [a == b for a, b in zip(alone, ids, strict=False)]
                start = same.index(False) if False in same else len(ids) - 1
                raise PromptError(
                    f"query {index} ends in {end[-20:]!r}, and label word {word!r} merges with "
                    f"this end to {self._tokenizer.convert_ids_to_tokens(ids[start:])}, so that "
                    "the label would not follow the last token of the query; end the template "
                    "before {label} with a word or a colon and without a space, begin the label "
                    "words with a space, or leave the query out"
                )
        return [ids[len(alone)] for ids in longer]

    def _check_different(self) -> None:
        word_of: dict[int, str] = {}
        for word, token in zip(self._written, self._tokens, strict=True):
            if token in word_of:
                name = self._tokenizer.convert_ids_to_tokens(token)
                raise PromptError(
                    f"labels {word_of[token]!r} and {word!r} have the same first token {name!r}, "
                    "so they cannot be told apart at the target position; choose other label words"
                )
            word_of[token] = word
