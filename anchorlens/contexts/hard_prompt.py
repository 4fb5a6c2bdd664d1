"""Hard prompts: tokens before a query, their text, and what is lost when people copy the text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..models.hooked import HookedModel
from ..passes.losses import LossOfBatch
from ..prompts.batch import PromptBatch, check_batch, demonstrations_ids
from ..prompts.segment_names import OTHER
from ..results.estimate import in_digits
from ..system.arguments import checked
from .embedded import prefix_of_tokens
from .prefix import PrefixContext
from .protocol import bos_of
from .training import TrainingRecord, answers


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class HardPrompt(PrefixContext):
    """Tokens that stand before a query.

    Attributes:
        text: Their text, without the BOS.
        encoded: The tokens of this text, with the BOS; a tokenizer may join some of ``tokens``.
        encoded_accuracy: Held-out accuracy of ``encoded``, not ``tokens``, from 0 to 1.
    """

    training: TrainingRecord
    text: str
    encoded: Int[Tensor, " encoded"]
    encoded_accuracy: Float[Tensor, ""]

    def _summary(self) -> dict[str, str]:
        back = "back to them" if self.encodes_back else "to other tokens"
        accuracy = f"{back}, accuracy {in_digits(self.encoded_accuracy)}"
        return {"text": repr(self.text), **super()._summary(), "text encodes": accuracy}

    @property
    def ids(self) -> Int[Tensor, " length"]:
        """The token ids without the BOS."""
        return self.tokens[len(self.info["bos"]) :]

    @property
    def encodes_back(self) -> bool:
        """Whether the tokenizer encodes the text to the same tokens."""
        return torch.equal(self.encoded, self.tokens)

    @checked
    def insert(self, batch: PromptBatch) -> PromptBatch:
        """The user's prompts with these tokens after the BOS, in the segment "other".

        All positions move with them, so that every metric applies to the result.

        Raises:
            PromptError: The prompts begin with another BOS, or their tensors do not agree.

        Examples:
            >>> prompt = al.contexts.hard_prompts.of_tokens(model, [300, 301], held_out=batches)
            >>> flows = al.run(model, [prompt.insert(batch)], [al.Accuracy()], progress=False)
        """
        self.check_bos(batch)
        check_batch(batch)
        right, bos, tokens = batch.padded_right(), int(batch.begins_with_bos), self.ids

        def widened(values: Tensor, inserted: Tensor) -> Tensor:
            rows = inserted.expand(len(values), -1)
            return torch.cat([values[:, :bos], rows, values[:, bos:]], dim=1)

        longer = replace(
            right,
            tokens=widened(right.tokens, tokens),
            attention_mask=widened(right.attention_mask, torch.ones_like(tokens, dtype=torch.bool)),
            segments=widened(right.segments, torch.full_like(tokens, OTHER)),
            label_positions=right.label_positions + len(tokens),
            label_ends=right.label_ends + len(tokens),
            target_positions=right.target_positions + len(tokens),
            query_start=right.query_start + len(tokens),
        )
        longer = replace(longer, demonstrations_id=demonstrations_ids(longer))
        return longer if batch.attention_mask[:, 0].all() else longer.padded_left()


def made_of_tokens(
    model: HookedModel,
    tokens: Int[Tensor, " position"],
    held_out: Sequence[PromptBatch],
    tokenizer: Any,
    loss: LossOfBatch,
    training: TrainingRecord,
    info: dict[str, Any],
) -> HardPrompt:
    """The hard prompt of tokens with their BOS, whose text is encoded and measured too."""
    n_bos = len(info["bos"])
    text = str(tokenizer.decode(tokens[n_bos:].tolist(), clean_up_tokenization_spaces=False))
    again = torch.tensor(
        tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long, device="cpu"
    )
    encoded = torch.cat([tokens[:n_bos], again])
    accuracy = float(training.best_accuracy)
    if not torch.equal(encoded, tokens):
        context = after_tokens(model, encoded, held_out[0])
        accuracy, _ = answers(model, context, held_out, loss)
    return HardPrompt(
        prefix=prefix_of_tokens(model, held_out[0], tokens),
        tokens=tokens,
        training=training,
        info=info,
        text=text,
        encoded=encoded,
        encoded_accuracy=torch.tensor(accuracy, dtype=torch.float32, device="cpu"),
    )


def after_tokens(
    model: HookedModel, tokens: Int[Tensor, " position"], batch: PromptBatch
) -> PrefixContext:
    """The context of tokens with their BOS, for prompts like those of a batch."""
    prefix = prefix_of_tokens(model, batch, tokens)
    return PrefixContext(prefix=prefix, tokens=tokens, info={"bos": bos_of(batch).tolist()})
