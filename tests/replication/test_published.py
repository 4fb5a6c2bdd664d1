"""The published values equal a second copy from the paper."""

import re

from anchorlens.replication.published import TABLE_1, TABLE_2, TABLE_3

PAPER_1 = """
vanilla      61.28  57.56  73.32  15.44
more shots   64.75  60.40  52.52   9.80
re-weighted  90.07  60.92  81.94  41.64
"""
PAPER_2 = """
GPT2-XL  ICL                100.00  100.00  51.90
GPT2-XL  Text_anchor         51.05   36.65  38.77
GPT2-XL  Hidden_random       48.96    5.59  39.96
GPT2-XL  Hidden_random-top   57.52    4.49  41.72
GPT2-XL  Hidden_anchor       79.47   62.17  45.04
GPT-J    ICL                100.00  100.00  56.82
GPT-J    Text_anchor         53.45   43.85  40.83
GPT-J    Hidden_random       49.03    2.16  31.51
GPT-J    Hidden_random-top   71.10   11.36  52.34
GPT-J    Hidden_anchor       89.06   75.04  55.59
"""
PAPER_3 = """
GPT2-XL  1.1  1.5  2.5  1.4
GPT-J    1.5  2.2  2.9  1.9
"""
TASKS = ("sst2", "trec", "agnews", "emo")


def fields(text: str) -> list[list[str]]:
    """The fields of each line, which two or more spaces separate."""
    return [re.split(r"\s{2,}", line) for line in text.strip().splitlines()]


def test_published_values_are_those_of_the_paper() -> None:
    assert {"GPT2-XL"} == set(TABLE_1)
    rows = {row[0]: dict(zip(TASKS, map(float, row[1:]), strict=True)) for row in fields(PAPER_1)}
    assert TABLE_1["GPT2-XL"] == rows
    columns = ("label loyalty", "word loyalty", "accuracy")
    table_2 = [
        [model, name, *(f"{row[column]:.2f}" for column in columns)]
        for model, of_model in TABLE_2.items()
        for name, row in of_model.items()
    ]
    assert table_2 == fields(PAPER_2)
    speed_ups = {
        row[0]: dict(zip(TASKS, map(float, row[1:]), strict=True)) for row in fields(PAPER_3)
    }
    assert {model: [*rows.values()] for model, rows in TABLE_3.items()} == {
        model: [rows] for model, rows in speed_ups.items()
    }
