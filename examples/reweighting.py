"""Table 1: re-weighted label words, compared with more demonstrations and two usual baselines.

python examples/reweighting.py --model gpt2 --seeds 42 43

The baselines are contextual calibration (Zhao et al., ICML 2021) and a linear probe of the hidden
states. The probe needs scikit-learn, which anchorlens itself does not: pip install scikit-learn.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import anchorlens as al

CONTENT_FREE = ("N/A", "", "[MASK]")


@dataclass(frozen=True, eq=False, kw_only=True)
class TargetStatesRecord(al.Record):
    states: Float[Tensor, "prompt d_model"]


@dataclass(frozen=True)
class TargetStates(al.Metric):
    """The residual stream at the target after one layer: an example of your own metric."""

    layer: int
    name: str = "target_states"
    record: ClassVar[type[al.Record]] = TargetStatesRecord

    def reads(self, batch: al.PromptBatch) -> al.reads.Reads:
        return {"states": al.reads.At("blocks.{}.hook_resid_post", al.edges.target)}

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        return {"states": seen["states"][:, self.layer, 0].float()}

    def result(self, contributions: Mapping[str, Tensor]) -> TargetStatesRecord:
        return TargetStatesRecord(states=contributions["states"])


def calibrated_labels(
    probabilities: Float[Tensor, "prompt class"], content_free: Float[Tensor, "text class"]
) -> Int[Tensor, " prompt"]:
    """argmax of W p, where W = diag(1 / p_cf) and p_cf is the mean over texts without content."""
    return (probabilities / content_free.mean(0)).argmax(1)


def probed_labels(
    states: Float[Tensor, "example d_model"],
    labels: Int[Tensor, " example"],
    new_states: Float[Tensor, "prompt d_model"],
) -> Int[Tensor, " prompt"]:
    """Labels of new states, predicted by logistic regression on the states of labelled examples."""
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return torch.from_numpy(probe.fit(states.numpy(), labels.numpy()).predict(new_states.numpy()))


def correct_answers(
    model: Any,
    task: al.Task,
    pool: Sequence[al.Example],
    tests: Sequence[al.Example],
    count: int,
    seed: int,
    rounds: int,
    lr: float,
) -> dict[str, Float[Tensor, " prompt"]]:
    """For each method: 1 for each query that it answers correctly, else 0."""
    demos = al.sample_demonstrations(pool, shots=1, seed=seed)
    rest = [example for example in pool if example not in demos]
    training = al.sample_demonstrations(rest, shots=4, seed=seed)
    queries = al.sample_queries(tests, count, seed, exclude=[*demos, *training])

    batches = al.build_prompts(model.tokenizer, task, demos, queries)
    more = al.build_prompts(model.tokenizer, task, [*demos, *training], queries)
    steps = al.build_prompts(model.tokenizer, task, demos, training, batch_size=1)
    how = al.contexts.Training(
        steps=rounds * len(steps), optimizer=partial(torch.optim.Adam, lr=lr)
    )
    beta = al.contexts.train_reweighting(model, steps, how)
    print(f"seed {seed}: training loss {beta.vanilla_loss:.2f}, re-weighted {beta.losses[-1]:.2f}")

    def probabilities(batches: Sequence[al.PromptBatch]) -> Float[Tensor, "prompt class"]:
        logits = al.target_logits(model, batches, progress=False)
        return logits[:, batches[0].label_token_ids].double().softmax(1)

    def states(batches: Sequence[al.PromptBatch]) -> Float[Tensor, "prompt d_model"]:
        metric = TargetStates(layer=2 * model.cfg.n_layers // 3)
        results = al.run(model, batches, [metric], resamples=0, progress=False)
        return results["target_states"].states

    without_content = al.build_prompts(model.tokenizer, task, demos, CONTENT_FREE)
    labels = torch.tensor([example.label for example in training])
    gold = torch.tensor([query.label for query in queries])
    predicted = {
        "contextual calibration": calibrated_labels(
            probabilities(batches), probabilities(without_content)
        ),
        "linear probe": probed_labels(states(steps), labels, states(batches)),
    }
    quiet: dict[str, Any] = {"resamples": 0, "progress": False}
    runs = {
        "vanilla": al.run(model, batches, [al.Accuracy()], **quiet),
        "more shots": al.run(model, more, [al.Accuracy()], **quiet),
        "re-weighted": al.run(
            model,
            batches,
            [al.Accuracy()],
            hooks=lambda batch: al.reweight_anchors(model, batch, beta),
            **quiet,
        ),
    }
    return {
        **{name: results["accuracy"].correct for name, results in runs.items()},
        **{method: (answers == gold).double() for method, answers in predicted.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, local folder or .gguf file")
    parser.add_argument("--task", choices=[*al.TASKS], default="questions")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--queries", type=int, default=48, help="drawn again for each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()

    model, task = al.load_model(options.model), al.TASKS[options.task]
    pool, tests = (
        al.load_examples(options.data / f"{split}.jsonl")
        if options.data
        else al.load_examples(options.task, split)
        for split in ("train", "test")
    )
    correct_by_seed = [
        correct_answers(model, task, pool, tests, options.queries, seed, options.rounds, options.lr)
        for seed in options.seeds
    ]
    correct = {
        method: torch.cat([answers[method] for answers in correct_by_seed])
        for method in correct_by_seed[0]
    }
    record = al.metrics.compare_accuracies(correct)

    print(f"{'':24}{'accuracy [95 %]':20}  gain, paired [95 %]")
    for number, method in enumerate(correct):
        accuracy, gain = (record.estimate(name, number) for name in ("accuracy", "gain"))
        print(f"{method:24}{accuracy}" + f"     {gain}" * (number > 0))
    record.plot().write_html("reweighting.html")


if __name__ == "__main__":
    main()
