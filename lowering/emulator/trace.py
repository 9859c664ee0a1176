"""The timeline as a trace file that Perfetto and chrome://tracing open.

The format is Chrome's Trace Event Format: a process for each CTA, a thread for each of its warps and
asynchronous units. One emulated step is one microsecond of the trace.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .timeline import Timeline

_ACTOR = re.compile(r"^CTA \((\d+), (\d+), (\d+)\) ?(.*)$")


def events(timeline: Timeline) -> list[dict[str, Any]]:
    """The records of ``traceEvents``."""
    processes: dict[str, int] = {}
    threads: dict[str, int] = {}
    names: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for event in timeline.events:
        match = _ACTOR.match(event.actor)
        process = f"CTA ({match[1]}, {match[2]}, {match[3]})" if match else "launch"
        if process not in processes:
            processes[process] = len(processes) + 1
            names.append(_name("process_name", processes[process], 0, _process(timeline, process)))
        pid = processes[process]
        if event.actor not in threads:
            threads[event.actor] = len(threads) + 1
            title = timeline.title(event.actor).removeprefix(process).strip() or process
            names.append(_name("thread_name", pid, threads[event.actor], title))
        record = {
            "name": event.label or event.kind,
            "cat": event.kind,
            "ts": event.start,
            "pid": pid,
            "tid": threads[event.actor],
            "args": {"kind": event.kind, "steps": event.end - event.start},
        }
        if event.kind == "phase":
            found.append({**record, "name": f"phase {event.label} complete", "ph": "i", "s": "t"})
        else:
            found.append({**record, "ph": "X", "dur": max(event.end - event.start, 1)})
    return names + found


def _process(timeline: Timeline, cta: str) -> str:
    peers = timeline.peers.get(cta, ())
    if len(peers) < 2:
        return cta
    return f"{cta}, rank {peers.index(cta)} of the cluster of {peers[0]}"


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def save(timeline: Timeline, path: str | Path) -> None:
    """Write the trace."""
    record = {"traceEvents": events(timeline), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(record) + "\n")
