"""Prompt tuning: embeddings that are learned and stand before a query (Lester et al., 2021)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ModelError, PromptError
from ..models.hooked import HookedModel
from ..models.kv_cache import KeyValues
from ..models.optimizers import Adafactor
from ..models.tiny_pass import relative_difference
from ..passes.comparison import tolerance
from ..passes.forward import mean_loss_with_gradient, run_pass
from ..passes.losses import LossOfBatch
from ..prompts.batch import PromptBatch
from ..system.arguments import check_counts, checked
from ..system.processes import gather_from_processes
from ..system.torch_state import gradient_mode
from .compressed import ROUNDINGS
from .embedded import embeddings_of, prefix_of_tokens, put_embeddings, start_tokens
from .prefix import PrefixContext, drawn_tokens
from .protocol import QueryPass, queries_after
from .training import Trainable, Training, TrainingRecord, TrainingRun


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SoftPrompt(PrefixContext):
    """Embeddings that stand before a query, with the keys and values that the model made of them.

    Attributes:
        embeddings: The learned embeddings after the BOS, in the space of ``hook_embed``.
    """

    training: TrainingRecord
    embeddings: Float[Tensor, "length d_model"]


@checked
def train_soft_prompt(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    training: Training = Training(),  # noqa: B008 - a frozen record
    *,
    held_out: Sequence[PromptBatch],
    length: int = 10,
    start: Sequence[int] | None = None,
) -> SoftPrompt:
    """Learn embeddings that stand before a query (prompt tuning).

    ``Training`` explains the other arguments and the errors of all trainers.

    Args:
        training: How to train; by default with Adafactor at rate 0.3, as in section 2 of the paper.
        length: Number of embeddings.
        start: Token ids whose embeddings are the start, repeated or cut to ``length``, such as
            ``al.contexts.hard_prompts.class_words(batches)``; random tokens by default.

    Raises:
        PromptError: ``length`` is below 1, or ``start`` is not a list of token ids.
        ModelError: The model reads tokens elsewhere than at ``hook_embed``.

    Examples:
        >>> training = al.contexts.Training(steps=2, progress=False)
        >>> prompt = al.train_soft_prompt(model, batches[:1], training, held_out=batches[1:],
        ...     length=2)
    """
    check_counts(PromptError, length=length)
    begin = "random tokens" if start is None else f"tokens {list(start)}"
    about = f"soft prompt of {length} embeddings from {begin}"
    run = TrainingRun.of(model, batches, held_out, training, Adafactor(lr=0.3), about)
    with run.study.entered():
        bos, batch = run.bos, run.batches[0]
        random = drawn_tokens(model, length, training.seed)
        tokens = torch.cat([bos, random if start is None else start_tokens(model, start, length)])
        run.check(tokens)
        with gradient_mode(True):
            embeddings = embeddings_of(model, batch, tokens)[len(bos) :]
            _check_reads_embeddings_alone(model, batch, tokens, embeddings)
            embeddings.requires_grad_()
        trainable = _TrainedEmbeddings(bos, embeddings)
        (best,), record = run.take_steps(trainable)
        prompt = SoftPrompt(
            prefix=trainable.prefix(model, batch, best),
            tokens=trainable.tokens,
            training=record,
            info=run.describe(),
            embeddings=best,
        )
        return gather_from_processes("soft prompt", prompt)[0]


@dataclass(frozen=True, eq=False)
class _TrainedEmbeddings(Trainable):
    """Embeddings that are learned, after the BOS."""

    bos: Int[Tensor, " _"]  # or no token
    embeddings: Float[Tensor, "length d_model"]

    @property
    def parameters(self) -> list[Tensor]:
        return [self.embeddings]

    @property
    def tokens(self) -> Int[Tensor, " position"]:
        """The BOS, then a 0 for each embedding, which is no token."""
        return torch.cat([self.bos, self.bos.new_zeros(len(self.embeddings))])

    def backward(self, model: HookedModel, batch: PromptBatch, loss: LossOfBatch) -> float:
        """Through the model, which computes keys and values from the embeddings."""
        queries = queries_after(batch, self.tokens)
        hooks = [put_embeddings(self.embeddings, len(self.bos))]
        return mean_loss_with_gradient(model, queries, loss, self.parameters, hooks=hooks)

    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        prefix = self.prefix(model, batch, self.embeddings.detach())
        return QueryPass(queries_after(batch, self.tokens).after(len(prefix)), prefix)

    def prefix(
        self, model: HookedModel, batch: PromptBatch, embeddings: Float[Tensor, "length d_model"]
    ) -> KeyValues:
        """Keys and values that the model makes of embeddings after the BOS."""
        hooks = [put_embeddings(embeddings, len(self.bos))]
        return prefix_of_tokens(model, batch, self.tokens, hooks=hooks)


def _check_reads_embeddings_alone(
    model: HookedModel, batch: PromptBatch, tokens: Int[Tensor, " _"], embeddings: Tensor
) -> None:
    """Raise an error if other tokens with the embeddings of these ones give other logits."""
    prompt, n_bos = batch.prompt(0), len(tokens) - len(embeddings)
    expected = run_pass(model, queries_after(prompt, tokens))
    placeholders = torch.cat([tokens[:n_bos], torch.zeros_like(tokens[n_bos:])])
    hooks = [put_embeddings(embeddings, n_bos)]
    logits = run_pass(model, queries_after(prompt, placeholders), hooks=hooks)
    difference = relative_difference(logits, expected)
    if not difference <= tolerance(model, ROUNDINGS):
        raise ModelError(
            f"{model.cfg.model_name} reads tokens elsewhere than at hook_embed, too: from "
            f"embeddings alone logits are off by {difference:.1e}; train a prefix or hard prompt"
        )
