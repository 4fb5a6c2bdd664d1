"""What each head adds to the answer: its mean output, written into prompts with shuffled labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from ..ablation.likelihood import log_odds_of
from ..errors import MetricError
from ..hooks import Site, replace_heads
from ..metrics.accuracy import require_gold
from ..metrics.question import Further, Question
from ..models.head_outputs import require_separate_heads, separate_heads
from ..models.hooked import (
    Hook,
    HookedModel,
    attention_layers,
    refuse_folded_value_biases,
    z_name,
)
from ..models.load import ensure_prepared
from ..prompts import edges
from ..prompts.batch import PromptBatch, check_label_words
from ..results import figures
from ..results.contributions import Contributions
from ..results.depth import in_all_layers
from ..results.kinds import mean, of_prompts, table
from ..results.population import check_resamples
from ..results.record import Record
from ..runs.passes import Passes
from ..runs.run import run
from ..runs.study import checked_batches
from ..system.arguments import check_counts, checked
from ..system.processes import fails_together
from .mean_states import mean_states, warn_of_same_queries


def _clean(contributions: Contributions) -> Float[Tensor, "prompt 1 1"]:
    return contributions["clean"][:, None, None]


def _effects(contributions: Contributions) -> Float[Tensor, "prompt layer head"]:
    return contributions["replaced"] - _clean(contributions)


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadEffectsRecord(Record):
    """What writing the mean output of each head does to the right answer, with its sign.

    Attributes:
        effect: Mean change of the log-odds of the right answer, in nats, any number. Above 0 for a
            writer, whose output after true labels makes it likelier; below 0 for a canceller.
        probability_effect: The same in probability, from -1 to 1 (the source's indirect effect).
        effect_of_prompts: ``effect`` in each prompt.
        log_odds: Log-odds of the right answer in each prompt with shuffled labels, unchanged.
        outputs: Mean output of each head at the target, before W_O: head h of layer l adds
            ``outputs[l, h] @ model.blocks[l].attn.W_O[h]``. Zeros pad narrow heads.
    """

    effect: Float[Tensor, "layer head"] = mean(_effects, unit="nats")
    probability_effect: Float[Tensor, "layer head"] = mean(
        lambda of_set: of_set["replaced"].sigmoid() - _clean(of_set).sigmoid()
    )
    effect_of_prompts: Float[Tensor, "prompt layer head"] = of_prompts(_effects)
    log_odds: Float[Tensor, " prompt"] = of_prompts("clean")
    outputs: Float[Tensor, "layer head d_head"] = table()

    caption: ClassVar[str] = (
        "What each head adds to the right answer: its mean output at the target, written into "
        "prompts whose demonstrations have shuffled labels. Change of log-odds in nats: above 0 "
        "the head writes the answer, below 0 it cancels it. The largest of many are partly chance."
    )

    def plot(self) -> go.Figure:
        """The effects by layer and head, in two colours on both sides of 0."""
        most = float(self.effect.nan_to_num().abs().max()) or 1.0
        title, limits = "What each head adds to the right answer", (-most, most)
        figure = figures.by_head(self.effect, title, "nats of log-odds", limits=limits)
        return figure.update_layout(coloraxis_colorscale="RdBu_r")

    @checked
    def largest(self, count: int = 10) -> pd.DataFrame:
        """The ``count`` heads with the largest effects of each sign, or as many as have it.

        Writers come first, each sign from the largest on; ``low`` and ``high`` are the interval.

        Raises:
            MetricError: ``count`` is below 1.
        """
        check_counts(MetricError, count=count)
        table = self.to_frame().query("quantity == 'effect'").rename(columns={"value": "effect"})
        kept = [name for name in ("layer", "head", "effect", "low", "high") if name in table]
        table = table[kept].astype({"layer": int, "head": int}).reset_index(drop=True)
        table["probability_effect"] = self.probability_effect.flatten().double().tolist()
        table.insert(0, "sign", (table["effect"] > 0).astype(int) - (table["effect"] < 0))
        by_size = table.sort_values("effect", key=abs, ascending=False, kind="stable")
        of_signs = [by_size[by_size["sign"] == sign].head(count) for sign in (1, -1)]
        return pd.concat(of_signs, ignore_index=True)


@fails_together()
@checked
def head_effects(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    shuffled: Sequence[PromptBatch],
    *,
    resamples: int = 200,
    folder: str | Path | None = None,
    progress: bool = True,
) -> HeadEffectsRecord:
    r"""Which heads write the answer at the target, and which cancel it.

    With $\bar z_{\ell h}$ the mean output of a head at the target over prompts of the task, p the
    probability of the right answer in a prompt whose demonstrations have shuffled labels, and
    $p_{\ell h}$ that with $\bar z_{\ell h}$ in place of the output of the head at the target,

    $$
    \text{effect}_{\ell h} = \underset{\text{prompts}}{\text{mean}} \;
    \log \frac{p_{\ell h}}{1 - p_{\ell h}} - \log \frac{p}{1 - p} .
    $$

    p is over the whole vocabulary, of the first token of the (first) label word of the true class.
    Log-odds, because p moves little near 0 and 1.

    Range:
        Any number of nats; ``probability_effect`` -1 to 1.

    How to read:
        Shuffled labels tell nothing about the answer, so that what is written in must. If a few
        heads have large effects, cut these (``replace_heads``), and as many random heads.

    Pitfalls:
        The largest of many effects are too large by chance: test them on other prompts. A head may
        make all label words likelier, and so the right one: look at the accuracy too. Effects of
        heads do not add up. Means over classes of queries hold what is common to them, not the
        single answer. Intervals are for these mean outputs.

    Cost:
        Layers times heads passes over each batch with shuffled labels, from the head's layer and
        after shared tokens where that gives the same logits. One pass over each batch of the mean.

    Source:
        Todd et al., *Function Vectors in Large Language Models* (ICLR 2024,
        [arXiv 2310.15213](https://arxiv.org/abs/2310.15213)): the average indirect effect, in
        probability, over several tasks. Log-odds and intervals are ours.

    Arguments and errors that are not named here are those of ``run``.

    Args:
        batches: Prompts of the task over which outputs are averaged, with other queries.
        shuffled: Prompts from ``build_prompts`` whose demonstrations have labels in a random order
            (``al.relabeling.random``), and queries with true labels.
        folder: It gets the folders ``outputs`` and ``effects``.

    Raises:
        MetricError: The queries of ``shuffled`` have no true labels.
        ModelError: The attention hooks do not act, value biases are folded, or outputs of single
            heads are not known (JetMoe, BitNet).
        PromptError: The prompts do not fit the model, or have no label words.

    Warns:
        UserWarning: A query is in both lists.

    Examples:
        >>> mixed = al.relabeling.relabel(demos, task, al.relabeling.random(seed=0))
        >>> queries = al.load_examples("questions")[:3]
        >>> shuffled = al.build_prompts(model.tokenizer, *mixed, queries)
        >>> record = al.head_effects(model, batches, shuffled, resamples=0, progress=False)
        >>> writers = record.largest(3).query("sign > 0")[["layer", "head"]]
    """
    ensure_prepared(model)
    refuse_folded_value_biases(model)
    layers, n_layers = attention_layers(model), model.cfg.n_layers
    require_separate_heads(model, layers)
    check_resamples(resamples)
    read, written = checked_batches(model, batches), checked_batches(model, shuffled)
    check_label_words(written)
    for batch in written:
        require_gold(batch.gold, "head_effects")
    warn_of_same_queries(read, written)
    folders = [None if folder is None else Path(folder) / name for name in ("outputs", "effects")]
    split = partial(separate_heads, n_heads=model.cfg.n_heads)
    states = mean_states(
        model, batches, z_name, edges.target, split, folder=folders[0], progress=progress
    )
    outputs = in_all_layers(states[:, 0], layers, n_layers, axis=0)
    asked = HeadEffects(outputs, sum(map(len, batches)))
    options: dict[str, Any] = {"folder": folders[1], "resamples": resamples, "progress": progress}
    record: Any = run(model, shuffled, [asked], **options)[asked.name]
    return record


@dataclass(frozen=True, eq=False)
class HeadEffects(Question):
    """What the mean output of one head after the other changes in prompts."""

    outputs: Float[Tensor, "layer head d_head"]
    prompts_of_mean: int
    name: ClassVar = "head_effects"
    record: ClassVar = HeadEffectsRecord

    def further(self, model: HookedModel, batches: Sequence[PromptBatch]) -> Further:
        layers = attention_layers(model)
        return Further([partial(self._replaced, model, layers[0], 0)], layers)

    def _replaced(
        self, model: HookedModel, layer: int, head: int, batch: PromptBatch
    ) -> Sequence[Hook]:
        return replace_heads(model, batch, self.outputs, Site(layer, head))

    def of_batch(self, passes: Passes, batch: PromptBatch) -> dict[str, Tensor]:
        answers = batch.label_token_ids[batch.gold].tolist()
        layers, heads = attention_layers(passes.model), self.outputs.shape[1]
        clean = log_odds_of(passes.clean(batch), answers).cpu()

        def log_odds(layer: int, head: int) -> Float[Tensor, " batch"]:
            hooks = partial(self._replaced, passes.model, layer, head)
            return log_odds_of(passes.logits(batch, hooks), answers).cpu()

        by_head = [
            torch.stack([log_odds(layer, head) for head in range(heads)], dim=1) for layer in layers
        ]
        replaced = torch.stack(by_head, dim=1)
        replaced = in_all_layers(replaced, layers, len(self.outputs), axis=1)
        return {"clean": clean, "replaced": replaced}

    def once(self, passes: Passes, contributions: Mapping[str, Tensor]) -> Mapping[str, Any]:
        reasons = passes.why_not_late(attention_layers(passes.model))
        not_late = {f"layer {layer}": why for layer, why in reasons.items()}
        return {"info": {"prompts_of_mean": self.prompts_of_mean, "not_started_late": not_late}}

    def result(self, contributions: Contributions) -> HeadEffectsRecord:
        return HeadEffectsRecord.of(contributions, outputs=self.outputs)
