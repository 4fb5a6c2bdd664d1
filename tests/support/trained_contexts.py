"""Short trainings of contexts, and records of them, for tests."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import anchorlens as al
from tests.support.tiny_models import questions


def split(model: Any, **options: Any) -> tuple[list[al.PromptBatch], list[al.PromptBatch]]:
    """Eight training and four held-out queries, in batches of four."""
    batches = questions(model, 12, batch_size=4, **options)
    return batches[:2], batches[2:]


def halves(model: Any, **options: Any) -> tuple[list[al.PromptBatch], list[al.PromptBatch]]:
    """Four training and four held-out queries, a batch of each."""
    batches = questions(model, 8, batch_size=4, **options)
    return batches[:1], batches[1:]


def trained(model: Any, **options: Any) -> al.contexts.PrefixContext:
    """A prefix after four steps, of three positions or from a start; checks after two and four."""
    training, held_out = split(model)
    others = {} if "start" in options else {"length": 3}
    given = {"held_out": held_out, "steps": 4, "check_every": 2, **others, **options}
    return al.train_prefix(model, given.pop("batches", training), **with_training(given))


def with_options(train: Callable[..., Any]) -> Callable[..., Any]:
    """A trainer that takes the options of ``al.contexts.Training`` as its own."""
    return lambda model, batches, **options: train(model, batches, **with_training(options))


train_prefix = with_options(al.train_prefix)
train_soft_prompt = with_options(al.train_soft_prompt)
train_hard_prompt = with_options(al.train_hard_prompt)
train_reweighting = with_options(al.contexts.train_reweighting)


NOISY = replace(al.contexts.hard_prompts.PEZ, noise=al.contexts.hard_prompts.Langevin(0.01))
# Each takes a model, training batches and held-out ones, and options of its trainer.
TRAINERS: dict[str, Any] = {
    "prefix": partial(train_prefix, length=2),
    "soft prompt": partial(train_soft_prompt, length=2),
    "hard prompt": partial(train_hard_prompt, length=2, start=[300], method=NOISY),
    "re-weighting": lambda model, batches, held_out, **options: train_reweighting(
        model, batches, **options
    ),
}
CONTEXTS = ["prefix", "soft prompt", "hard prompt"]


def with_training(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a trainer, of which those of ``al.contexts.Training`` are put into one."""
    names = {each.name for each in fields(al.contexts.Training)} & options.keys()
    training = al.contexts.Training(**{"progress": False} | {name: options[name] for name in names})
    others = {name: value for name, value in options.items() if name not in names}
    return {"training": training, **others}
