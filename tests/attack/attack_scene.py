"""The material of the attack: a model, its prompts and results, and wrong values."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import anchorlens as al
from tests.support.tiny_models import byte_level_tokenizer, questions, tiny_gpt2
from tests.support.unchanged import changed, everything_of

NAN, INF = float("nan"), float("inf")
QUIET: dict[str, Any] = {"progress": False}
QUICK = QUIET | {"resamples": 2}


class Scene:
    def __init__(self) -> None:
        self.tokenizer = byte_level_tokenizer()
        self.model = al.load_model(tiny_gpt2(len(self.tokenizer)), tokenizer=self.tokenizer)
        self.batches = questions(self.model, count=5, batch_size=3)
        self.batch = self.batches[0]
        self.examples = al.load_examples("questions")
        self.task = al.TASKS["trec"]
        self.demos = al.sample_demonstrations(self.examples)
        self.queries = [example for example in self.examples if example not in self.demos][:4]
        metrics: list[al.Metric] = [al.SaliencyFlows(), al.AnchorDistances(directions=2)]
        self.results = al.run(self.model, self.batches, metrics, **QUICK)
        self.prefix = al.train_prefix(
            self.model,
            self.batches[:1],
            al.contexts.Training(steps=0, **QUIET),
            length=2,
            held_out=self.batches[1:],
        )

    def check(self, before: dict[str, Any], attempt: str) -> None:
        """Raise an error if an attempt has changed something, whatever came of it."""
        changes = changed(before, self.state())
        assert not changes, f"{attempt}: the model is not as before: {changes[:3]}"

    def state(self) -> dict[str, Any]:
        """Everything that a call must not change; a pass of the model would take longer."""
        return everything_of(self.model)


@cache
def scene() -> Scene:
    return Scene()


def odd_batches(batch: al.PromptBatch) -> list[al.PromptBatch]:
    """Invalid batches: of another vocabulary, shape or type, or out of range."""

    tokens, positions, targets = batch.tokens, batch.label_positions, batch.target_positions
    unknown = al.prompts.Verbalizer((batch.label_token_ids[:, None] + 100_000).tolist())
    wrong: dict[str, list[Any]] = {
        "tokens": [tokens + 100_000, tokens - 1000, tokens[:, :-1], tokens.float(), tokens[:0]],
        "attention_mask": [torch.zeros_like(batch.attention_mask), batch.attention_mask[:1]],
        "label_positions": [positions + 10_000, positions - 10_000, positions[:, :0]],
        "label_classes": [batch.label_classes + 100, batch.label_classes[:, :1]],
        "target_positions": [targets + 1000, torch.zeros_like(targets), targets[:1]],
        "verbalizer": [unknown, None, batch.label_token_ids],
        "first_query": [7, -1],
    }
    wrong["tokens"].append(tokens[0])
    wrong["label_positions"] += [positions.float(), positions[:1]]
    return [replace(batch, **{name: value}) for name in wrong for value in wrong[name]]


def odd_hooks() -> list[Any]:
    """Invalid values for ``hooks``, and hooks that break the run."""
    point = "blocks.0.attn.hook_pattern"

    def of(function: Any, name: Any = point) -> Any:
        return lambda batch: [(name, function)]

    return [
        [],
        lambda batch: None,
        lambda batch: 3,
        lambda batch: [3],
        lambda batch: [(point,)],
        lambda batch: [(point, None)],
        lambda batch: [(point, 3)],
        of(lambda tensor, hook: None, "blocks.99.attn.hook_pattern"),
        of(lambda tensor, hook: None, "nope"),
        of(lambda tensor, hook: None, 3),
        of(lambda tensor, hook: tensor[:, :1, :1, :1]),
        of(lambda tensor, hook: tensor[:0]),
        of(lambda tensor, hook: tensor * NAN),
        of(lambda tensor, hook: 3),
        of(lambda tensor, hook: "text"),
        of(lambda tensor: tensor),
        of(lambda tensor, hook: tensor.double().to(torch.int32)),
    ]


def odd_losses() -> list[Any]:
    return [
        lambda logits, batch: None,
        lambda logits, batch: 0.5,
        lambda logits, batch: logits.sum(),
        lambda logits, batch: logits,
        lambda logits, batch: logits[:, 0].detach(),
        lambda logits, batch: logits[:1, 0] if len(batch) > 1 else logits,
        lambda logits, batch: logits[:, 0] * NAN,
        lambda logits, batch: torch.ones(len(batch)),
        lambda logits: logits[:, 0],
        "loss",
        3,
    ]
