"""The answer in words: what a model's numbers say of its label words, and what is surprising."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from ..experiments.isolation import IsolationRecord
from ..metrics.aucroc import AttentionAUCROCRecord
from ..metrics.distances import AnchorDistancesRecord
from ..metrics.saliency import PAPER_FLOWS, SaliencyFlowsRecord
from ..results.depth import shallow_and_deep
from ..results.record import Record
from .claims import (
    Claim,
    Verdict,
    accuracy_of,
    estimate,
    first_layers,
    shallow_isolation,
)


def headline(judged: Collection[Claim]) -> str:
    """How many claims of the paper agree with the model; "" without claims."""
    if not judged:
        return ""
    counts = Counter(claim.verdict for claim in judged)
    agreeing = counts[Verdict.AGREES]
    if agreeing == len(judged):
        start = "Yes: all claims of the paper agree"
    elif agreeing:
        start = f"In part: {agreeing} of {len(judged)} claims of the paper agree"
    elif counts[Verdict.DOES_NOT_AGREE]:
        start = "No claim of the paper agrees"
    else:
        return "These prompts cannot tell: no claim of the paper is confirmed or contradicted."
    rest = [
        f"{count} {'does' if count == 1 else 'do'} not"
        for count in [counts[Verdict.DOES_NOT_AGREE]]
        if count and agreeing
    ]
    rest += [
        f"{count} cannot be told from these prompts"
        for count in [counts[Verdict.CANNOT_TELL]]
        if count
    ]
    return f"{'; '.join([start, *rest])}."


def sentences(records: Mapping[str, Record]) -> list[str]:
    """What the numbers say, at most a sentence for each analysis."""
    return [*_on_ability(records), *_on_isolation(records), *_on_flows(records), *_on_rest(records)]


def surprises(records: Mapping[str, Record]) -> list[str]:
    """What differs from the pattern of the paper: layers, and signs."""
    found: list[str] = []
    for record in records.values():
        if isinstance(record, SaliencyFlowsRecord):
            found += _layers_against_the_pattern(record)
        if isinstance(record, AnchorDistancesRecord):
            layer = int(record.default_layer)
            correlation = estimate(record, "correlation", layer)
            if correlation.value < 0:
                found.append(
                    f"In layer {layer} the rank correlation of key distances with confusions is "
                    f"below 0: {correlation.text()}."
                )
    return found


def _on_ability(records: Mapping[str, Record]) -> Iterator[str]:
    known = accuracy_of(records.values())
    if known is not None:
        accuracy, commonest = known
        yield (
            f"The model names the right class of {accuracy.percent()} of the queries; "
            f"always naming the commonest class would be right for {100 * commonest:.0f} %."
        )


def _on_isolation(records: Mapping[str, Record]) -> Iterator[str]:
    record = shallow_isolation(records.values())
    if record is not None:
        yield _isolation_sentence(record)


def _isolation_sentence(record: IsolationRecord) -> str:
    labels = [estimate(record, f"{kind}_loyalty") for kind in ("label", "control_label")]
    words = [estimate(record, f"{kind}_loyalty") for kind in ("word", "control_word")]
    label, random_label = (value.percent() for value in labels)
    word, random_word = (value.percent() for value in words)
    return (
        f"Isolating the label words in {first_layers(record)} keeps {label} of the predicted "
        f"labels; isolating as many random words keeps {random_label}. The five likeliest next "
        f"words overlap with those of the clean run by {word} and by {random_word}."
    )


def _on_flows(records: Mapping[str, Record]) -> Iterator[str]:
    for record in records.values():
        if not isinstance(record, SaliencyFlowsRecord):
            continue
        if tuple(record.axis_names("flow") or ()) == tuple(PAPER_FLOWS):
            shallow, deep = shallow_and_deep(len(record.share))
            into, out_of = record.share[shallow, 0].mean(), record.share[deep, 1].mean()
            times = estimate(record, "deep_pq_over_tq").text(digits=1)
            yield (
                f"In the first third of the layers {100 * into:.0f} % of the flow goes from texts "
                f"to label words; in the last third {100 * out_of:.0f} % goes from label words to "
                f"the target, and a label word gives {times} times as much as any other word."
            )


def _on_rest(records: Mapping[str, Record]) -> Iterator[str]:
    for record in records.values():
        if isinstance(record, AttentionAUCROCRecord) and not record.deep_aucroc.isnan():
            yield (
                "In the last third of the layers the attention to the label words tells the "
                f"predicted label with an AUCROC of {estimate(record, 'deep_aucroc').text()}, "
                "where 0.5 is chance and 1 is certain."
            )


def _layers_against_the_pattern(record: SaliencyFlowsRecord) -> Iterator[str]:
    """Deep layers in which the flow into label words is larger than the flow out of them."""
    if tuple(record.axis_names("flow") or ()) != tuple(PAPER_FLOWS):
        return
    _, deep = shallow_and_deep(len(record.share))
    layers = [
        layer
        for layer in range(deep.start, deep.stop)
        if record.share[layer, 0] > record.share[layer, 1]
    ]
    if layers:
        names = ", ".join(map(str, layers))
        yield (
            f"In the deep {'layer' if len(layers) == 1 else 'layers'} {names} more flows into the "
            "label words than from them to the target, against the pattern of the paper."
        )
