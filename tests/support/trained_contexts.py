"""Short trainings of contexts, and records of them, for tests."""

from typing import Any

import torch
from tiny_models import questions

import anchorlens as al


def split(model: Any, **options: Any) -> tuple[list[al.PromptBatch], list[al.PromptBatch]]:
    """Eight training and four held-out queries, in batches of four."""
    batches = questions(model, 12, batch_size=4, **options)
    return batches[:2], batches[2:]


def trained(model: Any, **options: Any) -> al.PrefixContext:
    """A prefix after four steps, of three positions or from a start; checks after two and four."""
    training, held_out = split(model)
    settings: dict[str, Any] = {"steps": 4, "check_every": 2, "progress": False}
    settings |= {} if "start" in options else {"length": 3}
    return al.train_prefix(
        model,
        options.pop("batches", training),
        held_out=options.pop("held_out", held_out),
        **(settings | options),
    )


def same(ours: al.PrefixContext, theirs: al.PrefixContext) -> bool:
    """Whether two contexts have the same bits and the same record of their training."""
    pairs = zip(
        (*ours.prefix.keys, *ours.prefix.values, ours.tokens, *curves(ours)),
        (*theirs.prefix.keys, *theirs.prefix.values, theirs.tokens, *curves(theirs)),
        strict=True,
    )
    return all(torch.equal(*pair) for pair in pairs)


def curves(context: al.PrefixContext) -> list[torch.Tensor]:
    return [] if context.training is None else [*context.training.tensors().values()]
