"""Contexts as prefix-tuning adapters of peft: keys and values of every layer in a folder.

peft puts them before the tokens that it is given, which have the positions after the last key.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ModelError, PromptError, StoreError
from ..models.hooked import HookedModel, refuse_folded_value_biases
from ..models.kinds import config_of, is_bridge
from ..models.kv_cache import KeyValues
from ..models.load import ensure_prepared
from ..models.model_state import frozen_in_eval_mode
from ..prompts.batch import PromptBatch, check_batch
from ..system.arguments import checked
from ..system.digest_file import read_tensors, to_bytes_with_digest
from ..system.files import bytes_of, kind_of, parsed, write_atomically, write_text
from ..system.warn import warn_user
from .compressed import CompressedContext, cache_of_tokens, refuse_gaps
from .embedded import prefix_of_tokens, token_ids
from .prefix import PrefixContext
from .protocol import bos_of, check_queries, model_identity, refuse_another_model
from .stored import key_values_at_start

_CONFIG = "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
_TENSOR = "prompt_embeddings"
# The settings of prefix tuning in peft 0.21. A projection was applied before it was stored.
_KNOWN = {
    *("auto_mapping", "base_model_name_or_path", "encoder_hidden_size", "inference_mode"),
    *("init_weights", "modules_to_save", "num_attention_heads", "num_layers"),
    *("num_transformer_submodules", "num_virtual_tokens", "peft_type", "peft_version"),
    *("prefix_projection", "revision", "task_type", "token_dim"),
}


@checked
def context_to_peft(
    context: PrefixContext | CompressedContext, model: HookedModel, folder: str | Path
) -> Path:
    """Write a context as a prefix-tuning adapter, which peft loads on the transformers model.

    ``PeftModel.from_pretrained(transformers_model, folder)`` with the same weights then gives the
    logits of the context. The context holds the BOS, so give peft the tokens of the query without
    one (``tokenizer(query, add_special_tokens=False)``).

    The file of weights holds one tensor, ``prompt_embeddings``, in float32, with a row for each
    position: for each layer the keys of all cached heads, then their values. It needs peft, which
    ``anchorlens[peft]`` installs.

    Args:
        context: Its keys stand at the positions 0, 1, ... with the query after them.
        model: The model with which it was made, as ``load_model`` gives it.
        folder: Where ``adapter_config.json`` and ``adapter_model.safetensors`` are written; it is
            returned. Training records, embeddings and texts are only in ``context.save``.

    Raises:
        PromptError: The positions have gaps.
        ModelError: The context is of another model, the model is a ``HookedTransformer``, its value
            biases are folded, or layers have keys and values of several shapes.
        StoreError: peft is not installed, or the files cannot be written.

    Examples:
        >>> context = al.compress(model, batch, select=al.contexts.selection.everything)
        >>> adapter = al.contexts.context_to_peft(context, model, folder / "adapter")
    """
    try:
        from peft import PrefixTuningConfig, prompt_embeddings_from_past_key_values
    except ImportError as error:
        raise StoreError(
            "writing an adapter of peft needs peft 0.21 or newer, which cannot be imported "
            f'({error}); run: pip install "anchorlens[peft]"'
        ) from error
    _check_model(model)
    refuse_gaps(context, "an adapter of peft")
    refuse_another_model(model, context)
    prefix = context.prefix
    heads, d_head = _one_shape(model, prefix)
    sizes = _Sizes(len(prefix), len(prefix.keys), heads, heads * d_head)
    config = PrefixTuningConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        # Where transformers read the weights, which tells peft the base model.
        base_model_name_or_path=config_of(model).name_or_path or None,
        num_transformer_submodules=1,
        encoder_hidden_size=sizes.token_dim,
        **sizes._asdict(),
    )
    pairs = list(zip(prefix.keys, prefix.values, strict=True))
    embeddings = prompt_embeddings_from_past_key_values(pairs, num_virtual_tokens=len(prefix))
    tokens = context.cached_tokens.tolist()
    ours = {"tokens": tokens, "info": context.info, "sizes": sizes._asdict()}
    weights = to_bytes_with_digest({"adapter": ours}, {_TENSOR: embeddings})
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        raise StoreError(f"{folder} cannot be made: {error}; use another folder") from error
    write_atomically(folder / _ADAPTER, weights)
    write_text(folder / _CONFIG, json.dumps(config.to_dict(), indent=2))
    return folder


@checked
def context_from_peft(
    folder: str | Path,
    model: HookedModel,
    batch: PromptBatch | None = None,
    *,
    tokens_after: Sequence[int] | None = None,
) -> PrefixContext:
    """Read a prefix-tuning adapter of peft as a context.

    A folder of ``context_to_peft`` needs no other argument: it has tokens and ``info``, the model
    is compared, and the context comes back as a ``PrefixContext``, bit for bit.

    Of a prefix that was trained in peft, the context is the prefix, then the BOS on which the model
    is run after it; figures and tables count this BOS as a part of it. Such a folder does not say
    of which weights it is: only the shapes are compared. peft is not needed for reading. Queries
    are run without a BOS of their own.

    Args:
        folder: A local folder that ``save_pretrained`` of peft or ``context_to_peft`` wrote.
        model: That for which the adapter was made, as ``load_model`` gives it.
        batch: Prompts for which the context is, which tell the BOS; not needed as above.
        tokens_after: Token ids between the prefix and each query, by default the BOS of the
            prompts; none for a prefix that holds it already.

    Raises:
        StoreError: The files cannot be read, are damaged, or hold an adapter of another kind.
        PromptError: ``batch`` is missing or has another BOS, ``tokens_after`` are no token ids or
            the folder has its own, or queries become too long.
        ModelError: The adapter is of another model, the model is a ``HookedTransformer`` or takes
            no key-value cache, or its value biases are folded.

    Examples:
        >>> context = al.compress(model, batch, select=al.contexts.selection.everything)
        >>> adapter = al.contexts.context_to_peft(context, model, folder / "adapter")
        >>> same = al.contexts.context_from_peft(adapter, model)
    """
    _check_model(model)
    if batch is not None:
        check_batch(batch)
    prefix, ours = _adapter(Path(folder))
    if ours is None:
        return _trained_in_peft(prefix, model, batch, tokens_after)
    if tokens_after is not None:
        raise PromptError(
            f"{folder} was written by context_to_peft and holds all tokens; leave tokens_after out"
        )
    tokens = torch.tensor(ours["tokens"], device="cpu")
    context = PrefixContext(prefix=prefix, tokens=tokens, info=ours["info"])
    refuse_another_model(model, context)
    if batch is not None:
        context.check_bos(batch)
    return context


class _Sizes(NamedTuple):
    """The sizes of an adapter under peft's names; ``token_dim`` is that of all cached heads."""

    num_virtual_tokens: int
    num_layers: int
    num_attention_heads: int
    token_dim: int

    def fit(self, embeddings: Tensor) -> bool:
        if not all(type(size) is int and size > 0 for size in self):
            return False
        shape = (self.num_virtual_tokens, 2 * self.num_layers * self.token_dim)
        whole_heads = self.token_dim % self.num_attention_heads == 0
        return embeddings.is_floating_point() and embeddings.shape == shape and whole_heads


def _check_model(model: HookedModel) -> None:
    """Raise an error for a model that caches other keys and values than transformers."""
    ensure_prepared(model)
    if not is_bridge(model):
        raise ModelError(
            f"{model.cfg.model_name} is a HookedTransformer, whose keys and values are not those "
            "of the transformers model that peft wraps; load the same weights with al.load_model"
        )
    refuse_folded_value_biases(model)


def _one_shape(model: HookedModel, prefix: KeyValues) -> tuple[int, int]:
    """The number of cached heads and their width, which peft takes to be those of all layers."""
    if getattr(config_of(model), "kv_lora_rank", None):
        raise ModelError(
            f"{model.cfg.model_name} has latent attention, for whose cache peft has no place; the "
            "save of a context stores any shapes"
        )
    tensors = (*prefix.keys, *prefix.values)
    shapes = sorted({(tensor.shape[1], tensor.shape[3]) for tensor in tensors})
    if len(shapes) > 1 or len(prefix.keys) != model.cfg.n_layers:
        raise ModelError(
            "an adapter of peft has keys and values of one shape in every layer, but "
            f"{model.cfg.model_name} with {model.cfg.n_layers} layers caches them in "
            f"{len(prefix.keys)}, with (heads, d_head) {', '.join(map(str, shapes))}. The save of "
            "a context stores any shapes"
        )
    return shapes[0]


def _adapter(folder: Path) -> tuple[KeyValues, dict[str, Any] | None]:
    """The keys and values, and what ``context_to_peft`` wrote of the context; None if peft did."""
    path = folder / _CONFIG
    cure = "give the local folder that save_pretrained of peft or context_to_peft wrote"
    if not kind_of(path):
        raise StoreError(f"{folder} has no {_CONFIG}; {cure}")
    config = parsed(path, bytes_of(path), json.loads, "json", cure)
    if not isinstance(config, dict):
        raise StoreError(f"{path} is damaged: it holds no settings; use a copy of it")
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "PREFIX_TUNING" or task not in (None, "CAUSAL_LM"):
        raise StoreError(
            f"{folder} holds an adapter of the kind {kind} for {task}, but only PREFIX_TUNING for "
            "CAUSAL_LM has keys and values. Merge a LoRA into the weights instead "
            "(merge_and_unload in peft) and load those with al.load_model"
        )
    if unread := {key: config[key] for key in config.keys() - _KNOWN if config[key]}:
        warn_user(
            f"{path} has settings that are not read: {unread}. If they decide numbers, the "
            "context is not what peft computes"
        )
    path = folder / _ADAPTER
    if kind_of(path) != "file":
        raise StoreError(
            f"{folder} has no {_ADAPTER}; if peft wrote adapter_model.bin, load and save it in "
            "peft again"
        )
    header, stored = read_tensors(path)
    ours = header.get("adapter")
    sizes = _Sizes(*(config.get(name) for name in _Sizes._fields))  # type: ignore[arg-type]
    is_whole = stored.keys() == {_TENSOR} and sizes.fit(stored[_TENSOR])
    if not is_whole or (ours is not None and ours["sizes"] != sizes._asdict()):
        found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        raise StoreError(
            f"{path} should hold one tensor, {_TENSOR!r} of the shape (num_virtual_tokens, "
            f"2 num_layers token_dim), but holds {found}, where {_CONFIG} has {sizes._asdict()}; "
            "use the two files that one call of peft's save_pretrained or of context_to_peft wrote"
        )
    count, n_layers, heads, _ = sizes
    by_layer = stored[_TENSOR].view(count, n_layers, 2, heads, -1)
    by_kind = by_layer.permute(2, 1, 3, 0, 4)  # key or value, layer, head, position, d_head
    keys, values = ([layer[None] for layer in half.contiguous()] for half in by_kind)
    return key_values_at_start(keys, values), ours


def _trained_in_peft(
    prefix: KeyValues,
    model: HookedModel,
    batch: PromptBatch | None,
    tokens_after: Sequence[int] | None,
) -> PrefixContext:
    """A prefix that was trained in peft, and after it the tokens that come before each query."""
    if batch is None:
        raise PromptError(
            "this folder, not of context_to_peft, does not say with which BOS prompts begin; pass "
            "a batch of the prompts that it is for"
        )
    bos = bos_of(batch)
    after = bos if tokens_after is None else token_ids(model, tokens_after, "tokens_after")
    count = len(prefix)
    check_queries(model, [batch], count + len(after))
    with frozen_in_eval_mode(model):
        cached = cache_of_tokens(model, batch, batch.tokens.new_zeros(count))
        expected = (model.cfg.n_layers, *_one_shape(model, cached))
        got = (len(prefix.keys), prefix.keys[0].shape[1], prefix.keys[0].shape[3])
        if got != expected:
            raise ModelError(
                f"the adapter has (layers, cached heads, d_head) {got}, but {model.cfg.model_name} "
                f"has {expected}; use the model for which the adapter was made"
            )
        keys = [ours.to(like) for ours, like in zip(prefix.keys, cached.keys, strict=True)]
        values = [ours.to(like) for ours, like in zip(prefix.values, cached.values, strict=True)]
        prefix = key_values_at_start(keys, values)
        # These stand for no token; another than the BOS, for which the first could be taken.
        filler = bos.new_full((count,), int(0 in bos))
        tokens = torch.cat([filler, after])
        if len(after):
            prefix = prefix_of_tokens(model, batch, tokens, prefix=prefix)
    return PrefixContext(
        prefix=key_values_at_start(prefix.keys, prefix.values),
        tokens=tokens,
        info={**model_identity(model), "bos": bos.tolist()},
    )
