"""Answers on disk, one JSON object a line, written as they come: a run that is stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class SampleStore:
    """The answers to one task in `folder`: those of earlier runs, and those that this process adds.

    Each of several processes writes a file of its own, and reads those of all. A line that a killed process left half
    written is passed over: its row is asked again.
    """

    def __init__(self, folder: Path, name: str, rank: int = 0, world: int = 1) -> None:
        self.final = folder / f"{name}.jsonl"
        self.parts = folder / f".{name}.parts"
        self.path = self.parts / f"{rank}-of-{world}.jsonl"

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
        """Adds rows, on disk when this returns."""
        self.parts.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            if not new and not _ends_with_newline(self.path):
                file.write("\n")  # after the half line of a killed process
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, rows: Iterable[dict[str, Any]]) -> None:
        """Replaces all files by one with these rows; the old ones stay until it is whole."""
        self.final.parent.mkdir(parents=True, exist_ok=True)
        whole = self.final.with_suffix(".jsonl.new")
        with whole.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        whole.replace(self.final)
        if self.parts.is_dir():
            for part in self.parts.glob("*.jsonl"):
                part.unlink()
            self.parts.rmdir()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
