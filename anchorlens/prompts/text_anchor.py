"""Prompts whose demonstrations have empty texts, a baseline of the paper's Table 2."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..system.arguments import checked
from .batch import PromptBatch
from .build import build_prompts
from .examples import Example
from .tasks import Task


@checked
def text_anchor_prompts(
    tokenizer: Any,
    task: Task,
    demonstrations: Sequence[Example],
    queries: Sequence[Example],
    *,
    batch_size: int = 8,
) -> list[PromptBatch]:
    r"""Prompts whose demonstrations have empty texts (Text_anchor): labels have nothing to gather.

    "Review:\nSentiment: Negative\n...": the space before a text is left out too, as in the
    published code; queries do not change. Compare with ``target_logits`` and ``loyalty``.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        task: Template, label words and separator.
        demonstrations: Their labels count, their texts do not.
        queries: As in ``build_prompts``.
        batch_size: Prompts in a batch, at most.

    Examples:
        >>> bare = al.text_anchor_prompts(model.tokenizer, task, demos, [al.Example("Who?", 3)])
        >>> len(bare[0].label_positions[0]) == len(demos)
        True
    """
    before, _, after = task.template.partition("{text}")
    stripped = before.rstrip(" ")
    space = before[len(stripped) :]
    bare = replace(task, template=stripped + "{text}" + after)
    empty = [replace(demonstration, text="") for demonstration in demonstrations]
    spaced = [replace(query, text=space + query.text) for query in queries]
    return build_prompts(tokenizer, bare, empty, spaced, batch_size=batch_size)
