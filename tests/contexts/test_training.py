"""The loop of steps: resuming, divergence, the order of batches, and bad settings."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.contexts import compressed, hard_prompts, training
from anchorlens.errors import MetricError, ModelError, NotFiniteError, StoreError
from anchorlens.system.digest_file import read_with_digest, to_bytes_with_digest
from tests.references.architectures import BY_NAME
from tests.references.toys import native_bridge
from tests.support.measures import same
from tests.support.tiny_models import questions, tiny_llama
from tests.support.trained_contexts import CONTEXTS, NOISY, TRAINERS, split, train_prefix, trained
from tests.support.unchanged import state_of


@pytest.mark.slow("trained contexts")
@pytest.mark.parametrize("kind", TRAINERS)
def test_an_interrupted_training_continues_to_the_same_bits(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With the state of Adam and of Adafactor, and with noise; other seeds give other bits."""
    batches, held_out = split(gpt2)
    how: Any = {"held_out": held_out, "steps": 6, "check_every": 2, "clip": inf}
    call = partial(TRAINERS[kind], gpt2, batches, **how)
    expected = call()
    assert not all(same(expected, call(seed=seed)) for seed in (1, 2))
    steps: list[int] = []

    def counted(limit: int) -> None:
        def clip(*arguments: Any) -> None:
            steps.append(1)
            if len(steps) == limit:
                raise KeyboardInterrupt

        steps.clear()
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)

    counted(4)
    with pytest.raises(KeyboardInterrupt):
        call(folder=tmp_path)
    counted(99)
    resumed = call(folder=tmp_path)
    assert len(steps) == 4 and same(resumed, expected)
    counted(99)
    assert same(call(folder=tmp_path), expected) and not steps


@pytest.mark.slow_cases("trained contexts", *TRAINERS)
@pytest.mark.parametrize("kind", TRAINERS)
def test_the_default_type_changes_no_training(gpt2: Any, kind: str, coarse_default: Any) -> None:
    batches, held_out = split(gpt2)
    call = partial(TRAINERS[kind], gpt2, batches, held_out=held_out, steps=2)
    expected = call()
    with coarse_default():
        assert same(call(), expected)


@pytest.mark.slow_cases("trained contexts", "hard prompt")
@pytest.mark.changes_model
@pytest.mark.parametrize("kind", TRAINERS)
def test_training_leaves_the_model_as_it_was(gpt2: Any, kind: str) -> None:
    before, state = state_of(gpt2.train()), torch.get_rng_state()
    calls: list[int] = []

    def failing_loss(logits: Tensor, batch: al.PromptBatch) -> Tensor:
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("in the middle")
        return al.losses.label_cross_entropy(logits, batch)

    batches, held_out = split(gpt2)
    call = partial(TRAINERS[kind], gpt2, batches, held_out=held_out)
    with pytest.raises(RuntimeError, match="in the middle"):
        call(loss=failing_loss, steps=9, check_every=1)
    call(steps=1)
    assert state_of(gpt2) == before and torch.equal(state, torch.get_rng_state())
    assert gpt2.training and all(parameter.requires_grad for parameter in gpt2.parameters())


@pytest.mark.quick_cases("trained contexts", "prefix")
@pytest.mark.every_kind
@pytest.mark.parametrize("kind", CONTEXTS)
def test_the_padding_side_changes_nothing(llama: Any, kind: str) -> None:
    left, right = (
        TRAINERS[kind](llama, batches, held_out=held_out, steps=3, check_every=2)
        for batches, held_out in (split(llama, padding_side=side) for side in ("left", "right"))
    )
    assert same(left, right)


@pytest.mark.slow_cases("trained contexts", "prefix", "soft prompt", "torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", CONTEXTS)
def test_low_precision_is_trained_in_float32(
    hooked: Any, sentencepiece_like: Any, kind: str, dtype: torch.dtype
) -> None:
    """Steps of an optimizer would round to 0."""
    model = hooked(tiny_llama(len(sentencepiece_like)).to(dtype), sentencepiece_like)
    types: list[torch.dtype] = []

    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        types.extend(parameter.dtype for parameter in parameters)
        return torch.optim.SGD(parameters, lr=1e-4)

    how: dict[str, Any] = {"optimizer": optimizer}
    if kind == "hard prompt":
        how = {"method": hard_prompts.Descent(optimizer)}
    batches, held_out = split(model)
    context = TRAINERS[kind](model, batches, held_out=held_out, steps=2, **how)
    assert set(types) == {torch.float32} and context.prefix.keys[0].dtype == dtype
    assert context.logits(model, held_out[0]).isfinite().all()


@pytest.mark.slow("trained contexts")
def test_a_damaged_state_begins_again_a_forged_one_is_refused(gpt2: Any, tmp_path: Path) -> None:
    expected = trained(gpt2, folder=tmp_path)
    path = tmp_path / "training.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    for damaged in (bytes(data), b"", b"nothing"):
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match="is damaged; training begins again") as caught:
            assert same(trained(gpt2, folder=tmp_path), expected)
        assert caught[0].filename.endswith("trained_contexts.py")
    header, tensors = read_with_digest(path)
    forged = [{key: tensors[key] for key in tensors if key != name} for name in [*tensors][::2]]
    forged += [tensors | {name: torch.zeros(3, 3, 3)} for name in (*[*tensors][1::2], "optimizer")]
    for changed in forged:
        path.write_bytes(to_bytes_with_digest(header, changed))
        with pytest.raises(StoreError, match="is no training of this version"):
            trained(gpt2, folder=tmp_path)
    for other in ({"training": "text"}, {"training": {"training": 3}}, {"record": "Beta"}):
        path.write_bytes(to_bytes_with_digest(other, tensors))
        with pytest.raises(StoreError, match=r"is no training of this version|another "):
            trained(gpt2, folder=tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=r"training\.safetensors"):
        trained(gpt2, folder=tmp_path)


def halved_outputs(model: Any) -> Callable[[], None]:
    return torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, out: out / 2 if type(module).__name__ == "GPT2MLP" else None
    ).remove


def replaced_activations(model: Any) -> Callable[[], None]:
    patch = pytest.MonkeyPatch()
    for each in model.original_model.modules():
        if type(each).__name__ == "GPT2MLP":
            patch.setattr(each, "act", torch.nn.ReLU())
    return patch.undo


@pytest.mark.quick_cases("trained contexts", "soft prompt")
@pytest.mark.changes_model
@pytest.mark.parametrize(
    ("kind", "change"),
    [*((kind, halved_outputs) for kind in TRAINERS), ("prefix", replaced_activations)],
)
def test_a_model_that_computes_otherwise_is_refused(
    gpt2: Any, tmp_path: Path, kind: str, change: Callable[[Any], Callable[[], None]]
) -> None:
    batches, held_out = split(gpt2)
    call = partial(TRAINERS[kind], gpt2, batches, held_out=held_out, steps=1, folder=tmp_path)
    stored = call()
    restore = change(gpt2)
    try:
        with pytest.raises(StoreError, match=r"does not compute as it did|another hooks on"):
            call()
    finally:
        restore()
    assert same(call(), stored)


def negative(logits: Tensor, batch: al.PromptBatch) -> Tensor:
    return -al.losses.label_cross_entropy(logits, batch)


@pytest.mark.slow("trained contexts")
def test_the_folder_of_another_training_is_refused(gpt2: Any, tmp_path: Path) -> None:
    """Also if both starts have the same size and the same record."""
    batches, held_out = split(gpt2)
    first, other = (trained(gpt2, steps=0, seed=seed) for seed in (0, 1))
    start = al.compress(gpt2, batches[0], select=al.contexts.selection.everything)
    fewer = {"batches": batches[:1], "held_out": [batches[1], *held_out]}
    tokenizer = copy.deepcopy(gpt2.tokenizer)
    tokenizer.add_tokens(["another"])
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("context", "prefix", {"length": 4}),
        ("context, shape", "prefix", {"start": start, "length": None}),
        ("steps", "prefix", {"steps": 6}),
        ("seed", "prefix", {"seed": 1}),
        ("optimizer", "prefix", {"optimizer": partial(torch.optim.Adam, lr=0.02)}),
        ("clip", "prefix", {"clip": 2.0}),
        ("check_every", "prefix", {"check_every": 1}),
        ("loss", "prefix", {"loss": negative}),
        ("prompts", "prefix", {"batches": batches[:1]}),
        ("number of training batches", "prefix", fewer),
        ("context", "prefix from a start", {"start": replace(first, prefix=other.prefix)}),
        ("context", "soft prompt", {"length": 3}),
        ("context", "soft prompt", {"start": [301]}),
        ("context", "hard prompt", {"start": [301]}),
        ("context", "hard prompt", {"allowed": torch.arange(len(gpt2.W_E)) >= 300}),
        ("context", "hard prompt", {"method": replace(NOISY, fluency=0.5)}),
        ("context", "hard prompt", {"tokenizer": tokenizer}),
        ("context", "re-weighting", {"start": torch.zeros(3, 1, 6)}),
    ]
    trainers = TRAINERS | {"prefix from a start": partial(train_prefix, start=first)}
    call: dict[str, Any] = {"batches": batches, "held_out": held_out, "steps": 0}
    for kind, train in trainers.items():
        train(gpt2, folder=tmp_path / kind, **call)
    for name, kind, change in changes:
        with pytest.raises(StoreError, match=f"another.*{name}"):
            trainers[kind](gpt2, folder=tmp_path / kind, **(call | change))


HUGE = partial(torch.optim.SGD, lr=inf)
DIVERGING: dict[str, tuple[str, dict[str, Any]]] = {
    "prefix": ("prefix", {"optimizer": HUGE}),
    "soft prompt": ("soft prompt", {"optimizer": HUGE}),
    "hard prompt": ("hard prompt", {"method": hard_prompts.Descent(HUGE)}),
    "projected": ("hard prompt", {"method": hard_prompts.Descent(HUGE, False)}),
}


@pytest.mark.quick_cases("trained contexts", "prefix", "1-1-")
@pytest.mark.parametrize("name", DIVERGING)
@pytest.mark.parametrize(("check_every", "steps"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_divergence_gives_the_best(gpt2: Any, name: str, check_every: int, steps: int) -> None:
    """A check after the last step, or the next step, finds logits that are not finite."""
    batches, held_out = split(gpt2)
    kind, huge = DIVERGING[name]
    call = partial(TRAINERS[kind], gpt2, batches, held_out=held_out, check_every=check_every)
    start = call(steps=0)
    with pytest.warns(UserWarning, match="training diverged") as caught:
        context = call(steps=steps, **huge)
    assert caught[0].filename.endswith("trained_contexts.py")
    assert same(replace(context, training=None), replace(start, training=None))
    assert context.training.held_out_loss[context.training.best].isfinite()


def test_a_start_without_finite_answers_is_an_error(gpt2: Any) -> None:
    start = trained(gpt2, steps=0)
    values = tuple(value * float("inf") for value in start.prefix.values)
    broken = replace(start, prefix=replace(start.prefix, values=values))
    with pytest.raises(NotFiniteError, match="the model's logits are not finite"):
        trained(gpt2, start=broken)
    with pytest.raises(MetricError, match="must be finite before the first step; got nan"):
        trained(gpt2, steps=1, loss=lambda logits, batch: logits[:, 0] * torch.nan)


def state(losses: list[float], held_out: float) -> Any:
    return training._State(losses=losses, held_out_losses=[held_out])


@pytest.mark.parametrize("start", [2.0, 1e-3, 0.0, -5.0])
def test_only_a_loss_far_above_the_start_is_divergence(start: float) -> None:
    limit = start + 2 * max(abs(start), 1.0)
    for last, diverges in ((start, False), (limit - 0.01, False), (limit + 0.01, True)):
        assert state([start] * 2 + [last] * 2, start).diverges(2) == diverges
    assert not state([limit + 9] * 4, start).diverges(2)  # a start with a higher loss is none
    # The last losses are compared with others, and not with some of themselves.
    assert not state([start, start, limit + 99], start).diverges(2)
    assert state([start, float("nan")], start).diverges(9)
    assert state([start], float("inf")).diverges(9)


def test_the_norm_of_the_gradient_over_all_parameters_is_limited(llama: Any) -> None:
    norms: list[float] = []

    class Observed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            gradients = [p.grad for group in self.param_groups for p in group["params"]]
            norms.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))

    def optimizer(parameters: list[Tensor]) -> Observed:
        return Observed(parameters, lr=1.0)

    for clip in (1e-3, float("inf")):
        trained(llama, steps=2, clip=clip, optimizer=optimizer)
    tried, *limited, tried_again = norms[:4]
    # The optimizer is tried once without a gradient. torch adds 1e-6 to the norm before it divides.
    assert tried == tried_again == 0 and limited == pytest.approx([1e-3, 1e-3], rel=1e-5)
    assert min(norms[4:]) > 2e-3


@pytest.mark.slow("trained contexts")
def test_held_out_numbers_are_means_over_queries_of_unequal_batches(gpt2: Any) -> None:
    (first, *_), _ = split(gpt2)
    several, rest = questions(gpt2, 12, batch_size=4)[1:]
    single = rest.prompts(0, 1)
    context = trained(gpt2, batches=[first], held_out=[several, single], steps=0)
    logits = [context.logits(gpt2, batch) for batch in (several, single)]
    wrong = (several.label_scores(logits[0]).argmax(1) + 1) % len(several.label_token_ids)
    right = single.label_scores(logits[1]).argmax(1)
    held_out = [replace(several, gold=wrong), replace(single, gold=right)]
    record = trained(gpt2, batches=[first], held_out=held_out, steps=0).training
    losses = [*map(al.losses.label_cross_entropy, logits, held_out)]
    assert record is not None and float(record.best_accuracy) == pytest.approx(1 / 5)
    assert float(record.held_out_loss) == pytest.approx(float(torch.cat(losses).mean()))
    assert losses[0].mean() != losses[1].mean()


MAKERS: dict[str, Any] = {kind: TRAINERS[kind] for kind in CONTEXTS} | {
    "hard prompt of tokens": lambda model, _, **how: hard_prompts.of_tokens(model, [300], **how),
    "random hard prompt": lambda model, _, **how: hard_prompts.random(model, draws=1, **how),
    "compressed": lambda model, batches, **options: al.compress(model, batches[0]),
}


@pytest.mark.slow_cases("trained contexts", "random")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_model_without_a_cache_is_refused_before_any_step(byte_level: Any, make: Any) -> None:
    model: Any = al.prepare_model(native_bridge(BY_NAME["Toy"].build(len(byte_level)), byte_level))
    task = al.Task("{text} ->{label}", labels=(" Human", " Number"))
    demos = [al.Example("Who was he?", 0), al.Example("How many?", 1)]
    queries = [al.Example("Where?", 1), al.Example("What do they eat?", 0)]
    first, second = al.build_prompts(byte_level, task, demos, queries, batch_size=1)
    steps: list[bool] = []

    def loss(logits: Tensor, batch: al.PromptBatch) -> Tensor:
        steps.append(logits.requires_grad)
        return al.losses.label_cross_entropy(logits, batch)

    reason = "native does not run from a key-value cache: .* takes no key"
    with pytest.raises(ModelError, match=reason):
        make(model, [first], held_out=[second], loss=loss)
    assert not any(steps)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_wrong_cache_is_refused(gpt2: Any, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    right = compressed.run_prefix

    def wrong(*arguments: Any, **options: Any) -> Any:
        prefix = right(*arguments, **options)
        return replace(prefix, values=tuple(value * 1.01 for value in prefix.values))

    monkeypatch.setattr(compressed, "run_prefix", wrong)
    batches, held_out = split(gpt2)
    with pytest.raises(ModelError, match="gives other logits after a cached prefix"):
        make(gpt2, batches, held_out=held_out)


class Untrained(al.contexts.NoContext, training.Trainable):
    def __init__(self) -> None:
        self.taken: list[int] = []

    @property
    def parameters(self) -> list[Tensor]:
        return [torch.zeros(1, requires_grad=True)]

    def backward(self, model: Any, batch: al.PromptBatch, loss: Any) -> float:
        self.taken.append(int(batch.index))
        return 1.0


def test_each_round_has_every_batch_once(gpt2: Any) -> None:
    held_out, *batches = questions(gpt2, 6, batch_size=1)

    def rounds(seed: int) -> list[list[int]]:
        untrained = Untrained()
        how = al.contexts.Training(steps=40, check_every=40, seed=seed, progress=False)
        al.contexts.train_context(gpt2, untrained, batches, how, held_out=[held_out])
        return [untrained.taken[start : start + 5] for start in range(0, 40, 5)]

    of_seed = rounds(3)
    assert all(sorted(order) == [1, 2, 3, 4, 5] for order in of_seed)
    assert len(set(map(tuple, of_seed))) > 4 and of_seed != rounds(4)


def test_the_best_check_has_the_highest_accuracy_then_the_lowest_loss() -> None:
    record = al.contexts.TrainingRecord(
        losses=torch.zeros(0),
        checked_steps=torch.arange(5),
        held_out_accuracy=torch.tensor([0.2, 0.5, 0.5, 0.5, 0.5]),
        held_out_loss=torch.tensor([0.1, float("nan"), 0.9, 0.8, 0.8]),
    )
    assert record.best == 3 and float(record.best_accuracy) == 0.5
    assert "0.50 after step 3" in record.plot().layout.title.text


def test_training_says_which_queries_it_used(gpt2: Any) -> None:
    """Also if the queries stand in other prompts."""
    context, (batches, held_out) = trained(gpt2, steps=0), split(gpt2)
    stored = context.info["queries_in_training"]
    assert sorted(training.query_digests([*batches, *held_out])) == stored
    left = split(gpt2, padding_side="left", seed=2)[0]  # after other demonstrations
    assert set(training.query_digests(left)) <= set(stored)
    assert len(set(training.query_digests(questions(gpt2, 14))) - set(stored)) == 2
