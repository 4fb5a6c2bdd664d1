"""Random configurations of models give the numbers of plain transformers, or a ModelError."""

import copy
import random
from dataclasses import replace
from typing import Any

import plain
import torch
from architecture_row import Architecture
from architectures import ROWS
from comparison import batch_of, class_attention, precise, tokenizer
from measures import difference, hooks_on
from sklearn.metrics import roc_auc_score
from tiny_models import with_dropout
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ModelError

LIMITS = {torch.float32: 2e-4, torch.float64: 1e-6}
LAYER = 0  # the layer in which label words are isolated


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
        with precise(dtype):
            prompts = plain.prompts_of(batch)
            in_order = [prompts[k] for k in batch.index.argsort()]  # as results are
            expected = reference(weights, in_order)
    except Exception:
        return  # transformers cannot make or run such a model
    if not all(value.isfinite().all() for value in expected.values()):
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
    with precise(dtype):
        computed = ours(model, batch)
    if not torch.equal(state, torch.get_rng_state()) or hooks_on(model) != hooks:
        raise AssertionError(f"{attempt}: the random state or the hooks are not as before")
    differences = {name: difference(computed[name], value) for name, value in expected.items()}
    too_large = {name: value for name, value in differences.items() if not value <= LIMITS[dtype]}
    if too_large:
        raise AssertionError(f"{attempt}: off by {too_large}")


def reference(weights: Any, prompts: list[plain.Prompt]) -> dict[str, Tensor]:
    """Plain transformers: flows of each prompt, AUCROC, and logits, clean and isolated."""
    observed = [plain.observe(weights, prompt) for prompt in prompts]
    flows = [
        [plain.flows_of(layer, prompt) for layer in observation.saliency]
        for prompt, observation in zip(prompts, observed, strict=True)
    ]
    clean = torch.stack([observation.logits for observation in observed])
    cut = []
    for prompt, observation in zip(prompts, observed, strict=True):
        factor = torch.ones_like(observation.attention)
        edges = plain.isolation_edges(prompt)
        factor[LAYER] *= (~edges).to(factor.dtype)
        cut.append(plain.with_pattern_times(weights, prompt, factor))
    scores = torch.stack(
        [
            class_attention(prompt, observation)
            for prompt, observation in zip(prompts, observed, strict=True)
        ]
    )
    predicted = clean[:, prompts[0].label_token_ids].argmax(1)
    return {
        "flows": torch.tensor(flows, dtype=torch.float64),
        "aucroc": aucroc(scores, predicted),
        "logits": clean,
        "isolated": torch.stack(cut),
    }


def aucroc(scores: Tensor, predicted: Tensor) -> Tensor:
    """AUCROC of each layer with scikit-learn, as in test_aucroc.py; 0 if it is undefined."""
    present = predicted.unique()
    values = []
    for layer in range(scores.shape[1]):
        of_classes = scores[:, layer][:, present].double()
        class_index = torch.searchsorted(present, predicted)
        if len(present) < 2:
            values.append(0.0)
        elif len(present) == 2:
            values.append(float(roc_auc_score(class_index == 1, of_classes[:, 1])))
        else:
            shares = (of_classes / of_classes.sum(1, keepdim=True)).numpy()
            values.append(
                float(roc_auc_score(class_index, shares, multi_class="ovo", average="macro"))
            )
    # Plus 1, so that a relative difference from 0 is defined.
    return torch.tensor(values, dtype=torch.float64) + 1.0


def ours(model: Any, batch: al.PromptBatch) -> dict[str, Tensor]:
    quiet: dict[str, Any] = {"progress": False}
    metrics: list[al.Metric] = [al.SaliencyFlows(), al.AttentionAUCROC()]
    results = al.run(model, [batch], metrics, resamples=0, **quiet)

    def isolated(batch: al.PromptBatch) -> Any:
        return al.isolate_labels(model, batch, al.Site([LAYER], renormalize=False))

    return {
        "flows": results["saliency_flows"].per_prompt[..., :3].double(),
        "aucroc": results["attention_aucroc"].aucroc.nan_to_num().double() + 1.0,
        "logits": al.target_logits(model, [batch], **quiet),
        "isolated": al.target_logits(model, [batch], hooks=isolated, **quiet),
    }
