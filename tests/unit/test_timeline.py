"""The timeline against what a reader of the Chrome trace format takes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import timeline
from offload.errors import ConfigError
from offload.lanes import Lane
from offload.storage.tiers import Tier
from offload.timeline import Event, Timeline, _apart

spans = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=40)


def complete(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in values["traceEvents"] if event["ph"] == "X"]


@given(spans, st.booleans())
def test_events_of_one_row_are_apart_or_within_each_other(given_spans: list[tuple[int, int]], nested: bool) -> None:
    events = [Event("row", str(n), start, start + length, None) for n, (start, length) in enumerate(given_spans)]
    rows = _apart(events, nested)
    assert sorted(e for row in rows for e in row) == sorted(events)
    for row in rows:
        for i, a in enumerate(row):
            for b in row[i + 1 :]:
                after = a.end_ns <= b.start_ns
                within = a.start_ns <= b.start_ns and b.end_ns <= a.end_ns
                assert after or (nested and within)


def test_levels_of_a_tier_are_counters(tmp_path: Path) -> None:
    made, tier = Timeline(tmp_path / "trace.json"), Tier("cpu", 100)
    tier.take(10, "staging")
    timeline.start(made)
    tier.take(30, "gradients")
    tier.give(10, "staging")
    timeline.stop(made)
    tier.give(30, "gradients")
    counters = [event for event in made.as_json()["traceEvents"] if event["ph"] == "C"]
    assert [(event["name"], event["args"]) for event in counters] == [
        ("tier cpu", {"bytes": 40}),
        ("tier cpu", {"bytes": 30}),
    ]
    assert complete(made.as_json()) == []
    assert [(event.row, event.name) for event in made.events()] == [("tier cpu", "gradients"), ("tier cpu", "staging")]


def test_a_file_that_a_reader_takes(tmp_path: Path) -> None:
    made = Timeline(tmp_path / "trace.json")
    lane = Lane("nvme_write")
    begin = time.monotonic_ns()
    timeline.add("adam", "before it is on", begin, begin, 1)
    timeline.start(made)
    lane.record(begin, begin + 5000, 100)
    lane.record(begin + 1000, begin + 6000, 50, "state of a block")  # at the same time: on a row of its own
    lane.record(begin - 10_000_000_000, begin - 9_000_000_000, 7)  # before it began: left out
    timeline.add("compute", "model", begin, begin + 9000)
    timeline.add("compute", "block", begin + 10, begin + 8000)  # within it: on the same row
    timeline.stop(made)
    lane.record(begin, begin + 5000, 100)
    assert not timeline.tracing()
    made.write()
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    values = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    titles = {e["tid"]: e["args"]["name"] for e in values["traceEvents"] if e["name"] == "thread_name"}
    assert list(titles.values()) == ["compute", "nvme write", "nvme write (2)"]
    for event in values["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "args"} <= set(event)
        assert event["pid"] == os.getpid()
    events = complete(values)
    for event in events:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["tid"] in titles
    assert [(titles[e["tid"]], e["name"], e["args"]) for e in events] == [
        ("compute", "model", {}),
        ("compute", "block", {}),
        ("nvme write", "nvme_write", {"bytes": 100}),
        ("nvme write (2)", "state of a block", {"bytes": 50}),
    ]
    assert values["otherData"]["dropped_events"] == 0


def test_the_newest_events_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    made = Timeline(tmp_path / "trace.json", limit=100)
    now = time.monotonic_ns()

    def work(row: str) -> None:
        for i in range(100):
            made.add(Event(row, str(i), now + i, now + i + 1, None))

    threads = [threading.Thread(target=work, args=(f"row {n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = made.as_json()
    assert len(complete(values)) == 100
    assert values["otherData"]["dropped_events"] == 200
    last = defaultdict(list)
    for event in complete(values):
        last[event["cat"]].append(int(event["name"]))
    assert all(numbers == list(range(numbers[0], 100)) for numbers in last.values())


def test_a_directory_that_does_not_exist_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file in a directory that exists"):
        Timeline(tmp_path / "missing" / "trace.json")


def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    made = Timeline(tmp_path / "trace.json")
    made._process += 1
    made.write()
    assert list(tmp_path.iterdir()) == []
