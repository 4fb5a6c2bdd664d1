"""The record of one batch of prompts: tokens, and where everything in them stands."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import torch
from jaxtyping import Bool, Int, jaxtyped
from torch import Tensor

from ..errors import PromptError

GROUPS = ("other", "text", "label", "format", "query", "target")
"""Names of the token groups, in the order of their numbers in ``PromptBatch.groups``:
demonstration texts, label words, the template and separators around them, the query with its
format, the target position, and everything else (BOS, instructions). Padding is -1."""

_NO_TENSORS = ("labels", "begins_with_bos", "first_query")

OTHER, TEXT, LABEL, FORMAT, QUERY, TARGET = range(len(GROUPS))
PADDING = -1


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts of one batch, with the positions that the analyses need.

    Positions count from 0 in the padded rows. Build it with ``build_prompts`` or, for tokens of
    your own, with :meth:`from_positions`.

    Attributes:
        tokens: Token ids.
        attention_mask: True where a token stands, False under padding.
        label_positions: Position of each label word of the demonstrations (the paper's p_k), in
            order of appearance; the first token of a word that has several.
        label_ends: Position of the last token of each label word. With
            ``dataclasses.replace(batch, label_positions=batch.label_ends)`` it is the anchor.
        label_classes: Class of each anchor.
        target_positions: The last token, where the label is predicted (the paper's q).
        label_token_ids: First token of each class's label word.
        gold: True class of each query, or None.
        groups: Group of each token, a number into ``GROUPS``; -1 under padding.
        query_start: Position of the query's first token.
        demonstrations_id: Names the set of demonstrations: equal for prompts that share one.
        index: Place of each prompt in the list of queries; undoes grouping by length.
        labels: The label words, by class, where they are known.
        begins_with_bos: Whether the tokenizer put a BOS before each prompt.
        first_query: Position of the first query row of a pattern, where a prefix is cached.
    """

    tokens: Int[Tensor, "batch position"]
    attention_mask: Bool[Tensor, "batch position"]
    label_positions: Int[Tensor, "batch anchor"]
    label_ends: Int[Tensor, "batch anchor"]
    label_classes: Int[Tensor, "batch anchor"]
    target_positions: Int[Tensor, " batch"]
    label_token_ids: Int[Tensor, " class"]
    gold: Int[Tensor, " batch"] | None
    groups: Int[Tensor, "batch position"]
    query_start: Int[Tensor, " batch"]
    demonstrations_id: Int[Tensor, " batch"]
    index: Int[Tensor, " batch"]
    labels: tuple[str, ...] = ()
    begins_with_bos: bool = False
    first_query: int = 0

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def shared_prefix(self) -> int:
        """Number of leading tokens that all prompts of the batch have in common."""
        rows = [
            row[mask]
            for row, mask in zip(self.tokens.cpu(), self.attention_mask.cpu(), strict=True)
        ]
        shortest = min(len(row) for row in rows)
        same = torch.stack([row[:shortest] == rows[0][:shortest] for row in rows]).all(0)
        return int(same.long().cumprod(0).sum())

    def prompt(self, number: int) -> "PromptBatch":
        """One prompt as a batch of its own, without padding.

        Examples:
            >>> al.saliency(model, batch.prompt(0)).shape[:2] == (1, model.cfg.n_layers)
            True
        """
        if not isinstance(number, int) or not 0 <= number < len(self):
            raise PromptError(f"the batch has the prompts 0 to {len(self) - 1}; got {number!r}")
        return self.prompts(number, number + 1)

    def prompts(self, start: int, stop: int, step: int = 1) -> "PromptBatch":
        """The prompts from ``start`` to before ``stop``, without columns of padding around them.

        Examples:
            >>> len(batch.prompts(0, 2))
            2
        """
        rows: dict[str, Any] = {
            name: value[start:stop:step]
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "label_token_ids"
        }
        kept = rows["attention_mask"].any(0).nonzero()
        first, last = int(kept[0]), int(kept[-1])
        for name in ("tokens", "attention_mask", "groups"):
            rows[name] = rows[name][:, first : last + 1]
        for name in ("label_positions", "label_ends", "target_positions", "query_start"):
            rows[name] = rows[name] - first
        return replace(self, **rows)

    def padded_right(self) -> "PromptBatch":
        """The same prompts, each beginning in the first column; itself where they do already."""
        return self._columns_from(self._ends()[0])

    def padded_left(self) -> "PromptBatch":
        """The same prompts, each ending in the last column."""
        starts, ends = self._ends()
        return self._columns_from(ends - int((ends - starts).max()))

    def before(self, position: int) -> "PromptBatch":
        """The tokens of the columns before ``position``; the target may lie beyond them."""
        names = ("tokens", "attention_mask", "groups")
        return replace(self, **{name: getattr(self, name)[:, :position] for name in names})

    def _ends(self) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """Where each prompt begins, and where the padding behind it does."""
        mask = self.attention_mask.long()
        return mask.argmax(1), mask.shape[1] - mask.flip(1).argmax(1)

    def _columns_from(self, starts: Int[Tensor, " batch"]) -> "PromptBatch":
        """As many columns as the longest prompt needs, from each row's start; padding wraps."""
        first, ends = self._ends()
        width = int((ends - first).max())
        if width == self.tokens.shape[1] and not starts.any():
            return self
        where = torch.arange(width, device=starts.device) + starts[:, None]
        columns = where % self.tokens.shape[1]
        rows: dict[str, Any] = {
            name: getattr(self, name).gather(1, columns)
            for name in ("tokens", "attention_mask", "groups")
        }
        for name in ("label_positions", "label_ends"):
            rows[name] = getattr(self, name) - starts[:, None]
        for name in ("target_positions", "query_start"):
            rows[name] = getattr(self, name) - starts
        return replace(self, **rows)

    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> "PromptBatch":
        """The same batch with its tensors on ``device``, as autograd takes them."""
        moved: dict[str, Any] = {
            name: value.to(device, copy=value.is_inference())
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    @classmethod
    def from_positions(
        cls,
        tokens: Int[Tensor, "batch position"],
        *,
        label_positions: Int[Tensor, "batch anchor"] | Sequence[Sequence[int]],
        label_classes: Int[Tensor, "batch anchor"] | Sequence[Sequence[int]],
        label_token_ids: Int[Tensor, " class"] | Sequence[int],
        gold: Int[Tensor, " batch"] | Sequence[int] | None = None,
        attention_mask: Int[Tensor, "batch position"]
        | Bool[Tensor, "batch position"]
        | None = None,
        target_positions: Int[Tensor, " batch"] | Sequence[int] | None = None,
        begins_with_bos: bool = False,
    ) -> "PromptBatch":
        """A batch from tokens and positions of your own.

        Args:
            tokens: Token ids, padded on either side.
            label_positions: Position of each label word, in order of appearance.
            label_classes: Class of each label word.
            label_token_ids: First token of each class's label word, all different.
            gold: True class of each prompt.
            attention_mask: 1 or True where a token stands; all, by default.
            target_positions: Where the label is predicted; each row's last token, by default.
            begins_with_bos: Whether the first token of each prompt is a BOS.

        Returns:
            A batch. Tokens after the last label word are in the group "query", those before that
            are no label words in "other".

        Raises:
            PromptError: Tokens or positions are no whole numbers; a position lies outside the
                prompt, under padding, or not before the target; classes or gold labels are out of
                range; label tokens are not distinct; or the shapes do not fit together. The message
                says which.

        Examples:
            >>> batch = PromptBatch.from_positions(
            ...     torch.tensor([[5, 1, 6, 2, 7, 8]]),
            ...     label_positions=[[1, 3]], label_classes=[[0, 1]], label_token_ids=[1, 2])
            >>> batch.target_positions.tolist()
            [5]
        """
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise PromptError(
                f"tokens must have the shape (batch, position); got {tuple(tokens.shape)}"
            )
        if not holds_integers(tokens) or int(tokens.min()) < 0:
            raise PromptError(
                "tokens must be whole numbers from 0, also under padding; got "
                + (f"{int(tokens.min())}" if holds_integers(tokens) else f"{tokens.dtype}")
            )
        device, (size, length) = tokens.device, tokens.shape
        mask = torch.ones(size, length) if attention_mask is None else attention_mask
        if not ((mask == 0) | (mask == 1)).all():
            raise PromptError("attention_mask must hold 1 where a token stands, and 0 elsewhere")
        mask = mask.to(device).bool()
        if mask.shape != tokens.shape:
            raise PromptError(
                f"attention_mask must have the shape of tokens, {tuple(tokens.shape)}; "
                f"got {tuple(mask.shape)}"
            )
        if not mask.any(1).all():
            raise PromptError(f"prompt {int((~mask.any(1)).nonzero()[0])} is padding only")
        last = length - 1 - mask.flip(1).long().argmax(1)

        def row_of_ints(name: str, value: Any, shape: tuple[int | None, ...]) -> Tensor:
            try:
                tensor = torch.as_tensor(value, device=device)
            except (ValueError, TypeError, RuntimeError) as error:  # None, rows of other lengths
                raise PromptError(
                    f"{name} must be a table of the shape {shape}: {error}"
                ) from error
            fits = tensor.ndim == len(shape) and all(
                got > 0 if want is None else got == want
                for want, got in zip(shape, tensor.shape, strict=True)
            )
            if not fits:
                raise PromptError(f"{name} must have the shape {shape}; got {tuple(tensor.shape)}")
            if not holds_integers(tensor):
                raise PromptError(f"{name} must be integers; got {tensor.dtype}")
            return tensor.long()

        anchors = row_of_ints("label_positions", label_positions, (size, None))
        classes = row_of_ints("label_classes", label_classes, (size, anchors.shape[1]))
        ids = row_of_ints("label_token_ids", label_token_ids, (None,))
        target = (
            last
            if target_positions is None
            else row_of_ints("target_positions", target_positions, (size,))
        )
        golds = None if gold is None else row_of_ints("gold", gold, (size,))
        query_start = anchors.max(1).values + 1
        groups = torch.full_like(tokens, QUERY, dtype=torch.long)
        where = torch.arange(length, device=device)
        groups[where < query_start[:, None]] = OTHER
        batch = cls(
            tokens=tokens,
            attention_mask=mask,
            label_positions=anchors,
            label_ends=anchors,
            label_classes=classes,
            target_positions=target,
            label_token_ids=ids,
            gold=golds,
            groups=groups,
            query_start=query_start,
            demonstrations_id=torch.zeros(size, dtype=torch.long, device=device),
            index=torch.arange(size, device=device),
            begins_with_bos=begins_with_bos,
        )
        _check_positions(batch)
        groups.scatter_(1, anchors, LABEL).scatter_(1, target[:, None], TARGET)
        groups[~mask] = PADDING
        return replace(batch, demonstrations_id=_demonstrations_ids(batch))


def holds_integers(tensor: Tensor) -> bool:
    """Whether a tensor is of a type that can count or index."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def digest(tokens: Sequence[int]) -> int:
    """A number that names a list of tokens: the same in every process and on every machine."""
    digest = hashlib.sha256(",".join(map(str, tokens)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _demonstrations_ids(batch: PromptBatch) -> Int[Tensor, " batch"]:
    where = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    inside = batch.attention_mask & (where <= batch.label_ends.max(1, keepdim=True).values)
    rows = zip(batch.tokens, inside, strict=True)
    ids = [digest(tokens[keep].tolist()) for tokens, keep in rows]
    return torch.tensor(ids, device=batch.tokens.device)


def check_batch(batch: PromptBatch) -> None:
    """Refuse a batch whose tensors do not fit together, as ``dataclasses.replace`` can make one.

    Raises:
        PromptError: A tensor has another type or shape, a position lies outside its prompt or not
            before the target, or a class is out of range. The message says which.
    """
    hints = get_type_hints(PromptBatch)
    with jaxtyped("context"):  # so that an axis is as long in all tensors
        for name in [name for name in hints if name not in _NO_TENSORS]:
            value, hint = getattr(batch, name), hints[name]
            if isinstance(value, hint):
                continue
            got = (
                f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            )
            raise PromptError(
                f"{name} of a batch must be {getattr(hint, '__name__', hint)}, with axes as long "
                f"as those of its other tensors; got {got}. Build batches with build_prompts or "
                "PromptBatch.from_positions"
            )
    if batch.tokens.numel() == 0:
        raise PromptError(f"a batch has at least one token; got {tuple(batch.tokens.shape)}")
    if batch.first_query:
        raise PromptError(
            f"the prompts are to be run from position {batch.first_query}, but keys of 0 tokens "
            "are cached; a batch of whole prompts has first_query=0"
        )
    if not batch.attention_mask.any(1).all():
        row = int((~batch.attention_mask.any(1)).nonzero()[0])
        raise PromptError(f"prompt {row} is padding only")
    if (batch.tokens < 0).any():
        raise PromptError(f"tokens count from 0; got {int(batch.tokens.min())}")
    _check_positions(batch)


def refuse_outside(batch: PromptBatch, name: str, positions: Int[Tensor, "batch _"]) -> None:
    """Refuse positions where no token of the prompt stands."""
    length = batch.tokens.shape[1]
    if len(positions) != len(batch) or not holds_integers(positions):
        raise PromptError(
            f"{name} of a batch must be whole numbers, in a row for each of its {len(batch)} "
            f"prompts; got {positions.dtype} {tuple(positions.shape)}"
        )
    outside = (positions < 0) | (positions >= length)
    padded = ~batch.attention_mask.gather(1, positions.clamp(0, length - 1))
    for fault, wrong in (("outside the prompt", outside), ("under padding", padded)):
        if wrong.any():
            row = int(wrong.any(1).nonzero()[0])
            stand = batch.attention_mask[row].nonzero().flatten()
            raise PromptError(
                f"{name} of prompt {row} has a position {fault}: {positions[row].tolist()}; "
                f"its tokens stand at {int(stand[0])} to {int(stand[-1])}"
            )


def _check_positions(batch: PromptBatch) -> None:
    """Every position inside its prompt and before the target, every class in range."""
    classes = len(batch.label_token_ids)
    refuse_outside(batch, "label_positions", batch.label_positions)
    refuse_outside(batch, "label_ends", batch.label_ends)
    refuse_outside(batch, "target_positions", batch.target_positions[:, None])
    if batch.label_positions.shape[1] == 0:
        raise PromptError(
            "a batch has at least one label word in each prompt; got label_positions "
            f"of the shape {tuple(batch.label_positions.shape)}"
        )
    if (batch.label_positions.diff(dim=1) <= 0).any():
        raise PromptError(
            "label_positions of one prompt must be different, and in order of appearance; got "
            f"{batch.label_positions.tolist()}"
        )
    if (batch.label_ends < batch.label_positions).any():
        raise PromptError(
            "label_ends are not before label_positions; got "
            f"{batch.label_ends.tolist()} and {batch.label_positions.tolist()}"
        )
    late = batch.label_ends >= batch.target_positions[:, None]
    if late.any():
        row = int(late.any(1).nonzero()[0])
        raise PromptError(
            f"label words must stand before the target position; prompt {row} has label words at "
            f"{batch.label_positions[row].tolist()} and its target at "
            f"{int(batch.target_positions[row])}"
        )
    for name, values in (("label_classes", batch.label_classes), ("gold", batch.gold)):
        if values is not None and not ((values >= 0) & (values < classes)).all():
            raise PromptError(
                f"{name} must be classes from 0 to {classes - 1}, one for each of the {classes} "
                f"label_token_ids; got {sorted(set(values.flatten().tolist()))}"
            )
    ids = batch.label_token_ids.tolist()
    if len(set(ids)) < len(ids):
        raise PromptError(f"label_token_ids must be different; got {ids}")
    if min(ids) < 0:
        raise PromptError(f"label_token_ids count from 0; got {ids}")
