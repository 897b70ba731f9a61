"""Program of a clean process: shuts out packages and the network, then runs a script. Started by clean_process.py.

    python -I clean_process_main.py JOB.json

Knows nothing of normalign, which it is there to do without: only the standard library here.
"""

import importlib
import json
import runpy
import sys
from pathlib import Path


class WithoutPackages:
    """Stands before all of Python's finders and finds none of the blocked packages, as if they were not installed."""

    def __init__(self, blocked: list[str], finders: list):
        self.blocked, self.finders = set(blocked), finders

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            return None
        for finder in self.finders:
            if hasattr(finder, "find_spec") and (spec := finder.find_spec(name, path, target)) is not None:
                return spec
        return None

    def find_distributions(self, *context):
        for finder in self.finders:
            for distribution in getattr(finder, "find_distributions", lambda *_: ())(*context):
                name = distribution.metadata["Name"] or ""
                if name.replace("-", "_") not in self.blocked:
                    yield distribution

    def invalidate_caches(self):
        for finder in self.finders:
            getattr(finder, "invalidate_caches", lambda: None)()


def block_network(attempts: list[str]) -> None:
    """Refuses every connection and name look-up, and notes it."""

    def refuse(event: str, arguments: tuple) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
            attempts.append(f"{event} {arguments[-4:]!r}")
            raise OSError(f"The network is blocked in this process ({event}).")

    sys.addaudithook(refuse)


def can_import(name: str) -> bool:
    """Whether `import name` works."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def main(job_file: str) -> None:
    """Runs the job's script with FOLDER, ARGUMENTS and an empty RESULT; writes RESULT and what was tried as JSON."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    attempts: list[str] = []
    block_network(attempts)
    sys.meta_path[:] = [WithoutPackages(job["blocked"], list(sys.meta_path))]
    importable = [name for name in job["blocked"] if can_import(name)]
    if importable:
        raise SystemExit(f"Still importable in the clean process: {', '.join(importable)}.")
    names = runpy.run_path(
        job["script"], {"FOLDER": job["folder"], "ARGUMENTS": job["arguments"], "RESULT": {}}, run_name="__main__"
    )
    report = {"result": names["RESULT"], "blocked": job["blocked"], "network_attempts": attempts}
    Path(job["report"]).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
