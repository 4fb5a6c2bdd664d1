"""Rotations that depend on the length of a text: every path that caches, against whole prompts.

The oracle is plain transformers, which runs each text alone on a copy of the weights.
"""

import copy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.contexts.reweighted import _all_but_target
from anchorlens.errors import PromptError
from anchorlens.metrics.question import no_hooks
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.models.rotary import rotate_alike
from anchorlens.passes.forward import run_pass
from anchorlens.passes.losses import WordCrossEntropy
from anchorlens.runs import way
from tests.support.measures import difference, is_shared
from tests.support.peft_oracle import peft_logits
from tests.support.rotary_models import alone, longrope, rotating
from tests.support.tiny_models import questions

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
SWITCH = 237  # the prompts have 232 to 246 tokens, and the demonstrations 205
AFTER_SWITCH = 150  # a switch before the end of the demonstrations
CACHED = "keys that were cached in a text of .* tokens .*longrope"
MAKE: dict[str, tuple[str, int, bool]] = {
    "Llama longrope": ("longrope", SWITCH, False),
    "Phi-3 longrope": ("longrope", SWITCH, True),
    "Llama yarn": ("yarn", 1024, False),
    "Llama dynamic": ("dynamic", 1024, False),
}
CHANGING = ["Llama longrope", "Phi-3 longrope"]
STAYING = ["Llama yarn", "Llama dynamic"]


def prompts(model: Any, count: int = 20, seed: int = 1) -> list[al.PromptBatch]:
    return questions(model, count, seed, batch_size=1)


def on_side(batches: list[al.PromptBatch], is_long: bool) -> list[al.PromptBatch]:
    return [batch for batch in batches if (batch.tokens.shape[1] > SWITCH) == is_long]


def run_as_alone(model: Any, plain: Any, *sets: list[al.PromptBatch]) -> al.Record:
    batches = [batch for each in sets for batch in each]
    logits = al.target_logits(model, batches, progress=False)
    ordered = [batch for each in sets for batch in sorted(each, key=lambda b: int(b.index[0]))]
    assert difference(logits, alone(plain, *ordered)) < 1e-5
    return al.run(model, batches, [al.Accuracy()], **QUIET)["accuracy"]


@pytest.mark.slow("whole models")
@pytest.mark.parametrize("name", [*CHANGING, *STAYING])
@pytest.mark.parametrize("large", [way.LARGE, 0], ids=["whole", "fused"])
def test_runs_with_several_sets_have_the_logits_of_whole_prompts(
    name: str, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way, "LARGE", large)
    model, plain = rotating(*MAKE[name])
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, shots=2, seed=3)  # all above the switch
    queries = [example for example in examples if example not in demos][:3]
    task = al.TASKS["trec"]
    longer = al.build_prompts(model.tokenizer, task, demos, queries, batch_size=1)
    assert int(longer[0].query_start[0]) > SWITCH
    status = run_as_alone(model, plain, prompts(model), longer).info["shared_prefix"]
    assert ("the model rotates differently" if name in CHANGING else "run once") in status


def test_prompts_on_both_sides_of_a_switch_share_nothing() -> None:
    model, _ = rotating(*MAKE["Llama longrope"])
    batches = prompts(model)
    decided = way.way_of(model, batches, [no_hooks])
    assert "tokens, which the model rotates differently in a prompt of" in decided.shared_prefix
    assert way.way_of(model, on_side(batches, False), [no_hooks]).lengths


@pytest.mark.slow("whole models")
@pytest.mark.parametrize("name", CHANGING)
def test_runs_on_one_side_are_native_and_share_their_demonstrations(name: str) -> None:
    """transformers sets its frequencies anew in each pass: nobody changed the model."""
    model, plain = rotating(*MAKE[name])
    short, long = (on_side(prompts(model), is_long) for is_long in (False, True))
    for batches in (short[:1], long[:1], short[:1], long[:1], short):
        record = run_as_alone(model, plain, batches)
        assert record.info["passes"] == "native"
    assert is_shared(record)


@pytest.mark.quick_cases("whole models", "Llama dynamic")
@pytest.mark.parametrize("name", [*CHANGING, *STAYING])
def test_contexts_answer_as_the_whole_prompt_or_refuse(name: str, tmp_path: Any) -> None:
    model, plain = rotating(*MAKE[name])
    short, long = (on_side(prompts(model), is_long)[0] for is_long in (False, True))
    beta = torch.zeros(2, 4, short.label_positions.shape[1])
    made = al.compress(model, short, al.contexts.selection.everything)
    al.contexts.context_to_peft(made, model, tmp_path / "peft")
    of_peft = peft_logits(copy.deepcopy(plain), tmp_path / "peft", short)
    assert difference(of_peft, alone(plain, short)) < 1e-5
    contexts: list[Any] = [
        made,
        al.contexts.context_from_peft(tmp_path / "peft", model),
        al.contexts.CompressedContext.load(made.save(tmp_path / "context.safetensors")),
        al.contexts.reweight_demonstrations(model, short, beta),
        al.compress(
            model, short, al.contexts.selection.everything, positions=al.contexts.placement.rebased
        ),
    ]
    for context in contexts:
        assert difference(context.logits(model, short), alone(plain, short)) < 1e-5
        if name in CHANGING:
            with pytest.raises(PromptError, match=CACHED):
                context.logits(model, long)
        else:
            assert difference(context.logits(model, long), alone(plain, long)) < 1e-5
    # A selection of few tokens has few columns, but stands at the positions of the prompt.
    few = al.compress(model, short, al.contexts.selection.label_words)
    if name in STAYING:
        few.logits(model, long)
        return
    with pytest.raises(PromptError, match=CACHED):
        few.logits(model, long)
    for keep in (al.contexts.selection.everything, al.contexts.selection.anchors_and_format):
        with pytest.raises(PromptError, match=CACHED):
            al.compress(model, long, keep)


@pytest.mark.slow("whole models")
def test_demonstrations_above_the_switch_are_cached() -> None:
    model, plain = rotating("longrope", AFTER_SWITCH)
    batches = prompts(model, 4)
    context = al.compress(model, batches[0], al.contexts.selection.everything)
    for batch in batches:
        assert difference(context.logits(model, batch), alone(plain, batch)) < 1e-5
    assert is_shared(run_as_alone(model, plain, batches))


@pytest.mark.parametrize(
    "positions", [al.contexts.placement.restarted, al.contexts.placement.rebased]
)
def test_keys_above_the_switch_do_not_move_below_it(positions: Any) -> None:
    model, _ = rotating("longrope", AFTER_SWITCH)
    with pytest.raises(PromptError, match=CACHED):
        al.compress(
            model, prompts(model, 1)[0], al.contexts.selection.label_words, positions=positions
        )


@pytest.mark.parametrize("name", [*CHANGING, *STAYING])
def test_everything_before_the_target_is_cached_on_one_side_alone(name: str) -> None:
    model, plain = rotating(*MAKE[name])
    batches = {batch.tokens.shape[1]: batch for batch in prompts(model)}
    for length in (SWITCH, SWITCH + 1):
        batch = batches[length]
        with frozen_in_eval_mode(model):
            ready = _all_but_target(model, batch)
            logits = ready.logits(model)
        assert (ready.prefix is None) == (name in CHANGING and length == SWITCH + 1)
        assert difference(logits, alone(plain, batch)) < 1e-5


WORDS = torch.tensor([[300, 310, 320], [301, 311, 321]])


@dataclass(frozen=True)
class WordLogProbs(WordCrossEntropy):
    """A loss of two words of three tokens, which notes their log probabilities."""

    words: Any = None
    per_token: bool = False
    seen: list[Tensor] = field(default_factory=list)

    def continuations(self, batch: al.PromptBatch) -> Tensor:
        return WORDS

    def __call__(self, log_probs: Tensor, batch: al.PromptBatch) -> Tensor:
        self.seen.append(log_probs.detach())
        return -log_probs.sum((1, 2))


def words_alone(plain: Any, batch: al.PromptBatch) -> Tensor:
    """Log probabilities of the words, each token from a pass over the whole text before it."""
    prompt = batch.tokens[0, : int(batch.target_positions[0]) + 1]
    rows = []
    for word in WORDS:
        for count, token in enumerate(word):
            text = torch.cat([prompt, word[:count]])[None]
            with torch.no_grad():
                rows.append(plain(text).logits[0, -1].log_softmax(-1)[token])
    return torch.stack(rows).unflatten(0, WORDS.shape)[None]


@pytest.mark.slow_cases("whole models", "Llama yarn")
@pytest.mark.parametrize("name", [*CHANGING, *STAYING])
def test_label_words_of_several_tokens(name: str) -> None:
    model, plain = rotating(*MAKE[name])
    batches = {batch.tokens.shape[1]: batch for batch in prompts(model)}
    for length in (232, 236, SWITCH, SWITCH + 1):  # two more tokens of a word are run
        loss = WordLogProbs()
        with frozen_in_eval_mode(model):
            if name in CHANGING and length in (SWITCH - 1, SWITCH):
                with pytest.raises(PromptError, match=CACHED):
                    run_pass(model, batches[length], loss=loss)
                continue
            run_pass(model, batches[length], loss=loss)
        expected = words_alone(plain, batches[length])
        torch.testing.assert_close(loss.seen[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*CHANGING, *STAYING])
def test_a_generated_text_stays_on_one_side(name: str) -> None:
    model, plain = rotating(*MAKE[name])
    text = model.tokenizer.decode(prompts(model, 1)[0].tokens[0])
    length = len(model.tokenizer(text)["input_ids"])
    if name in CHANGING:
        with pytest.raises(PromptError, match=CACHED):
            al.trace_generation(model, text, max_new_tokens=SWITCH - length + 1)
    trace = al.trace_generation(model, text, max_new_tokens=SWITCH - length)
    tokens = trace.batch.tokens
    for stop in range(length, tokens.shape[1]):
        with torch.no_grad():
            assert int(plain(tokens[:, :stop]).logits[0, -1].argmax()) == int(tokens[0, stop])


TRAIN: dict[str, Any] = {
    "prefix": al.train_prefix,
    "soft prompt": al.train_soft_prompt,
    "hard prompt": partial(al.train_hard_prompt, start=[300]),
    "given tokens": lambda model, _, held_out, length, training: al.contexts.hard_prompts.of_tokens(
        model, [300] * length, held_out=held_out
    ),
}


@pytest.mark.slow_cases("whole models", "prefix")
@pytest.mark.parametrize("kind", TRAIN)
def test_trained_contexts_refuse_queries_beyond_the_switch(kind: str, tmp_path: Any) -> None:
    model, _ = rotating("longrope", 34)  # in the queries after a trained context
    batches = prompts(model)
    lengths = [int(b.target_positions[0] - b.query_start[0]) + 1 for b in batches]
    shortest, longest = min(lengths), max(lengths)
    assert shortest + 2 <= 34 < longest
    options: dict[str, Any] = {"training": al.contexts.Training(steps=1, progress=False)}
    with pytest.raises(PromptError, match=CACHED):
        TRAIN[kind](model, batches[:3], held_out=batches[3:], length=2, **options)
    near = [batch for batch, length in zip(batches, lengths, strict=True) if length + 2 <= 34]
    context = TRAIN[kind](model, near[:1], held_out=near[1:2], length=2, **options)
    loaded = al.contexts.StoredContext.load(context.save(tmp_path / "context.safetensors"))
    assert torch.equal(context.logits(model, near[0]), loaded.logits(model, near[0]))


@pytest.mark.slow("whole models")
def test_dynamic_rotations_do_not_depend_on_earlier_passes() -> None:
    """From the limit on, transformers rotates by the longest text of all passes before."""
    model, plain = rotating("dynamic", SWITCH)
    batches = {batch.tokens.shape[1]: batch for batch in prompts(model)}
    inside = batches[SWITCH - 1]
    context = al.compress(model, inside, al.contexts.selection.everything)
    with torch.no_grad():
        model.original_model(torch.arange(400)[None] % 600)  # a user's own long text
    for logits in (
        al.target_logits(model, [inside], progress=False),
        context.logits(model, inside),
    ):
        assert difference(logits, alone(plain, inside)) < 1e-5
    for run in (
        lambda batch: al.target_logits(model, [batch], progress=False),
        lambda batch: al.compress(model, batch),
        lambda batch: context.logits(model, batch),
    ):
        with pytest.raises(PromptError, match=r"from 237 tokens on .*dynamic NTK.* earlier passes"):
            run(batches[SWITCH])
    with pytest.raises(PromptError, match="the model's context is 237"):
        al.target_logits(model, [batches[SWITCH + 1]], progress=False)


def test_padding_counts_as_the_model_counts_it() -> None:
    """Columns of padding after a short prompt would rotate it as a long one."""
    model, _ = rotating("longrope", AFTER_SWITCH)
    tokens = torch.arange(160)[None] % 600
    mask = torch.arange(160)[None] < 140
    batch = al.PromptBatch.from_segments(tokens, mask.long() - 1, ["text"], attention_mask=mask)
    with pytest.raises(PromptError, match="prompts of 140 and 160 tokens are in one batch"):
        al.target_logits(model, [batch], progress=False)


OLDER: dict[str, Any] = {"rope_scaling": {"type": "su", "long_factor": [1.0]}}
LONGROPE: dict[str, Any] = {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}
LONGROPE |= {"original_max_position_embeddings": 70, "max_position_embeddings": 700}


@pytest.mark.parametrize(
    ("config", "switches"),
    [
        ({"rope_parameters": {"full_attention": longrope(50)["rope_parameters"]}}, [50]),
        (OLDER | {"max_position_embeddings": 9}, [9]),
        (LONGROPE, [70]),
        *(
            ({"rope_parameters": {"rope_type": kind, "original_max_position_embeddings": 5}}, [])
            for kind in ("llama3", "yarn")
        ),
        ({"rope_parameters": None, "rope_scaling": None}, []),
    ],
)
def test_settings_of_one_layer_type_and_of_older_code_are_read(
    config: dict[str, Any], switches: list[int]
) -> None:
    of_text = SimpleNamespace(**config)
    whole = SimpleNamespace(get_text_config=lambda: of_text)
    model = SimpleNamespace(original_model=SimpleNamespace(config=whole))
    for length in range(1, 800):
        alike = [(length > switch) == (switch < 800) for switch in switches]
        assert rotate_alike(model, length, 800) == all(alike)
