"""The first token of each label word after a query, where the model predicts it.

A tokenizer reads the end of a query and the label word together: "stage 1" and the label "1" become
"stage 11". So every query is tried with every word, in one call, without its long demonstrations.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ..errors import PromptError
from ..system.warn import warn_user
from .examples import Example
from .label_positions import WrittenPrompt, encode
from .tasks import Task


def query_label_tokens(
    tokenizer: Any,
    task: Task,
    prompts: Sequence[WrittenPrompt],
    sets: Sequence[Sequence[Example]],
    queries: Sequence[Example],
) -> list[list[int]]:
    """The first token of each label word, by class; it must be the same after all queries."""
    words = [*chain.from_iterable(task.words)]
    written = _written_words(tokenizer, task, words, sets, queries)
    after = _after_all_queries(tokenizer, task, words, written, prompts)
    word_of: dict[int, str] = {}
    for word, token in zip(written, after[0], strict=True):
        if token in word_of:
            name = tokenizer.convert_ids_to_tokens(token)
            raise PromptError(
                f"labels {word_of[token]!r} and {word!r} have the same first token {name!r}, "
                "so they cannot be told apart at the target position; choose other label words"
            )
        word_of[token] = word
    _warn_of_vague(tokenizer, word_of)
    for index, tokens in enumerate(after):
        for word, expected, got in zip(words, after[0], tokens, strict=True):
            if expected != got:
                names = tokenizer.convert_ids_to_tokens([expected, got])
                raise PromptError(
                    f"label word {word!r} begins with the token {names[0]!r} after query 0 "
                    f"({prompts[0].end[-20:]!r}), but with {names[1]!r} after query {index} "
                    f"({prompts[index].end[-20:]!r}); end the template before {{label}} with a "
                    "word or a colon, so that all queries end alike, or leave one of the two out"
                )
    of_word = iter(after[0])
    return [[next(of_word) for _ in words_of_class] for words_of_class in task.words]


def _warn_of_vague(tokenizer: Any, word_of: Mapping[int, str]) -> None:
    """Warn of words whose first token begins other words too: a blank, bytes, a few letters."""
    words = [word.strip() for word in word_of.values()]
    vague = list[str]()
    for token, word in zip(word_of, words, strict=True):
        begin = tokenizer.decode([token]).strip()
        others = [other for other in words if other != word]
        if begin != word and ("\ufffd" in begin or any(o.startswith(begin) for o in others)):
            vague.append(f"{word!r} by {tokenizer.convert_ids_to_tokens(token)!r}")
    if vague:
        warn_user(
            f"label words are scored by their first token: {', '.join(vague)}. Such a token (a "
            "blank, a part of a letter, or the beginning of another label word) is as likely as "
            "all texts that begin so; choose label words whose first token is theirs alone"
        )


def _written_words(
    tokenizer: Any,
    task: Task,
    words: Sequence[str],
    sets: Sequence[Sequence[Example]],
    queries: Sequence[Example],
) -> list[str]:
    """The words as they stand after the queries, each tried with one word: templates take long."""
    written = [task.written_word(tokenizer, sets[0], queries[0].text, word) for word in words]
    for index, (demos, query) in enumerate(zip(sets, queries, strict=True)):
        k = index % len(words)
        again = task.written_word(tokenizer, demos, query.text, words[k])
        if again != written[k]:
            raise PromptError(
                f"the chat template writes label word {words[k]!r} as {again!r} after "
                f"query {index}, but as {written[k]!r} after query 0; leave one out, or give "
                "another template (options={'chat_template': '...'})"
            )
    for demos, query in zip(sets, queries, strict=True):
        task.check_asking(tokenizer, demos, query.text)
    return written


def _after_all_queries(
    tokenizer: Any,
    task: Task,
    words: Sequence[str],
    written: Sequence[str],
    prompts: Sequence[WrittenPrompt],
) -> list[list[int]]:
    """The first token of each word after each query."""
    texts = [prompt.end + word for prompt in prompts for word in ("", *written)]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
    short = iter(encoded["input_ids"])
    after = []
    for index, prompt in enumerate(prompts):
        alone, *longer = (next(short) for _ in ("", *written))
        # The demonstrations are left out where the tokens of the query do not depend on them. The
        # first token may, because it begins the text here: some tokenizers put a space there.
        if len(alone) < 2 or prompt.tokens[1 - len(alone) :] != alone[1:]:
            alone = prompt.tokens
            how: dict[str, Any] = {"adds_special_tokens": task.adds_special_tokens}
            how["as_text"] = prompt.as_text
            longer = [encode(tokenizer, prompt.text + word, **how)[0] for word in written]
        for word, ids in zip(words, longer, strict=True):
            if len(ids) == len(alone) or ids[: len(alone)] != alone:
                same = [a == b for a, b in zip(alone, ids, strict=False)]
                start = same.index(False) if False in same else len(ids) - 1
                raise PromptError(
                    f"query {index} ends in {prompt.end[-20:]!r}, and label word {word!r} merges "
                    f"with this end to {tokenizer.convert_ids_to_tokens(ids[start:])}, so that "
                    "the label would not follow the last token of the query; end the template "
                    "before {label} with a word or a colon and without a space, begin the label "
                    "words with a space, or leave the query out"
                )
        after.append([ids[len(alone)] for ids in longer])
    return after
