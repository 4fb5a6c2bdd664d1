"""The paper's claims against the numbers of a model, each with a verdict and its reason."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, isnan, nan, sqrt
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from ..experiments.diagnosis import class_orders, permutation_test
from ..metrics.aucroc import AttentionAUCROCRecord
from ..metrics.distances import AnchorDistancesRecord
from ..metrics.saliency_flows import PAPER_FLOWS, SaliencyFlowsRecord
from ..printable import printable
from ..questions.edge_sweep import EdgeSweepRecord
from ..results.answer import scope_in
from ..results.depth import with_pattern
from ..results.estimate import Estimate, in_digits
from ..results.record import Record
from ..results.text_frame import table
from ..system.arguments import checked
from ..system.rounding import rounding_of
from .ability import reason_against_ability
from .contents import contents_of

SHARE_LIMIT, RATIO_LIMIT, AS_OTHERS, CHANCE = 0.25, 2.0, 1.0, 0.5
MOST_DRAWN = 0.5  # part of the words that a draw takes; with more, draws are nearly the same
# What the paper claims, in the order in which claims are given, and the limit of each.
LIMITS = {
    "Label words gather the information of their demonstrations in shallow layers.": SHARE_LIMIT,
    "In deep layers the answer is read off the label words.": RATIO_LIMIT,
    "Flows into label words and out of them surpass those between other words.": AS_OTHERS,
    "Predictions need what label words gather in shallow layers.": 0.0,
    "In deep layers the attention to the label words tells which label is predicted.": CHANCE,
    "Classes whose label words have similar keys are confused.": 0.0,
}
GATHERED, READ_OFF, SURPASSED, NEEDED, ATTENDED, CONFUSED = LIMITS
CERTAIN = 0.05  # a p-value below it decides

HOW_VERDICTS_ARE_REACHED = (
    "A claim agrees if the whole 95 % interval of its number is above a limit, and does not agree "
    "if the whole interval is below it. The limit speaks neither for nor against the claim: 0 for "
    f"a difference, {CHANCE:g} for an AUCROC, {SHARE_LIMIT:g} for a change of a share, "
    f"{RATIO_LIMIT:g} for S_pq / S_tq and {AS_OTHERS:g} for a flow over S_ww. With one set of "
    "demonstrations the interval is over queries, and does not speak of other sets; with several, "
    "each of at least ten queries, it is over sets. The claim about key distances is about "
    "classes, of which more queries do not give more: there a permutation test over classes "
    f"decides, with p below {CERTAIN:g}. Isolated label words must differ from random words by "
    "more than one draw of these from another, with the edges to a BOS left. A flow or an AUCROC "
    "that a model of the same architecture with random weights reaches too says nothing; flows "
    "over S_ww also say nothing if no such model was run, or if one reaches their interval. In all "
    "other cases one cannot tell, and neither if the accuracy is not clearly above that of naming "
    "the commonest class: then there is no answer to explain, and even the numbers of a model with "
    "random weights can be far from chance."
)


class Verdict(StrEnum):
    """What a number and its interval say of a claim."""

    AGREES = "agrees"
    DOES_NOT_AGREE = "does not agree"
    CANNOT_TELL = "cannot tell"


SIGNS = {Verdict.AGREES: "✓", Verdict.DOES_NOT_AGREE: "✗", Verdict.CANNOT_TELL: "?"}
NO_NUMBER = Estimate(nan)


@dataclass(frozen=True)
class Control:
    """A number with which that of a claim is compared."""

    name: str
    estimate: Estimate = NO_NUMBER  # NaN where there are only draws
    draws: Sequence[float] = ()

    def __str__(self) -> str:
        """The name with the number, or with the range of the draws."""
        known = [draw for draw in self.draws if not isnan(draw)]
        if not isnan(self.estimate.value) or not known:
            return printable(f"{self.name}: {self.estimate}")
        ends = dict.fromkeys(map(in_digits, (min(known), max(known))))
        return printable(f"{self.name}: {' to '.join(ends)}")


@dataclass(frozen=True)
class Claim:
    """A claim of the paper against the number of a model.

    Attributes:
        statement: What the paper claims.
        measure: What the number is.
        estimate: The number and its interval.
        limit: The claim agrees where the whole interval is above this number.
        paper: What the paper found.
        scope: Of what the verdict speaks: other queries, other sets of demonstrations, or classes.
        verdict: Whether the number agrees with the claim.
        reason: Why it is this verdict.
        controls: The same number where it should be at the limit, or of another run.
        clause: What the number says, for the sentence that answers; "" if it is not in it.
    """

    statement: str
    measure: str
    estimate: Estimate
    limit: float
    paper: str
    scope: str
    verdict: Verdict
    reason: str
    controls: Sequence[Control] = ()
    clause: str = ""

    @property
    def number(self) -> str:
        """The number with its interval, or why there is none."""
        return f"no number: {self.reason}" if isnan(self.estimate.value) else str(self.estimate)

    def __repr__(self) -> str:
        number, scope = self.estimate, f"; for {self.scope}" if self.scope else ""
        return printable(f"Claim({self.verdict}: {self.statement[:-1]}: {number}{scope})")

    def __str__(self) -> str:
        """The verdict with its reason, in one line."""
        return printable(f"{self.verdict}: {self.statement[:-1]}: {self.estimate}; {self.reason}")


class Claims(list[Claim]):
    """Claims, which print as lines and are a table in a notebook, each with its reason."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        head = ["claim", "this model", "compared with", "verdict", "because", "in the paper"]
        rows = [
            (
                claim.statement,
                claim.number,
                "; ".join(map(str, claim.controls)),
                f"{SIGNS[claim.verdict]} {claim.verdict}",
                claim.reason,
                claim.paper,
            )
            for claim in self
        ]
        return table(head, rows)


@checked
def claims(results: Mapping[str, Any]) -> Claims:
    """Compare the numbers of a model with the claims of the paper.

    A claim *agrees* if the whole 95 % interval of its number is above a limit, and *does not agree*
    if the whole interval is below it; in every other case one *cannot tell*. If the number is the
    limit, at most 5 of 100 verdicts agree and at most 5 do not.

    The interval is over sets of demonstrations where the run has several of at least ten queries,
    else over queries, and ``scope`` says so. Of key distances the permutation test of ``diagnose``
    decides. Isolated label words must differ from random words by more than one draw of these from
    another, with edges to a BOS left. One cannot tell from a flow or an AUCROC that a model of
    random weights has too, nor from any number if the interval of the accuracy is not above the
    share of the commonest class (docs/definitions.md, "Claims and verdicts").

    Args:
        results: Records of one task by name, as ``al.run`` returns them; also mappings of records.

    Returns:
        A claim for each of these that is among the results: flows (three claims), isolation in the
        first layers, attention AUCROC and anchor distances. A list, which prints a line for each.

    Raises:
        AnchorlensError: A value is neither a record nor a mapping of records, or two have one name.

    Examples:
        >>> results = al.run(model, batches, [al.SaliencyFlows()], progress=False)
        >>> [claim.verdict.value for claim in al.claims(results)]  # accuracy was not computed
        ['cannot tell', 'cannot tell', 'cannot tell']
    """
    records = list(contents_of(results).records.values())
    ability = reason_against_ability(records)
    return Claims(
        replace(claim, verdict=Verdict.CANNOT_TELL, reason=ability)
        if ability and not isnan(claim.estimate.value)
        else claim
        for claim in _claims_without_ability(records)
    )


@dataclass(frozen=True)
class Isolation:
    """One site of a sweep in which label words are isolated."""

    record: EdgeSweepRecord
    site: int

    @property
    def acts_in(self) -> Mapping[str, Any]:
        """The layers, the heads (None: all), and whether edges to BOS stay."""
        known: list[Mapping[str, Any]] = [*self.record.info["sites"].values()]
        return known[self.site]

    @property
    def layers(self) -> list[int]:
        return list(self.acts_in["layers"])

    @property
    def keeps_bos(self) -> bool:
        return bool(self.acts_in["keep_bos"])

    @property
    def is_of_first_layers(self) -> bool:
        """Whether it isolates the first layers, in all heads."""
        first = with_pattern(self.record.info, self.layers[-1] + 1)
        return self.layers == first and self.acts_in["heads"] is None

    @property
    def is_shallow(self) -> bool:
        """Whether it isolates at most half of the layers that have a pattern."""
        layers = with_pattern(self.record.info, self.record.info.get("n_layers", 0))
        return 2 * len(self.layers) <= len(layers)

    def first_layers(self) -> str:
        """The first layers, in which it isolates, in words."""
        count = len(self.layers)
        words = "the first layer" if count == 1 else f"the first {count} layers"
        others = self.record.info.get("not_cut")
        return f"{words} with attention ({others} still carry them)" if others else words

    def estimate(self, name: str) -> Estimate:
        return self.record.estimate(name, self.site)

    def draws(self, name: str) -> Tensor:
        of_draws: Tensor = getattr(self.record, name)
        return of_draws[..., self.site].double().cpu()


def estimate_over_sets(record: Record, name: str, *index: int) -> Estimate:
    """A number with its 95 % interval over given sets of demonstrations, or else over queries."""
    number = record.estimate(name, *index)
    of_sets = record.info.get("of_sets", {}).get(name)
    if of_sets is None:
        return number
    values = np.array([np.array(of_set, dtype=float)[index] for of_set in of_sets])
    values = values[~np.isnan(values)]
    if len(values) < 2 or not np.isfinite(values).all():
        return replace(number, low=nan, high=nan)
    low, high = record.kinds()[name].over_sets(values)
    return replace(number, low=low, high=high)


def scope_of(record: Record) -> str:
    """Of what an interval of ``estimate_over_sets`` speaks."""
    if "of_sets" in record.info:
        return f"other sets of demonstrations, by these {record.info.get('demonstration_sets', '')}"
    return scope_in(record.info)


def first_layers_isolations(records: Iterable[Record]) -> list[Isolation]:
    """Isolations of the first layers in all heads: shallow ones, and with edges to BOS, first."""
    sites = [
        Isolation(record, site)
        for record in records
        if isinstance(record, EdgeSweepRecord) and record.is_isolation
        for site in range(len(record.label_loyalty))
    ]
    found = [each for each in sites if each.is_of_first_layers]
    return sorted(found, key=lambda each: (not each.is_shallow, not each.keeps_bos))


def _claim(
    statement: str,
    measure: str,
    number: Estimate,
    paper: str,
    scope: str,
    no_number: str = "there is no number",
    controls: Sequence[Control] = (),
    of_random: Sequence[float] = (),
    clause: str = "",
    often_random: bool = False,
) -> Claim:
    """A claim, judged by the interval of its number and by the numbers of random weights.

    With ``often_random`` the whole interval must be above those, and without them none agrees.
    """
    verdict, limit = Verdict.CANNOT_TELL, LIMITS[statement]
    # A number that is the limit but for its rounding is neither above nor below it.
    margin = rounding_of(torch.float32) * max(abs(limit), 1)
    is_above, is_below = number.low > limit + margin, number.high < limit - margin
    most = max(of_random, default=-inf)
    if of_random:
        controls = [*controls, Control("random weights", draws=of_random)]
    if isnan(number.value):
        reason = no_number
    elif not number.has_interval:
        reason = "the number has no interval"
    elif is_above and often_random and not of_random:
        reason = (
            f"the whole interval is above {limit:g}, but random weights often give such numbers, "
            "and none were drawn to compare with; ask for them"
        )
    elif is_above and most >= (number.low if often_random else number.value):
        reason = (
            f"the whole interval is above {limit:g}, but a model of random weights has "
            f"{in_digits(most)}: the architecture and the prompts alone may give such numbers"
        )
    elif is_above:
        verdict, reason = Verdict.AGREES, f"the whole interval is above {limit:g}"
    elif is_below:
        verdict, reason = Verdict.DOES_NOT_AGREE, f"the whole interval is below {limit:g}"
    else:
        reason = f"the interval includes {limit:g}"
    return Claim(statement, measure, number, limit, paper, scope, verdict, reason, controls, clause)


def _claims_without_ability(records: Collection[Record]) -> Iterator[Claim]:
    """The claims, judged as if the model did the task."""
    for record in records:
        if isinstance(record, SaliencyFlowsRecord):
            yield from _of_flows(record)
    if isolations := first_layers_isolations(records):
        yield _of_isolation(*isolations)
    yield from (_of_attention(each) for each in records if isinstance(each, AttentionAUCROCRecord))
    yield from (_of_distances(each) for each in records if isinstance(each, AnchorDistancesRecord))


def _of_flows(record: SaliencyFlowsRecord) -> Iterator[Claim]:
    flows = tuple(record.axis_names("flow") or ())
    several = len(with_pattern(record.info, len(record.share))) > 1
    if flows == tuple(PAPER_FLOWS):  # shares of other flows are not those of the paper
        wp = flows.index("wp")
        change = estimate_over_sets(record, "share_change", wp)
        yield _claim(
            GATHERED,
            "share of the flow from texts to label words (S_wp): mean of the first third of the "
            "layers minus mean of the last third",
            Estimate(-change.value, -change.high, -change.low) if several else NO_NUMBER,
            paper="S_wp is large in shallow layers and small in deep ones (Figure 3)",
            scope=scope_of(record),
            no_number="the model has one layer, which is neither shallow nor deep",
            of_random=[-each for each in _of_random_models(record, "share_change", wp)],
        )
    ratio = estimate_over_sets(record, "deep_pq_over_tq")
    yield _claim(
        READ_OFF,
        "flow from a label word to the target over that from any other word (S_pq / S_tq): median "
        "over the last third of the layers",
        ratio,
        paper="S_pq is the largest flow in deep layers (Figure 3)",
        scope=scope_of(record),
        of_random=_of_random_models(record, "deep_pq_over_tq"),
        clause=f"in deep layers the answer reads {ratio} times as much from a label word as "
        "from another word",
    )
    if flows == tuple(PAPER_FLOWS):
        # Both flows must surpass S_ww, so that the lower end of either decides; NaN stays.
        both = (estimate_over_sets(record, "over_ww", flow) for flow in (0, 1))
        of_wp, of_pq = ([each.value, each.low, each.high] for each in both)
        ends = np.minimum(of_wp, of_pq).tolist()
        of_random = record.of_random_models("over_ww").reshape(-1, len(flows))[:, :2].min(1)
        yield _claim(
            SURPASSED,
            "S_wp / S_ww or S_pq / S_ww, whichever is smaller: median over all layers",
            Estimate(*ends) if several else NO_NUMBER,
            paper="S_wp and S_pq usually surpass S_ww (Section 2.1, Figure 3)",
            scope=scope_of(record),
            no_number="in a model of one layer label words collect nothing that the target reads",
            of_random=of_random[~np.isnan(of_random)].tolist(),
            often_random=True,
        )


def _of_isolation(isolation: Isolation, *others: Isolation) -> Claim:
    (number, no_control), is_left = gap_of(isolation), isolation.keeps_bos
    label, control = map(isolation.estimate, ("label_loyalty", "control_label_loyalty"))
    draws = control.value - isolation.draws("random_label_loyalty")
    cut = [each for each in others if each.layers == isolation.layers and is_left]
    cut_too = Control("BOS cut too", gap_of(cut[0])[0]) if cut else None
    layers = isolation.first_layers()
    changed, by_random = (f"{100 * (1 - each.value):z.0f} %" for each in (label, control))
    claim = _claim(
        NEEDED,
        f"share of predicted labels that stay with random words isolated in {layers}"
        ", minus the share that stays with the label words isolated; edges to BOS are "
        f"{'left' if is_left else 'cut too'}",
        number if isolation.is_shallow else NO_NUMBER,
        paper="far fewer labels stay than with random words (Figure 4)",
        scope=scope_of(isolation.record),
        no_number=f"{layers} are more than half of the layers: isolate fewer",
        controls=(Control("random words", draws=draws.tolist()), *([cut_too] if cut_too else [])),
        clause=f"isolating the label words in {layers} changes {changed} of the predictions and "
        f"isolating random words {by_random} (a difference of {number.percent()})",
    )
    if isolation.record.info.get("begins_with_bos") and not is_left:
        reason = (
            "the edges to BOS were cut too, which alone may change the answers: isolate with "
            "keep_bos=True as well"
        )
        return replace(claim, verdict=Verdict.CANNOT_TELL, reason=reason)
    if no_control and isolation.is_shallow:
        return replace(claim, reason=no_control)
    if cut_too and claim.verdict != Verdict.AGREES and cut_too.estimate.low > claim.limit:
        reason = (
            f"{claim.reason}; only with the edges to BOS cut too it is above: {cut_too.estimate}"
        )
        return replace(claim, reason=reason)
    return claim


def gap_of(isolation: Isolation) -> tuple[Estimate, str]:
    """Label loyalty of random words minus that of label words; why it has no interval, or ""."""
    record, site = isolation.record, isolation.site
    number = estimate_over_sets(record, "label_gap", site)
    return (number, "") if "of_sets" in record.info else _as_one_more_draw(number, isolation)


def _of_random_models(record: Record, name: str, *index: int) -> list[float]:
    """The same number of each model of the same architecture with random weights that has one."""
    numbers = [float(value[index]) for value in record.of_random_models(name)]
    return [number for number in numbers if not isnan(number)]


def _as_one_more_draw(number: Estimate, isolation: Isolation) -> tuple[Estimate, str]:
    """The gap with an interval that also holds if the label words are one more random draw.

    After one set of demonstrations a single draw differs from the mean of the draws, too, by as
    much as the draws differ. Draws of n of N words share some, and have 1 - n/N of the variance of
    groups that share none; the mean of all N has n/N of it. N words tell as much as N draws.
    """
    record, none = isolation.record, replace(number, low=nan, high=nan)
    fields = ("random_kl", "random_label_kept", "random_word_overlap")
    numbers = torch.cat([torch.atleast_2d(isolation.draws(name)) for name in fields])
    same = [of_draw.numpy().tobytes() for of_draw in numbers.unbind(1)]
    draws = {*zip(same, isolation.draws("random_label_loyalty").tolist(), strict=True)}
    if len(draws) < 2:
        return none, "there is one draw of random words, or all draws are the same: give more draws"
    drawn, words = record.info.get("random_words", (0, inf))
    if (part := drawn / words) > MOST_DRAWN:
        return none, (
            f"a draw takes {drawn} of only {words} random words, so that all draws are nearly the "
            "same: use longer demonstrations, or several sets of them, each with 10 queries or more"
        )
    freedom = 1 / (1 / (len(draws) - 1) + 1 / (words - 1))
    spread = np.std([loyalty for _, loyalty in draws], ddof=1) * sqrt((1 + part) / (1 - part))
    half = float(stdtrit(freedom, 0.975) * spread)
    low, high = (
        number.value + side * sqrt((end - number.value) ** 2 + half**2)
        for side, end in ((-1, number.low), (1, number.high))
    )
    return replace(number, low=max(low, -1.0), high=min(high, 1.0)), ""


def _of_attention(record: AttentionAUCROCRecord) -> Claim:
    return _claim(
        ATTENDED,
        "AUCROC of the attention from the target to the label words: mean over the last third of "
        "the layers",
        estimate_over_sets(record, "deep_aucroc"),
        paper="about 0.8 (Figure 5)",
        scope=scope_of(record),
        no_number="the model predicts one class for all queries",
        of_random=_of_random_models(record, "deep_aucroc"),
    )


def _of_distances(record: AnchorDistancesRecord) -> Claim:
    layer, count = int(record.default_layer), len(record.pair_auc)
    number = float(record.correlation[layer])
    claim = _claim(
        CONFUSED,
        "rank correlation, over pairs of classes, of the distance of keys with how well the model "
        f"tells the two classes apart, in layer {layer}",
        # Its interval over queries does not speak of other classes.
        Estimate(number),
        paper="the most confused pair of TREC is also the predicted one (Figure 6)",
        scope=f"other keys of these {count} classes",
        no_number=f"there is no rank correlation: {_without_correlation(record)}",
        of_random=_of_random_models(record, "correlation", layer),
    )
    if isnan(number):
        return claim
    verdict, reason = judge_distances(record)
    return replace(claim, verdict=verdict, reason=reason)


def _without_correlation(record: AnchorDistancesRecord) -> str:
    """Why distances and confusions have no rank correlation in the layer that is judged."""
    distance, auc = record.anchor_distance[int(record.default_layer)], record.pair_auc
    known = int((distance + auc).isnan().logical_not().triu(1).sum())
    if known < 3:
        pairs = len(auc) * (len(auc) - 1) // 2
        return f"it needs three pairs of classes with queries and distances; got {known} of {pairs}"
    return "all pairs of classes have the same distance, or the model tells all apart equally well"


def judge_distances(record: AnchorDistancesRecord) -> tuple[Verdict, str]:
    """The verdict on key distances by the permutation test of ``diagnose``, and its reason."""
    layer, count = int(record.default_layer), len(record.pair_auc)
    orders = class_orders(count)
    one = record.anchor_distance[layer : layer + 1]
    _, above, below = (float(each) for each in permutation_test(one, record.pair_auc, orders))
    number, position = float(record.correlation[layer]), float(record.position_correlation[layer])
    reason = f"p = {min(above, below):.2g}"
    if 1 / len(orders) >= CERTAIN:
        return Verdict.CANNOT_TELL, (
            f"{count} classes have only {len(orders)} orders, so that no p-value can be below "
            f"{CERTAIN:g}: use a task with more classes"
        )
    if min(above, below) >= CERTAIN:
        others = f"keys that are assigned to the {count} classes at random often correlate as much"
        return Verdict.CANNOT_TELL, f"{reason}: {others}"
    if abs(number) <= abs(position):
        return Verdict.CANNOT_TELL, (
            f"{reason}, but the distance of keys goes with the distance of their positions "
            f"({in_digits(position)}) as much, which may be why: use other orders of demonstrations"
        )
    verdict = Verdict.AGREES if above < CERTAIN else Verdict.DOES_NOT_AGREE
    return verdict, f"{reason} in a permutation test over the classes"
