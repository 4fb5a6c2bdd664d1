"""A metric and a question of a user's own, which use all that these can use."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al


@dataclass(frozen=True, eq=False, kw_only=True)
class EveryReadRecord(al.Record):
    pattern: Float[Tensor, "layer head key"] = al.kinds.mean("pattern")
    slope: Float[Tensor, "layer head pair"] = al.kinds.mean("slope")
    keys: Float[Tensor, "layer key_head position d_head"] = al.kinds.mean("keys")
    states: Float[Tensor, "layer d_model"] = al.kinds.mean("states")
    sums: Float[Tensor, "layer merged_and_heads"] = al.kinds.mean("sums")
    blocks: Float[Tensor, "layer head"] = al.kinds.mean("blocks")
    embedded: Float[Tensor, " embedded"] = al.kinds.mean("embedded")


@dataclass(frozen=True)
class EveryRead(al.Metric):
    """A metric of a user's own that reads in every way; with hooks or without them."""

    has_hooks: bool
    name: str = "every_read"
    record: ClassVar[type[al.Record]] = EveryReadRecord

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        labels, found = batch.label_positions, dict[str, Tensor]()

        def product(block: al.reads.Block) -> Tensor:
            assert block.slope is not None
            return (block.pattern * block.slope).abs().sum((2, 3))

        def store(embedded: Tensor, hook: Any) -> None:
            is_token = batch.attention_mask[..., None].to(embedded)
            found["embedded"] = (embedded * is_token).sum(1).cpu()

        reads: dict[str, Any] = {
            "pattern": al.reads.At("pattern", al.edges.target, labels),
            "slope": al.reads.At("slope", labels[:, 1:], labels[:, :-1], pairs=True),
            "keys": al.reads.At("keys", labels),
            "states": al.reads.At("blocks.{}.hook_resid_post", al.edges.target),
            "sums": al.reads.Sums(al.weights.saliency, al.reads.EdgeSets([al.edges.tq(batch)])),
            "blocks": al.reads.Blocks(product, slope=True),
        }
        hooks = al.reads.Hooks(found, [("hook_embed", store)])
        return reads | {"embedded": hooks} if self.has_hooks else reads

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        embedded = seen["embedded"]["embedded"] if self.has_hooks else torch.zeros(len(batch), 1)
        return {
            **{name: seen[name] for name in ("slope", "keys", "blocks")},
            "pattern": seen["pattern"][:, :, :, 0],
            "states": seen["states"][:, :, 0],
            "sums": seen["sums"][..., 0],
            "embedded": embedded.cpu(),
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class EveryPassRecord(al.Record):
    clean: Float[Tensor, " vocab"] = al.kinds.mean("clean")
    cut: Float[Tensor, "layer vocab"] = al.kinds.mean("cut")
    at_first_label: Float[Tensor, " vocab"] = al.kinds.mean("at_first_label")
    flows: Float[Tensor, "layer flow"] = al.kinds.mean("flows")


class EveryPass(al.Question):
    """A question of a user's own that makes passes of every kind."""

    name, record = "every_pass", EveryPassRecord

    def isolated(self, model: Any, layer: int, batch: al.PromptBatch) -> Any:
        return al.isolate_labels(model, batch, layer)

    def further(self, model: Any, batches: Any) -> al.Further:
        return al.Further(
            [partial(self.isolated, model, 0)],
            range(model.cfg.n_layers),
            [al.SaliencyFlows()],
            al.losses.word_cross_entropy(),
        )

    def of_batch(self, passes: Any, batch: al.PromptBatch) -> dict[str, Tensor]:
        cut = [
            passes.logits(batch, partial(self.isolated, passes.model, layer), layer)
            for layer in range(passes.model.cfg.n_layers)
        ]
        first = al.edges.at(batch, batch.label_positions[:, :1])
        of_prompts = torch.stack(passes.logits_at(batch, first)).flatten(0, -2)
        return {
            "clean": passes.clean(batch).cpu(),
            "cut": torch.stack(cut, dim=1).cpu(),
            "at_first_label": of_prompts.cpu(),
            "flows": passes.further(self, batch)["saliency_flows"]["sums"],
        }
