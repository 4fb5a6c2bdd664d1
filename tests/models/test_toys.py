"""Models of TransformerLens itself: which analyses run, and which are refused with a reason.

Their numbers are compared with plain PyTorch in test_matrix.py.
"""

from typing import Any

import pytest
import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

import anchorlens as al
from anchorlens.errors import ModelError, PromptError
from anchorlens.runs.identity import fingerprint
from tests.references.architecture_row import LINE
from tests.references.architectures import BY_NAME
from tests.references.toys import COMMON, hooked_toy, native_bridge
from tests.support.asked import scored
from tests.support.tiny_models import questions, randomize

pytestmark = [
    pytest.mark.every_kind,
    pytest.mark.filterwarnings("ignore:some pairs of classes", "ignore:in .* of .* sets"),
]
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}
MAKE: dict[str, Any] = {"native": native_bridge}
if LINE.startswith("3."):
    MAKE["hooked-transformer"] = hooked_toy


@pytest.fixture(params=list(MAKE))
def toy(request: pytest.FixtureRequest, byte_level: Any) -> Any:
    plain = BY_NAME["Toy (grouped keys)"].build(len(byte_level), n_ctx=512)
    return MAKE[request.param](plain, byte_level)


def native(tokenizer: Any = None, **options: Any) -> Any:
    settings = COMMON | {"architecture": "TransformerLensNative", "d_vocab": 50}
    make: Any = TransformerBridge
    model = make.boot_native(TransformerBridgeConfig(**(settings | options)), tokenizer=tokenizer)
    randomize(model.original_model)
    return model


def prompts_of_numbers(n_tokens: int, answers: tuple[int, int] = (3, 5)) -> al.PromptBatch:
    """Return prompts without a tokenizer, with two anchors and the last token as the target."""
    tokens = torch.arange(3 * n_tokens).view(3, n_tokens) % 7
    return al.PromptBatch.from_positions(
        tokens,
        label_positions=[[0, 1]] * 3,
        label_classes=[[0, 1]] * 3,
        label_token_ids=list(answers),
        gold=[0, 1, 0],
    )


@pytest.mark.slow("whole models")
def test_another_toy_has_another_fingerprint(byte_level: Any) -> None:
    """Toys have no configuration of transformers, so settings and weights tell them apart."""
    prompts = [prompts_of_numbers(6)]
    small, same = native(), native()
    other_settings = native(attn_scores_soft_cap=9.0)
    other_weights = native()
    with torch.no_grad():
        other_weights.original_model.head.weight.mul_(1.1)
    of_small = fingerprint(small, prompts, {})
    assert fingerprint(same, prompts, {}) == of_small
    assert fingerprint(other_settings, prompts, {}) != of_small
    assert fingerprint(other_weights, prompts, {}) != of_small


@pytest.mark.slow("whole models")
@pytest.mark.changes_model
@pytest.mark.filterwarnings("ignore:in layers .* the attributions do not sum")
def test_every_question_is_answered(toy: Any) -> None:
    batches = questions(toy, 6, batch_size=3)
    sites = {"first": al.Site(0), "last": al.Site(-1)}
    asked = [
        *(al.SaliencyFlows(), al.AttentionAUCROC(), al.AnchorDistances(3), al.Accuracy()),
        *(scored(name="scores"), al.IntegratedFlows(steps=2)),
        *(al.EdgeSweep.isolation(sites, draws=1), al.Faithfulness({"a": al.SegmentAttention()})),
    ]
    records = al.run(toy, batches, asked, **QUIET)
    flows = records["saliency_flows"].flows
    assert flows[:2].gt(0).all()
    again = al.run(toy, batches, asked[:1], gradient_checkpointing=True, **QUIET)
    torch.testing.assert_close(again["saliency_flows"].flows, flows)
    training = al.contexts.Training(steps=2, progress=False)
    beta = al.contexts.train_reweighting(toy, batches, training)
    assert beta.of_prompts(batches[0]).any()


def test_a_model_without_a_tokenizer_runs_on_few_tokens(byte_level: Any) -> None:
    """As in modular addition, prompts have three tokens, and there are fewer output tokens."""
    model = al.prepare_model(native(n_layers=1, n_ctx=3, d_vocab=8, d_vocab_out=6, n_heads=4))
    batch = prompts_of_numbers(3)
    assert al.saliency(model, batch)[:, :, 2, :2].gt(0).all()
    assert al.run(model, [batch], [al.Accuracy()], **QUIET)["accuracy"].correct.shape == (3,)
    wrong = prompts_of_numbers(3, answers=(3, 7))
    message = "label token 7 is outside the 6 tokens that"
    with pytest.raises(PromptError, match=message):
        al.saliency(model, wrong)
    with pytest.raises(PromptError, match=message):
        al.run(model, [wrong], [al.Accuracy()], **QUIET)


def test_unsuitable_models_are_refused() -> None:
    cases: dict[str, dict[str, Any]] = {
        "bidirectional: its tokens attend to later ones": {"attention_dir": "bidirectional"},
        r"context of native is 3 tokens, .* takes 4": {"n_heads": 3, "n_ctx": 3},
    }
    for message, options in cases.items():
        with pytest.raises(ModelError, match=message):
            al.prepare_model(native(**options))


@pytest.mark.skipif(not LINE.startswith("3."), reason="gone from this line")
@pytest.mark.filterwarnings("ignore:Hooked.* is deprecated")
def test_unsuitable_models_of_the_older_line_are_refused() -> None:
    from transformer_lens import HookedEncoder, HookedTransformer, HookedTransformerConfig

    sizes = {key: value for key, value in COMMON.items() if key != "init_weights"} | {"d_vocab": 50}
    bidirectional = {"attention_dir": "bidirectional"}
    for make, changes, message in (
        (HookedEncoder, bidirectional, "bidirectional: its tokens attend to later ones"),
        (HookedTransformer, bidirectional, "bidirectional: its tokens attend to later ones"),
        (HookedTransformer, {"n_layers": 0}, "has no layers"),
    ):
        config = HookedTransformerConfig(**(sizes | changes), device="cpu")
        with pytest.raises(ModelError, match=message):
            al.prepare_model(make(config))


@pytest.mark.skipif(LINE.startswith("3."), reason="not yet in this line")
def test_a_remote_bridge_is_refused() -> None:
    from transformer_lens.model_bridge.remote_bridge import RemoteBridge

    model: Any = object.__new__(RemoteBridge)
    model.cfg = TransformerBridgeConfig(**COMMON, d_vocab=50, model_name="far-away")
    message = "far-away is a RemoteBridge.*no gradients and no attention patterns"
    with pytest.raises(ModelError, match=message):
        al.prepare_model(model)
