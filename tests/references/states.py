"""Raw hooks on one unpadded prompt at a time, in loops over heads and layers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import anchorlens as al
from tests.support.plain_prompts import rows


def alone(batches: Sequence[al.PromptBatch]) -> Iterator[tuple[Tensor, list[int], Any]]:
    """The tokens of each prompt, positions of its label words, and its class; by query."""
    for row in rows(batches):
        yield torch.tensor([row.tokens]), [first for first, _, _ in row.words], row.gold


def logits_at_end(model: Any, tokens: Tensor, hooks: Sequence[Any] = ()) -> Tensor:
    with torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=list(hooks))
    return logits[0, -1].double()


def state_of(model: Any, tokens: Tensor, name: str) -> Tensor:
    seen: list[Tensor] = []
    logits_at_end(model, tokens, [(name, lambda tensor, hook: seen.append(tensor[0].double()))])
    return seen[0]


def written(name: str, positions: Sequence[int], values: Tensor, head: int | None = None) -> Any:
    def write(tensor: Tensor, hook: Any) -> Tensor:
        tensor = tensor.clone()
        for position, value in zip(positions, values, strict=True):
            where = (0, position) if head is None else (0, position, head)
            tensor[where] = value.to(tensor.dtype)
        return tensor

    return name, write


def log_odds(logits: Tensor, token: int) -> Tensor:
    p = logits.softmax(-1)[token]
    return (p / (1 - p)).log()


def effects(
    model: Any, batches: Sequence[al.PromptBatch], outputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Changes of log-odds and of probability [prompt, layer, head]."""
    words, found = batches[0].label_token_ids.tolist(), []
    for tokens, _, gold in alone(batches):
        last = [tokens.shape[1] - 1]
        clean = log_odds(logits_at_end(model, tokens), words[gold])
        changed = torch.zeros(outputs.shape[:2], dtype=torch.double)
        for layer, of_layer in enumerate(outputs):
            for head, value in enumerate(of_layer):
                hook = written(f"blocks.{layer}.attn.hook_z", last, value[None], head)
                changed[layer, head] = log_odds(logits_at_end(model, tokens, [hook]), words[gold])
        found.append((changed - clean, changed.sigmoid() - clean.sigmoid()))
    odds, probabilities = zip(*found, strict=True)
    return torch.stack(odds), torch.stack(probabilities)


def mean_states(
    model: Any,
    batches: Sequence[al.PromptBatch],
    positions: Callable[..., Any],
    point: str = "hook_resid_post",
) -> Tensor:
    """What each layer gives out [layer, position, ...]; positions are of (tokens, label words)."""
    prompts, by_layer = [*alone(batches)], []
    for name in (f"blocks.{layer}.{point}" for layer in range(model.cfg.n_layers)):
        states = [state_of(model, tokens, name)[positions(tokens, w)] for tokens, w, _ in prompts]
        by_layer.append(torch.stack(states).mean(0))
    return torch.stack(by_layer)


def queries_alone(batches: Sequence[al.PromptBatch]) -> Iterator[tuple[Tensor, list[int], Any]]:
    """The tokens after the demonstrations, after BOS if there is one."""
    for row in rows(batches):
        tokens = row.tokens[: int(batches[0].begins_with_bos)] + row.tokens[row.query_start :]
        yield torch.tensor([tokens]), [], row.gold


def answers(
    model: Any,
    prompts: Iterator[tuple[Tensor, list[int], Any]],
    label_words: Tensor,
    hooks_of: Callable[..., Sequence[Any]] = lambda tokens, words: (),
) -> list[float]:
    """1 for each prompt whose true class has the likeliest label word, else 0."""
    return [
        float(logits_at_end(model, tokens, hooks_of(tokens, words))[label_words].argmax() == gold)
        for tokens, words, gold in prompts
    ]
