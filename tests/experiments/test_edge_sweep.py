"""Sweeps over any edges, compared with separate runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from measures import assert_same, logits_of
from tiny_models import questions
from torch import Tensor

import anchorlens as al
from anchorlens.errors import AnchorlensError, StoreError
from anchorlens.prompts import edges
from anchorlens.trials import how_to_run

pytestmark = pytest.mark.without_jaxtyping
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


@pytest.fixture(params=["gpt2", "llama", "gemma3"])
def model(request: pytest.FixtureRequest, hooked: Any) -> Any:
    return request.getfixturevalue(request.param)


def forerunners_read(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.query(batch), edges.forerunners(batch))


def labels_read_format(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.anchors(batch), edges.segment(batch, "format"))


def context(batch: al.PromptBatch) -> Tensor:
    return edges.between(edges.query(batch), edges.demonstrations(batch))


@pytest.mark.parametrize(
    ("cut", "control", "sites"),
    [
        (
            forerunners_read,
            edges.random_keys,
            {"window": al.Site(range(1, 3)), "head": al.Site(0, 1)},
        ),
        (
            context,
            edges.random_edges,
            {"from layer 1": al.Site(range(1, 3)), "head": al.Site(0, 1)},
        ),
    ],
)
def test_a_sweep_equals_separate_runs(model: Any, cut: Any, control: Any, sites: Any) -> None:
    batches = questions(model, 5, batch_size=2, padding_side="left")
    records = al.edge_sweep(model, batches, cut, sites, control=control, draws=2, seed=7, **QUIET)

    def logits(hooks_of: Any) -> Tensor:
        rows = torch.empty(5, model.W_E.shape[0])
        for batch in batches:
            rows[batch.index] = logits_of(model, batch, hooks_of(batch))
        return rows

    def loyalty(site: al.Site, edges_of: Any) -> al.LoyaltyRecord:
        changed = logits(lambda batch: al.block_edges(model, batch, edges_of, site))
        return al.loyalty(clean, changed, batches[0].label_token_ids)

    clean = logits(lambda batch: [])
    for name, site in sites.items():
        expected = loyalty(site, cut)
        assert float(expected.kl) > 1e-6
        draws = [
            loyalty(site, lambda batch, seed=seed: control(batch, cut(batch), seed))
            for seed in (7, 8)
        ]
        for field in ("kl", "word_loyalty", "label_loyalty"):
            ours, of_draws = (
                getattr(records[name], f"{start}{field}") for start in ("", "random_")
            )
            torch.testing.assert_close(ours, getattr(expected, field), rtol=1e-3, atol=1e-8)
            stacked = torch.stack([getattr(draw, field) for draw in draws])
            torch.testing.assert_close(of_draws, stacked, rtol=1e-3, atol=1e-8)


@pytest.mark.every_kind
@pytest.mark.parametrize("cut", [labels_read_format, edges.pq, forerunners_read])
def test_shared_tokens_give_the_records_of_whole_prompts(
    model: Any, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = questions(model, 6, batch_size=3, padding_side="left")
    sites = {"all": al.Site(range(3)), "last": al.Site(-1)}
    shared = al.edge_sweep(model, batches, cut, sites, draws=2, **QUIET)
    monkeypatch.setattr(how_to_run, "shared_lengths", lambda *of: {})
    whole = al.edge_sweep(model, batches, cut, sites, draws=2, **QUIET)
    for name, record in whole.items():
        assert "run once" in shared[name].info["shared_prefix"]
        assert record.info["shared_prefix"].startswith("off")
        assert_same(shared[name], record, 1e-4)


def test_an_edge_to_bos_is_not_cut_and_none_is_drawn_for_it(llama: Any) -> None:
    (batch,) = questions(llama, 3)
    seen: list[Tensor] = []

    def control(prompts: al.PromptBatch, chosen: Tensor, seed: int) -> Tensor:
        seen.append(chosen)
        return edges.random_keys(prompts, chosen, seed)

    def with_bos(prompts: al.PromptBatch) -> Tensor:
        keys = edges.anchors(prompts) | edges.bos(prompts)
        return edges.between(edges.target(prompts), keys)

    options: dict[str, Any] = {"draws": 1, **QUIET}
    sites = {"kept": al.Site(0, keep_bos=True)}
    record = al.edge_sweep(llama, [batch], with_bos, sites, control=control, **options)
    expected = al.edge_sweep(llama, [batch], edges.pq, {"kept": al.Site(0)}, **options)
    assert torch.equal(seen[0], edges.pq(batch)) and not torch.equal(seen[0], with_bos(batch))
    for field, values in expected["kept"].tensors().items():
        assert torch.equal(getattr(record["kept"], field), values)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"edges": lambda b: edges.pq(b).float()}, "edges must be a tensor of True and False"),
    ({"edges": lambda b: edges.pq(b)[:, :5]}, r"= \(2, .*got torch.bool of the shape \(2, 5"),
    ({"edges": lambda b: torch.ones_like(edges.pq(b))}, "token to an earlier token"),
    ({"edges": lambda b: edges.pq(b) & False}, "nothing to cut: .* no edge in any prompt$"),
    ({"edges": context}, r"too few for a random control; .*control=al.edges.random_edges"),
    ({"control": lambda b, e, seed: e[:1]}, "edges must be a tensor of True and False"),
    ({"sites": {}}, "there is no site"),
    ({"sites": {"a": al.Site(9)}}, r"layers must be numbers .*got \[9\]"),
    ({"sites": {"a": al.Site(0, keep_bos=True)}}, "do not begin with a BOS"),
    ({"sites": {"a": al.Site([])}}, "got none"),
    ({"draws": 0}, "at least one draw; got 0"),
    ({"metrics": [al.SaliencyFlows()]}, "saliency_flows needs a gradient.*give it to al.run"),
    ({"metrics": [al.AttentionAUCROC()] * 2}, "different names"),
    ({"metrics": [al.AttentionAUCROC(name="a")]}, "a site and a metric have one name: a"),
    ({"metrics": [al.Loyalty()]}, "nothing changes this run"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_arguments_raise_an_error_before_any_pass(
    gpt2: Any, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = questions(gpt2, 2)
    options: dict[str, Any] = {"edges": edges.pq, "sites": {"a": al.Site(0)}, **QUIET}
    monkeypatch.delattr(type(gpt2), "forward")
    with pytest.raises(AnchorlensError, match=message):
        al.edge_sweep(gpt2, batches, **(options | change))


def test_every_setting_belongs_to_the_stored_rows(llama: Any, tmp_path: Path) -> None:
    batches = questions(llama, 4, batch_size=2)
    options: dict[str, Any] = {"draws": 1, "sites": {"a": al.Site(0)}, **QUIET}
    isolation, others = tmp_path / "isolation", tmp_path / "others"
    al.isolation_sweep(llama, batches, folder=isolation, **options)
    options |= {"edges": forerunners_read}
    first = al.edge_sweep(llama, batches, folder=others, **options)
    assert_same(al.edge_sweep(llama, batches, folder=others, **options)["a"], first["a"])
    changes: list[dict[str, Any]] = [
        {"edges": edges.pq},
        {"control": edges.random_edges},
        {"sites": {"a": al.Site(0, renormalize=False)}},
        {"seed": 1},
        {"draws": 2},
        {"sites": {"a": al.Site(1)}},
        {"sites": {"a": al.Site(0, heads=0)}},
        {"sites": {"a": al.Site(0, keep_bos=True)}},
    ]
    for change in changes:
        with pytest.raises(StoreError, match=r"another run.* cut: stored .1 draws from 0"):
            al.edge_sweep(llama, batches, folder=others, **(options | change))
    del options["edges"]
    with pytest.raises(StoreError, match=r"another run.* cut: stored .1 draws from 0"):
        al.isolation_sweep(llama, batches, folder=isolation, whole_words=True, **options)


def test_the_record_says_what_was_cut_and_is_drawn(gpt2: Any, tmp_path: Path) -> None:
    batches = questions(gpt2, 4)
    sites = al.sites.windows(gpt2, 2)
    records = al.edge_sweep(gpt2, batches, edges.pq, sites, draws=2, progress=False)
    record = records["layers 0 to 1"]
    assert record.info["edges"] == "pq" and record.info["control"] == "random_keys"
    assert record.info["layers"] == [0, 1] and record.info["renormalize"] is True
    assert [bar.name for bar in records.plot().data[:2]] == [
        "edges cut",
        "random edges cut (range of draws)",
    ]
    assert al.load_record(record.save(tmp_path / "cut.safetensors")).plot() == record.plot()
    isolations = al.isolation_sweep(gpt2, batches, {"isolated": al.Site(0)}, draws=1, **QUIET)
    assert isolations["isolated"].is_isolation and not record.is_isolation
    with pytest.raises(AnchorlensError, match=r"no CutEdgesRecord .*\['AccuracyRecord'\]"):
        al.SweepResults(al.run(gpt2, batches, [al.Accuracy()], **QUIET)).plot()
    both = {**records, **isolations}
    assert al.SweepResults(both).plot().data[0].name == "edges cut"
    al.write_report(both, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text("utf-8")
    # Both windows are in one figure.
    titles = [
        f"What stays as it was when {what}" for what in ("edges are cut", "words are isolated")
    ]
    assert text.count(titles[0]) == text.count(titles[1]) > 0
