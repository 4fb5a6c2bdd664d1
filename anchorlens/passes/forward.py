"""One pass of a model over one batch with hooks, which returns the logits at the targets."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from threading import Event
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..errors import HookError, MetricError, NotFiniteError, PromptError
from ..models.facts import fact, facts_of
from ..models.head import head_in_float32
from ..models.hooked import (
    Hook,
    HookedModel,
    HookFunction,
    after_block,
    check_fits,
    has_sinks,
    hooks_by_layer,
    refuse_folded_value_biases,
    run_sent,
)
from ..models.kinds import inputs_without_cache
from ..models.kv_cache import (
    Graph,
    KeyValues,
    check_rotation,
    inputs_after,
    keys_and_values,
    prefix_of,
)
from ..models.media_tokens import check_media_tokens, inputs_of_images, refuse_media_tokens
from ..models.model_state import added_hooks
from ..models.native_pass import UNEMBED, Attend
from ..prompts.batch import PromptBatch
from ..system.checksum import row_sums
from ..system.devices import holds_numbers, sent, wide
from ..system.texts import described
from .blocks import BlockRuns, Checkpoints, Start, Starts
from .loss_checks import continuations_of, targets_of
from .losses import LossOfBatch, WordCrossEntropy, columns_of, refuse_other_losses
from .running import running, twin_for


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass, as a value.

    A ``LossAtPositions`` gets the logits at its positions, a ``WordCrossEntropy`` log probabilities
    of texts after the prompts, and any other loss the logits at the targets. The gradient continues
    through a prefix that has a graph. For ``gradient_checkpointing`` see blocks.py.
    """

    model: HookedModel
    batch: PromptBatch
    hooks: Sequence[Hook] = ()  # interventions, which act first
    observers: Sequence[Hook] = ()  # of the tensors after the interventions
    backward_hooks: Sequence[Hook] = ()  # on the gradient of a hook point's output
    loss: LossOfBatch | None = None
    into: Sequence[Tensor] = ()  # what the loss is differentiated by; the input of block 0
    prefix: KeyValues | None = None  # of the tokens before ``batch.first_query``, which do not run
    gradient_checkpointing: bool = False
    runs_backward: bool = True  # whether the loss is differentiated, if there is one
    attend: Attend | None = None  # computes the attention in the place of the model
    start: Start | None = None  # where the pass begins, and with what
    starts: Starts | None = None  # stores where later passes may begin

    @property
    def differentiates(self) -> bool:
        return self.loss is not None and self.runs_backward

    @property
    def is_checkpointed(self) -> bool:
        """Whether blocks run again for the gradient."""
        return self.gradient_checkpointing and self.differentiates

    @property
    def graph(self) -> Graph | None:
        """The graph of the prefix, if the gradient continues through it."""
        return self.prefix.graph if self.prefix is not None and self.differentiates else None

    def check(self) -> None:
        """Raise an error if the batch, the loss or the prefix do not fit the model."""
        facts_of(self.model)  # an error if it is not prepared
        check_fits(self.model, self.batch)
        (check_media_tokens if self.prefix is None else refuse_media_tokens)(self.model, self.batch)
        cached = 0 if self.prefix is None else len(self.prefix)
        if self.batch.first_query != cached:
            raise PromptError(
                f"the prompts are to be run from position {self.batch.first_query}, but keys of "
                f"{cached} tokens are cached; a batch of whole prompts has first_query=0"
            )
        if self.prefix is not None:
            check_rotation(self.model, self.batch.attention_mask[:, cached:], self.prefix)
        self.check_gradient()

    def check_gradient(self) -> None:
        """Raise an error if model and prompts, which fit each other, do not fit the gradient."""
        if self.gradient_checkpointing and (self.loss is None or self.prefix is not None):
            raise MetricError(
                "gradient_checkpointing=True is for the gradient through whole prompts; there is "
                f"{'no loss' if self.loss is None else 'a prefix'} here, so leave it out"
            )
        if has_sinks(self.model):  # there folding changes the logits too
            refuse_folded_value_biases(self.model)
        if isinstance(self.loss, WordCrossEntropy):
            if self.gradient_checkpointing:
                raise MetricError(
                    "a loss of texts after the prompts needs keys and values, which "
                    "gradient_checkpointing=True does not store; leave it out, or take another loss"
                )
            refuse_media_tokens(self.model, self.batch)
            continuations_of(self.loss, self.batch, self.model)

    def run(self) -> tuple[Float[Tensor, "batch vocab"], Float[Tensor, " batch"] | None]:
        """Logits at the targets in float32 or wider, and the losses, if the pass has a loss."""
        batch, loss = self.batch, self.loss
        # An inference_mode of the caller would make tensors that autograd rejects.
        with torch.inference_mode(False):
            needed = batch.target_positions[:, None] - batch.first_query
            if hasattr(loss, "positions"):  # those of the loss, then that of the target
                needed = torch.cat([targets_of(loss, batch) - batch.first_query, needed], dim=1)
        leaves = [*self.into]  # what the loss is differentiated by
        input_of_block_0 = leaves if self.differentiates and not leaves else None
        hooks = (*self.hooks, *self.observers, *self.backward_hooks)
        select = partial(at_rows, rows=needed) if _are_in_blocks(hooks) else None
        acting, copies = Acting(self, input_of_block_0, select), list[Tensor]()
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self.differentiates),
            acting.inside,
        ):
            continues = isinstance(loss, WordCrossEntropy)
            given = copies if self.graph is not None else None
            outputs, cache = acting.outputs(stores=continues, copies=given)
            leaves += copies
            rows = wide(outputs if select else at_rows(outputs, needed))
            logits, losses = rows[:, -1], None
            if loss is not None:
                if continues:
                    acting.inside.close()  # the hooks are for the rows of the prompts
                losses = _losses(self, rows, cache)
            # Read at once, because Python waits for a GPU at each.
            numbers = [logits] if losses is None else [logits, losses.to(logits.device)]
            are_finite = torch.stack([is_finite(each.detach()) for each in numbers]).tolist()
            if losses is not None and self.differentiates and all(are_finite):
                _differentiate(self, losses, leaves, copies)
        if not are_finite[0]:
            raise not_finite(self, "at the target position")
        if not all(are_finite):
            raise MetricError(
                "the loss is not finite (NaN or infinite) for some prompts whose logits are finite"
            )
        acting.check()
        return logits.detach(), losses


def run_pass(
    model: HookedModel, batch: PromptBatch, **options: Any
) -> Float[Tensor, "batch vocab"]:
    """Check a pass and run it: logits at the targets. The options are fields of ``Pass``."""
    described = Pass(model, batch, **options)
    described.check()
    return described.run()[0]


def any_loss(logits: Tensor, batch: PromptBatch) -> Tensor:
    """Cross entropy of the first token of the vocabulary, where any loss serves."""
    return logits.logsumexp(-1) - logits[:, 0]


def run_checked(
    model: HookedModel, batch: PromptBatch, **options: Any
) -> Float[Tensor, "batch vocab"]:
    """The logits of a pass that a study has checked before its first one."""
    return Pass(model, batch, **options).run()[0]


def losses_of(
    model: HookedModel,
    batch: PromptBatch,
    loss: LossOfBatch,
    *,
    into: Sequence[Tensor] = (),
    **options: Any,
) -> Float[Tensor, " batch"]:
    """The loss of each prompt, and the gradient of their sum for the tensors ``into``, if any."""
    described = Pass(model, batch, loss=loss, into=into, runs_backward=bool(into), **options)
    described.check()
    losses = described.run()[1]
    assert losses is not None
    return losses.detach()


def mean_loss_with_gradient(
    model: HookedModel,
    batch: PromptBatch,
    loss: LossOfBatch,
    into: Sequence[Tensor],
    **options: Any,
) -> float:
    """The mean loss over a batch, whose gradient is added to ``grad`` of the tensors ``into``."""
    losses: list[Tensor] = []

    def mean_loss(logits: Tensor, batch: PromptBatch) -> Tensor:
        losses.append(loss(logits, batch))
        return losses[-1] / len(batch)

    try:
        run_pass(model, batch, loss=mean_loss, into=into, **options)
    except NotFiniteError:  # a step of an optimizer was too large
        return nan
    return float(losses[0].detach().mean())


def logits_at(
    model: HookedModel,
    batch: PromptBatch,
    positions: Bool[Tensor, "batch position"],
    hooks: Sequence[Hook] = (),
    **options: Any,
) -> list[Float[Tensor, "_ vocab"]]:
    """The logits at some positions of each whole prompt, in order and in the type of the model."""
    described = Pass(model, batch, hooks, **options)
    described.check()
    acting = Acting(described, select=partial(at_rows, rows=columns_of(positions)[0]))
    with torch.inference_mode(False), torch.no_grad(), acting.inside:
        logits, _ = acting.outputs()
    counts = positions.sum(1).tolist()
    of_prompts = [of_prompt[:count] for of_prompt, count in zip(logits, counts, strict=True)]
    for of_prompt in of_prompts:
        if len(of_prompt) and not is_finite(of_prompt):
            raise not_finite(described, "at the positions that were asked for")
    return of_prompts


def run_prefix(
    model: HookedModel,
    batch: PromptBatch,
    *,
    observers: Sequence[Hook] = (),
    backward_hooks: Sequence[Hook] = (),
    **options: Any,
) -> KeyValues:
    """Keys and values of leading tokens (``batch.before(position)``), those of ``prefix`` first.

    ``backward_hooks`` get the gradient of each pass that continues from them, [batch, ...].
    """
    facts_of(model)  # an error if it is not prepared
    refuse_media_tokens(model, batch)
    points: list[tuple[Tensor, HookFunction]] = []

    def noted(name: Any, receive: HookFunction) -> Hook:
        return name, lambda tensor, hook: points.append((tensor, receive))

    observing = [*observers, *(noted(*hook) for hook in backward_hooks)]
    # The logits are not used.
    select = (lambda resid: resid[:, -1:]) if _are_in_blocks(observing) else None
    described, leaves = Pass(model, batch, observers=observing, **options), list[Tensor]()
    acting = Acting(described, leaves if backward_hooks else None, select)
    mask, prefix = batch.attention_mask[:, batch.first_query :], described.prefix
    with torch.inference_mode(False), torch.set_grad_enabled(bool(backward_hooks)), acting.inside:
        if prefix is not None:
            check_rotation(model, mask, prefix)
        _, cache = acting.outputs(stores=True)
        acting.check()
        return prefix_of(cache, mask, points, prefix)


class Acting:
    """What acts in a pass: what is described, and more.

    ``leaves`` gets the input of block 0, which requires a gradient then. ``select`` makes of the
    state before the unembedding the rows that are needed.
    """

    def __init__(
        self,
        described: Pass,
        leaves: list[Tensor] | None = None,
        select: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._described, model, batch = described, described.model, described.batch
        hooks = described.hooks, described.observers, described.backward_hooks
        twin = twin_for(model, batch, *hooks)
        changes, observers, _ = hooks if twin else map(_watched, hooks)
        # A twin calls all points that it knows, but no gradient may reach some of them.
        self._changes: Any = () if twin else changes
        self._observed: Any = () if twin else observers
        self._of_gradients = _watched(described.backward_hooks)
        self._checkpoints = saved = Checkpoints() if described.is_checkpointed else None
        observers = observers if saved is None else saved.observers(observers)
        parts = described.start, described.starts, saved
        blocks = None if parts == (None, None, None) else BlockRuns(*parts)
        forward = [*changes, *observers]
        if select is not None:
            point = UNEMBED if twin else _before_unembedding(model)
            forward.append((point, lambda resid, hook: select(resid)))
        acting = forward, self._of_gradients, leaves, described.attend, blocks
        self._run, self.inside = running(model, batch, twin, *acting)

    def outputs(
        self, *, stores: bool = False, copies: list[Tensor] | None = None
    ) -> tuple[Tensor, Any]:
        """What the model gives for the tokens that run, and its cache if it continues or stores."""
        model, batch = self._described.model, self._described.batch
        first, cache = batch.first_query, None
        tokens, mask = batch.tokens[:, first:], batch.attention_mask[:, first:]
        if self._described.prefix is None and not stores:
            images = inputs_of_images(model, batch) if batch.inputs else {}
            inputs = inputs_without_cache(model, mask) | images
        else:
            inputs, cache = inputs_after(model, mask, self._described.prefix, copies)
        outputs = self._run(tokens, **inputs)
        _check_calls("hooks that change the run", self._changes)
        return outputs, cache

    def check(self) -> None:
        """Raise an error for what a pass with finite numbers did not call."""
        _check_calls("hooks that observe", self._observed)
        if self._described.loss is not None:
            _check_calls("hooks on gradients", self._of_gradients)
            if self._checkpoints is not None:
                self._checkpoints.require_all(self._described.model)


def _losses(
    described: Pass, rows: Float[Tensor, "batch row vocab"], cache: Any
) -> Float[Tensor, " batch"]:
    """The loss of each prompt, from the rows of logits that it reads."""
    batch, loss = described.batch, described.loss
    assert loss is not None
    logits = rows[:, -1]
    read = rows[:, :-1] if rows.shape[1] > 1 else logits
    if isinstance(loss, WordCrossEntropy):
        texts = loss.continuations(batch)
        read = _log_probs_after(described.model, batch, texts, logits, cache, described.prefix)
    losses = loss(read, batch)
    refuse_other_losses(losses, len(rows))
    return losses


def _log_probs_after(
    model: HookedModel,
    batch: PromptBatch,
    texts: Int[Tensor, "class token"],
    logits: Float[Tensor, "batch vocab"],
    cache: Any,
    prefix: KeyValues | None,
) -> Float[Tensor, "batch class token"]:
    """``log p(token | prompt, earlier tokens)`` of each text after the target of each prompt."""
    is_token, tokens = texts >= 0, texts.clamp(min=0)
    log_probs = logits.log_softmax(-1)[:, sent(tokens[:, 0], logits.device)][..., None]
    if texts.shape[1] > 1:
        prompts, count = len(batch), len(texts)
        before = _up_to_targets(batch, cache, prefix, count)
        rows = tokens.repeat(prompts, 1)
        inputs, _ = inputs_after(model, is_token[:, :-1].repeat(prompts, 1), before)
        with head_in_float32(model), added_hooks(model):
            later = run_sent(model, model, rows[:, :-1], **inputs)
        later = wide(later).log_softmax(-1)
        at = sent(rows[:, 1:, None], later.device)
        of_tokens = later.gather(2, at)[..., 0].unflatten(0, (prompts, count))
        log_probs = torch.cat([log_probs, of_tokens], dim=2)
    return log_probs.masked_fill(~sent(is_token, logits.device), 0.0)


def _up_to_targets(
    batch: PromptBatch, cache: Any, prefix: KeyValues | None, count: int
) -> KeyValues:
    """Keys and values up to each target, ``count`` times."""
    # It comes last: distances may be counted in columns, so that no padding may follow it.
    length = batch.tokens.shape[1]
    columns = (batch.positions + batch.target_positions[:, None] + 1) % length
    in_rows = batch.up_to_target[:, batch.first_query :].sum(1)
    start = 0 if prefix is None else prefix.next_position

    def rows_of(tensor: Tensor) -> Tensor:
        index = sent(columns, tensor.device)[:, None, :, None]
        moved = tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[3]))
        return moved.repeat_interleave(count, 0)

    keys, values = keys_and_values(cache, length)
    return KeyValues(
        keys=tuple(map(rows_of, keys)),
        values=tuple(map(rows_of, values)),
        attention_mask=batch.up_to_target.gather(1, columns).repeat_interleave(count, 0),
        next_position=(start + in_rows).repeat_interleave(count, 0),
        text_length=int((start + in_rows).max()),
    )


def _differentiate(
    described: Pass,
    losses: Float[Tensor, " batch"],
    leaves: Sequence[Tensor],
    copies: Sequence[Tensor],
) -> None:
    """The gradient of the sum of the losses, which continues through a prefix that has a graph."""
    if not losses.requires_grad:
        raise MetricError(
            "a loss must be computed from the logits by what torch differentiates; got one without "
            "a graph (detached, of numpy, or the same whatever the logits are)"
        )
    # For the leaves alone: other tensors that require a gradient belong to the user's hooks.
    losses.sum().backward(inputs=list(leaves))
    if described.graph is not None:
        for receive, gradient in described.graph.at_points(copies):
            receive(gradient, hook=None)


def is_finite(values: Tensor) -> Bool[Tensor, ""]:
    # The smallest and the largest suffice: isfinite makes three copies of all logits.
    return torch.stack(values.aminmax()).isfinite().all()


def not_finite(described: Pass, where: str) -> NotFiniteError:
    return NotFiniteError(
        f"the model's logits are not finite (NaN or infinite) {where}, and so is what "
        f"{_first_not_finite(described)} gives out; try dtype=torch.float32, and check hooks there"
    )


def _first_not_finite(described: Pass) -> str:
    """Where numbers stop being finite; this costs a second pass, but only after a failure."""
    model, batch = described.model, described.batch
    wrong: list[int] = []
    inside = batch.attention_mask[:, batch.first_query :]

    def check(layer: int, resid: Tensor) -> None:
        if not resid[inside.to(resid.device)].isfinite().all():
            wrong.append(layer)

    observers = hooks_by_layer(model, after_block, check)
    again = Pass(model, batch, described.hooks, observers, prefix=described.prefix)
    acting = Acting(replace(again, attend=described.attend))
    with torch.no_grad(), acting.inside:
        acting.outputs()
    return f"layer {min(wrong)}" if wrong else "the final norm or the unembedding"


def at_rows(
    values: Shaped[Tensor, "batch query *axes"], rows: Int[Tensor, "batch target"]
) -> Shaped[Tensor, "batch target *axes"]:
    prompts = torch.arange(len(values), device=values.device)[:, None]
    return values[prompts, rows.to(values.device, non_blocking=True)]


@fact
def _before_unembedding(model: HookedModel) -> str:
    """The input of the unembedding, or, where an adapter does not name it, of the final norm."""
    # Not after the last block, whose shape some models of transformers fix.
    return UNEMBED if UNEMBED in model.hook_dict else after_block(model.cfg.n_layers - 1)


def _are_in_blocks(hooks: Iterable[Hook]) -> bool:
    """Whether hooks are certain to see all positions."""
    inside = ("blocks.", "hook_embed")
    return not [name for name, _ in hooks if callable(name) or not name.startswith(inside)]


# TransformerLens takes the repr of every hook that it adds, and that of tensors takes long.
@dataclass(eq=False, repr=False)
class Watched:
    """A hook that counts its calls; an error names its owner if it edits a tensor."""

    act: HookFunction
    owner: str = ""  # without one it may change the run
    trusted: Event | None = None  # set when a batch has shown that no ``data`` is changed
    is_users: bool = False  # so that it may ask its hook point for anything
    calls: int = 0

    def __call__(self, tensor: Tensor, hook: Any) -> Tensor | None:
        self.calls += 1
        if not self.owner:
            changed = self.act(tensor, hook=hook)
            if changed is not None and isinstance(tensor, Tensor):
                _refuse_another_kind(changed, tensor, hook)
            return changed
        what = f"the tensor at {_point_of(hook)}"
        compares = self.trusted is not None and not self.trusted.is_set()
        with unedited(self.owner, what, tensor, compares=compares):
            try:
                returned = self.act(tensor, hook=hook)
            except RuntimeError as error:  # PyTorch raises it for edits of some tensors
                if not ("modified inplace" in str(error) or "in-place operation" in str(error)):
                    raise
                raise edited(self.owner, what) from error
        if returned is not None:
            raise HookError(
                f"a hook of {self.owner} must return None, but its hook on {_point_of(hook)} "
                "returned something; pass hooks that change the run as interventions (hooks=...)"
            )
        return None


def _refuse_another_kind(changed: Any, tensor: Tensor, hook: Any) -> None:
    """Raise an error for what a model cannot continue with in place of a tensor."""
    fits = holds_numbers(changed) and changed.shape == tensor.shape
    if not fits or changed.dtype != tensor.dtype or changed.device != tensor.device:
        raise HookError(
            f"a hook must return None or a tensor like the one it gets, on {_point_of(hook)} "
            f"{described(tensor)} on {tensor.device}; got {described(changed)}"
        )


@contextmanager
def unedited(owner: str, what: str, *tensors: Tensor, compares: bool = False) -> Iterator[None]:
    """Raise an error if a tensor is edited inside; ``compares`` sees edits of its ``data`` too."""

    def state() -> list[Any]:
        # Private in torch, which has no public counter; tests/test_private_names.py verifies it.
        versions = [each._version for each in tensors if not each.is_inference()]
        # By a checksum: a copy of a long prompt's pattern may be a gigabyte.
        return versions + ([row_sums(each.detach()) for each in tensors] if compares else [])

    before = state()
    yield
    if not all(map(np.array_equal, state(), before)):
        raise edited(owner, what)


def edited(owner: str, what: str) -> HookError:
    return HookError(
        f"{owner} changed {what} in place, so that the model and the other metrics would continue "
        "with other numbers; work on a copy (tensor.clone())"
    )


def _point_of(hook: Any) -> str:
    return "the gradient of shared demonstrations" if hook is None else str(hook.name)


def _watched(hooks: Sequence[Hook]) -> list[tuple[Any, Any]]:
    """The same hooks, which count their calls: a pass gets only hooks for what it runs."""
    return [(name, act if isinstance(act, Watched) else Watched(act)) for name, act in hooks]


def _check_calls(what: str, hooks: Sequence[tuple[Any, Watched]]) -> None:
    """Raise an error for points that exist, but that the model does not call."""
    # An expert gets no token of some prompts.
    silent = [
        "any that a function selects" if callable(name) else repr(name)
        for name, watched in hooks
        if not watched.calls and not (isinstance(name, str) and ".experts." in name)
    ]
    if silent:
        names = ", ".join(list(dict.fromkeys(silent))[:3]) + " and others" * (len(silent) > 3)
        raise HookError(
            f"{what} did nothing, because the model did not call their hook points: {names}; "
            "choose points that it calls, which model.run_with_cache(tokens) lists, or switch them "
            "on where TransformerLens can, as with model.set_use_attn_result(True)"
        )
