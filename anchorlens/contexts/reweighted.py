"""Demonstrations whose label words are read more, or less, as a context (section 3.1)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ..hooks import reweight_anchors
from ..models.hooked import HookedModel, LearnedBeta
from ..models.load import ensure_prepared
from ..prompts.batch import PromptBatch, check_batch
from ..system.arguments import checked
from .compression import compress
from .context import CompressedContext, refuse_another_model
from .query_pass import QueryPass, checked_logits
from .selection import everything


@dataclass(frozen=True, eq=False)
class ReweightedContext:
    """Cached demonstrations to whose label words the target's attention is multiplied.

    Attributes:
        demonstrations: The keys and values of all tokens of the demonstrations.
        beta: Logarithm of the factors; see ``reweight_anchors``.
    """

    demonstrations: CompressedContext
    beta: Float[Tensor, "layer head anchor"] | LearnedBeta

    def __repr__(self) -> str:
        """One line: the demonstrations."""
        return f"ReweightedContext({self.demonstrations!r})"

    @property
    def info(self) -> Mapping[str, Any]:
        """The model, its type and weights, and digests of the queries that beta was trained on."""
        trained = getattr(self.beta, "info", {}).get("queries_in_training", [])
        return self.demonstrations.info | {"queries_in_training": trained}

    @property
    def size(self) -> int:
        """Bytes of the stored keys and values, without the few of beta."""
        return self.demonstrations.size

    @checked
    def query_pass(self, model: HookedModel, batch: PromptBatch) -> QueryPass:
        """The pass over the queries of a batch; see ``Context.query_pass``.

        Raises:
            HookError: Beta is for other label words.
            PromptError: The prompts begin with other tokens, or a query is too long.
        """
        query_pass = self.demonstrations.query_pass(model, batch)
        # All tokens are stored, so that the label words have the positions of whole prompts.
        hooks = reweight_anchors(model, query_pass.batch, self.beta)
        return replace(query_pass, hooks=[*query_pass.hooks, *hooks])

    @checked
    def logits(self, model: HookedModel, batch: PromptBatch) -> Float[Tensor, "batch vocab"]:
        """Next-token logits at the targets of prompts that begin with these demonstrations.

        Raises:
            ModelError: The context was made with another model, type or weights.
            HookError: Beta is for other label words.
            PromptError: The prompts begin with other tokens, or a query is too long.
        """
        ensure_prepared(model)
        refuse_another_model(model, self.info)
        return checked_logits(self, model, batch)


@checked
def reweight_demonstrations(
    model: HookedModel,
    demonstrations: PromptBatch,
    beta: Float[Tensor, "layer head anchor"] | LearnedBeta,
) -> ReweightedContext:
    """Run demonstrations once, and answer queries with re-weighted attention to the label words.

    The answers are those of ``reweight_anchors`` on whole prompts.

    Args:
        model: A hooked model; its attention hooks are verified at first use.
        demonstrations: Any batch of ``build_prompts`` with these demonstrations.
        beta: From ``train_reweighting``, or the logarithm of the factors.

    Raises:
        PromptError: The prompts have several sets of demonstrations.
        HookError: Beta does not fit the model and the prompts.
        ModelError: The model takes no key-value cache, or its value biases are folded.

    Examples:
        >>> beta = torch.zeros(model.cfg.n_layers, model.cfg.n_heads, len(demos))
        >>> context = al.reweight_demonstrations(model, batch, beta)
        >>> context.logits(model, batch).shape[0] == len(batch)
        True
    """
    ensure_prepared(model)
    check_batch(demonstrations)
    reweight_anchors(model, demonstrations, beta)  # an error before the model runs
    return ReweightedContext(compress(model, demonstrations, everything), beta)
