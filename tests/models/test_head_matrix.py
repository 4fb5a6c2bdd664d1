"""What each head gives out and how gradients go through it, in every architecture.

- ``sum_h sum_j A_h,ij f_h(x_j) + b_O`` is what the attention gives out at i, also with sinks.
- ``sum_j A_ij dL/dA_ij = z_i . dL/dz_i`` for each row, the diagonal included, also with sinks; and
  ``dL/dA_ij = (dL/dz)_i . v_j``.
- No gradient goes through a head that is detached, and its output stays as it is.
- Parts of queries and keys sum to scores that differ as the logarithm of the attention does.
- The sum over heads of their mean outputs times W_O, with b_O, is what the attention gives out on
  average. A prompt's own outputs of all heads, and its own residual stream after any layer, change
  no logit, bit for bit. That after the last layer gives the logits in any other prompt.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import ModelError
from anchorlens.experiments.mean_states import mean_states
from anchorlens.experiments.task_vectors import residual_name, write_states
from anchorlens.models.head_outputs import separate_heads, transformed_values
from anchorlens.models.hooked import Hook, hooks_by_layer, pattern_name, values_name, z_name
from anchorlens.models.model_state import added_hooks, frozen_in_eval_mode
from anchorlens.models.tiny_pass import LEAF
from anchorlens.passes.forward import run_pass
from anchorlens.passes.provide import Observation
from anchorlens.passes.residual_parts import residual_parts
from anchorlens.passes.step_gradients import step_gradients
from tests.models.test_matrix import KINDS, cases, hooked
from tests.references.comparison import batch_of, precise
from tests.support.measures import difference
from tests.support.tiny_models import questions

# What the attention weighs is not what hook_v holds, or W_O is not all that comes after it. Then
# gradients of steps come from patterns.
REFUSED = {
    "Gemma 4": "in layer 0, their sum differs",  # a norm of the values
    "Gemma 4 (global keys)": "in layer 0, their sum differs",
    "Gemma 4 (shared)": "in layer 0, their sum differs",
    "BitNet": "in layer 0, their sum differs",  # a norm of all heads before W_O
    "DeepSeek V2": "in layer 0, values and W_O do not fit",  # latent attention
    "DeepSeek V3": "in layer 0, values and W_O do not fit",
    "JetMoe": r"in layer 0, blocks.0.attn.hook_v does not exist",  # experts of heads
}
MIXED = ("BitNet", "JetMoe")  # a norm over all heads before the projection; no output of each head
# Norms before and after the attention, a residual stream inside it, grouped keys; of others a
# bridge suffices.
VALUES_OF_KINDS = cases("bridge", every_kind=("GPT-2", "Gemma 2", "Bloom", "Llama"))
DETACHED_OF_KINDS = cases("bridge", every_kind=("GPT-2", "GPT-J", "Llama", "Gemma 3"))


@pytest.fixture
def model(name: str, kind: str) -> Iterator[Any]:
    """All of it is in float64: what float32 rounds differs between processors."""
    made = hooked(name, torch.float64, kind)
    with precise(torch.float64):
        yield made


@pytest.mark.parametrize(("name", "kind"), VALUES_OF_KINDS)
def test_the_sum_over_keys_and_heads_is_the_output_of_the_attention(name: str, model: Any) -> None:
    prompt = batch_of("right").prompt(1)
    metric = al.SegmentFlows(weight=al.weights.value_norm)
    if name in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[name]):
            Observation(model, metric, prompt).check()
        return
    Observation(model, metric, prompt).check()
    patterns: dict[int, Any] = {}
    values: dict[int, Any] = {}
    outputs: dict[int, Any] = {}
    hooks = [
        *hooks_by_layer(model, pattern_name, patterns.__setitem__),
        *hooks_by_layer(model, values_name, values.__setitem__),
    ]
    if name == "Bloom":  # its attention adds the residual stream
        out = "blocks.{}.hook_attn_out".format
        hooks += hooks_by_layer(model, out, outputs.__setitem__)

    def store(attention: Any, inputs: Any, output: Any) -> None:
        layer = [block.attn for block in model.blocks].index(attention)
        outputs.setdefault(layer, output[0] if isinstance(output, tuple) else output)

    of_modules = [(block.attn, store) for block in model.blocks]
    with torch.no_grad(), added_hooks(model, hooks, of_modules=of_modules):
        model(prompt.tokens, attention_mask=prompt.attention_mask.long())
    for layer, block in enumerate(model.blocks):
        vectors = transformed_values(model, layer, values[layer])
        total = torch.einsum("bhqk,bhkm->bqm", patterns[layer], vectors)
        bias = getattr(block.attn, "b_O", None)
        total = total if bias is None else total + bias
        assert difference(total.detach(), outputs[layer]) <= 1e-10


def gradients(
    model: Any,
    batch: al.PromptBatch,
    name: Callable[[int], str],
    hooks: list[Hook],
    loss: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits, a hook point's tensor in each layer, and its gradient."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor, hook: Any) -> Tensor:
        tensors.append(tensor.view_as(tensor))  # the model goes on with this very tensor
        return tensors[-1]

    # The tensors are stored before the hooks that detach a part of them.
    stored = [(name(layer), keep) for layer in range(model.cfg.n_layers)]
    with frozen_in_eval_mode(model), model.hooks(fwd_hooks=[LEAF, *stored, *hooks]):
        logits = model(batch.tokens, attention_mask=batch.attention_mask.long())
        at_target = logits[torch.arange(len(batch)), batch.target_positions]
        of_words = at_target[:, :16].log_softmax(-1)[:, 0].sum() if loss is None else loss(logits)
        found = torch.autograd.grad(of_words, tensors)
    return at_target.detach(), tensors, list(found)


OTHERWISE = "cannot be told apart by parts"
BY_ITSELF = "calls the attention interface of transformers 0 times"
OF_LENS = "transformers does not compute its attention"
# Scores that are no product of queries and keys alone, or an attention that cannot be called.
NO_PARTS = {
    **dict.fromkeys(("GPT-Neo", "MPT", "XGLM"), BY_ITSELF),
    **dict.fromkeys(("Bloom", "Falcon", "Falcon (ALiBi)", "Gemma 4 (shared)"), OTHERWISE),
    "Llama 4": OTHERWISE,
    **dict.fromkeys(("OPT (norms after)", "Gemma 4"), "what the layers before it add"),
    "JetMoe": "no hook point blocks.0.attn.hook_z",
    **dict.fromkeys(("Toy", "Toy (one layer)", "Toy (soft caps)", "Toy (grouped keys)"), OF_LENS),
}
# Heads do not sum to what the attention adds; ModernBERT has another layer before its unembedding.
NOT_CARRIED = {
    "BitNet": "the attention of layer 2 and the sum",
    "Granite": "the attention of layer 2 and the sum",
    "Gemma 4 (global keys)": "Cannot split",
    "ModernBERT decoder": "what is unembedded",
}
NO_HEADS = ("BitNet", "Granite")  # a norm over all heads before W_O; a factor after it


@pytest.mark.parametrize(("name", "kind"), cases("bridge", every_kind=("Llama", "Gemma 3")))
def test_parts_of_scores_sum_to_the_attention(name: str, model: Any) -> None:
    batch = batch_of("left")
    layer, target = model.cfg.n_layers - 1, batch.target_positions
    queries, keys = target[:, None], target[:, None] - torch.arange(3)

    def parts(by_head: bool) -> Any:
        with frozen_in_eval_mode(model):
            return residual_parts(model, batch, layer, [0, 1], queries, keys, by_head=by_head)

    if name in NO_PARTS:
        with pytest.raises(ModelError, match=NO_PARTS[name]):
            parts(by_head=True)
        return
    if name in NO_HEADS:
        with pytest.raises(ModelError, match="the attention of layer 0 and the sum of the parts"):
            parts(by_head=True)
    found = parts(by_head=name not in NO_HEADS)
    scores = found.queries.sum(0).double() @ found.keys.sum(0).double().mT
    cap = model.cfg.attn_scores_soft_cap or 0
    capped = cap * (scores / cap).tanh() if cap > 0 else scores
    log = found.pattern.double().log()
    apart = (capped - capped[..., :1]) - (log - log[..., :1])
    assert apart.abs().max() <= 1e-10 * max(1.0, float(scores.abs().max()))
    assert (found.directions is None) == (name in NOT_CARRIED)
    assert NOT_CARRIED.get(name, "") in found.unknown
    # Attention times values is what each head gives out, in the columns of its own prompt.
    prompt, outputs = batch.prompt(0), list[Tensor]()
    seen = prompt.attention_mask[0].nonzero().T
    with frozen_in_eval_mode(model):
        of_prompt = residual_parts(
            model, prompt, layer, [0, 1], prompt.target_positions[:, None], seen, by_head=False
        )
        run_pass(model, prompt, observers=[(z_name(layer), lambda z, hook: outputs.append(z))])
    z = separate_heads(outputs[0], model.cfg.n_heads)[0, prompt.target_positions, :2]
    mixed = of_prompt.pattern[:, :, 0, None].double() @ of_prompt.values.sum(0).double()
    is_mixed = name != "BitNet"  # whose norm comes before
    assert (difference(mixed[:, :, 0], z) <= 1e-10) == is_mixed


@pytest.mark.parametrize(("name", "kind"), cases("bridge", every_kind=()))
def test_gradients_of_a_step_equal_those_of_its_loss(name: str, model: Any) -> None:
    prompt = batch_of("right").prompt(1)
    limit = KINDS["bridge"].limits[torch.float64]
    positions = torch.zeros_like(prompt.attention_mask)
    positions[0, [20, 40]] = True
    products: dict[tuple[int, int], Any] = {}

    def store(step: int, layer: int, pattern: Any, gradient: Any) -> None:
        products[step, layer] = (pattern * gradient)[0]

    step_gradients(model, prompt, positions, store)
    for step, position in enumerate((20, 40)):
        at_step = torch.arange(positions.shape[1])[None] == position
        loss = al.losses.next_token_cross_entropy(lambda _, at_step=at_step: at_step)  # type: ignore[misc]
        expected = al.saliency(model, prompt, loss=loss, weight=al.weights.signed, per_head=True)[0]
        for layer in range(model.cfg.n_layers):
            assert difference(products[step, layer], expected[layer]) <= limit
            assert not products[step, layer][:, position + 1 :].any()
    if name in REFUSED:  # its outputs are no products of patterns and values
        return

    def of_token(logits: Tensor) -> Tensor:
        return -logits[0, 40].log_softmax(-1)[prompt.tokens[0, 41]]

    _, outputs, slopes = gradients(model, prompt, z_name, [], of_token)
    for layer, (z, slope) in enumerate(zip(outputs, slopes, strict=True)):
        expected = (z * slope).sum(-1)[0].T.detach()
        assert difference(products[1, layer].sum(-1), expected) <= 10 * limit


def mean_at_target(model: Any, batch: al.PromptBatch, point: Any, **split: Any) -> Tensor:
    return mean_states(model, [batch], point, al.edges.target, progress=False, **split)


def assert_own_outputs_change_nothing(model: Any, batch: al.PromptBatch, name: str) -> None:
    def split(z: Tensor) -> Tensor:
        return separate_heads(z, model.cfg.n_heads)

    outputs = mean_at_target(model, batch, z_name, split=split)[:, 0]
    given_out: list[Tensor] = []

    def store(attention: Any, inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        given_out.append(output[torch.arange(len(batch)), batch.target_positions].mean(0))

    point = "blocks.{}.hook_attn_out".format
    hooks = hooks_by_layer(model, point, lambda layer, output: store(None, None, output))
    of_modules = [(block.attn, store) for block in model.blocks]
    if name == "Bloom":  # its attention adds the residual stream
        of_modules = []
    with added_hooks(model, [] if of_modules else hooks, of_modules=of_modules):
        run_pass(model, batch)
    # TransformerLens cannot divide the weights of Gemma 4, whose layers have heads of two widths.
    is_gemma = name.startswith("Gemma 4")
    readable = [] if is_gemma else zip(outputs, model.blocks, given_out, strict=True)
    for of_layer, block, expected in readable:
        weights, bias = block.attn.W_O.detach().double(), getattr(block.attn, "b_O", None)
        total = torch.einsum("hd,hdm->m", of_layer, weights)
        assert difference(total if bias is None else total + bias.detach(), expected) <= 1e-10
    prompt = batch.prompt(1)
    own = mean_at_target(model, prompt, z_name, split=split)[:, 0]
    hooks = al.replace_heads(model, prompt, own)
    assert torch.equal(run_pass(model, prompt, hooks=hooks), run_pass(model, prompt))


def assert_own_states_change_nothing(model: Any, batch: al.PromptBatch) -> None:
    prompt, others, target = batch.prompt(1), batch.prompts(2, 4), al.edges.target
    states, clean = mean_at_target(model, prompt, residual_name), run_pass(model, prompt)
    for layer in range(model.cfg.n_layers):
        hooks = write_states(prompt, target(prompt), states, layer)
        assert torch.equal(run_pass(model, prompt, hooks=hooks), clean)
    assert difference(run_pass(model, others), clean.expand(2, -1)) > 1e-3
    hooks = write_states(others, target(others), states, model.cfg.n_layers - 1)
    assert difference(run_pass(model, others, hooks=hooks), clean.expand(2, -1)) <= 1e-10


@pytest.mark.parametrize(("name", "kind"), DETACHED_OF_KINDS)
def test_logits_are_equal_and_detached_heads_have_no_gradient(name: str, model: Any) -> None:
    batch = batch_of("right")
    layer, heads = max(0, model.cfg.n_layers - 2), [1, 3]
    assert_own_states_change_nothing(model, batch)
    if name in MIXED:
        unknown = r"of single heads are not known in layers \[\d\] of"
        with pytest.raises(ModelError, match=unknown):
            al.detach_heads(model, al.Site(layer, heads=heads))
        with pytest.raises(ModelError, match=unknown):
            al.replace_heads(model, batch, torch.zeros(model.cfg.n_layers, 4, 8), al.Site(layer, 1))
        return
    assert_own_outputs_change_nothing(model, batch, name)
    hooks = al.detach_heads(model, al.Site(layer, heads=heads))
    for point in (pattern_name, z_name):
        logits, _, clean = gradients(model, batch, point, [])
        same, _, ours = gradients(model, batch, point, hooks)
        assert torch.equal(same, logits)
        axis = 1 if point is pattern_name else 2
        if model.cfg.n_heads != clean[0].shape[axis]:  # latent attention of a bridge
            clean, ours = ([z.flatten(2).unflatten(2, (4, -1)) for z in zs] for zs in (clean, ours))
        detached, others = torch.tensor(heads), torch.tensor([0, 2])
        assert not ours[layer].index_select(axis, detached).any()
        assert clean[layer].index_select(axis, detached).any()
        expected = clean[layer].index_select(axis, others)
        assert torch.equal(ours[layer].index_select(axis, others), expected) and expected.any()
        # Nothing after these heads was changed, and everything before them was.
        assert all(map(torch.equal, ours[layer + 1 :], clean[layer + 1 :]))
        assert not any(map(torch.equal, ours[:layer], clean[:layer]))


def test_all_heads_are_detached_by_default_and_layers_count_from_the_end(gpt2: Any) -> None:
    (batch,) = questions(gpt2, 3)
    logits, *_ = gradients(gpt2, batch, pattern_name, [])
    hooks = al.detach_heads(gpt2, [-1, 1])
    assert [name for name, _ in hooks] == [z_name(1), z_name(2)]
    same, _, ours = gradients(gpt2, batch, pattern_name, hooks)
    assert torch.equal(same, logits)
    assert not ours[1].any() and not ours[2].any() and ours[0].any()
