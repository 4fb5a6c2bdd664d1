"""Isolate the label words, and as many random words: what does the model lose? (section 2.2)"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import figures
from ..batch import PromptBatch
from ..collect import check_batches, check_same_call, collect, describe
from ..errors import HookError
from ..hooked import Hook, HookedModel, layer_numbers
from ..hooks import isolate_labels, isolate_random
from ..metrics.loyalty import loyalty_rows
from ..models import ensure_prepared
from ..processes import together
from ..results import Record, Rows, with_intervals
from ..sharing import HooksOfBatch, shared_passes


@dataclass(frozen=True, eq=False, kw_only=True)
class IsolationRecord(Record):
    """Loyalty with label words isolated, and with as many random words isolated.

    Attributes:
        label_loyalty: Share of prompts whose predicted label survives, from 0 to 1; high means
            that isolation changes little.
        word_loyalty: Mean Jaccard similarity of the top 5 next tokens, from 0 to 1; high means
            that isolation changes little.
        kl: Mean KL(clean || isolated) of the next token, in nats, ``sum p log(p / q)``, from 0 up;
            low means that isolation changes little.
        random_label_loyalty: Label loyalty of each random draw.
        random_word_loyalty: Word loyalty of each random draw.
        random_kl: KL of each random draw.
        label_gap: Mean of the random draws minus the label words', paired by prompt. High means
            that the label words in particular are needed in these layers.
        word_gap: The same of word loyalty.
        label_kept: 1 for each prompt whose label survives, else 0.
        word_overlap: Jaccard similarity of each prompt.
        random_label_kept: label_kept under each random draw.
        random_word_overlap: word_overlap under each random draw.
    """

    label_loyalty: Float[Tensor, ""]
    word_loyalty: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    random_label_loyalty: Float[Tensor, " draw"]
    random_word_loyalty: Float[Tensor, " draw"]
    random_kl: Float[Tensor, " draw"]
    label_gap: Float[Tensor, ""]
    word_gap: Float[Tensor, ""]
    label_kept: Float[Tensor, " prompt"]
    word_overlap: Float[Tensor, " prompt"]
    random_label_kept: Float[Tensor, "prompt draw"]
    random_word_overlap: Float[Tensor, "prompt draw"]

    def plot(self) -> Any:
        """Loyalty of label words and random words (the paper's Figure 4)."""
        return plot_isolation({"isolated": self})


@together()
def isolation_loyalty(
    model: HookedModel,
    batches: Sequence[PromptBatch],
    layers: Iterable[int] | int,
    *,
    draws: int = 10,
    seed: int = 0,
    whole_words: bool = False,
    keep_bos: bool = False,
    renormalize: bool = True,
    resamples: int = 200,
    progress: bool = True,
) -> IsolationRecord:
    """Clean run, label words isolated, random words isolated: loyalty of each to the clean run.

    Args:
        model: A hooked model; its attention hooks are proven at first use.
        batches: Prompts from ``build_prompts``.
        layers: Layers to isolate in: ``range(5)`` the first five, ``range(-5, 0)`` the last.
        draws: Random controls; one is none, their loyalties range widely.
        seed: Number of the first draw.
        whole_words: See ``isolate_labels``.
        keep_bos: See ``isolate_labels``; where prompts begin with BOS report both.
        renormalize: See ``block_edges``.
        resamples: Bootstrap resamples over prompts for the 95 % intervals; 0 for none.
        progress: Show a progress bar.

    Returns:
        Loyalties of both, the gap between them, and what each prompt contributed.

    Raises:
        ModelError: The attention hooks do not act, or value biases are folded and ``renormalize``
            is False.
        HookError: A layer does not exist, ``keep_bos`` without BOS, or demonstrations with too few
            other words for the control: before any pass over the prompts.

    Examples:
        >>> result = al.isolation_loyalty(model, batches, range(5), draws=2, progress=False)
        >>> bool(0 <= result.word_loyalty <= 1)
        True
    """
    ensure_prepared(model)
    check_batches(model, batches, resamples)
    chosen = layer_numbers(model, layers)
    if draws < 1:
        raise HookError(f"the random control needs at least one draw; got {draws}")
    options: dict[str, Any] = {
        "whole_words": whole_words,
        "keep_bos": keep_bos,
        "renormalize": renormalize,
    }

    def labels(batch: PromptBatch) -> list[Hook]:
        return isolate_labels(model, batch, chosen, **options)

    def control(number: int) -> HooksOfBatch:
        return lambda batch: isolate_random(model, batch, chosen, number, **options)

    draws_of_seed = [control(seed + draw) for draw in range(draws)]
    for batch in batches:
        for change in (labels, draws_of_seed[0]):
            change(batch)
    settings = {"layers": chosen, "draws": draws, "seed": seed, **options}
    check_same_call(model, batches, {name: str(value) for name, value in settings.items()})
    passes = shared_passes(model, batches, [labels])

    def rows_of_batch(batch: PromptBatch) -> dict[str, Tensor]:
        batch = passes.ready(batch)
        clean = passes.logits(batch)

        def loyalty_with(change: HooksOfBatch) -> dict[str, Tensor]:
            return loyalty_rows(clean, passes.logits(batch, change), batch.label_token_ids)

        own = loyalty_with(labels)
        controls = [loyalty_with(change) for change in draws_of_seed]
        stacked = {f"random_{name}": torch.stack([c[name] for c in controls], 1) for name in own}
        return own | stacked

    rows = collect(model, batches, rows_of_batch, progress=progress)
    info = describe(model, batches) | {"layers": chosen, "seed": seed, **options}
    info |= {"shared_prefix": passes.said}
    return with_intervals(_record, rows, resamples=resamples, info=info)


def plot_isolation(records: Mapping[str, IsolationRecord]) -> Any:
    """Loyalties of several isolations side by side, each with its control (the paper's Figure 4).

    Args:
        records: Records by what was isolated where ("first 5 layers", "last 5 layers").

    Returns:
        A plotly figure; bars of label words have their 95 % intervals, those of random words the
        range of their draws.

    Examples:
        >>> result = al.isolation_loyalty(model, batches, range(5), draws=2, progress=False)
        >>> figure = al.plot_isolation({"first 5 layers": result})
    """
    series, values, low, high = [], [], [], []
    for name, record in records.items():
        controls = torch.stack([record.random_label_loyalty, record.random_word_loyalty])
        own = torch.stack([record.label_loyalty, record.word_loyalty])
        bounds = [record.intervals.get(f"{kind}_loyalty") for kind in ("label", "word")]
        known = [own.expand(2, 2).T[k] if one is None else one for k, one in enumerate(bounds)]
        series += [f"label words, {name}", f"random words, {name}"]
        values += [own, controls.mean(1)]
        low += [torch.stack([one[0] for one in known]), controls.amin(1)]
        high += [torch.stack([one[1] for one in known]), controls.amax(1)]
    return figures.grouped_bars(
        torch.stack(values, dim=1),
        ["label loyalty", "word loyalty"],
        series,
        title="What isolation leaves as it was (bars of random words: range of draws)",
        y_title="loyalty to the clean run",
        low=torch.stack(low, dim=1),
        high=torch.stack(high, dim=1),
    )


def _record(rows: Rows) -> IsolationRecord:
    label, word = rows["label_kept"], rows["word_overlap"]
    random_label, random_word = rows["random_label_kept"], rows["random_word_overlap"]
    return IsolationRecord(
        label_loyalty=label.mean(),
        word_loyalty=word.mean(),
        kl=rows["kl"].mean(),
        random_label_loyalty=random_label.mean(0),
        random_word_loyalty=random_word.mean(0),
        random_kl=rows["random_kl"].mean(0),
        label_gap=random_label.mean() - label.mean(),
        word_gap=random_word.mean() - word.mean(),
        label_kept=label,
        word_overlap=word,
        random_label_kept=random_label,
        random_word_overlap=random_word,
    )
