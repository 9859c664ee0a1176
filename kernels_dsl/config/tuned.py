"""Records of what was measured here, and the tuner's: which configuration was the fastest for a problem.

A record is one JSON file, read once and read again when it changed. Writers take a lock and replace the file
in one step, so that many processes may tune at once and a reader never sees half a record.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kernels_dsl.config.gemm import GemmConfig, Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.problem import Device, GemmProblem

FORMAT = 1
_CLASSES = {"sm90": Sm90GemmConfig, "sm80": Sm80GemmConfig}


def config_to_json(config: GemmConfig) -> dict[str, Any]:
    """A configuration as plain data, with its family."""
    data = asdict(config)
    if isinstance(config, Sm90GemmConfig):
        data["schedule"] = config.schedule.value
    return {"family": config.family, **data}


def config_from_json(data: dict[str, Any]) -> GemmConfig:
    """The configuration that `config_to_json` wrote. ValueError where it is not one."""
    values = dict(data)
    kind = _CLASSES.get(values.pop("family", None))
    if kind is None or set(values) - {field.name for field in fields(kind)}:
        raise ValueError(f"{data} does not describe a GEMM configuration")
    if "schedule" in values:
        values["schedule"] = Schedule(values["schedule"])
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{data} does not describe a GEMM configuration: {error}") from error


def problem_key(problem: GemmProblem, device: Device, family: str) -> str:
    """A text that names a problem on a device, for one family of kernels."""
    # Records are older than the last field: without it a problem has the name that it had.
    named = [field.name for field in fields(problem) if field.name != "gated" or problem.gated]
    values = ",".join(f"{name}={getattr(problem, name)}" for name in named)
    return f"{device.name}/{device.sm_count} SMs/{family}/{values}"


class RecordFile:
    """Named entries, each a JSON object, in the file `path`. A file that cannot be read counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._entries: dict[str, dict[str, Any]] = {}

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry of a key, None where there is none."""
        return self._read().get(key)

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Write an entry beside the others. OSError where that fails."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self.path.with_suffix(".lock")):
            entries = {**self._read(), key: entry}
            _replace(self.path, json.dumps({"format": FORMAT, "winners": entries}, indent=1, sort_keys=True))
        self._stamp = None

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            status = self.path.stat()
        except OSError:
            self._stamp, self._entries = None, {}
            return self._entries
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            self._stamp, self._entries = stamp, _parse(self.path)
        return self._entries


class TunedRecord:
    """Measured winners in the file `path`, a `RecordFile`."""

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def get(self, problem: GemmProblem, device: Device, family: str) -> GemmConfig | None:
        """The recorded winner, None where nothing was measured."""
        entry = self._file.get(problem_key(problem, device, family))
        if entry is None:
            return None
        try:
            return config_from_json(entry["config"])
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, problem: GemmProblem, device: Device, config: GemmConfig, seconds: float) -> None:
        """Record `config` as the fastest of its family, at `seconds` a call. OSError where that fails."""
        entry = {"config": config_to_json(config), "seconds": seconds}
        self._file.put(problem_key(problem, device, config.family), entry)


def _parse(path: Path) -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if (
        not isinstance(data, dict)
        or data.get("format") != FORMAT
        or not isinstance(data.get("winners"), dict)
    ):
        return {}
    return {key: value for key, value in data["winners"].items() if isinstance(value, dict)}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows: the file is replaced whole, and of two writers at once the last one wins
        yield
        return
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
