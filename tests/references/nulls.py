"""Rows of prompts under the null of each claim: verdicts must seldom agree or disagree.

In each the number of the claim is its limit, but for chance: that of queries, of random draws, of
classes, and of sets of demonstrations. Prompts are given by the sizes of their sets: ``[20]`` is
one set of 20 queries.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al
from anchorlens.report.claims import Isolation, gap_of
from anchorlens.results.bootstrap import with_intervals

LAYERS, CLASSES = 3, 6
SHARES = torch.tensor([[0.45, 0.3, 0.25], [0.3, 0.4, 0.3], [0.2, 0.45, 0.35]]).double()  # by layer
Null = Callable[[Sequence[int], torch.Generator], al.Record]


def jackknife(number: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """A number of prompts without its bias of first order, by leaving out each in turn."""
    count = len(rows)
    others = [number(rows[torch.arange(count) != each]) for each in range(count)]
    return count * number(rows) - (count - 1) * torch.stack(others).mean(0)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.double)


def sets_of(sizes: Sequence[int]) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def flows(sizes: Sequence[int], generator: torch.Generator) -> al.Record:
    """The share of S_wp falls by 0.25, S_pq is twice S_tq in the deep layer, and S_wp is S_ww in
    the layer between. Models of random weights, by which no such claim can agree, are far below.

    Flows are skewed, alike in all layers of a prompt, and differ between sets.
    """
    sets = len(sizes)
    share = SHARES.expand(sets, -1, -1).clone()
    shift = 0.05 * normal(generator, sets, 1) * (sets > 1)
    share[:, 0, 0], share[:, 0, 2] = share[:, 0, 0] + shift[:, 0], share[:, 0, 2] - shift[:, 0]
    ratio = 2 + 0.3 * normal(generator, sets, 1) * (sets > 1)
    ids = sets_of(sizes)
    common = torch.rand(len(ids), 1, 1, generator=generator).double()
    own = torch.rand(len(ids), LAYERS, 4, generator=generator).double()
    return of_flows(share, ratio, ids, common.log() * own.log())


@dataclass(frozen=True, eq=False, kw_only=True)
class Ratios(al.Record):
    ratio: Float[Tensor, " series"] = al.kinds.ratio("read", over="rest", by_set=True)


Draws = np.ndarray[Any, np.dtype[np.float64]]
# What prompts contribute to both means of a ratio, about 1; and the ratios of sets, about 2.
NOISES: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Draws]] = {
    "common": lambda random, shape: random.exponential(size=(1, *shape)).repeat(2, 0),
    "common and own": lambda random, shape: (
        random.exponential(size=shape) * random.exponential(size=(2, *shape))
    ),
    "exponential": lambda random, shape: random.exponential(size=(2, *shape)),
    "lognormal": lambda random, shape: random.lognormal(-0.125, 0.5, (2, *shape)),
}
RATIOS: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Draws]] = {
    "normal": lambda random, shape: random.normal(2, 0.3, shape),
    "lognormal": lambda random, shape: 2 * random.lognormal(-0.125, 0.5, shape),
    "gamma 1": lambda random, shape: random.gamma(1, 2, shape),
    "gamma 0.7": lambda random, shape: random.gamma(0.7, 2 / 0.7, shape),
    "gamma 0.5": lambda random, shape: random.gamma(0.5, 4, shape),
}


def drawn_ratios(
    noise: str, ratios: str, sizes: Sequence[int], series: int, seed: int = 0
) -> tuple[Draws, Draws]:
    """The ratio of each set [set, series], and what prompts contribute [2, prompt, series]."""
    random = np.random.default_rng(seed)
    of_sets = RATIOS[ratios](random, (len(sizes), series))
    return of_sets, NOISES[noise](random, (sum(sizes), series))


def estimated_ratios(of_sets: Draws, noise: Draws, sizes: Sequence[int]) -> Draws:
    """Of each series the number and its interval over sets: [3, series]."""
    ids, (read, rest) = sets_of(sizes), torch.from_numpy(noise)
    rows = {"read": read * torch.from_numpy(of_sets)[ids], "rest": rest}
    record = with_intervals(Ratios.of, rows, sets=ids, resamples=1, info={})
    of_series = np.array(record.info["of_sets"]["ratio"]).T
    bounds = [Ratios.kinds()["ratio"].over_sets(values) for values in of_series]
    return np.stack([record.ratio.numpy(), *np.array(bounds).T])


def of_flows(share: Tensor, ratio: Tensor, ids: Tensor, noise: Tensor) -> al.Record:
    means = torch.cat([share, share[..., 1:2] / ratio[..., None]], dim=-1)
    sums = means[ids] * noise
    flows = sums[..., :3]
    rows = {"sums": flows, "head_sums": flows[:, :, None], "counts": torch.ones(len(ids), 3)}
    rows |= dict(zip(("pq", "ww", "tq"), sums[..., 1:].unbind(-1), strict=True))
    info = {"of_random_models": {"over_ww": [[0.0, 0.0, 1.0]]}}
    return judged(al.SaliencyFlows().result, rows, ids, info)


def isolation(sizes: Sequence[int], generator: torch.Generator, spread: float = 0.3) -> al.Record:
    """The label words are one more draw of words: how much is needed differs between draws."""
    ids, draws = sets_of(sizes), 10
    needed = spread * normal(generator, len(sizes), 1 + draws)
    latent = normal(generator, len(ids), 1) + normal(generator, len(ids), 1 + draws)
    kept = (latent + needed[ids] < 0.8).double()
    names = ("label_kept", "word_overlap", "kl")
    rows = dict.fromkeys(names, kept[:, 0]) | {f"random_{name}": kept[:, 1:] for name in names}
    at_one_site = {name: values[..., None] for name, values in rows.items()}
    site = {"layers": [0], "heads": None, "keep_bos": False, "renormalize": True}
    info = {"sites": {"first layer": site}, "n_layers": LAYERS, "isolation": True}
    return judged(al.records.EdgeSweepRecord.of, at_one_site, ids, info)


def gaps_of_words(
    drawn: int, words: int, spread: float, runs: int, generator: Any, effect: float = 0.0
) -> list[tuple[float, float]]:
    """Intervals of ``label_gap`` where label words are like the other ``words``, but for an effect.

    A group of words adds up what its words do, so that draws with words in common are alike.
    """
    queries, draws, names = 200, 10, ("label_kept", "word_overlap", "kl")
    order = torch.rand(runs, draws, words, generator=generator).argsort(2)[..., :drawn] + drawn
    chosen = torch.cat([torch.arange(drawn).expand(runs, 1, -1), order], 1)

    def of_groups(of_words: Tensor) -> Tensor:
        index = chosen.flatten(1).expand(*of_words.shape[:-1], -1)
        return of_words.gather(-1, index).unflatten(-1, (1 + draws, drawn)).sum(-1) / drawn**0.5

    needed = of_groups(spread * normal(generator, runs, drawn + words))
    needed[:, 0] += effect
    noise = of_groups(normal(generator, queries, runs, drawn + words))
    kept = (normal(generator, queries, runs, 1) + noise + needed < 0.8).double()
    rows = dict.fromkeys(names, kept[..., 0])
    rows |= {f"random_{name}": kept[..., 1:].transpose(1, 2) for name in names}
    info = {"random_words": [drawn, words]}
    ids = torch.zeros(queries, dtype=torch.long)
    record = judged(al.records.EdgeSweepRecord.of, rows, ids, info, resamples=60)
    gaps = [gap_of(Isolation(record, site))[0] for site in range(runs)]  # type: ignore[arg-type]
    return [(gap.low, gap.high) for gap in gaps]


def attention(sizes: Sequence[int], generator: torch.Generator) -> al.Record:
    """Attention to label words is as high for the predicted class as for others."""
    ids = sets_of(sizes)
    predicted = torch.randint(CLASSES, (len(ids),), generator=generator)
    likes = 0.3 * normal(generator, len(sizes), CLASSES, 1) * (len(sizes) > 1)
    # The attention of prompts of a class differs between sets, by chance.
    tilt = torch.nn.functional.one_hot(predicted, CLASSES) * likes[ids, predicted]
    common = normal(generator, len(ids), 1, 1, CLASSES)
    scores = common + normal(generator, len(ids), LAYERS, 1, CLASSES)
    rows = {
        "attention": (scores + tilt[:, None, None]).exp(),
        "probabilities": torch.nn.functional.one_hot(predicted, CLASSES).double(),
        "rounding": torch.tensor([[1e-5, 0.0]] * len(ids)),
    }
    return judged(al.AttentionAUCROC().result, rows, ids)


def distances(sizes: Sequence[int], generator: torch.Generator) -> al.Record:
    """Keys that have nothing to do with which classes are confused."""
    ids = sets_of(sizes)
    places = normal(generator, CLASSES, 2)  # near classes are confused
    gold = torch.randint(CLASSES, (len(ids),), generator=generator)
    seen = places[gold] + 0.7 * normal(generator, len(ids), 2)
    logits = -(torch.cdist(seen, places) ** 2)
    spread = torch.linspace(2, 0.1, 16).double() ** 2
    keys = normal(generator, CLASSES, 16).expand(len(ids), LAYERS, -1, -1)
    rows = {
        "queries": (normal(generator, len(ids), LAYERS, 16) * spread).float(),
        "keys": keys.float(),
        "positions": torch.randperm(CLASSES, generator=generator).double().expand(len(ids), -1),
        "label_logits": logits,
        "gold": gold,
    }
    # Its verdict comes from a permutation test, and not from the interval.
    return judged(al.AnchorDistances().result, rows, ids, resamples=1)


NULLS: Mapping[str, tuple[Null, int]] = {
    "label words gather": (flows, 0),
    "the answer is read off": (flows, 1),
    "flows of label words surpass others": (flows, 2),
    "predictions need label words": (isolation, 0),
    "attention tells the label": (attention, 0),
    "near keys are confused": (distances, 0),
}


def judged(result: Any, rows: Any, ids: Tensor, info: Any = (), resamples: int = 100) -> al.Record:
    described = {"demonstration_sets": len(ids.unique()), **dict(info)}
    if len(ids.unique()) > 1:
        resamples = min(resamples, 20)  # verdicts are by the numbers of the sets
    return with_intervals(result, rows, sets=ids, resamples=resamples, info=described)


def able(prompts: int) -> al.Record:
    classes = torch.eye(2)[torch.arange(prompts) % 2]
    rows = {"correct": torch.ones(prompts).double(), "queries": classes, "answers": classes}
    return with_intervals(al.Accuracy().result, rows, resamples=1, info={})


def verdicts(null: Null, place: int, sizes: Sequence[int], repeats: int) -> list[al.records.Claim]:
    """The claim of each of many results under its null."""
    generator, accuracy = torch.Generator().manual_seed(0), able(sum(sizes))
    return [
        al.claims({"accuracy": accuracy, "null": null(sizes, generator)})[place]
        for _ in range(repeats)
    ]
