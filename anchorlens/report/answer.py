"""The answer in words: what a model's numbers say of its label words, and what is surprising."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from math import isnan

from torch import Tensor

from ..metrics.aucroc import AttentionAUCROCRecord
from ..metrics.distances import AnchorDistancesRecord
from ..metrics.saliency_flows import PAPER_FLOWS, SaliencyFlowsRecord
from ..results.answer import Answer, cannot_tell, speaks_of
from ..results.depth import shallow_and_deep, with_pattern
from ..results.estimate import Estimate, in_digits
from ..results.record import Record
from ..system.arguments import fitted
from .ability import ability_of, reason_against_ability
from .claims import NO_NUMBER, Claim, Verdict, first_layers_isolations, judge_distances

ARE_ANCHORS = "Does the model use its label words as anchors?"
YES_OR_NO = {Verdict.AGREES: "Yes", Verdict.DOES_NOT_AGREE: "No", Verdict.CANNOT_TELL: "Not sure"}


def answer_of(records: Collection[Record], judged: Sequence[Claim]) -> Answer | None:
    """What the records of a task say first: of the claims, or of the first record that answers."""
    if judged:
        sentence, number = _on_claims(records, judged)
        return Answer(ARE_ANCHORS, sentence, how_sure(records, judged), number)
    unable = reason_against_ability(records)
    answers = (
        fitted(f"answer of {type(record).__name__}", record.answer(unable), Answer | None)
        for record in records
    )
    return next(filter(None, answers), None)


def _on_claims(records: Collection[Record], judged: Sequence[Claim]) -> tuple[str, Estimate]:
    """How much label words matter, and how sure this is; "" without a number."""
    if reason := reason_against_ability(records):
        return cannot_tell(reason), NO_NUMBER
    # Cutting comes before reading: it shows what the answer needs, and not only where it looks.
    measured = [each for each in reversed(judged) if each.clause and not isnan(each.estimate.value)]
    if not measured:
        return "", NO_NUMBER
    first, *others = measured
    text = f"{YES_OR_NO[first.verdict]}: {first.clause}"
    for claim in others:
        text += f", {'and' if claim.verdict == first.verdict else 'but'} {claim.clause}"
    return f"{text}.", first.estimate


def how_sure(records: Collection[Record], judged: Collection[Claim]) -> str:
    """How many claims agree, and for how many prompts after how many sets of demonstrations."""
    counts = Counter(claim.verdict for claim in judged)
    words = {
        Verdict.AGREES: ("agrees", "agree"),
        Verdict.DOES_NOT_AGREE: ("does not agree", "do not agree"),
        Verdict.CANNOT_TELL: ("cannot be told", "cannot be told"),
    }
    parts = [
        f"{counts[verdict]} {word[counts[verdict] > 1]}"
        for verdict, word in words.items()
        if counts[verdict]
    ]
    found = [f"Of {len(judged)} claims of the paper {', '.join(parts)}."] if judged else []
    infos = [record.info for record in records if "prompts" in record.info]
    found += [speaks_of(infos[0])] if infos else []
    return " ".join(found)


def sentences(records: Collection[Record]) -> list[str]:
    """What the numbers say, at most a sentence for each analysis."""
    return [*_on_ability(records), *_on_isolation(records), *_on_flows(records), *_on_rest(records)]


def surprises(records: Collection[Record]) -> list[str]:
    """What differs from the pattern of the paper, if the model does the task: layers, and signs."""
    if reason_against_ability(records):
        return []
    found: list[str] = []
    for record in records:
        if isinstance(record, SaliencyFlowsRecord):
            found += _layers_against_the_pattern(record)
        if isinstance(record, AnchorDistancesRecord):
            layer = int(record.default_layer)
            correlation = float(record.correlation[layer])
            if correlation < 0 and judge_distances(record)[0] == Verdict.DOES_NOT_AGREE:
                found.append(
                    f"In layer {layer} the rank correlation of key distances with confusions is "
                    f"below 0: {in_digits(correlation)}."
                )
    return found


def _on_ability(records: Collection[Record]) -> Iterator[str]:
    if ability := ability_of(records):
        yield (
            f"The model names the right class of {ability.accuracy.percent()} of the queries; "
            f"always naming the commonest class would be right for {100 * ability.commonest:.0f} %."
        )


def _on_isolation(records: Collection[Record]) -> Iterator[str]:
    for isolation in first_layers_isolations(records)[:1]:
        label, random_label, word, random_word = (
            isolation.estimate(f"{name}_loyalty").percent()
            for name in ("label", "control_label", "word", "control_word")
        )
        words = f"by {word} and by {random_word}"
        bos = " but BOS" * isolation.keeps_bos
        yield (
            f"If the label words read nothing before them{bos} in {isolation.first_layers()} "
            f"(isolation), {label} of the predicted labels stay; if as many random words read "
            f"nothing, {random_label}. The five likeliest next words overlap with those of the "
            f"clean run {words}."
        )


def _on_flows(records: Collection[Record]) -> Iterator[str]:
    for record in records:
        if isinstance(record, SaliencyFlowsRecord) and _has_flows_of_the_paper(record):
            into = record.estimate("shallow_share", 0).percent()
            out_of = record.estimate("deep_share", 1).percent()
            times = record.estimate("deep_pq_over_tq")
            yield (
                "Per pair of tokens, in the first third of the layers the flow from texts to label "
                f"words (S_wp) is {into} of the three mean flows"
                f"{_with_random_weights(record, 'shallow_share', 0)}; in the last third that from "
                f"label words to the target (S_pq) is {out_of}"
                f"{_with_random_weights(record, 'deep_share', 1)}, and a label word gives {times} "
                "times as much as another word on average."
            )


def _on_rest(records: Collection[Record]) -> Iterator[str]:
    for record in records:
        if isinstance(record, AttentionAUCROCRecord) and not record.deep_aucroc.isnan():
            yield (
                "In the last third of the layers the attention to the label words tells the "
                f"predicted label with an AUCROC of {record.estimate('deep_aucroc')}, "
                "where 0.5 is chance and 1 is certain."
            )


def _with_random_weights(record: SaliencyFlowsRecord, name: str, flow: int) -> str:
    """The same share in models of random weights, from the smallest to the largest."""
    shares = [f"{100 * share[flow]:.0f}" for share in record.of_random_models(name)]
    ends = dict.fromkeys(sorted(shares, key=int)[:: max(1, len(shares) - 1)])
    return f" (with random weights {' to '.join(ends)} %)" if ends else ""


def _has_flows_of_the_paper(record: SaliencyFlowsRecord) -> bool:
    return tuple(record.axis_names("flow") or ()) == tuple(PAPER_FLOWS)


def _layers_against_the_pattern(record: SaliencyFlowsRecord) -> Iterator[str]:
    """Shallow layers with more flow out of the label words than into them, deep ones with less."""
    layers = with_pattern(record.info, len(record.share))
    if not _has_flows_of_the_paper(record) or len(layers) == 1:
        return
    shallow, deep = (layers[end] for end in shallow_and_deep(len(layers)))
    if "share" not in record.intervals:
        return
    # Many layers are looked at: only intervals that do not meet count.
    (into_low, out_low), (into_high, out_high) = record.intervals["share"][..., :2].movedim(-1, 1)
    if chosen := _layers_in(shallow, out_low > into_high):
        yield (
            f"In the shallow {chosen} more flows from the label words to the target than into "
            "them, against the pattern of the paper."
        )
    if chosen := _layers_in(deep, into_low > out_high):
        yield (
            f"In the deep {chosen} more flows into the label words than from them to the target, "
            "against the pattern of the paper."
        )


def _layers_in(part: Sequence[int], chosen: Tensor) -> str:
    """The chosen layers of a part in words; "" if there is none."""
    layers = [str(layer) for layer in part if chosen[layer]]
    return f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(layers)}" if layers else ""
