"""One list of the public calls that compute with a model, each with right arguments.

A call is a function of a ``Scene``. Devices, folded models, shapes and stored numbers
(tests/results/test_same_numbers.py) are tested with the same calls. What a call returns can be
compared: a tensor, a record, or lists and dictionaries of these.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anchorlens as al
from tests.support.asked import ask, by_site, scored
from tests.support.own_parts import EveryPass, EveryRead
from tests.support.printed_code import printed

TREC = al.TASKS["trec"]


@dataclass(frozen=True)
class Scene:
    model: Any
    batches: list[al.PromptBatch]  # the queries have mostly the labels that the model answers
    others: list[al.PromptBatch]  # the same sets of demonstrations with other queries
    written: list[al.PromptBatch]  # prompts of named segments, each with the model's own answer
    folder: Path  # an empty one, for this scene alone
    prompts: int  # after each set of demonstrations
    resamples: int = 0

    @property
    def first(self) -> list[al.PromptBatch]:
        """A batch of each set of demonstrations, for what takes many passes."""
        ids = [int(batch.demonstrations_id[0]) for batch in self.batches]
        return [self.batches[ids.index(each)] for each in dict.fromkeys(ids)]

    @property
    def batch(self) -> al.PromptBatch:
        return self.batches[0]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def quiet(self) -> dict[str, Any]:
        return {"resamples": self.resamples, "progress": False}

    def run(self, *questions: al.Question, **more: Any) -> Any:
        return al.run(self.model, self.batches, questions, **self.quiet | more)


def scene_of(
    model: Any, folder: Path, prompts: int = 6, sets: int = 1, resamples: int = 0
) -> Scene:
    """Prompts after each of some sets of demonstrations, in two batches of each set."""
    examples = al.load_examples("questions")
    build = partial(al.build_prompts, model.tokenizer, TREC, batch_size=prompts // 2)
    batches, others = [], []
    for seed in range(sets):
        demos = al.sample_demonstrations(examples, seed=seed)
        queries = [example for example in examples if example not in demos][seed:]
        asked, held_out = queries[:prompts], queries[prompts : 2 * prompts]
        # With labels that a random model answers, verdicts are about its numbers.
        logits = al.target_logits(model, build(demos, asked), progress=False)
        answers = logits[:, build(demos, asked)[0].label_token_ids].argmax(1).tolist()
        answered = [
            query if number % 4 == 0 else replace(query, label=answers[number])
            for number, query in enumerate(asked)
        ]
        batches += build(demos, answered)
        others += build(demos, held_out)
    pieces = [[("question", each.text), ("fact", f" {each.text[::-1]}")] for each in examples[:3]]
    written = [al.trace_generation(model, each, max_new_tokens=3).batch for each in pieces]
    return Scene(model, batches, others, written, folder, prompts, resamples)


def examples_of_questions() -> tuple[list[al.Example], list[al.Example]]:
    """Demonstrations and queries without prompts of their own."""
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=1)
    return demos, [example for example in examples if example not in demos][:12]


def run(s: Scene, *questions: al.Question, **more: Any) -> Any:
    results = s.run(*questions, **more)
    return {"records": results, "claims": al.claims(results)}


def metrics() -> list[al.Metric]:
    """Every metric that runs in all ways, and options that change what is in a record."""
    two = {"labels": al.edges.anchors, "target": al.edges.target}
    return [
        *(al.SaliencyFlows(), al.AttentionAUCROC(), al.Accuracy(), al.AnchorDistances(3)),
        al.SaliencyFlows(
            edges={"tq": al.edges.tq, "rest": al.edges.ww},
            weight=al.weights.saliency_of_heads,
            name="own_flows",
        ),
        *(al.LabelHeads(draws=2), al.SegmentAttention(["text", "label", "target"], apart=1)),
        *(al.SegmentFlows(), al.SegmentFlows(two, weight=al.weights.signed, name="signed")),
        al.SegmentFlows(weight=al.weights.value_norm, name="value_norm"),
    ]


def isolated(s: Scene, **more: Any) -> Any:
    hooks = partial(al.isolate_labels, s.model, site=0)
    given = al.Loyalty(), al.Accuracy(), al.SaliencyFlows(), al.AttentionAUCROC()
    return run(s, *given, hooks=hooks, **more)


def answers(s: Scene, **more: Any) -> Any:
    loss = al.losses.span_cross_entropy(ANSWER)
    return al.run(s.model, s.written, [al.SegmentFlows()], loss=loss, **s.quiet | more)


def attribution(s: Scene) -> Any:
    methods: Any = [
        (al.subsets.one_by_one, al.removal.edges, None),
        (al.subsets.shapley(), al.removal.text, ["text", "label", "query"]),
        (al.subsets.lasso(6), al.removal.edges, al.edges.each_demonstration(s.first[0])),
    ]
    return [
        ask(s.model, s.first, scored(method, remove=remove, segments=segments), **s.quiet)
        for method, remove, segments in methods
    ]


def analysis(s: Scene) -> Any:
    """With random models where they take little time."""
    is_tiny = s.model.cfg.n_heads == 2
    results = al.analyse(s.model, s.batches, depth=1, draws=2, random_weights=is_tiny, **s.quiet)
    judged = al.claims(results)
    isolation = results.pop("isolation")
    return {"records": {**results, **of_sites(isolation)}, "claims": judged}


def accuracies(s: Scene) -> Any:
    everywhere = range(s.model.cfg.n_layers)
    changes = {"clean": None, "isolated": partial(al.isolate_labels, s.model, site=everywhere)}
    correct = {
        name: s.run(al.Accuracy(), hooks=hooks)["accuracy"].correct
        for name, hooks in changes.items()
    }
    sets = torch.cat([batch.demonstrations_id for batch in s.batches])
    return al.metrics.compare_accuracies(correct, sets=sets, resamples=s.resamples)


def caches(s: Scene, **options: Any) -> Any:
    given: list[al.Metric] = [al.AttentionAUCROC(), al.AnchorDistances(3), al.Accuracy()]
    names = al.caches.names_filter(given, s.model, s.batch)
    passes = (
        s.model.run_with_cache(
            batch.tokens.to(s.device),
            attention_mask=batch.attention_mask.to(s.device),
            names_filter=names,
            **options,
        )
        for batch in s.batches
    )
    return al.caches.from_caches(given, s.batches, passes, model=s.model, resamples=s.resamples)


def text_of_a_prompt(s: Scene) -> Any:
    hard_prompts = al.contexts.hard_prompts
    given: dict[str, Any] = {"held_out": s.batches, "tokenizer": s.model.tokenizer}
    found = hard_prompts.of_tokens(s.model, [5, 6], **given)
    text = hard_prompts.of_text(s.model, found, **given)
    random = hard_prompts.random(s.model, length=len(text.ids), draws=2, **given)
    contexts = {"nothing": al.contexts.NoContext(), "text": text}
    asked = al.ContextComparison(contexts, random=random, repeats=0)
    return ask(s.model, s.batches, asked, **s.quiet)


def across_models(s: Scene) -> Any:
    options: dict[str, Any] = {"depth": 1, "draws": 1, "random_weights": False}
    return al.replication.across_models(
        {"one": s.model}, lambda tokenizer: s.batches, **options, **s.quiet
    )


def contexts(s: Scene) -> Any:
    compared: dict[str, Any] = {
        "demonstrations": al.compress,
        "words": partial(al.compress, select=al.contexts.selection.label_words),
        "none": al.contexts.NoContext(),
    }
    return ask(s.model, s.batches, al.ContextComparison(compared, draws=2, repeats=1), **s.quiet)


def effect_of_a_context(s: Scene) -> Any:
    """After the demonstrations of the first set."""
    context = al.compress(s.model, s.batch.prompt(0))
    set_id = int(s.batch.demonstrations_id[0])
    prompts = [each for each in s.others if int(each.demonstrations_id[0]) == set_id]
    return ask(s.model, prompts, al.PrefixEffect(context=context), **s.quiet)


def sites(s: Scene) -> dict[str, al.Site]:
    return {"first": al.Site(0), "rest": al.Site(range(1, s.model.cfg.n_layers))}


def cut_edges(s: Scene) -> Any:
    more: dict[str, Any] = {"control": al.edges.random_edges, "draws": 2}
    asked = [al.Accuracy(), al.SegmentAttention(), al.EdgeSweep(al.edges.tq, sites(s), **more)]
    results = s.run(*asked)
    sweep = results.pop("edge_sweep")
    return {**results, **of_sites(sweep)}


def isolation(s: Scene) -> Any:
    def asked(sites: Any, **more: Any) -> Any:
        question = al.EdgeSweep.isolation(sites, **more)
        return of_sites(ask(s.model, s.batches, question, **s.quiet))

    first = {"isolated": al.Site(0)}
    return {
        "sweep": asked(sites(s), draws=2),
        "three draws": asked(first, draws=3)["isolated"],
        "whole words": asked(first, draws=1, whole_words=True)["isolated"],
    }


def of_sites(record: Any) -> Any:
    return {name: vars(each) for name, each in by_site(record).items()}


def faithfulness(s: Scene) -> Any:
    scores: Any = {"signed": al.SegmentFlows(weight=al.weights.helpful)}
    scores["without each"] = al.subsets.one_by_one
    return ask(s.model, s.batches, al.Faithfulness(scores, subsets=8), **s.quiet)


def suppression(s: Scene, batches: list[al.PromptBatch]) -> Any:
    """The question of the documentation."""
    asked = printed("own_question.md", "Suppression")(tuple(batches[0].segment_names))
    return ask(s.model, batches, asked, **s.quiet)


def of_answers(question: Callable[..., al.Question], **more: Any) -> Callable[[Scene], Any]:
    asked = question(segments=["question", "fact"], answer=ANSWER, **more)
    return lambda s: ask(s.model, s.written, asked, **s.quiet)


def dependence(s: Scene) -> Any:
    demos, queries = examples_of_questions()
    gold, random, flipped = al.relabeling.gold, al.relabeling.random(), al.relabeling.flipped()
    labels = {"gold": gold, "random": random, "flipped": flipped}
    asked = queries[: s.prompts]
    return al.label_dependence(s.model, TREC, demos, asked, labels, **s.quiet)


def heads_of_demonstrations(s: Scene) -> Any:
    demos, queries = examples_of_questions()
    build = partial(al.build_prompts, s.model.tokenizer, TREC, demos)
    null = build(["N/A"] * s.prompts)
    record = al.retrieval_heads(s.model, build(queries[: s.prompts]), null, **s.quiet)
    return record, al.run(s.model, s.first, [record.masking(2, draws=2)], **s.quiet)


ANSWER = "answer"
# What can be told to run whole prompts, or does so always.
WHOLE: dict[str, Callable[[Scene], Any]] = {
    "metrics": lambda s: run(s, *metrics(), share_prefix=False),
    "isolated": lambda s: isolated(s, share_prefix=False),
    "answers": lambda s: answers(s, share_prefix=False),
    "patterns": lambda s: run(s, al.SegmentRollout(), al.PrefixEffect()),
    "checkpoints": lambda s: run(s, al.SaliencyFlows(), gradient_checkpointing=True),
    "caches": caches,
}


def trace_under_cuts(s: Scene) -> al.Record:
    def cut(batch: al.PromptBatch) -> Any:
        return al.block_edges(s.model, batch, al.edges.read_by(torch.tensor([1])))

    return al.trace_generation(s.model, "Who wrote it?", max_new_tokens=3, hooks=cut).flows


def losses_of_texts(s: Scene) -> al.Record:
    asked = al.Loss(al.losses.span_cross_entropy("query"))
    return s.run(asked, hooks=lambda batch: al.isolate_labels(s.model, batch, 0))["loss"]


# Calls after shared tokens, whose numbers are stored.
SHARED: dict[str, Callable[[Scene], Any]] = {
    "metrics": lambda s: run(s, *metrics()),
    **{"isolated": isolated, "answers": answers, "isolation": isolation, "cut edges": cut_edges},
    **{"faithfulness": faithfulness, "attribution": attribution},
    "faithfulness of answers": of_answers(al.Faithfulness, subsets=3),
    "attribution of answers": of_answers(scored),
    "head effects": lambda s: al.head_effects(s.model, s.others, s.batches, **s.quiet),
    "task vectors": lambda s: al.task_vectors(s.model, s.others, s.batches, **s.quiet),
    "integrated": lambda s: ask(s.model, s.first, al.IntegratedFlows(steps=2), **s.quiet),
    "parts of scores": lambda s: ask(s.model, s.first, al.ScoreParts(1), **s.quiet),
    "steps": lambda s: al.step_flows(s.model, s.written[0].prompt(0), ANSWER),
    "trace": lambda s: al.trace_generation(s.model, "Who wrote it?", max_new_tokens=3).flows,
    "trace under cuts": trace_under_cuts,
    "text losses": losses_of_texts,
    "suppression": lambda s: suppression(s, s.first),
    "suppression of answers": lambda s: suppression(s, s.written),
    **{
        "dependence on labels": dependence,
        "heads of demonstrations": heads_of_demonstrations,
        "diagnosis": lambda s: al.diagnose(s.run(al.AnchorDistances(3))["anchor_distances"]),
        "analysis": analysis,
        "accuracies": accuracies,
    },
    "effect of a context": effect_of_a_context,
    **{"contexts": contexts, "text of a prompt": text_of_a_prompt, "across models": across_models},
}


def with_hooks(make: Callable[[Scene, al.PromptBatch], Any]) -> Callable[[Scene], Tensor]:
    """Logits with hooks that are made for prompts on the CPU."""
    return lambda s: al.target_logits(s.model, s.batches, hooks=partial(make, s), progress=False)


def factors(s: Scene) -> Tensor:
    return torch.full((s.model.cfg.n_layers, s.model.cfg.n_heads, 6), 0.3, device="cpu")


def from_labels(batch: al.PromptBatch) -> Any:
    labels = al.edges.at(batch, batch.label_positions)
    return al.edges.between(labels, batch.attention_mask)


def losses(s: Scene) -> Any:
    early = al.losses.next_token_cross_entropy(lambda batch: batch.attention_mask.cumsum(1) <= 60)
    given = al.losses.word_cross_entropy(), al.losses.label_cross_entropy, early
    return [s.run(al.SaliencyFlows(), loss=loss) for loss in given]


def maps(s: Scene) -> Any:
    of_heads = al.saliency(s.model, s.batch, per_head=True)
    signed = al.saliency(s.model, s.batch, weight=al.weights.signed, per_head=True)
    rollout = al.metrics.rollout(of_heads.to(s.device))
    return [al.saliency(s.model, s.batch), of_heads, signed, rollout]


def of_tensors(s: Scene) -> Any:
    numbers = torch.arange(972.0, device="cpu").view(2, 3, 2, 9, 9).to(s.device)
    edges = torch.ones(3, 9, 9, device="cpu").tril(-1).bool().to(s.device)
    logits = al.target_logits(s.model, s.batches, progress=False).to(s.device)
    words = s.batch.label_token_ids.to(s.device)
    flows = al.metrics.flows(numbers[0], numbers[1], edges)
    return [flows, al.metrics.loyalty(logits, logits.flip(0), words)]


def of_attentions(s: Scene) -> Any:
    draw, (prompts, length) = torch.Generator().manual_seed(0), s.batch.tokens.shape
    patterns = [torch.rand(prompts, 2, length, length, generator=draw, device="cpu")] * 3
    cache = al.caches.cache_of_attentions([pattern.to(s.device) for pattern in patterns])
    logits = torch.zeros(prompts, len(s.model.tokenizer), device="cpu").to(s.device)
    return al.caches.from_caches([al.AttentionAUCROC()], [s.batch], [(logits, cache)], resamples=0)


def sweep_of_windows(s: Scene) -> Any:
    sites = al.sites.first_and_last(s.model, [1]) | al.sites.windows(s.model, 1)
    return s.run(al.EdgeSweep.isolation(sites, draws=1))


def pictures(s: Scene) -> Any:
    effect = al.PrefixEffect()
    return [
        al.plot_prompt(s.model, s.batch.prompt(0)).layers,
        al.plot_answer(al.step_flows(s.model, s.written[0].prompt(0), ANSWER)) is None,
        effect.plot_pattern(s.model, s.batch, 0, 0) is None,
        effect.plot_directions(s.model, s.batch, 0, 0) is None,
    ]


def stored_rows(s: Scene) -> Any:
    """A run that is stored, and the same again, which reads it."""
    asked = al.SaliencyFlows(), al.AttentionAUCROC()
    return [s.run(*asked, folder=s.folder / "rows") for _ in range(2)]


def report(s: Scene) -> str:
    results = s.run(al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances(directions=2))
    return al.write_report(results, s.folder / "report.html").read_text()[:15]


def compressed(**options: Any) -> Callable[[Scene], Tensor]:
    return lambda s: al.compress(s.model, s.batch, **options).logits(s.model, s.batch)


def training(s: Scene, name: str) -> al.contexts.Training:
    return al.contexts.Training(steps=2, check_every=1, progress=False, folder=s.folder / name)


def trained(s: Scene, train: Callable[..., Any], name: str, **options: Any) -> list[Any]:
    """What a training finds, and what the same call finds again, which does not train."""
    given: dict[str, Any] = {"held_out": s.others, "length": 2, **options}
    return [train(s.model, s.batches, training(s, name), **given) for _ in range(2)]


def saved(s: Scene, context: Any, name: str) -> list[Any]:
    """Logits after a context, and after what is loaded from its file."""
    loaded = al.contexts.StoredContext.load(context.save(s.folder / f"{name}.safetensors"))
    return [each.logits(s.model, s.batch) for each in (context, loaded)]


def peft(s: Scene) -> Tensor:
    prefix = al.train_prefix(s.model, s.batches, training(s, "peft"), held_out=s.others, length=2)
    path = al.contexts.context_to_peft(prefix, s.model, s.folder / "adapter")
    return al.contexts.context_from_peft(path, s.model, s.batch).logits(s.model, s.batch)


def reweighting(s: Scene) -> list[Any]:
    single = [s.batch.prompt(0), s.batch.prompt(1)]
    beta = al.contexts.train_reweighting(s.model, single, training(s, "beta"))
    loaded = al.contexts.Beta.load(beta.save(s.folder / "beta.safetensors"))
    context = al.contexts.reweight_demonstrations(s.model, s.batch, loaded)
    return [beta.beta, context.logits(s.model, s.batch)]


def segments(s: Scene) -> Any:
    prompts = [[("question", "Who?"), (ANSWER, " No.")], [("question", "Why?"), (ANSWER, " So")]]
    written = al.build_segments(s.model.tokenizer, prompts)
    loss = al.losses.span_cross_entropy(ANSWER)
    return al.run(s.model, written, [al.SegmentFlows()], loss=loss, **s.quiet)


def pairs(s: Scene) -> Any:
    pool = [("hot", "cold"), ("big", "small"), ("up", "down"), ("fast", "slow"), ("old", "new")]
    prompts = al.sample_pairs(s.model, pool, queries=2, shots=3)
    assert len(al.build_pairs(s.model, pool[:3], pool[3:])[0]) == 2
    return al.run(s.model, prompts, [al.SaliencyFlows(), al.Accuracy()], **s.quiet)


def own_context(s: Scene) -> list[Tensor]:
    """That of the documentation."""
    of_vector = partial(printed("own_context.md", "TaskVector"), 0)
    vector = torch.linspace(-1, 1, s.model.cfg.d_model, device=s.device, requires_grad=True)
    own, given = of_vector(vector), training(s, "own")
    (trained,), _ = al.contexts.train_context(s.model, own, s.batches, given, held_out=s.others)
    return [trained, of_vector(trained).logits(s.model, s.batch)]


def anchors_of_texts(s: Scene) -> Tensor:
    demos, queries = examples_of_questions()
    prompts = al.prompts.text_anchor_prompts(s.model.tokenizer, TREC, demos, queries[:2])
    return al.target_logits(s.model, prompts, progress=False)


# Calls whose numbers are not stored: hooks, maps, files, and what is trained.
FURTHER: dict[str, Callable[[Scene], Any]] = {
    "isolate_labels": with_hooks(lambda s, b: al.isolate_labels(s.model, b, site=[0, 1])),
    "isolate_random": with_hooks(lambda s, b: al.hooks.isolate_random(s.model, b, site=0, seed=1)),
    "scale_edges": with_hooks(lambda s, b: al.scale_edges(s.model, b, al.edges.pq, 0.5, 0)),
    "block_edges": with_hooks(
        lambda s, b: al.block_edges(s.model, b, from_labels(b), al.Site(range(2), heads=[1]))
    ),
    "reweight_anchors": with_hooks(lambda s, b: al.reweight_anchors(s.model, b, factors(s))),
    "replace_heads": with_hooks(
        lambda s, b: al.replace_heads(
            s.model, b, factors(s)[..., :1].expand(-1, -1, s.model.cfg.d_head), al.Site(0, 1)
        )
    ),
    "detached": lambda s: s.run(al.SaliencyFlows(), hooks=lambda _: al.detach_heads(s.model, 0)),
    "own question": lambda s: s.run(EveryPass()),
    "reads": lambda s: [s.run(EveryRead(has_hooks=hooks)) for hooks in (False, True)],
    **{"losses": losses, "maps": maps, "of tensors": of_tensors, "attentions": of_attentions},
    "caches on the CPU": lambda s: caches(s, device="cpu"),
    **{"sweep of windows": sweep_of_windows, "pictures": pictures},
    **{"stored rows": stored_rows, "report": report},
    "records": lambda s: al.Record.load(s.run(al.Accuracy())["accuracy"].save(s.folder / "one")),
    "compressed": lambda s: saved(s, al.compress(s.model, s.batch), "compressed"),
    "placed": compressed(
        select=al.contexts.selection.label_words, positions=al.contexts.placement.as_in_prompt
    ),
    "by score": compressed(select=al.contexts.selection.by_score("most read")),
    "prefix": lambda s: saved(s, trained(s, al.train_prefix, "prefix")[1], "prefix"),
    "soft prompt": lambda s: saved(s, trained(s, al.train_soft_prompt, "soft")[1], "soft"),
    "hard prompt": lambda s: trained(s, al.train_hard_prompt, "hard", tokenizer=s.model.tokenizer),
    **{"peft": peft, "reweighting": reweighting, "own context": own_context},
    **{
        "segments": segments,
        "pairs": pairs,
        "anchors of texts": anchors_of_texts,
        "prepared again": lambda s: al.target_logits(
            al.prepare_model(al.restore_model(s.model)), s.batches[:1], progress=False
        ),
    },
}
ALL = SHARED | FURTHER | {f"{name} of whole prompts": call for name, call in WHOLE.items()}
