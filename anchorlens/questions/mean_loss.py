"""The mean loss of prompts, of a clean run and of one that hooks change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from ..metrics.question import Question, no_hooks
from ..models.hooked import HookedModel
from ..passes.loss_checks import check_loss
from ..passes.losses import LossOfBatch
from ..prompts.batch import PromptBatch
from ..results import figures
from ..results.figure_parts import with_ends
from ..results.kinds import mean, of_prompts
from ..results.record import Record
from ..runs.passes import WHOLE, Passes
from ..system.arguments import checked
from ..system.processes import is_main
from ..system.texts import name_of
from ..system.warn import warn_user


@dataclass(frozen=True, eq=False, kw_only=True)
class LossRecord(Record):
    """Mean losses, in the unit of the loss: nats for those of ``al.losses``.

    Attributes:
        loss: Mean loss of the run, with hooks if any; low where the model expects what follows.
        clean_loss: Mean loss without hooks.
        change: ``loss - clean_loss``, paired by prompt; above 0 where hooks raise it.
        loss_per_prompt: Loss of each prompt.
        clean_loss_per_prompt: Loss of each prompt without hooks.
    """

    loss: Float[Tensor, ""] = mean("loss")
    clean_loss: Float[Tensor, ""] = mean("clean")
    change: Float[Tensor, ""] = mean("loss", minus="clean")
    loss_per_prompt: Float[Tensor, " prompt"] = of_prompts("loss")
    clean_loss_per_prompt: Float[Tensor, " prompt"] = of_prompts("clean")

    caption: ClassVar[str] = (
        "Mean loss of the run, and without its hooks if it has any. The change is among the "
        "numbers, paired by prompt: its interval tells more than whether two bars overlap."
    )

    def plot(self) -> go.Figure:
        """The mean loss as a bar beside that of the clean run; as a sentence if they are one."""
        if not self.change:
            return figures.sentence(f"The loss is {self.estimate('loss')}.", title="Mean loss")
        return figures.bars(
            **with_ends(self, "clean_loss", "loss", shaped=lambda of: of[None, :, None]),
            panels=["mean loss"],
            groups=["clean run", "changed run"],
            series=["loss"],
            title="Mean loss",
        )


@checked
@dataclass(frozen=True)
class Loss(Question):
    """The mean of a loss, such as that of a text at chosen positions, and what hooks change of it.

    With hooks in ``al.run`` a clean pass runs too, so that the change is paired by prompt.

    Range:
        That of the loss: 0 or more, in nats, for those of ``al.losses``.

    How to read:
        Read the change with its interval, beside that of a control, such as random heads.

    Pitfalls:
        ``al.losses.next_token_cross_entropy`` is a sum: give weights that sum to 1 in each prompt
        for a mean over its tokens. Prompts weigh alike, also if one is a longer text.

    Args:
        loss: Function of (logits, batch) to one number a prompt; see ``al.losses``.

    Examples:
        The mean loss of texts in which no token reads the one before it in layer 0.

        >>> prompts = al.build_segments(model.tokenizer, ["The museum opens", "Nobody knows."])
        >>> def mean_over_tokens(batch):
        ...     has_next = batch.attention_mask & ~al.edges.target(batch)
        ...     return has_next / has_next.sum(1, keepdim=True)
        >>> asked = al.Loss(al.losses.next_token_cross_entropy(mean_over_tokens))
        >>> cut = lambda batch: al.block_edges(model, batch, al.edges.previous_token, 0)
        >>> change = al.run(model, prompts, [asked], hooks=cut, progress=False)["loss"].change
    """

    loss: LossOfBatch
    name: str = "loss"
    record = LossRecord
    sees_hooks: ClassVar[bool] = True

    def check(self, model: HookedModel, batches: Sequence[PromptBatch], *, changed: bool) -> None:
        """Raise an error for a loss that does not give a number for each of these prompts."""
        check_loss(self.loss, batches, model)

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        """The loss of each prompt, of the run and without hooks."""
        runs = {"clean": no_hooks, "loss": passes.hooks or no_hooks}
        losses: dict[Any, Tensor] = {
            hooks: passes.losses(batch, self.loss, hooks).cpu().double()
            for hooks in dict.fromkeys(runs.values())
        }
        return {name: losses[hooks] for name, hooks in runs.items()}

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The loss, and that its passes ran whole prompts; a warning where hooks change nothing."""
        if passes.hooks and contributions["loss"].equal(contributions["clean"]) and is_main():
            warn_user(
                "hooks change the loss of no prompt; they may act at positions after those that it "
                "reads, as replace_heads does at the target (positions= names others)"
            )
        return {"info": {"loss": name_of(self.loss), "shared_prefix": WHOLE}}
