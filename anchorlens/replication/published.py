"""The values that the paper reports, in per cent or as ratios, for comparison with a model.

"Label Words are Anchors" (Wang et al., EMNLP 2023, arXiv 2305.14160 v4), Tables 1 to 3.
"""

from collections.abc import Mapping
from types import MappingProxyType

Values = Mapping[str, Mapping[str, Mapping[str, float]]]  # model, row, column

TASK_NAMES: Mapping[str, str] = MappingProxyType(
    {"sst2": "SST-2", "trec": "TREC", "agnews": "AGNews", "emo": "EmoC"}
)


def _by_task(*values: float) -> dict[str, float]:
    return dict(zip(TASK_NAMES, values, strict=True))


# Accuracy. "More shots" are 5 per class, on AGNews 3.
TABLE_1: Values = MappingProxyType(
    {
        "GPT2-XL": {
            "vanilla": _by_task(61.28, 57.56, 73.32, 15.44),
            "more shots": _by_task(64.75, 60.40, 52.52, 9.80),
            "re-weighted": _by_task(90.07, 60.92, 81.94, 41.64),
        }
    }
)


def _by_quantity(label: float, word: float, accuracy: float) -> dict[str, float]:
    return {"label loyalty": label, "word loyalty": word, "accuracy": accuracy}


# Means of the four tasks.
TABLE_2: Values = MappingProxyType(
    {
        "GPT2-XL": {
            "ICL": _by_quantity(100.0, 100.0, 51.90),
            "Text_anchor": _by_quantity(51.05, 36.65, 38.77),
            "Hidden_random": _by_quantity(48.96, 5.59, 39.96),
            "Hidden_random-top": _by_quantity(57.52, 4.49, 41.72),
            "Hidden_anchor": _by_quantity(79.47, 62.17, 45.04),
        },
        "GPT-J": {
            "ICL": _by_quantity(100.0, 100.0, 56.82),
            "Text_anchor": _by_quantity(53.45, 43.85, 40.83),
            "Hidden_random": _by_quantity(49.03, 2.16, 31.51),
            "Hidden_random-top": _by_quantity(71.10, 11.36, 52.34),
            "Hidden_anchor": _by_quantity(89.06, 75.04, 55.59),
        },
    }
)

# The time of the whole prompt divided by the time of the compressed context.
TABLE_3: Values = MappingProxyType(
    {
        "GPT2-XL": {"against the whole prompt": _by_task(1.1, 1.5, 2.5, 1.4)},
        "GPT-J": {"against the whole prompt": _by_task(1.5, 2.2, 2.9, 1.9)},
    }
)
