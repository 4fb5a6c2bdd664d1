"""What people try first, in the words of other tools, and what to write here in place of it."""

_CALLS = {
    'al.load_model("gpt2")': "load from_pretrained",
    "al.prepare_model(model)": "wrap hook_model verify",
    'al.build_segments(model, ["text"])': "Prompt Batch tokenize",
    "al.block_edges(model, batch, al.edges.read_by([key], [query]), al.Site(5, heads=[2]))": (
        "knockout attention_knockout cut_edges block_attention mask_edges"
    ),
    "al.replace_heads(model, batch, 0.0, al.Site(5, heads=[2]), "
    "positions=lambda batch: batch.attention_mask)": "ablate ablate_heads ablate_head",
    "al.isolate_labels(model, batch)": "isolate isolate_label_words",
    "al.edges.read_by([key])": "edges.to",
    "al.analyse(model, batches)": "analyze",
    "al.run(model, batches, [al.SaliencyFlows()])": "flows",
    "al.run(model, batches, [al.SaliencyFlows({'induction': al.edges.induction}, "
    "weight=al.weights.attention)])": "induction_heads",
    'al.run(model, batches, [al.Faithfulness(answer="answer")])': "attribute attribution",
    "al.run(model, batches, [al.SegmentRollout()])": "attention_rollout",
    "al.run(model, batches, [al.IntegratedFlows(['target'])])": "IntegratedGradients",
    "al.run(model, batches, [al.ScoreParts(5)])": "explain_edge explain_head decompose_scores",
    "al.head_effects(model, batches, shuffled)": "direct_logit_attribution logit_attribution",
    "al.task_vectors(model, batches, tested)": "function_vectors patch activation_patching",
    'al.trace_generation(model, "text")': "generate trace",
    'al.replication.across_models(models, "sentiment")': "compare",
    "al.write_report(results, path)": "report save_report",
    "record.plot()": "plot",
    "record.to_frame()": "record.df record.to_pandas record.to_df record.to_csv",
}
CALLS = {word: call for call, words in _CALLS.items() for word in words.split()}


def instead_of(word: str) -> str:
    """What an error for a name that there is not ends with; "" if nothing is known of it."""
    return f"; write {CALLS[word]}" if word in CALLS else ""
