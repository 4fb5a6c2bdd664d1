"""Calls of every public function that computes with a model, to compare one device with another.

``calls(model, tokenizer, folder)`` gives functions without arguments by name. Each returns what can
be compared: a tensor, a record, or lists and dictionaries of these.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

import anchorlens as al

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
WITHOUT_RESULT_ON_A_DEVICE = {
    # values that are made or read without a model
    *("AnchorlensError", "ChatTask", "Context", "EdgeSet", "Example", "SEGMENTS"),
    *("Metric", "NoContext", "Site"),
    *("TASKS", "Task", "Verbalizer", "figures", "hard_prompts", "relabeling", "relabel"),
    # images are read and laid out before a model sees them; tests/models/test_images.py runs them
    "with_images",
    *(
        "load_examples",
        "paper_tables",
        "named",
        "kinds",
        "sample_demonstrations",
        "sample_queries",
        "forget_run",
    ),
    *("read_task", "kinds", "named"),
    # it computes by the other calls
    "paper",
}
# What the calls return, or hold while they run.
RETURNED = {
    *("Answer", "AnswerFlows", "Claim", "CompressedContext", "GenerationTrace", "HardPrompt"),
    *("KeyValues", "LossAtPositions", "PrefixContext", "PromptFlows"),
    *("Contributions", "QueryPass", "Results"),
    *("ReweightedContext", "SoftPrompt"),
}


@dataclass(frozen=True)
class Added(al.contexts.Context, al.contexts.Trainable):
    """A context of a user's own: a vector that is added to the embeddings at the targets."""

    vector: Tensor

    @property
    def size(self) -> int:
        return self.vector.nbytes

    @property
    def parameters(self) -> list[Tensor]:
        return [self.vector]

    def query_pass(self, model: Any, batch: al.PromptBatch) -> al.contexts.QueryPass:
        alone = al.contexts.NoContext().query_pass(model, batch)
        prompts = torch.arange(len(batch), device="cpu")

        def add(embedded: Tensor, hook: Any) -> Tensor:
            changed = embedded.clone()
            changed[prompts, alone.batch.target_rows.cpu()] += self.vector.to(embedded)
            return changed

        return replace(alone, hooks=[("hook_embed", add)])


@dataclass(frozen=True, eq=False, kw_only=True)
class EveryReadRecord(al.Record):
    """What ``EveryRead`` reads."""

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
            found["embedded"] = (
                (embedded * batch.attention_mask[..., None].to(embedded)).sum(1).cpu()
            )

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
            "pattern": seen["pattern"][:, :, :, 0],
            "slope": seen["slope"],
            "keys": seen["keys"],
            "states": seen["states"][:, :, 0],
            "sums": seen["sums"][..., 0],
            "blocks": seen["blocks"],
            "embedded": embedded.cpu(),
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class EveryPassRecord(al.Record):
    """What ``EveryPass`` gets."""

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


def calls(model: Any, tokenizer: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Functions by name; ``folder`` is empty, and for this device alone."""
    examples = al.load_examples("questions")
    sampled = partial(al.sample_prompts, model, "questions", queries=6)
    demos = al.sample_demonstrations(examples, seed=1)
    queries = [example for example in examples if example not in demos]
    task = al.TASKS["trec"]

    def prompts(start: int, stop: int, **options: Any) -> list[al.PromptBatch]:
        return al.build_prompts(tokenizer, task, demos, queries[start:stop], **options)

    device = next(model.parameters()).device
    batches, held_out = prompts(0, 6, batch_size=3), prompts(6, 10, batch_size=2)
    batch, single = batches[0], prompts(0, 2, batch_size=1)
    pieces = [("question", "Who wrote it?"), ("answer", " Nobody knows, but many ask.")]
    written = al.build_segments(tokenizer, [pieces, [("question", "Why?"), ("answer", " So.")]])
    answer = al.losses.span_cross_entropy("answer")
    two_steps = al.contexts.Training(steps=2, check_every=1, progress=False)
    searched: dict[str, Any] = {"held_out": held_out, "length": 2}

    def run(*metrics: Any, **options: Any) -> Any:
        return al.run(model, batches, metrics, **(QUIET | options))

    def hooked(make: Callable[[al.PromptBatch], Any]) -> Tensor:
        """Logits with hooks that were made for prompts on the CPU."""
        return al.target_logits(model, batches, hooks=make, progress=False)

    def twice(train: Callable[..., Any], name: str) -> list[Any]:
        """A training that is stored, and the same call again, which finds it finished."""
        training = replace(two_steps, folder=folder / name)
        return [train(training=training), train(training=training)]

    def saved(context: Any, name: str) -> list[Any]:
        path = context.save(folder / f"{name}.safetensors")
        return [each.logits(model, batch) for each in (context, al.contexts.load_context(path))]

    def stored_rows() -> list[Any]:
        metrics = [al.SaliencyFlows(), al.AttentionAUCROC()]
        return [run(*metrics, folder=folder / "rows") for _ in range(2)]

    def caches(**options: Any) -> Any:
        metrics: list[al.Metric] = [al.AttentionAUCROC(), al.AnchorDistances(directions=2)]
        names = al.caches.names_filter(metrics, model, batch)
        passes = (
            model.run_with_cache(
                each.tokens.to(device),
                attention_mask=each.attention_mask.to(device),
                names_filter=names,
                **options,
            )
            for each in batches
        )
        return al.caches.from_caches(metrics, batches, passes, model=model, resamples=0)

    def of_attentions() -> Any:
        draw, length = torch.Generator().manual_seed(0), batch.tokens.shape[1]
        patterns = [torch.rand(3, 2, length, length, generator=draw, device="cpu")] * 3
        cache = al.caches.cache_of_attentions([pattern.to(device) for pattern in patterns])
        logits = torch.zeros(3, len(tokenizer)).to(device)
        return al.caches.from_caches(
            [al.AttentionAUCROC()], [batch], [(logits, cache)], resamples=0
        )

    def report() -> str:
        results = run(al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances(directions=2))
        al.claims(results)
        return al.write_report(results, folder / "report.html").read_text()[:15]

    def peft() -> Tensor:
        prefix = train_prefix(training=two_steps)
        path = al.contexts.context_to_peft(prefix, model, folder / "peft")
        return al.contexts.context_from_peft(path, model, batch).logits(model, batch)

    def retrieval() -> Any:
        null = al.build_prompts(tokenizer, task, demos, ["N/A"] * 6)
        record = al.retrieval_heads(model, batches, null, **QUIET)
        return [record, run(record.masking(2, draws=1))]

    def sweeps() -> Any:
        sites = al.sites.first_and_last(model, [1])
        swept = run(al.Accuracy(), al.EdgeSweep.isolation(sites, draws=1))
        swept["isolation"].plot()
        return swept

    train_prefix = partial(al.train_prefix, model, batches, **searched)
    train_soft = partial(al.train_soft_prompt, model, batches, **searched)
    train_hard = partial(al.train_hard_prompt, model, batches, tokenizer=tokenizer, **searched)

    def reweighted() -> list[Any]:
        beta = al.contexts.train_reweighting(model, single, two_steps)
        loaded = al.contexts.Beta.load(beta.save(folder / "beta.safetensors"))
        context = al.contexts.reweight_demonstrations(model, batch, loaded)
        return [beta.beta, context.logits(model, batch)]

    def of_ones_own() -> list[Tensor]:
        start = Added(torch.zeros(model.cfg.d_model, device=device, requires_grad=True))
        two = replace(two_steps, folder=folder / "own")
        (vector,), _ = al.contexts.train_context(model, start, batches, two, held_out=held_out)
        return [vector, Added(vector).logits(model, batch)]

    def records() -> Any:
        record = run(al.Accuracy())["accuracy"]
        correct = record.correct
        loaded = al.load_record(record.save(folder / "accuracy"))
        return [loaded, al.metrics.compare_accuracies({"a": correct, "b": correct}, resamples=0)]

    def of_logits() -> Any:
        logits = al.target_logits(model, batches, progress=False).to(device)
        return al.metrics.loyalty(logits, logits.flip(0), batch.label_token_ids.to(device))

    numbers = torch.arange(972.0).view(2, 3, 2, 9, 9).to(device)
    held: dict[str, Any] = {"held_out": held_out, "tokenizer": tokenizer}
    factors = torch.full((model.cfg.n_layers, model.cfg.n_heads, 6), 0.3)
    contexts: dict[str, Any] = {"demonstrations": al.compress, "none": al.contexts.NoContext()}
    return {
        "flows": lambda: run(al.SaliencyFlows(), al.AttentionAUCROC(), al.Accuracy()),
        "checkpoints": lambda: run(al.SaliencyFlows(), gradient_checkpointing=True),
        "whole prompts": lambda: run(al.SaliencyFlows(), share_prefix=False),
        "distances": lambda: al.diagnose(run(al.AnchorDistances(directions=2))["anchor_distances"]),
        "heads": lambda: run(al.LabelHeads(draws=1), al.SegmentAttention(), al.PrefixEffect()),
        "loyalty": lambda: run(al.Loyalty(), hooks=partial(al.isolate_labels, model, site=0)),
        "segments": lambda: al.run(model, written, [al.SegmentFlows()], loss=answer, **QUIET),
        "value norms": lambda: run(al.SegmentFlows(weight=al.weights.value_norm)),
        "losses": lambda: [
            run(al.SaliencyFlows(), loss=loss)
            for loss in (
                al.losses.word_cross_entropy(),
                al.losses.label_cross_entropy,
                al.losses.next_token_cross_entropy(
                    lambda each: each.attention_mask.cumsum(1) <= 60
                ),
            )
        ],
        "stored rows": stored_rows,
        "reads": lambda: [run(EveryRead(has_hooks=hooks)) for hooks in (False, True)],
        "maps": lambda: [
            al.saliency(model, batch),
            al.saliency(model, batch, weight=al.weights.signed, per_head=True),
        ],
        "rollout": lambda: [
            al.metrics.rollout(al.saliency(model, batch, per_head=True).to(device)),
            run(al.SegmentRollout()),
        ],
        "of tensors": lambda: al.metrics.flows(
            numbers[0], numbers[1], torch.ones(3, 9, 9).tril(-1).bool().to(device)
        ),
        "of logits": of_logits,
        "isolate_labels": lambda: hooked(partial(al.isolate_labels, model, site=[0, 1])),
        "isolate_random": lambda: hooked(partial(al.hooks.isolate_random, model, site=0, seed=1)),
        "isolate": lambda: hooked(
            lambda each: al.block_edges(
                model,
                each,
                al.edges.between(al.edges.at(each, each.label_positions), each.attention_mask),
                al.Site(1, heads=0),
            )
        ),
        "scale_edges": lambda: hooked(
            lambda each: al.scale_edges(model, each, al.edges.pq, 0.5, 0)
        ),
        "block_edges": lambda: hooked(
            lambda each: al.block_edges(model, each, al.edges.wp, al.Site(range(2), heads=[1]))
        ),
        "reweight_anchors": lambda: hooked(lambda each: al.reweight_anchors(model, each, factors)),
        "replace_heads": lambda: hooked(
            lambda each: al.replace_heads(
                model, each, factors[..., :1].expand(-1, -1, model.cfg.d_head), al.Site(0, 1)
            )
        ),
        "detach_heads": lambda: al.run(
            model, batches, [al.SaliencyFlows()], hooks=lambda _: al.detach_heads(model, 0), **QUIET
        ),
        "analyse": lambda: al.analyse(model, sampled(), depth=1, draws=1, **QUIET),
        "across": lambda: al.replication.across_models(
            {"one": model},
            lambda tokenizer: sampled(),
            depth=1,
            draws=1,
            random_weights=False,
            **QUIET,
        ),
        "sweep": sweeps,
        "isolation": lambda: run(al.EdgeSweep.isolation({"first": al.Site(0)}, draws=2)),
        "cut edges": lambda: run(
            al.EdgeSweep(
                al.edges.wp, al.sites.windows(model, 1), control=al.edges.random_edges, draws=1
            )
        ),
        "attribution": lambda: [
            al.run(
                model,
                batches[:1],
                [al.SegmentAttribution(al.subsets.lasso(4), remove=remove, segments=parts)],
                **QUIET,
            )
            for remove in (al.removal.edges, al.removal.text)
            for parts in (None, ["text", "label", "query"])
        ],
        "faithfulness": lambda: al.run(
            model,
            batches[:1],
            [al.Faithfulness({"signed": al.SegmentFlows(weight=al.weights.helpful)})],
            **QUIET,
        ),
        "head effects": lambda: al.head_effects(model, held_out, batches, **QUIET),
        "task vectors": lambda: al.task_vectors(model, held_out, batches, **QUIET),
        "retrieval heads": retrieval,
        "label dependence": lambda: al.label_dependence(
            model, task, demos, queries[:3], {"flipped": al.relabeling.flipped()}, **QUIET
        ),
        "integrated": lambda: al.run(model, batches[:1], [al.IntegratedFlows(steps=2)], **QUIET),
        "steps": lambda: al.step_flows(model, written[0].prompt(0), "answer"),
        "trace": lambda: al.trace_generation(model, "Who wrote it?", max_new_tokens=3).flows,
        "pictures": lambda: [
            al.plot_prompt(model, batch.prompt(0)).layers,
            al.plot_answer(al.step_flows(model, written[0].prompt(0), "answer")) is None,
            al.PrefixEffect().plot_pattern(model, batch, 0, 0) is None,
            al.PrefixEffect().plot_directions(model, batch, 0, 0) is None,
        ],
        "caches": caches,
        "caches on the CPU": lambda: caches(device="cpu"),
        "attentions": of_attentions,
        "compressed": lambda: saved(al.compress(model, batch), "compressed"),
        "placed": lambda: al.compress(
            model,
            batch,
            al.contexts.selection.label_words,
            positions=al.contexts.placement.as_in_prompt,
        ).logits(model, batch),
        "by score": lambda: al.compress(model, batch, al.contexts.selection.most_read()).logits(
            model, batch
        ),
        "prepared again": lambda: al.target_logits(
            al.prepare_model(al.restore_model(model)), batches[:1], progress=False
        ),
        "effect": lambda: run(al.PrefixEffect(context=al.compress(model, batch))),
        "anchors of texts": lambda: al.target_logits(
            model,
            al.prompts.text_anchor_prompts(tokenizer, task, demos, queries[:2]),
            progress=False,
        ),
        "contexts": lambda: run(al.ContextComparison(contexts, draws=1, repeats=1)),
        "reweighting": reweighted,
        "own context": of_ones_own,
        "prefix": lambda: saved(twice(train_prefix, "prefix")[1], "prefix"),
        "soft prompt": lambda: saved(twice(train_soft, "soft")[1], "soft"),
        "hard prompt": lambda: twice(train_hard, "hard"),
        "given words": lambda: al.contexts.hard_prompts.of_text(
            model, al.contexts.hard_prompts.of_tokens(model, [5, 6], **held), **held
        ),
        "random words": lambda: al.contexts.hard_prompts.random(model, length=2, draws=2, **held),
        "peft": peft,
        "records": records,
        "own question": lambda: run(EveryPass()),
        "metrics and experiments": lambda: run(
            al.SaliencyFlows(),
            al.EdgeSweep.isolation(al.sites.first_and_last(model, [1]), draws=1),
            al.PrefixEffect(),
            al.IntegratedFlows(["text", "label", "query"], steps=2),
            EveryPass(),
        ),
        "report": report,
    }


def tensors_of(result: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every number of a result, on the CPU, but for times in seconds."""
    if isinstance(result, Tensor):
        yield name, result.detach().cpu()
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from tensors_of(value, f"{name}.{key}")
    elif is_dataclass(result):
        for field in fields(result):
            if field.name not in ("info", "seconds", "whole_seconds"):
                yield from tensors_of(getattr(result, field.name), f"{name}.{field.name}")
    elif isinstance(result, list) and result and all(isinstance(each, float) for each in result):
        yield name, torch.tensor(result, device="cpu")
    elif isinstance(result, list | tuple):
        for number, value in enumerate(result):
            yield from tensors_of(value, f"{name}[{number}]")
    elif isinstance(result, float):
        yield name, torch.tensor(result, device="cpu")
