"""The examples of all docstrings, run with a tiny model on a device."""

import contextlib
import dataclasses
import doctest
import importlib
import io
import tempfile
from pathlib import Path

import torch

import anchorlens as al
from tests.support.image_models import image_model, picture
from tests.support.printed_code import MODULES
from tests.support.tiny_models import byte_level_tokenizer, tiny_gpt2


def failed_docstrings(device: str) -> dict[str, str]:
    """By module what those of its examples that fail should have given, and gave."""
    tokenizer, folder = byte_level_tokenizer(), Path(tempfile.mkdtemp())
    tiny_gpt2(len(tokenizer), n_layer=3, n_embd=16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model, examples = al.load_model(str(folder), device=device), al.load_examples("questions")
    task, demos = al.TASKS["trec"], al.sample_demonstrations(examples, seed=42)
    batches = al.build_prompts(model.tokenizer, task, demos, examples[-14:])
    names = {  # that every example may use
        **{"al": al, "dataclasses": dataclasses, "torch": torch, "edges": al.edges},
        **{"model": model, "folder": folder, "task": task, "demos": demos, "batches": batches},
        **{"batch": batches[0], "processor": image_model("LLaVA")[1]},
        "picture": picture(0),
    }
    failed = {}
    for module in map(importlib.import_module, MODULES):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS).failed:
                failed[module.__name__] = printed.getvalue()
    return failed
