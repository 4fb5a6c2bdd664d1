"""Random configurations of models give the numbers of plain transformers, or a ModelError."""

import copy
import random
from dataclasses import replace
from typing import Any

import torch

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.models.model_state import frozen_in_eval_mode
from tests.references.architecture_row import Architecture
from tests.references.architectures import ROWS
from tests.references.comparison import batch_of, differences, precise, reference_of, tokenizer
from tests.support.measures import hooks_on
from tests.support.tiny_models import with_dropout

LIMITS = {torch.float32: 2e-4, torch.float64: 1e-6}


def configured(rng: random.Random) -> tuple[Architecture, dict[str, Any]]:
    """A row of the matrix with other numbers of layers and heads, and another window."""
    row = rng.choice(ROWS)
    options = dict(row.options)
    layers, heads = rng.randint(1, 4), rng.choice([1, 2, 3, 4, 6])
    size = rng.choice([4, 6, 8, 10])
    changes: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": heads}
    changes["hidden_size"] = heads * size
    for name in ("layer_types", "no_rope_layers"):
        if name in options:
            changes[name] = [rng.choice(options[name]) for _ in range(layers)]
    if "attention_types" in options:
        changes["attention_types"] = (
            [[["global", "local"], layers // 2]] if layers % 2 == 0 else [[["global"], layers]]
        )
    for name in ("num_key_value_heads", "num_kv_heads"):
        if name in options:
            changes[name] = rng.choice([k for k in range(1, heads + 1) if heads % k == 0])
    if "head_dim" in options:
        changes["head_dim"] = rng.choice([4, 6, 8, 12])
    for name in ("sliding_window", "window_size", "attention_chunk_size", "local_attention"):
        if isinstance(options.get(name), int):
            changes[name] = rng.choice([4, 10, 16, 64])
    if "word_embed_proj_dim" in options:
        changes["word_embed_proj_dim"] = changes["hidden_size"]
    return replace(row, options=options | changes), changes


def random_configurations(rng: random.Random) -> None:
    row, changes = configured(rng)
    dtype = rng.choice([torch.float32, torch.float32, torch.float64])
    side, training = rng.choice(["left", "right"]), rng.random() < 0.3
    attempt = f"{row.name}, {changes}, {str(dtype)[6:]}, {side}" + ", training" * training
    try:
        weights = row.build(len(tokenizer()), dtype)
        batch = batch_of(side)
        expected = reference_of(weights, batch, dtype)
    except Exception:
        return  # transformers cannot make or run such a model
    seen = [value for each in expected.observed for value in (each.logits, each.saliency)]
    if not all(value.isfinite().all() for value in (*seen, *expected.reweighted)):
        return
    training = training and dtype == torch.float32
    source = copy.deepcopy(weights)
    try:
        with_drop = with_dropout(source, 0.3).train() if training else source
        with precise(dtype):
            model = al.load_model(with_drop, tokenizer=tokenizer())
    except ModelError as error:
        if training and "another model" in str(error):
            raise AssertionError(f"{attempt}: {error}") from error
        return
    state = torch.get_rng_state()
    hooks = hooks_on(model)
    with precise(dtype), frozen_in_eval_mode(model):
        measured = differences(model, batch, expected)
    assert torch.equal(state, torch.get_rng_state()) and hooks_on(model) == hooks, (
        f"{attempt}: the random state or the hooks are not as before"
    )
    too_large = {name: value for name, value in measured.items() if not value <= LIMITS[dtype]}
    assert not too_large, f"{attempt}: off by {too_large}"
