"""A run, and one batch more of it, walk through few files."""

from benchmarks.files_crossed import counted

AT_MOST = {  # in tests even small runs share tokens, which takes a few moves more
    "flows, one batch more": (32, 280),
    "flows, a run of one batch": (53, 1351),
    "two contexts, one batch more": (36, 900),
}


def test_runs_walk_through_few_files() -> None:
    visits = counted()
    assert "passes/forward.py" in visits["flows, one batch more"]
    assert "runs/study.py" in visits["flows, a run of one batch"]
    counts = {name: (len(of_one), of_one.total()) for name, of_one in visits.items()}
    assert all(
        files <= AT_MOST[name][0] and moves <= AT_MOST[name][1]
        for name, (files, moves) in counts.items()
    ), counts
