"""Answers on disk, one JSON object a line, written as they come: a run that is stopped goes on where it was."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any


_SYNC_SECONDS = 5


class SampleStore:
    """The answers to one task in `folder`: those of earlier runs, and those that this process adds.

    Each of several processes writes a file of its own, and reads those of all. A line that a killed process left half
    written is passed over: its row is asked again.
    """

    def __init__(self, folder: Path, name: str, rank: int = 0, world: int = 1) -> None:
        self.final = folder / f"{name}.jsonl"
        self.parts = folder / f".{name}.parts"
        self.path = self.parts / f"{rank}-of-{world}.jsonl"
        self._file: IO[str] | None = None
        self._synced = -float("inf")

    def read(self) -> dict[str, dict[str, Any]]:
        """By row id, the last answer that any process wrote."""
        files = [self.final, *(sorted(self.parts.glob("*.jsonl")) if self.parts.is_dir() else [])]
        rows = {}
        for file in files:
            if file.is_file():
                for line in file.read_text(encoding="utf-8").split("\n"):  # an answer may hold U+2028
                    try:
                        row = json.loads(line)
                        rows[row["id"]] = row
                    except (json.JSONDecodeError, KeyError, TypeError):
                        continue
        return rows

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Adds rows; a process that is killed later loses none of them.

        A machine that fails may lose those of the last seconds: the disk is waited for only so often, since that takes as
        long as an answer of a small model.
        """
        if self._file is None:
            self.parts.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        self._file.write("\n" + "\n".join(lines) + "\n")  # what stands before may be half a line
        self._file.flush()
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Lets the file go to which rows were added; further ones open it anew."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def finish(self, rows: Iterable[dict[str, Any]]) -> None:
        """Replaces all files by one with these rows; the old ones stay until it is whole."""
        self.close()
        self.final.parent.mkdir(parents=True, exist_ok=True)
        whole = self.final.with_suffix(".jsonl.new")
        with whole.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        whole.replace(self.final)
        if self.parts.is_dir():
            for part in self.parts.glob("*.jsonl"):
                part.unlink()
            self.parts.rmdir()
