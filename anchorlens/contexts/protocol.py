"""What can stand before a query: what every context has, and the pass over queries after it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ModelError, PromptError
from ..models.hooked import Hook, HookedModel, check_fits, dtype_of
from ..models.kv_cache import KeyValues
from ..models.load import ensure_prepared
from ..models.media_tokens import refuse_media_tokens
from ..models.model_state import frozen_in_eval_mode
from ..models.rotary import refuse_another_rotation
from ..passes.forward import run_pass
from ..prompts.batch import PromptBatch, check_batch, only_set
from ..prompts.segment_names import OTHER, PADDING
from ..runs.identity import identity
from ..system.arguments import called, checked, fitted, has_methods
from ..system.devices import holds_numbers
from ..system.texts import described


@checked
@dataclass(frozen=True, eq=False)
class QueryPass:
    """A pass over the queries of a batch, in which a context stands before them.

    Attributes:
        batch: The queries after the context. The keys before ``batch.first_query`` are those of the
            context. It has the label words that a compressed context stores, and no others.
        prefix: Keys and values of the context, or None if it is empty.
        hooks: Interventions that belong to the context.
    """

    batch: PromptBatch
    prefix: KeyValues | None
    hooks: Sequence[Hook] = ()

    def __repr__(self) -> str:
        """One line: the prompts, the cached positions and the number of hooks."""
        cached = 0 if self.prefix is None else len(self.prefix)
        return f"QueryPass({self.batch!r}; {cached} cached positions, {len(self.hooks)} hooks)"

    @checked
    def logits(self, model: HookedModel) -> Float[Tensor, "batch vocab"]:
        """Next-token logits at the targets, from a prepared model that is frozen."""
        return run_pass(model, self.batch, hooks=self.hooks, prefix=self.prefix)


@runtime_checkable
class Context(Protocol):
    """What can stand before a query in place of demonstrations, and answer it.

    A context of your own has ``size`` and ``query_pass``, and ``logits`` from this class. ``info``
    is optional: with the entries of that of ``al.compress`` another model is refused, and with
    ``queries_in_training`` queries that a training used.
    """

    @property
    def size(self) -> int:
        """Bytes of the stored keys and values."""
        raise _lacks(self, "size, the bytes that it stores")

    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch, with the context in place of demonstrations."""
        raise _lacks(self, "query_pass(model, batch), which returns an al.contexts.QueryPass")

    @checked
    def logits(self, model: HookedModel, batch: PromptBatch) -> Float[Tensor, "batch vocab"]:
        """Next-token logits at the targets of a batch. Only the queries are run.

        The context takes the place of the demonstrations of prompts from ``build_prompts``. After a
        ``CompressedContext`` they must be those that were compressed.

        Raises:
            ModelError: The context was made with another model, type or weights.
            PromptError: A query is too long, or prompts begin with other tokens than the context.
        """
        ensure_prepared(model)
        check_batch(batch)
        refuse_another_model(model, self)
        with frozen_in_eval_mode(model):
            return query_pass_of(self, model, batch).logits(model)


def _lacks(context: Context, what: str) -> PromptError:
    return PromptError(f"the context {type(context).__name__} needs {what}")


def is_context(value: object) -> TypeGuard[Context]:
    """Whether it is an instance with the methods of a context, and a size."""
    is_instance = not isinstance(value, type)
    return is_instance and has_methods(value, "query_pass", "logits") and hasattr(value, "size")


@checked
@dataclass(frozen=True)
class NoContext(Context):
    """Nothing before the query, apart from the BOS of tokenizers that add one.

    The baseline of every context.

    Examples:
        >>> logits = al.contexts.NoContext().logits(model, batch)
    """

    @property
    def size(self) -> int:
        """No keys and values are stored: 0 bytes."""
        return 0

    @checked
    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``."""
        return QueryPass(checked_queries(model, batch, bos_of(batch)), None)


def query_pass_of(context: Any, model: HookedModel, batch: PromptBatch) -> QueryPass:
    """The pass over queries after a context, or an error if its class gives something else."""
    what = f"what query_pass of {type(context).__name__} returns"
    found: QueryPass = fitted(what, context.query_pass(model, batch), QueryPass)
    return found


def info_of(context: Context) -> Mapping[str, Any]:
    """What a context says of itself; nothing if it is a user's own without ``info``."""
    info: Mapping[str, Any] = getattr(context, "info", {})
    return info


def refuse_another_model(model: HookedModel, context: Context) -> None:
    """Raise an error if a context was made with another model, type or weights, and says so."""
    info = info_of(context)
    if "weights" not in info:
        return
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


def demonstrations_of(batch: PromptBatch) -> PromptBatch:
    """The demonstrations that the prompts of a batch share, as one prompt without a query."""
    if only_set(batch) is None:
        raise PromptError(
            "a context holds one set of demonstrations, but these prompts have several; compress "
            "each set by itself (call build_prompts for each set and join the lists)"
        )
    prompt = batch.prompt(0)
    return prompt.before(int(prompt.query_start[0]))


def selected_by(
    what: str, select: Callable[..., Any], demonstrations: PromptBatch
) -> Bool[Tensor, " position"]:
    """The positions that a function selects; an error names it ``what`` if these are none."""
    given = called(what, select, "the demonstrations", demonstrations)
    length = demonstrations.tokens.shape[1]
    is_mask = holds_numbers(given) and given.dtype == torch.bool and given.shape == (length,)
    if not is_mask or not given.any():
        raise PromptError(
            f"{what} must give Bool['position'] with some of the {length} positions of the "
            f"demonstrations; got {described(given)}{', all False' * is_mask}"
        )
    selected: Bool[Tensor, " position"] = given.cpu()
    return selected


def queries_after(batch: PromptBatch, tokens: Int[Tensor, " position"]) -> PromptBatch:
    """The queries up to their targets, without label positions, after tokens that may be none."""
    count, rows = len(tokens), len(batch)
    lengths = batch.target_positions - batch.query_start + 1
    offsets = torch.arange(longest_query(batch), device="cpu")
    inside = offsets < lengths[:, None]
    columns = batch.query_start[:, None] + torch.where(inside, offsets, 0)
    none, others = batch.label_positions[:, :0], torch.full((rows, count), OTHER, device="cpu")
    segments = batch.segments.gather(1, columns).masked_fill(~inside, PADDING)
    return replace(
        batch,
        tokens=torch.cat([tokens.expand(rows, -1), batch.tokens.gather(1, columns)], dim=1),
        attention_mask=torch.cat([inside.new_ones(rows, count), inside], dim=1),
        segments=torch.cat([others, segments], dim=1),
        label_positions=none,
        label_ends=none,
        label_classes=none,
        query_start=torch.full_like(batch.query_start, count),
        target_positions=count + lengths - 1,
        first_query=0,
    )


def bos_of(batch: PromptBatch) -> Int[Tensor, " position"]:
    """The BOS with which the prompts begin, or no token."""
    first = batch.padded_right().tokens[0, :1]
    return first if batch.begins_with_bos else first[:0]


def longest_query(batch: PromptBatch) -> int:
    """Number of tokens of the longest query, up to the target."""
    return int((batch.target_positions - batch.query_start).max()) + 1


def checked_queries(
    model: HookedModel, batch: PromptBatch, tokens: Int[Tensor, " position"]
) -> PromptBatch:
    """``queries_after``, or an error if a query does not fit the model after these tokens."""
    left = max(model.cfg.n_ctx - len(tokens), 0)
    longest = longest_query(batch)
    if longest > left:
        raise PromptError(
            f"a query has {longest} tokens, but {left} of the model's context of "
            f"{model.cfg.n_ctx} are left after {len(tokens)} positions; use shorter queries, or a "
            "context with fewer positions"
        )
    queries = queries_after(batch, tokens)
    check_fits(model, queries)
    refuse_media_tokens(model, queries.after(len(tokens)))
    return queries


def checked_queries_after_cache(
    model: HookedModel, batch: PromptBatch, tokens: Int[Tensor, " position"]
) -> PromptBatch:
    """The same, where these tokens are cached and only the queries are run."""
    queries = checked_queries(model, batch, tokens)
    refuse_another_rotation(model, len(tokens), len(tokens) + longest_query(batch))
    return queries.after(len(tokens))


def check_queries(model: HookedModel, batches: Sequence[PromptBatch], count: int) -> None:
    """Raise an error for queries that do not fit the model after ``count`` cached positions."""
    for batch in batches:
        checked_queries_after_cache(model, batch, batch.tokens.new_zeros(count))
