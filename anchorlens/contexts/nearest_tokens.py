"""The projection of hard prompts: the token whose embedding points most in the same direction."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import ModelError, NotFiniteError, PromptError
from ..models.hooked import HookedModel
from ..prompts.batch import PromptBatch
from ..system.devices import in_float64
from .embedded import embeddings_of

_ROWS = 2**15  # tokens whose embeddings are converted to another type at a time


@dataclass(frozen=True, eq=False)
class NearestTokens:
    """Finds the nearest allowed token by cosine.

    The norms are stored, and not a normalised copy of the embeddings, which would take as much
    memory as they do.

    Attributes:
        table: Embeddings of all tokens, up to a factor.
        norms: Their norms.
        allowed: True for the tokens that may be found.
    """

    table: Float[Tensor, "vocab d_model"]
    norms: Float[Tensor, " vocab"]
    allowed: Bool[Tensor, " vocab"]

    @classmethod
    def of(cls, model: HookedModel, allowed: Bool[Tensor, " vocab"]) -> "NearestTokens":
        """The allowed tokens of a model.

        Raises:
            PromptError: No token is allowed.
        """
        table = model.W_E.detach()
        # Norms of low precision would be wrong by more than what two tokens differ in.
        wide = torch.promote_types(table.dtype, torch.float32)
        norms = torch.cat([rows.to(wide).norm(dim=1) for rows in table.split(_ROWS)])
        allowed = allowed.to(table.device) & (norms > 0)
        if not allowed.any():
            raise PromptError(
                "no token is allowed: each is special, unused, a byte, changed by decoding and "
                "encoding, or not in allowed=...; allow more tokens, and pass the tokenizer of "
                "the model"
            )
        return cls(table, norms, allowed)

    def ids(self, embeddings: Float[Tensor, "length d_model"]) -> Int[Tensor, " length"]:
        """The nearest tokens; of equally near ones the lowest id.

        Raises:
            NotFiniteError: An embedding has no direction.
        """
        lengths = embeddings.norm(dim=1, keepdim=True)
        if not (lengths.isfinite() & (lengths > 0)).all():
            raise NotFiniteError(
                "an embedding is zero, too large, infinite or NaN, so that no token is nearest to "
                "it; use a lower learning rate"
            )
        units = embeddings / lengths
        products = [units @ rows.to(units).T for rows in self.table.split(_ROWS)]
        cosines = torch.cat(products, dim=1) / self.norms
        cosines[:, ~self.allowed] = -torch.inf
        # The rounding of a matrix product depends on the column. It must not decide between equal
        # embeddings, nor between almost equal ones.
        tolerance = 64 * torch.finfo(cosines.dtype).eps
        near = cosines >= cosines.max(1, keepdim=True).values - tolerance
        pairs = zip(units, near, strict=True)
        return torch.stack([self._nearest(unit, row.nonzero()[:, 0]) for unit, row in pairs])

    def _nearest(
        self, unit: Float[Tensor, " d_model"], candidates: Int[Tensor, " near"]
    ) -> Int[Tensor, ""]:
        rows = in_float64(self.table[candidates])
        cosines = (rows * in_float64(unit)).sum(1) / rows.norm(dim=1)
        return candidates[cosines.argmax()]


def check_embeds_by_table(
    model: HookedModel, batch: PromptBatch, tokens: Int[Tensor, " position"]
) -> None:
    """Raise an error if embeddings do not point in the direction of the rows of ``W_E``."""
    embeddings, rows = embeddings_of(model, batch, tokens), model.W_E[tokens].detach()
    if embeddings.shape == rows.shape:
        cosines = torch.cosine_similarity(embeddings, rows.to(embeddings), dim=1)
        if cosines.min() > 0.999:
            return
    raise ModelError(
        f"the output of hook_embed in {model.cfg.model_name} is no multiple of the rows of W_E "
        f"(shapes {tuple(embeddings.shape)} and {tuple(rows.shape)}), so that the token nearest to "
        "an embedding is not known (factorised embeddings, or a norm after them); train a prefix "
        "or a soft prompt"
    )
