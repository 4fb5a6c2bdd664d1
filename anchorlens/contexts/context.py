"""A compressed context: keys and values of some of the demonstrations, which answer queries."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int, jaxtyped
from torch import Tensor

from ..errors import ModelError, PromptError, StoreError
from ..hooks import block_edges
from ..metrics.metric import hooks_by_layer
from ..models.hooked import Hook, HookedModel, device_of, scores_name
from ..models.kv_cache import Prefix
from ..models.load import ensure_prepared
from ..models.model_state import undisturbed, without_user_hooks
from ..passes.forward import run_pass
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_batch
from ..runs.fingerprint import identity
from ..system.files import write_whole
from ..system.sealed import sealed, unsealed


@dataclass(frozen=True, eq=False)
class CompressedContext:
    """Keys and values of some of the demonstrations' tokens, from which queries are answered.

    Attributes:
        prefix: Keys and values of the kept tokens; of all tokens where :attr:`is_cut` is False.
        tokens: The demonstrations, up to where the query begins.
        kept: Which of them are kept.
        key_positions: Where each kept token stands, as the model takes it.
        query_position: Where the query's first token stands, as the model takes it.
        info: The model, its type and weights, and the placement.
    """

    prefix: Prefix
    tokens: Int[Tensor, " position"]
    kept: Bool[Tensor, " position"]
    key_positions: Int[Tensor, " key"]
    query_position: int
    info: dict[str, Any]

    @property
    def is_cut(self) -> bool:
        """Whether what is dropped takes no memory.

        In some models (ALiBi, chunked attention, a HookedTransformer) distances follow the place
        in the cache, so that everything stays there and the dropped tokens are masked: the same
        answers, nothing saved.
        """
        return len(self.prefix) == int(self.kept.sum())

    @property
    def size(self) -> int:
        """Bytes of the keys and values that are held."""
        return self.prefix.size

    def logits(self, model: HookedModel, batch: PromptBatch) -> Float[Tensor, "batch vocab"]:
        """Next-token logits at the targets of prompts that begin with these demonstrations.

        Only the queries are run.

        Args:
            model: The model that the context was made with.
            batch: Prompts from ``build_prompts`` with the same demonstrations; their demonstrations
                are compared and not run.

        Raises:
            ModelError: The model, its type or its weights are others.
            PromptError: The prompts begin with other tokens, or a query is too long.

        Examples:
            >>> context = al.compress(model, batch)
            >>> context.logits(model, batch).shape[0] == len(batch)
            True
        """
        ensure_prepared(model)
        check_batch(batch)
        _refuse_another_model(model, self.info)
        return self.logits_unchecked(model, batch)

    def logits_unchecked(
        self, model: HookedModel, batch: PromptBatch
    ) -> Float[Tensor, "batch vocab"]:
        """What :meth:`logits` gives of the model that made the context: its weights are not read.

        Comparing all weights takes about as long as answering a few queries.
        """
        ready = _behind(batch.to(device_of(model)), self.tokens)
        self._check_lengths(model, ready)
        with undisturbed(model):
            return self.answer(model, ready)

    def answer(self, model: HookedModel, ready: PromptBatch) -> Float[Tensor, "batch vocab"]:
        """What :meth:`logits` gives, of a checked model and prompts on its device."""
        prefix = self.prefix.to(ready.tokens.device)
        if not self.is_cut:
            hooks = _block_dropped(model, ready, self.kept)
            return run_pass(model, ready, hooks=hooks, prefix=prefix)
        compact = self._compact(ready)
        hooks = [] if self._has_no_gap else self._window_hooks(model, compact, ready)
        return run_pass(model, compact, hooks=hooks, prefix=prefix)

    def save(self, path: str | Path) -> Path:
        """Write the context into one safetensors file, with a digest of all of it.

        Returns:
            The path.

        Raises:
            StoreError: Json cannot hold ``info``, or the file cannot be written.
        """
        tensors = {f"key.{n}": keys for n, keys in enumerate(self.prefix.keys)}
        tensors |= {f"value.{n}": values for n, values in enumerate(self.prefix.values)}
        tensors |= {name: getattr(self, name) for name in ("tokens", "kept", "key_positions")}
        header = {"query_position": self.query_position, "info": self.info}
        write_whole(Path(path), sealed({"context": header}, tensors))
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> "CompressedContext":
        """Read a context that :meth:`save` wrote.

        Raises:
            StoreError: The file cannot be read, is damaged, is none of a context, or was saved by
                an earlier version.

        Examples:
            >>> context = al.compress(model, batch)
            >>> same = al.CompressedContext.load(context.save(folder / "context.safetensors"))
            >>> bool((same.kept == context.kept).all())
            True
        """
        header, stored = unsealed(path)
        if "context" not in header:
            raise StoreError(f"{path} holds a {header.get('record')}, not a CompressedContext")
        fields = header["context"]
        if not _is_context(fields, stored):
            raise StoreError(
                f"{path} does not hold what a CompressedContext of this version holds; compress "
                "the demonstrations again and save that"
            )
        layers = range(len(stored) // 2 - 1)
        keys = tuple(stored[f"key.{n}"] for n in layers)
        prefix = Prefix(
            keys=keys,
            values=tuple(stored[f"value.{n}"] for n in layers),
            attention_mask=torch.ones(1, keys[0].shape[2], dtype=torch.bool),
            next_position=torch.tensor([fields["query_position"]]),
        )
        return cls(
            prefix=prefix,
            tokens=stored["tokens"],
            kept=stored["kept"],
            key_positions=stored["key_positions"],
            query_position=fields["query_position"],
            info=fields["info"],
        )

    def _check_lengths(self, model: HookedModel, batch: PromptBatch) -> None:
        left = model.cfg.n_ctx - max(self.query_position, len(self.prefix))
        longest = int(batch.attention_mask[:, batch.first_query :].sum(1).max())
        if longest > left:
            raise PromptError(
                f"a query has {longest} tokens, but {left} of the model's context of "
                f"{model.cfg.n_ctx} are left behind this compressed context; use shorter queries "
                "or fewer demonstrations, or in Python positions=al.rebased"
            )

    @property
    def _has_no_gap(self) -> bool:
        """Whether everything stands at its place in the cache."""
        places = torch.arange(len(self.prefix), device=self.key_positions.device)
        at_places = torch.equal(self.key_positions, places)
        return at_places and self.query_position == len(self.prefix)

    def _compact(self, batch: PromptBatch) -> PromptBatch:
        """The prompts as they stand behind the cut cache."""
        rest = batch.tokens.shape[1] - len(self.kept)
        keep = torch.cat([self.kept, self.kept.new_ones(rest)]).to(batch.tokens.device)
        return replace(columns_of(batch, keep), first_query=int(self.kept.sum()))

    def _window_hooks(
        self, model: HookedModel, batch: PromptBatch, whole: PromptBatch
    ) -> list[Hook]:
        """Sliding windows go by positions, the model's own mask by places in the cache."""
        windows = _windows(model, whole)
        n_keys, length = batch.first_query, batch.tokens.shape[1]
        places = torch.arange(length, device=batch.tokens.device)
        positions = places - n_keys + self.query_position
        positions[:n_keys] = self.key_positions.to(places.device)
        queries = torch.arange(length, device=places.device)[:, None] >= n_keys
        hooks: list[Hook] = []
        for window in set(windows):
            beyond = queries & (positions[:, None] - positions >= window)
            if (queries & (places[:, None] - places >= window) & ~beyond).any():
                raise ModelError(
                    f"layers with a window of {window} tokens cannot see all that these positions "
                    "leave in it; in Python use positions=al.as_in_prompt"
                )
            if beyond.any():
                layers = [layer for layer, one in enumerate(windows) if one == window]
                hooks += block_edges(model, beyond[None], layers, first_query=n_keys)
        return hooks


def _is_context(fields: Any, stored: Mapping[str, Tensor]) -> bool:
    """Whether types and shapes of what a file holds are those of a context."""
    layers = range(len(stored) // 2 - 1)
    states = {f"{kind}.{n}" for kind in ("key", "value") for n in layers}
    if not layers or stored.keys() != {*states, "tokens", "kept", "key_positions"}:
        return False
    if not isinstance(fields, dict) or fields.keys() != {"query_position", "info"}:
        return False
    if type(fields["query_position"]) is not int or not isinstance(fields["info"], dict):
        return False
    expected: dict[str, Any] = {name: Float[Tensor, "1 _ cached _"] for name in states}
    expected |= {"tokens": Int[Tensor, " position"], "kept": Bool[Tensor, " position"]}
    expected |= {"key_positions": Int[Tensor, " key"]}
    with jaxtyped("context"):  # so that an axis is as long in all of them
        if not all(isinstance(stored[name], expected[name]) for name in expected):
            return False
    kept, cached = int(stored["kept"].sum()), stored["key.0"].shape[2]
    return len(stored["key_positions"]) == kept and cached in (kept, len(stored["tokens"]))


def columns_of(batch: PromptBatch, keep: Bool[Tensor, " position"]) -> PromptBatch:
    """The prompts without what is dropped before the query; label positions have no meaning."""
    names = ("tokens", "attention_mask", "groups")
    columns: dict[str, Any] = {name: getattr(batch, name)[:, keep] for name in names}
    dropped = int((~keep).sum())
    return replace(batch, **columns, target_positions=batch.target_positions - dropped)


def _block_dropped(
    model: HookedModel, batch: PromptBatch, kept: Bool[Tensor, " position"]
) -> list[Hook]:
    """The edges from the query to what is dropped, cut."""
    length = batch.tokens.shape[1]
    places = torch.arange(length, device=batch.tokens.device)
    dropped = torch.zeros(length, dtype=torch.bool, device=places.device)
    dropped[: len(kept)] = ~kept.to(places.device)
    cut = edges.between((places >= batch.first_query)[None], dropped[None])
    return block_edges(model, cut, range(model.cfg.n_layers), first_query=batch.first_query)


# How far each layer of a model sees, and over how many tokens that was tried.
_seen: WeakKeyDictionary[Any, tuple[int, list[int]]] = WeakKeyDictionary()


def forget_windows(model: HookedModel) -> None:
    """They are tried anew: settings of the model may have been changed."""
    _seen.pop(model, None)


def _windows(model: HookedModel, batch: PromptBatch) -> list[int]:
    """How many tokens each layer sees, itself included; read off the scores of the longest prompt.

    Raises:
        ModelError: A layer sees something else than a window.
    """
    row = int(batch.attention_mask.sum(1).argmax())
    prompt = replace(batch, first_query=0).prompt(row)
    length = min(prompt.tokens.shape[1], model.cfg.n_ctx)
    last = torch.full_like(prompt.target_positions, length - 1)
    prompt = replace(prompt.before(length), target_positions=last)
    if model in _seen and _seen[model][0] >= length:
        return _seen[model][1]
    where = torch.arange(length)
    distances = where[:, None] - where
    windows: list[int] = []

    def look(layer: int, scores: Float[Tensor, "batch head query key"]) -> None:
        visible = (scores[0].detach() > -5e3).any(0).cpu() & (distances >= 0)
        windows.append(int(distances[visible].max()) + 1)
        if not torch.equal(visible, (distances >= 0) & (distances < windows[-1])):
            raise ModelError(
                f"layer {layer} of {model.cfg.model_name} attends in chunks at {length} tokens, "
                "which a cut cache cannot follow; in Python pass a prompt as long as this to "
                "al.compress, which then keeps the whole cache"
            )

    with without_user_hooks(model):
        run_pass(model, prompt, observers=hooks_by_layer(model, scores_name, look))
    # A window as long as the prompt is none that was seen.
    unbounded = model.cfg.n_ctx + 1
    _seen[model] = length, [unbounded if one == length else one for one in windows]
    return _seen[model][1]


def _behind(batch: PromptBatch, tokens: Int[Tensor, " position"]) -> PromptBatch:
    """Prompts that begin with these tokens, ready to run behind them."""
    right, length = batch.padded_right(), len(tokens)
    ours = tokens.to(batch.tokens.device)
    if int(right.target_positions.min()) >= length:
        same = right.tokens[:, :length] == ours
        if same.all():
            return replace(right, first_query=length)
        row, place = (int(one) for one in (~same).nonzero()[0])
        why = f"prompt {row} differs at position {place}"
    else:
        why = f"one has its target at position {int(right.target_positions.min())}"
    raise PromptError(
        f"the prompts do not begin with the {length} tokens of this context: {why}. Build them "
        "with the tokenizer, task and demonstrations that were compressed, or compress theirs"
    )


def _refuse_another_model(model: HookedModel, info: Mapping[str, Any]) -> None:
    found = model_of(model)
    different = [
        f"{name} {info[name]!r}, got {found[name]!r}" for name in found if found[name] != info[name]
    ]
    if different:
        raise ModelError(
            f"this context was made with {'; '.join(different)}: keys and values fit no other "
            "model. Load that one in that type, or compress the demonstrations with this one"
        )


def model_of(model: Any) -> dict[str, str]:
    """What a model must be for keys and values to be its own."""
    dtype = str(next(iter(model.parameters())).dtype).removeprefix("torch.")
    return {**identity(model), "dtype": dtype}
