"""A compressed context: it answers queries from the keys and values of selected tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int, jaxtyped
from torch import Tensor

from ..errors import ModelError, PromptError, StoreError
from ..hooks import Site, hooks_on_edges
from ..models.hooked import Hook, HookedModel, device_of, dtype_of, hooks_by_layer, scores_name
from ..models.kv_cache import KeyValues
from ..models.load import ensure_prepared
from ..models.model_identity import identity
from ..models.model_state import frozen_in_eval_mode, without_user_hooks
from ..models.rotary import refuse_another_rotation
from ..passes.forward import run_pass
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_batch, on_both
from ..results.html_tables import table, titled
from ..results.record import kind_of_file
from ..system.arguments import checked
from ..system.digest_file import read_with_digest, to_bytes_with_digest
from ..system.files import write_atomically
from ..system.texts import printable
from .query_pass import QueryPass


@dataclass(frozen=True, eq=False)
class CompressedContext:
    """Keys and values of selected tokens of the demonstrations, from which queries are answered.

    Attributes:
        prefix: Keys and values of the selected tokens, or of all tokens if ``is_cut`` is False.
        tokens: The demonstrations, up to the first token of the query.
        kept: True for the selected tokens.
        key_positions: Position of each selected token as the model takes it.
        query_position: Position of the query's first token as the model takes it.
        info: The model, its type and weights, the placement, the BOS with which prompts begin, and
            how many tokens of each segment are selected.
    """

    prefix: KeyValues
    tokens: Int[Tensor, " position"]
    kept: Bool[Tensor, " position"]
    key_positions: Int[Tensor, " key"]
    query_position: int
    info: dict[str, Any]

    def __repr__(self) -> str:
        """One line: the selected positions and their segments, bytes, placement and model."""
        parts = "; ".join(f"{name} {text}" for name, text in self._summary().items())
        return shorten(printable(f"CompressedContext({parts})"), 200, placeholder=" …)")

    def _repr_html_(self) -> str:
        return titled("CompressedContext", table(["what", "value"], self._summary().items()))

    def _summary(self) -> dict[str, str]:
        segments = self.info.get("selected", {})
        return {
            "positions": f"{int(self.kept.sum())} of {len(self.kept)}",
            "segments": ", ".join(f"{name} {count}" for name, count in segments.items())
            or "not known",
            "cached": "these positions" if self.is_cut else "all positions, the others masked",
            "bytes": f"{self.size:,}",
            "placement": str(self.info.get("positions")),
            "model": f"{self.info.get('model')}, {self.info.get('dtype')}",
        }

    @property
    def is_cut(self) -> bool:
        """Whether the cache holds the selected tokens only, so that dropped ones take no memory.

        In some models (ALiBi, chunked attention, a HookedTransformer) distances follow the index
        in the cache. There all tokens stay in the cache and the dropped ones are masked: the
        answers are the same, but no memory is saved.
        """
        return len(self.prefix) == int(self.kept.sum())

    @property
    def size(self) -> int:
        """Bytes of the stored keys and values."""
        return self.prefix.size

    @checked
    def logits(self, model: HookedModel, batch: PromptBatch) -> Float[Tensor, "batch vocab"]:
        """Next-token logits at the targets of prompts that begin with these demonstrations.

        Only the queries are run.

        Args:
            model: The model with which the context was made.
            batch: Prompts from ``build_prompts`` with the same demonstrations, whose tokens are
                compared but not run.

        Raises:
            ModelError: The context was made with another model, type or weights.
            PromptError: The prompts begin with other tokens, or a query is too long.

        Examples:
            >>> context = al.compress(model, batch)
            >>> context.logits(model, batch).shape[0] == len(batch)
            True
        """
        ensure_prepared(model)
        check_batch(batch)
        refuse_another_model(model, self.info)
        return self.logits_unchecked(model, batch)

    @checked
    def logits_unchecked(
        self, model: HookedModel, batch: PromptBatch
    ) -> Float[Tensor, "batch vocab"]:
        """The same as ``logits``, but without a check of the model and its weights.

        A comparison of all weights takes about as long as the answers to a few queries.
        """
        with frozen_in_eval_mode(model):
            return self.query_pass(model, batch).logits(model)

    @checked
    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``.

        Raises:
            PromptError: The prompts begin with other tokens, or a query is too long.
        """
        after_prefix = _after_prefix(batch.to(device_of(model)), self.tokens)
        self._check_lengths(model, after_prefix)
        return self._pass_over(model, after_prefix)

    @checked
    def answer(self, model: HookedModel, batch: PromptBatch) -> Float[Tensor, "batch vocab"]:
        """The same as ``logits``, for a checked model and checked prompts on its device."""
        return self._pass_over(model, batch).logits(model)

    def _pass_over(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        prefix = self.prefix.beside(model)
        if not self.is_cut:
            return QueryPass(batch, prefix, _block_dropped(model, batch, self.kept))
        compact = self._compact(batch)
        hooks = [] if self.has_no_gap else self._window_hooks(model, compact, batch)
        return QueryPass(compact, prefix, hooks)

    @checked
    def save(self, path: str | Path) -> Path:
        """Write the context into one safetensors file, with a digest of its contents.

        Returns:
            The path.

        Raises:
            StoreError: Json cannot hold ``info``, or the file cannot be written.
        """
        tensors = {f"key.{n}": keys for n, keys in enumerate(self.prefix.keys)}
        tensors |= {f"value.{n}": values for n, values in enumerate(self.prefix.values)}
        tensors |= {name: getattr(self, name) for name in ("tokens", "kept", "key_positions")}
        header = {"query_position": self.query_position, "info": self.info}
        write_atomically(Path(path), to_bytes_with_digest({"context": header}, tensors))
        return Path(path)

    @classmethod
    @checked
    def load(cls, path: str | Path) -> "CompressedContext":
        """Read a context that ``save`` wrote.

        Raises:
            StoreError: The file cannot be read, is damaged, or does not hold a context.

        Examples:
            >>> context = al.compress(model, batch)
            >>> same = al.CompressedContext.load(context.save(folder / "context.safetensors"))
            >>> bool((same.kept == context.kept).all())
            True
        """
        header, stored = read_with_digest(path)
        refuse_another_kind(path, header, cls.__name__)
        fields = header["context"]
        if not _is_context(fields, stored):
            raise StoreError(
                f"{path} does not hold what a CompressedContext of this version holds; compress "
                "the demonstrations again and save that"
            )
        layers = range(len(stored) // 2 - 1)
        keys = tuple(stored[f"key.{n}"] for n in layers)
        in_prompt = torch.equal(stored["key_positions"], stored["kept"].nonzero().flatten())
        prefix = KeyValues(
            keys=keys,
            values=tuple(stored[f"value.{n}"] for n in layers),
            attention_mask=torch.ones(1, keys[0].shape[2], dtype=torch.bool, device="cpu"),
            next_position=torch.tensor([fields["query_position"]], device="cpu"),
            text_length=len(stored["tokens"] if in_prompt else stored["key_positions"]),
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
        longest = int(batch.attention_mask[:, batch.query_rows].sum(1).max())
        if longest > left:
            raise PromptError(
                f"a query has {longest} tokens, but {left} of the model's context of "
                f"{model.cfg.n_ctx} are left after this compressed context; use shorter queries "
                "or fewer demonstrations, or positions=al.placement.rebased"
            )
        refuse_another_rotation(model, self.prefix.text_length, self.query_position + longest)

    @property
    def has_no_gap(self) -> bool:
        """Whether the position of each token is its index in the cache."""
        indices = torch.arange(len(self.prefix), device=self.key_positions.device)
        keys_have_no_gap = torch.equal(self.key_positions, indices)
        return keys_have_no_gap and self.query_position == len(self.prefix)

    def _compact(self, batch: PromptBatch) -> PromptBatch:
        """The prompts without the dropped tokens, to be run after the cut cache."""
        rest = batch.tokens.shape[1] - len(self.kept)
        selected = torch.cat([self.kept, self.kept.new_ones(rest)]).to(batch.tokens.device)
        return selected_columns(batch, selected).after(int(self.kept.sum()))

    def _window_hooks(
        self, model: HookedModel, batch: PromptBatch, whole: PromptBatch
    ) -> list[Hook]:
        """Hooks that make sliding windows right.

        A window is a distance in positions, but the model's own mask counts indices in the cache.
        """
        windows = _windows(model, whole)
        n_keys, length = batch.first_query, batch.tokens.shape[1]
        indices = torch.arange(length, device=batch.tokens.device)
        positions = indices - n_keys + self.query_position
        positions[:n_keys] = self.key_positions.to(indices.device)
        queries = indices[:, None] >= n_keys
        hooks: list[Hook] = []
        for window in set(windows):
            beyond = queries & (positions[:, None] - positions >= window)
            if (queries & (indices[:, None] - indices >= window) & ~beyond).any():
                raise ModelError(
                    f"layers with a window of {window} tokens cannot see all keys that these "
                    "positions put into the window; use "
                    "positions=al.placement.as_in_prompt"
                )
            if beyond.any():
                layers = [layer for layer, size in enumerate(windows) if size == window]
                cut = edges.EdgeSet.of(beyond[None])
                hooks += hooks_on_edges(model, batch, cut, Site(layers))
        return hooks


def _is_context(fields: Any, stored: Mapping[str, Tensor]) -> bool:
    """Whether the fields and tensors of a file have the types and shapes of a context."""
    layers = range(len(stored) // 2 - 1)
    states = {f"{kind}.{n}" for kind in ("key", "value") for n in layers}
    if not layers or stored.keys() != {*states, "tokens", "kept", "key_positions"}:
        return False
    if not isinstance(fields, dict) or fields.keys() != {"query_position", "info"}:
        return False
    if type(fields["query_position"]) is not int or not isinstance(fields["info"], dict):
        return False
    if not {"bos", "selected"} <= fields["info"].keys():
        return False
    expected: dict[str, Any] = {name: Float[Tensor, "1 _ cached _"] for name in states}
    expected |= {"tokens": Int[Tensor, " position"], "kept": Bool[Tensor, " position"]}
    expected |= {"key_positions": Int[Tensor, " key"]}
    with jaxtyped("context"):  # compares the length of each axis across all tensors
        if not all(isinstance(stored[name], expected[name]) for name in expected):
            return False
    if len({stored[name].dtype for name in states}) > 1:
        return False
    count, cached = int(stored["kept"].sum()), stored["key.0"].shape[2]
    return len(stored["key_positions"]) == count and cached in (count, len(stored["tokens"]))


def selected_columns(batch: PromptBatch, selected: Bool[Tensor, " position"]) -> PromptBatch:
    """The selected columns of the prompts, whose label words are those that are selected whole."""
    return on_both(batch, lambda each: _selected_columns(each, selected))


def _selected_columns(batch: PromptBatch, selected: Bool[Tensor, " position"]) -> PromptBatch:
    selected = selected.to(batch.tokens.device)
    ends = (batch.label_positions, batch.label_ends)
    whole = torch.stack([selected[end] for end in ends]).all(0).all(0)
    moved = selected.cumsum(0) - 1
    names = ("tokens", "attention_mask", "segments")
    columns: dict[str, Any] = {name: getattr(batch, name)[:, selected] for name in names}
    dropped = int((~selected).sum())
    return replace(
        batch,
        **columns,
        label_positions=moved[batch.label_positions[:, whole]],
        label_ends=moved[batch.label_ends[:, whole]],
        label_classes=batch.label_classes[:, whole],
        target_positions=batch.target_positions - dropped,
        query_start=batch.query_start - dropped,
    )


def _block_dropped(
    model: HookedModel, batch: PromptBatch, selected: Bool[Tensor, " position"]
) -> list[Hook]:
    """Hooks that block the edges from the query to the dropped tokens."""
    length = batch.tokens.shape[1]
    positions = torch.arange(length, device=batch.tokens.device)
    dropped = torch.zeros(length, dtype=torch.bool, device=positions.device)
    dropped[: len(selected)] = ~selected.to(positions.device)
    cut = edges.between((positions >= batch.first_query)[None], dropped[None])
    return hooks_on_edges(model, batch, cut, Site())


# For each model the length of the prompt on which windows were measured, and each layer's window.
_measured: WeakKeyDictionary[Any, tuple[int, list[int]]] = WeakKeyDictionary()


def forget_windows(model: HookedModel) -> None:
    """Measure the windows of a model again at next use: its settings may have changed."""
    _measured.pop(model, None)


def _windows(model: HookedModel, batch: PromptBatch) -> list[int]:
    """How many tokens each layer can attend to, a token itself included.

    This is read from the attention scores of the longest prompt.

    Raises:
        ModelError: A layer does not attend to a sliding window.
    """
    row = int(batch.attention_mask.sum(1).argmax())
    prompt = batch.whole().prompt(row)
    length = min(prompt.tokens.shape[1], model.cfg.n_ctx)
    last = torch.full_like(prompt.target_positions, length - 1)
    prompt = replace(prompt.before(length), target_positions=last)
    if model in _measured and _measured[model][0] >= length:
        return _measured[model][1]
    positions = torch.arange(length, device="cpu")
    distances = positions[:, None] - positions
    windows: list[int] = []

    def observe(layer: int, scores: Float[Tensor, "batch head query key"]) -> None:
        visible = (scores[0].detach() > -5e3).any(0).cpu() & (distances >= 0)
        windows.append(int(distances[visible].max()) + 1)
        if not torch.equal(visible, (distances >= 0) & (distances < windows[-1])):
            raise ModelError(
                f"layer {layer} of {model.cfg.model_name} attends in chunks at {length} tokens, "
                "which is not possible with a cut cache; pass a prompt as long as this "
                "to al.compress, which then stores the whole cache"
            )

    with without_user_hooks(model):
        run_pass(model, prompt, observers=hooks_by_layer(model, scores_name, observe))
    # A window as long as the prompt is not known to end there.
    unbounded = model.cfg.n_ctx + 1
    _measured[model] = length, [unbounded if size == length else size for size in windows]
    return _measured[model][1]


def _after_prefix(batch: PromptBatch, tokens: Int[Tensor, " position"]) -> PromptBatch:
    """Prompts that begin with these tokens, to be run after a cached prefix of them."""
    right, length = batch.padded_right(), len(tokens)
    expected = tokens.to(batch.tokens.device)
    if int(right.target_positions.min()) >= length:
        same = right.tokens[:, :length] == expected
        if same.all():
            return right.after(length)
        row, position = (~same).nonzero()[0].tolist()
        reason = f"prompt {row} differs at position {position}"
    else:
        reason = f"a prompt has its target at position {int(right.target_positions.min())}"
    raise PromptError(
        f"the prompts do not begin with the {length} tokens of this context: {reason}. Build "
        "them with the tokenizer, task and demonstrations that were compressed, or compress the "
        "demonstrations of these prompts"
    )


def refuse_another_kind(path: str | Path, header: Mapping[str, Any], expected: str) -> None:
    """Raise an error if a file with this header holds something else than a context of a class."""
    kind = kind_of_file(header)
    if kind != expected:
        reader = "load_context" if "context" in header else "load_record"
        raise StoreError(f"{path} holds a {kind}, not a {expected}; use al.{reader}")


def refuse_gaps(context: CompressedContext, what: str) -> None:
    """Raise an error if the keys and the query of a context do not stand at 0, 1, ..."""
    if not context.has_no_gap:
        raise PromptError(
            f"{what} must have its keys at the positions 0, 1, ... and the query after them, but "
            f"this context has them {context.info.get('positions')}; compress the demonstrations "
            "with positions=al.placement.rebased, or keep everything "
            "(keep=al.selection.everything)"
        )


def refuse_another_model(model: HookedModel, info: Mapping[str, Any]) -> None:
    """Raise an error if a context of this ``info`` was made with another model, type or weights."""
    different = [
        f"{name} {info.get(name)!r}, got {value!r}"
        for name, value in model_identity(model).items()
        if value != info.get(name)
    ]
    if different:
        raise ModelError(
            f"this context was made with {'; '.join(different)}: keys and values fit no other "
            "model. Load that model in that type, or make the context with this one"
        )


def model_identity(model: Any) -> dict[str, str]:
    """What must be equal for the keys and values of one model to fit another: identity and type."""
    dtype = str(dtype_of(model)).removeprefix("torch.")
    return {**identity(model), "dtype": dtype}
