"""Runs the demo and records what it came to: python benchmarks/demo_record.py [RESULTS.json of a demo on this machine]

Writes benchmarks/results/demo.json, the results.json of `normalign demo` without the paths of this machine.
"""

import json
import sys
import tempfile
from pathlib import Path

from record import machine, versions

from normalign.demo import run_demo


RESULT = Path(__file__).resolve().parent / "results" / "demo.json"


def main() -> None:
    """Runs, strips, writes."""
    if len(sys.argv) > 1:
        results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = run_demo(folder)
    for key in ("export", "machine", "versions", "reload"):
        results.pop(key)
    rows = [
        {"case": phase, "seconds_median": seconds, "ratio": seconds / results["seconds"]}
        for phase, seconds in results["seconds_by_phase"].items()
    ]
    RESULT.write_text(
        json.dumps({"machine": machine(), "versions": versions(), "rows": rows, **results}, indent=2) + "\n"
    )
    print(f"written to {RESULT}")


if __name__ == "__main__":
    main()
