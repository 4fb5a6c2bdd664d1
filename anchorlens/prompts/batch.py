"""The record of one batch of prompts: tokens and the positions that analyses need.

All of it lies on the CPU, where Python reads single numbers: at each one on a GPU it would wait.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress
from reprlib import Repr
from typing import Any, cast, get_args, get_type_hints

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ArgumentError, PromptError
from ..printable import printable
from ..system.arguments import checked, fitted, is_array
from ..system.texts import described
from ..system.torch_state import gradient_mode
from .prompt_html import NO_SEGMENT, Picture, PromptView
from .segment_names import LABEL, OTHER, PADDING, QUERY, SEGMENTS, TARGET, of_task
from .tasks import TASKS
from .token_texts import token_texts
from .verbalizer import Verbalizer, note_ties

_OF_EACH_TOKEN = ("tokens", "attention_mask", "segments")
_POSITIONS = ("label_positions", "label_ends", "target_positions", "query_start")
_SHOWN = 150  # tokens at each end of a prompt that a notebook shows unasked
_LABELS = Repr()  # of six labels
_LABELS.maxstring = 14


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts of one batch, with the positions that the analyses need, on the CPU.

    Positions count from 0 in the padded rows. Build a batch with ``build_prompts`` or
    ``build_segments``, or from your own tokens with ``from_positions`` or ``from_segments``.

    Attributes:
        tokens: Token ids.
        attention_mask: True for a token, False for padding.
        label_positions: First token of each label word (the paper's p_k), in order of appearance.
        label_ends: Last token of each label word. To use it as the anchor, write
            ``dataclasses.replace(batch, label_positions=batch.label_ends)``.
        label_classes: Class of each anchor.
        target_positions: The last token, where the label is predicted (the paper's q).
        gold: True class of each query, or None.
        segments: Segment of each token, an index into ``segment_names``; -1 for none and padding.
        query_start: Position of the query's first token.
        demonstrations_id: Number of the set of demonstrations; equal for prompts that share it.
        index: Index of each prompt's query in the list of queries; batches are ordered by length.
        verbalizer: The label words of each class as tokens, and how they give its score; None in
            batches of segments. See ``label_scores`` and ``label_token_ids``.
        labels: The label words as texts, by class, if they are known; the first of each class.
        segment_names: Names of the segments: ``label``, ``query`` and so on for tasks, or your own.
        begins_with_bos: Whether the tokenizer put a BOS before each prompt.
        first_query: First position that is run: 0, or after a cached prefix (see ``after``).
        inputs: For each prompt what the model's forward takes beside tokens, with images or patches
            along the first axis; empty for texts. See ``al.with_images``, ``forward_inputs``.
        pictures: For each prompt its images, as pages draw them; empty if they are not known.
    """

    tokens: Int[Tensor, "batch position"]
    attention_mask: Bool[Tensor, "batch position"]
    label_positions: Int[Tensor, "batch anchor"]
    label_ends: Int[Tensor, "batch anchor"]
    label_classes: Int[Tensor, "batch anchor"]
    target_positions: Int[Tensor, " batch"]
    gold: Int[Tensor, " batch"] | None
    segments: Int[Tensor, "batch position"]
    query_start: Int[Tensor, " batch"]
    demonstrations_id: Int[Tensor, " batch"]
    index: Int[Tensor, " batch"]
    verbalizer: Verbalizer | None = None
    labels: tuple[str, ...] = ()
    segment_names: tuple[str, ...] = SEGMENTS
    begins_with_bos: bool = False
    first_query: int = 0
    inputs: tuple[Mapping[str, Tensor], ...] = ()
    pictures: tuple[tuple[Picture, ...], ...] = ()

    def __post_init__(self) -> None:
        """Take tensors to the CPU, and none from an inference mode, which autograd rejects."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and (value.device.type != "cpu" or value.is_inference()):
                with gradient_mode(True):
                    object.__setattr__(self, name, value.to("cpu", copy=True))

    @staticmethod
    def _in_place_of(value: Any) -> str:
        """What to write in place of the name of a task, of texts or of tokens."""
        texts = value if isinstance(value, list | tuple) and value else [value]
        if all(isinstance(text, str) for text in texts):
            made = f"al.build_segments(model, {'texts' if texts is value else '[text]'})"
            made = f"al.sample_prompts(model, {value!r})" if value in [*TASKS] else made
            return f"write batches = {made}; batches[0] is a batch"
        return "write al.PromptBatch.from_segments(tokens)" * isinstance(value, Tensor)

    def __new__(cls, *fields: Any, **named: Any) -> "PromptBatch":
        """An error for tokens or a text alone."""
        if len(fields) == 1 and not named:
            cure = cls._in_place_of(fields[0]) or "write al.PromptBatch.from_segments(tokens)"
            raise ArgumentError(f"PromptBatch takes more than one field; {cure}")
        return super().__new__(cls)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __repr__(self) -> str:
        """One line: the number of prompts, their length, label words and classes."""
        parts = [f"batch {len(self)}, position {self.tokens.shape[-1]}"]
        if self.has_label_words:
            parts[0] += f", anchor {self.label_positions.shape[1]}"
            parts[0] += f", class {len(self.label_token_ids)}"
        if not of_task(self.segment_names):
            parts += [f"segments {_LABELS.repr(self.segment_names)}"]
        parts += [f"labels {_LABELS.repr(self.labels)}"] if self.labels else []
        parts += [f"inputs {', '.join(self._input_names)}"] if self.inputs else []
        parts += [f"run from position {self.first_query}"] if self.first_query else []
        return printable(f"{type(self).__name__}({'; '.join(parts)})")

    def _repr_html_(self) -> str:
        """The first prompt as token ids, which need no tokenizer."""
        prompt = self.prompt(0)
        ids, (segments, names) = prompt.tokens[0].tolist(), segments_to_show(prompt)
        tokens = [f"{token} " for token in ids]
        heading = f"{self!r}: token ids of prompt 0; show(tokenizer) shows its text"
        if left_out := max(0, len(ids) - 2 * _SHOWN):
            segments[_SHOWN:-_SHOWN] = [PADDING] * left_out
            tokens[_SHOWN - 1] += "… "
            heading += f". {left_out} of its {len(ids)} tokens are left out"
        return PromptView(tokens, segments, heading, names)._repr_html_()

    @checked
    def show(self, tokenizer: Any, prompt: int = 0) -> PromptView:
        """The text of a prompt, which a notebook shows in the colours of their segments.

        Raises:
            PromptError: There is no such prompt, or the tokenizer is not that of the prompts.

        Examples:
            >>> text = str(batch.show(model.tokenizer))
            >>> text[:10], text.count("◆")  # there is one before each label word
            ('Question: ', 6)
        """
        alone = self.prompt(prompt)
        ids = alone.tokens[0].tolist()
        heading = f"Prompt {prompt} of 0 to {len(self) - 1}, {len(ids)} tokens"
        segments, names = segments_to_show(alone)
        pictures = alone.pictures[0] if alone.pictures else ()
        return PromptView(token_texts(tokenizer, ids), segments, heading, names, pictures)

    @property
    def positions(self) -> Int[Tensor, " position"]:
        """The number of each column, from 0."""
        return torch.arange(self.tokens.shape[1], device="cpu")

    @property
    def starts(self) -> Int[Tensor, " batch"]:
        """Position of the first token of each prompt."""
        return self.attention_mask.long().argmax(1)

    @property
    def up_to_target(self) -> Bool[Tensor, "batch position"]:
        """The tokens of each prompt up to its target; later ones cannot influence it."""
        return self.attention_mask & (self.positions <= self.target_positions[:, None])

    @property
    def from_query(self) -> Bool[Tensor, "batch position"]:
        """The tokens of each prompt from the first of its query on."""
        return self.attention_mask & (self.positions >= self.query_start[:, None])

    @property
    def has_label_words(self) -> bool:
        """Whether the prompts have classes with label words; batches of segments have none."""
        return self.verbalizer is not None

    @property
    def label_token_ids(self) -> Int[Tensor, " class"]:
        """First token of each class's label word, of its first word if it has several."""
        words = () if self.verbalizer is None else self.verbalizer.token_ids
        return torch.tensor([first for first, *_ in words], dtype=torch.long, device="cpu")

    @checked
    def label_scores(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch class"]:
        """Score of each class, from next-token logits at the target positions.

        The logit of the first token of its label word; of several words ``Task.score``.

        Examples:
            >>> logits = al.target_logits(model, batches, progress=False)
            >>> predictions = batch.label_scores(logits).argmax(-1)
        """
        check_label_words([self])
        scores = cast(Verbalizer, self.verbalizer).scores(logits)
        note_ties(scores)
        return scores

    @property
    def _input_names(self) -> list[str]:
        return list(dict.fromkeys(name for each in self.inputs for name in each))

    @property
    def forward_inputs(self) -> dict[str, Tensor]:
        """The ``inputs`` of all prompts in one call of the model.

        They are joined along their first axis. The other axes are widened with zeros to the
        longest, as the processors of transformers do with images of several sizes.

        Examples:
            >>> pixels = [{"pixel_values": torch.ones(n, 3, 8, 8)} for n in (1, 2)]
            >>> pair = dataclasses.replace(batch.prompts(0, 2), inputs=tuple(pixels))
            >>> pair.forward_inputs["pixel_values"].shape
            torch.Size([3, 3, 8, 8])
        """
        return {
            name: _one_after_another([each[name] for each in self.inputs if name in each])
            for name in self._input_names
        }

    @property
    def is_whole(self) -> bool:
        """Whether all tokens are run, and not only those after a cached prefix."""
        return self.first_query == 0

    @property
    def target_rows(self) -> Int[Tensor, " batch"]:
        """Index of each target position among the query rows of a pattern."""
        return self.target_positions - self.first_query

    @checked
    def after(self, position: int) -> "PromptBatch":
        """The same prompts, of which only the tokens from ``position`` on are run.

        Keys and values of the tokens before it are cached. All tokens stay in the batch, so that
        positions are those of whole prompts; only the rows of patterns begin at ``position``.
        """
        return replace(self, first_query=position)

    def whole(self) -> "PromptBatch":
        """The same prompts, of which all tokens are run."""
        return replace(self, first_query=0)

    @checked
    def prompt(self, number: int) -> "PromptBatch":
        """A batch with one prompt of this batch, without padding.

        Examples:
            >>> al.saliency(model, batch.prompt(0)).shape[:2] == (1, model.cfg.n_layers)
            True
        """
        if not 0 <= number < len(self):
            raise PromptError(f"the batch has the prompts 0 to {len(self) - 1}; got {number!r}")
        return self.prompts(number, number + 1)

    @checked
    def prompts(self, start: int, stop: int, step: int = 1) -> "PromptBatch":
        """The prompts from ``start`` up to ``stop`` (excluded), without columns of only padding.

        Raises:
            PromptError: There is none of them, or the fields of the batch do not agree.

        Examples:
            >>> len(batch.prompts(0, 2))
            2
        """
        _check_fields(self)
        columns = self.attention_mask[start:stop:step].any(0).nonzero()
        if not len(columns):
            raise PromptError(f"no prompt is in {start}:{stop}:{step} of a batch of {len(self)}")
        first, last = int(columns[0]), int(columns[-1])
        rows: dict[str, Any] = {
            name: value[start:stop:step]
            for name, value in vars(self).items()
            if isinstance(value, Tensor) or name in ("inputs", "pictures")
        }
        return replace(self, **rows)._with(lambda value: value[:, first : last + 1], first)

    def padded_right(self) -> "PromptBatch":
        """The same prompts with padding on the right; this batch itself if it is so already."""
        return self._columns_from(self._ends()[0])

    def padded_left(self) -> "PromptBatch":
        """The same prompts with padding on the left."""
        starts, ends = self._ends()
        return self._columns_from(ends - int((ends - starts).max()))

    @checked
    def before(self, position: int) -> "PromptBatch":
        """The columns before ``position`` alone, all of which are run, as a cached prefix is made.

        Positions are those of the whole prompts: targets and the last label words may lie beyond.
        """
        first: dict[str, Any] = {name: getattr(self, name)[:, :position] for name in _OF_EACH_TOKEN}
        return replace(self, first_query=0, **first)

    def _ends(self) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
        """The first position of each prompt, and the first position after it."""
        last = self.attention_mask.flip(1).long().argmax(1)
        return self.starts, self.tokens.shape[1] - last

    def _columns_from(self, starts: Int[Tensor, " batch"]) -> "PromptBatch":
        """Rows that begin at ``starts`` and are as long as the longest prompt."""
        first, ends = self._ends()
        width = int((ends - first).max())
        if width == self.tokens.shape[1] and not starts.any():
            return self
        numbers = torch.arange(width, device="cpu") + starts[:, None]
        columns = numbers % self.tokens.shape[1]  # at the end of a row is only padding
        return self._with(lambda value: value.gather(1, columns), starts)

    def _with(self, columns: Callable[[Tensor], Tensor], start: Any) -> "PromptBatch":
        """The same prompts in other columns, of which the first was at ``start``."""
        values: dict[str, Any] = {name: columns(getattr(self, name)) for name in _OF_EACH_TOKEN}
        for name in _POSITIONS:
            positions = getattr(self, name)
            of_rows = isinstance(start, Tensor) and positions.ndim == 2
            values[name] = positions - (start[:, None] if of_rows else start)
        return replace(self, **values)

    @classmethod
    @checked
    def from_positions(
        cls,
        tokens: Int[Tensor, "batch position"],
        *,
        label_positions: Int[Tensor, "batch anchor"] | Sequence[Sequence[int]] | None = None,
        label_classes: Int[Tensor, "batch anchor"] | Sequence[Sequence[int]] | None = None,
        label_token_ids: Int[Tensor, " class"] | Sequence[int] | Verbalizer | None = None,
        gold: Int[Tensor, " batch"] | Sequence[int] | None = None,
        attention_mask: Int[Tensor, "batch position"]
        | Bool[Tensor, "batch position"]
        | None = None,
        target_positions: Int[Tensor, " batch"] | Sequence[int] | None = None,
        begins_with_bos: bool = False,
    ) -> "PromptBatch":
        """A batch from your own tokens and positions.

        Args:
            tokens: Token ids, padded on either side.
            label_positions: Position of each label word, in order of appearance. Without label
                words leave this, the next two and gold out: it is ``from_segments(tokens)`` then.
            label_token_ids: First token of each class's label word, all different; an
                ``al.prompts.Verbalizer`` where classes have several words.
            attention_mask: 1 or True for a token, 0 or False for padding; all 1 by default.
            target_positions: Where the label is predicted; the last token of each row by default.
            begins_with_bos: Whether the first token of each prompt is a BOS.

        Returns:
            A batch, in which other tokens are "query" after the last label word, "other" before it.

        Raises:
            PromptError: Shapes do not agree; positions or classes are out of range or of order;
                label tokens are not distinct, or all label words are tokens of other classes.

        Examples:
            >>> batch = PromptBatch.from_positions(
            ...     torch.tensor([[5, 1, 6, 2, 7, 8]]),
            ...     label_positions=[[1, 3]], label_classes=[[0, 1]], label_token_ids=[1, 2])
            >>> batch.target_positions.tolist()
            [5]
        """
        of_words = (label_positions, label_classes, label_token_ids)
        if all(each is None for each in (*of_words, gold)):
            return cls.from_segments(
                tokens,
                attention_mask=attention_mask,
                target_positions=target_positions,
                begins_with_bos=begins_with_bos,
            )
        if label_positions is None or label_classes is None or label_token_ids is None:
            raise PromptError(
                "label words are label_positions, label_classes and label_token_ids together; give "
                "all three, or neither these nor gold"
            )
        if not isinstance(label_token_ids, Verbalizer):
            label_token_ids = Verbalizer([[token] for token in label_token_ids])
        batch = as_batch(
            tokens,
            attention_mask,
            label_positions=label_positions,
            label_ends=label_positions,
            label_classes=label_classes,
            target_positions=target_positions,
            gold=gold,
            verbalizer=label_token_ids,
            begins_with_bos=begins_with_bos,
        )
        _check_words(batch)
        query_start = batch.label_positions.amax(1) + 1
        segments = torch.where(batch.positions < query_start[:, None], OTHER, QUERY)
        segments.scatter_(1, batch.label_positions, LABEL)
        segments.scatter_(1, batch.target_positions[:, None], TARGET)
        segments[~batch.attention_mask] = PADDING
        return replace(batch, segments=segments, query_start=query_start)

    @classmethod
    @checked
    def from_segments(
        cls,
        tokens: Int[Tensor, "batch position"],
        segments: Int[Tensor, "batch position"] | Sequence[Sequence[int]] | None = None,
        names: Sequence[str] = ("text",),
        *,
        attention_mask: Int[Tensor, "batch position"]
        | Bool[Tensor, "batch position"]
        | None = None,
        target_positions: Int[Tensor, " batch"] | Sequence[int] | None = None,
        begins_with_bos: bool = False,
    ) -> "PromptBatch":
        """A batch from your own tokens and named segments, without label words.

        For flows between any parts of a text: a question, steps, documents, an answer.

        Args:
            tokens: Token ids, padded on either side.
            segments: Segment of each token, an index into ``names``; -1 for tokens of no segment,
                and under padding. By default all tokens are one segment.
            names: Names of the segments, all different.
            attention_mask: 1 or True for a token, 0 or False for padding; all 1 by default.
            target_positions: Where the next token is predicted; the last token of each row by
                default. To predict several tokens, see ``al.losses.span_cross_entropy``.
            begins_with_bos: Whether the first token of each prompt is a BOS.

        Raises:
            PromptError: Shapes, ranges or names do not fit, or padding is in a segment.

        Examples:
            >>> batch = al.PromptBatch.from_segments(
            ...     torch.tensor([[5, 1, 6, 2, 7, 8]]), [[0, 0, 1, 1, 1, 2]],
            ...     ["question", "step", "answer"])
            >>> batch
            PromptBatch(batch 1, position 6; segments ('question', 'step', 'answer'))
        """
        if segments is None:
            if len(names) != 1:
                raise PromptError(
                    f"segments= says which of the segments {list(names)} a token is in; give it"
                )
            mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
            segments = mask.long() - 1
        return as_batch(
            tokens,
            attention_mask,
            segments=segments,
            target_positions=target_positions,
            segment_names=tuple(names),
            begins_with_bos=begins_with_bos,
        )


def _one_after_another(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors joined along the first axis; the others are widened with zeros."""
    widest = [max(sizes) for sizes in zip(*(each.shape[1:] for each in tensors), strict=True)]
    joined = tensors[0].new_zeros(sum(map(len, tensors)), *widest)
    start = 0
    for each in tensors:
        joined[(slice(start, start + len(each)), *map(slice, each.shape[1:]))] = each
        start += len(each)
    return joined


def segments_to_show(prompt: PromptBatch) -> tuple[list[int], Sequence[str]]:
    """The segments of a prompt's tokens, and all names, with one more for tokens of no segment."""
    names, segments = prompt.segment_names, prompt.segments[0].tolist()
    if of_task(names):
        return segments, names
    return [len(names) if k == PADDING else k for k in segments], (*names, NO_SEGMENT)


def digest(tokens: Iterable[int]) -> int:
    """A number for a list of tokens: the same in every process and on every machine."""
    return bytes_digest(",".join(map(str, tokens)).encode())


def bytes_digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def demonstrations_ids(batch: PromptBatch) -> Int[Tensor, " batch"]:
    """A number for the tokens of each prompt up to its last label word, or for all its tokens."""
    inside = batch.attention_mask
    if batch.has_label_words:
        inside = inside & (batch.positions <= batch.label_ends.amax(1, keepdim=True))
    return digests(batch, inside)


def digests(batch: PromptBatch, inside: Bool[Tensor, "batch position"]) -> Int[Tensor, " batch"]:
    """A number for these tokens of each prompt."""
    rows = zip(batch.tokens.tolist(), inside.tolist(), strict=True)
    ids = [digest(compress(tokens, mask)) for tokens, mask in rows]
    return torch.tensor(ids, device="cpu")


def anchors_of(batch: PromptBatch) -> Bool[Tensor, "batch position"]:
    """True at one token of each label word."""
    check_label_words([batch])
    check_inside(batch, "label_positions")
    return torch.zeros_like(batch.attention_mask).scatter(1, batch.label_positions, True)


def tokens_of_paper(batch: PromptBatch) -> tuple[Bool[Tensor, "batch position"], ...]:
    """True at the anchors, at the target (the paper's q), and at all tokens up to it."""
    target = batch.positions == batch.target_positions[:, None]
    return anchors_of(batch), target, batch.up_to_target


def count_tokens(batches: Sequence[PromptBatch]) -> int:
    return sum(int(batch.attention_mask.sum()) for batch in batches)


def longest_prompt(*batches: PromptBatch) -> int:
    return max(int(batch.attention_mask.sum(1).max()) for batch in batches)


def after_shared(batch: PromptBatch, lengths: Mapping[int, int]) -> tuple[PromptBatch, int | None]:
    """A batch after the tokens that its prompts share, by set, and its set; None for several."""
    set_id = only_set(batch)
    length = 0 if set_id is None else lengths.get(set_id, 0)
    return replace(batch, first_query=length) if length else batch, set_id


def in_longer_rows(batch: PromptBatch, length: int) -> PromptBatch:
    """The same prompts in rows of a length, in which other tokens come after them."""
    more, pad = (0, length - batch.tokens.shape[1]), torch.nn.functional.pad
    return replace(
        batch,
        tokens=pad(batch.tokens, more),
        attention_mask=pad(batch.attention_mask, more, value=True),
        segments=pad(batch.segments, more, value=PADDING),
    )


def only_set(batch: PromptBatch) -> int | None:
    """The set of demonstrations of a batch; None if it has several."""
    return only_sets([batch])[0]


def only_sets(batches: Sequence[PromptBatch]) -> list[int | None]:
    """The set of demonstrations of each batch; None where it has several."""
    of_batches = [set(batch.demonstrations_id.tolist()) for batch in batches]
    return [sets.pop() if len(sets) == 1 else None for sets in of_batches]


def as_batch(
    tokens: Int[Tensor, "batch position"], attention_mask: Tensor | None = None, **given: Any
) -> PromptBatch:
    """A batch of tokens and what is known of them (None is unknown), which is checked."""
    _check_axes({"tokens": tokens})
    tokens, axes = tokens.cpu(), _axes_of_fields()
    mask = torch.ones_like(tokens) if attention_mask is None else attention_mask.cpu()
    if not ((mask == 0) | (mask == 1)).all():
        raise PromptError("attention_mask must hold 1 for tokens and 0 for padding, and no other")
    known: dict[str, Any] = {"tokens": tokens, "attention_mask": mask.bool()}
    _check_axes(known)
    for name, value in given.items():
        if value is not None:
            known[name] = _as_integers(name, value) if name in axes else value
    size, length = tokens.shape
    none, zeros = tokens.new_zeros(size, 0).long(), tokens.new_zeros(size).long()
    batch = PromptBatch(
        **{
            "label_positions": none,
            "label_ends": none,
            "label_classes": none,
            "target_positions": length - 1 - mask.flip(1).long().argmax(1),
            "gold": None,
            "segments": torch.full_like(tokens, PADDING, dtype=torch.long),
            "query_start": mask.long().argmax(1),
            "demonstrations_id": zeros,
            "index": torch.arange(size, device="cpu"),
            **known,
        }
    )
    check_prompts(batch)
    return replace(batch, demonstrations_id=demonstrations_ids(batch))


def _as_integers(name: str, values: Any) -> Tensor:
    """A tensor or lists as a tensor of whole numbers; one of other numbers stays as it is."""
    try:
        tensor = torch.as_tensor(values, device="cpu")
    except (ValueError, TypeError) as error:  # rows of unequal lengths
        raise PromptError(f"{name} must be a table of whole numbers: {error}") from error
    return tensor.long() if holds_integers(tensor) or not tensor.numel() else tensor


def holds_integers(tensor: Tensor) -> bool:
    """Whether the type of a tensor is an integer type (not bool)."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def check_label_words(batches: Sequence[PromptBatch]) -> None:
    """Raise an error for batches of segments, which have no label words."""
    if not all(batch.has_label_words for batch in batches):
        raise PromptError(
            "these prompts have segments but no label words, which are needed here; build them "
            "with build_prompts, or from your own tokens with PromptBatch.from_positions"
        )


def check_batch(batch: PromptBatch) -> None:
    """Check prompts with label words; see ``check_prompts``."""
    check_prompts(batch)
    check_label_words([batch])


def check_prompts(*batches: PromptBatch) -> None:
    """Check that the fields of a batch agree: ``replace`` can make one in which they do not."""
    for batch in batches:
        if batch.first_query:
            raise PromptError(
                f"the prompts are to be run from position {batch.first_query}, but keys of 0 "
                "tokens are cached; a batch of whole prompts has first_query=0"
            )
        _check_fields(batch)
        if not (has_tokens := batch.attention_mask.any(1)).all():
            raise PromptError(f"prompt {int((~has_tokens).nonzero()[0])} is padding only")
        if (batch.tokens < 0).any():
            least = int(batch.tokens.min())
            raise PromptError(f"tokens are whole numbers from 0, also under padding; got {least}")
        for name in ("inputs", "pictures"):
            if (count := len(getattr(batch, name))) not in (0, len(batch)):
                raise PromptError(
                    f"{name} are one for each of {len(batch)} prompts, or none; got {count}"
                )
        _check_inputs(batch)
        _check_segments(batch)
        check_inside(batch, "target_positions")
        if batch.has_label_words or batch.label_positions.numel():
            _check_positions(batch)


@cache
def _axes_of_fields() -> dict[str, list[str]]:
    """The axes of each tensor of a batch, as its annotation names them."""
    hints = get_type_hints(PromptBatch)
    arrays = {name: (get_args(hint) or [hint])[0] for name, hint in hints.items()}
    return {name: hint.dim_str.split() for name, hint in arrays.items() if is_array(hint)}


def _check_fields(batch: PromptBatch) -> None:
    """Check what fields are, and that each axis has one length in all of them."""
    _check_axes({name: getattr(batch, name) for name in _axes_of_fields()})
    fitted("verbalizer of a batch", batch.verbalizer, Verbalizer | None)


def _check_axes(values: Mapping[str, Any]) -> None:
    """Check that tensors have the axes of their annotations, each axis of one length in all."""
    lengths: dict[str, int] = {}
    for name, value in values.items():
        axes = _axes_of_fields()[name]
        if name == "gold" and value is None:
            continue
        if not isinstance(value, Tensor):
            raise PromptError(
                f"{name} of a batch must be a tensor; got {value!r}; build batches with "
                "build_prompts or PromptBatch.from_positions"
            )
        expected, shape = [lengths.get(axis) for axis in axes], tuple(value.shape)
        fits = len(shape) == len(axes) and all(
            length == known if known is not None else length or axis == "anchor"
            for axis, length, known in zip(axes, shape, expected, strict=True)
        )
        if not fits:
            words = ", ".join(axes) + "," * (len(axes) == 1)
            here = "" if None in expected else f" = {tuple(expected)}"
            raise PromptError(f"{name} must have the shape ({words}){here}; got {shape}")
        if holds_integers(value) == (name == "attention_mask"):
            kind = "True or False" if name == "attention_mask" else "whole numbers from 0"
            raise PromptError(f"{name} must be {kind}, a tensor of them; got {value.dtype}")
        lengths.update(zip(axes, shape, strict=True))


def check_inside(
    batch: PromptBatch, name: str, positions: Int[Tensor, "batch _"] | None = None
) -> None:
    """Raise an error if a position (by default of the field ``name``) is not that of a token."""
    positions = getattr(batch, name) if positions is None else positions.cpu()
    positions = positions[:, None] if positions.ndim == 1 else positions
    length = batch.tokens.shape[1]
    if len(positions) != len(batch) or not holds_integers(positions):
        raise PromptError(
            f"{name} of a batch must be whole numbers, in a row for each of its {len(batch)} "
            f"prompts; got {described(positions)}"
        )
    outside = (positions < 0) | (positions >= length)
    padded = ~batch.attention_mask.gather(1, positions.clamp(0, length - 1))
    for fault, wrong in (("outside the prompt", outside), ("under padding", padded)):
        if wrong.any():
            row = int(wrong.any(1).nonzero()[0])
            tokens = batch.attention_mask[row].nonzero().flatten()
            raise PromptError(
                f"{name} of prompt {row} has a position {fault}: {positions[row].tolist()}; "
                f"its tokens are at {int(tokens[0])} to {int(tokens[-1])}"
            )


def _check_inputs(batch: PromptBatch) -> None:
    if not all(isinstance(each, Mapping) for each in batch.inputs):
        raise PromptError(
            "inputs of a batch are what the model's forward takes for each prompt, by name, such "
            f"as {{'pixel_values': tensor}}; got {batch.inputs[0]!r}"
        )
    for name in batch._input_names:
        values = [each[name] for each in batch.inputs if name in each]
        kinds = {(each.ndim, each.dtype) if isinstance(each, Tensor) else () for each in values}
        if len(kinds) > 1 or not next(iter(kinds)) or not values[0].ndim:
            raise PromptError(
                f"inputs {name!r} of the prompts must be tensors of one type and one number of "
                f"axes; got {', '.join(map(described, values[:3]))}"
            )


def _check_segments(batch: PromptBatch) -> None:
    """Check that names of segments are different, and that each token has one of them or none."""
    names, segments = batch.segment_names, batch.segments
    are_names = isinstance(names, tuple) and all(isinstance(name, str) and name for name in names)
    if not are_names or not names or len(set(names)) < len(names):
        raise PromptError(f"segments have different names, at least one text; got {names!r}")
    if not ((segments >= PADDING) & (segments < len(names))).all():
        raise PromptError(
            f"segments are numbers from 0 to {len(names) - 1}, one for each of the {len(names)} "
            f"names, or {PADDING} for none; got {int(segments.min())} to {int(segments.max())}"
        )
    if (segments[~batch.attention_mask] != PADDING).any():
        row = int(((segments != PADDING) & ~batch.attention_mask).any(1).nonzero()[0])
        raise PromptError(f"prompt {row} has padding in a segment; its segment is {PADDING}")


def _check_words(batch: PromptBatch) -> None:
    """Check that label words are not the tokens of other classes than theirs."""
    words = batch.tokens.gather(1, batch.label_positions)
    found = words[..., None] == batch.label_token_ids
    of_word = found.long().argmax(-1)
    if found.any(-1).all() and (of_word != batch.label_classes).all():
        raise PromptError(
            f"no label word is the token of its class: the first is the token {int(words[0, 0])}, "
            f"in label_token_ids that of class {int(of_word[0, 0])}, but its label_classes is "
            f"{int(batch.label_classes[0, 0])}; give both in the order of the classes"
        )


def _check_positions(batch: PromptBatch) -> None:
    """Check that positions are inside their prompt and before the target, and classes in range."""
    if batch.verbalizer is None:
        raise PromptError("the batch's verbalizer is an al.prompts.Verbalizer; got None")
    classes = len(batch.verbalizer.token_ids)
    check_inside(batch, "label_positions")
    check_inside(batch, "label_ends")
    first, last = batch.label_positions.tolist(), batch.label_ends.tolist()
    if not (shape := tuple(batch.label_positions.shape))[1]:
        raise PromptError(f"expected at least one label word in each; got label_positions {shape}")
    if (batch.label_positions.diff(dim=1) <= 0).any():
        raise PromptError(f"label_positions must be different, in order of appearance; got {first}")
    if (batch.label_ends < batch.label_positions).any():
        raise PromptError(f"label_ends must not be before label_positions; got {last} and {first}")
    late = batch.label_ends >= batch.target_positions[:, None]
    if late.any():
        row = int(late.any(1).nonzero()[0])
        raise PromptError(
            "label words must stand before the target position; prompt "
            f"{row} has them at {first[row]} and its target at {int(batch.target_positions[row])}"
        )
    for name, values in (("label_classes", batch.label_classes), ("gold", batch.gold)):
        if values is not None and not ((values >= 0) & (values < classes)).all():
            raise PromptError(
                f"{name} must be classes from 0 to {classes - 1}, one for each of the {classes} "
                f"label_token_ids; got {sorted(set(values.flatten().tolist()))}"
            )
