"""Count the bug reports of docs/bug-reports.md whose tests pass: every test with a report's id is run.

    .venv/bin/python benchmarks/bug_reports.py [--json]

A report passes if at least one test has its id (`test_D01_...`) and none of those fails. `not_applicable` are those
that the page says cannot apply, with the reason there. Exit status 1 if a report is missing or failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "bug-reports.md"
ID = re.compile(r"(?<![A-Za-z0-9])[A-Z]\d{2}(?![0-9])")


def reports() -> dict[str, bool]:
    """Ids in the page's table; True for those marked as not applicable."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        match = re.match(r"\| ([A-Z]\d{2}) \|(.*)", line)
        if match:
            found[match[1]] = "not applicable:" in match[2]
    return found


def ids_of(test: str) -> set[str]:
    """Ids in a test's name: `test_X09_X15_each_field` bears two; M03b counts for M03."""
    head = test.split("[")[0].removeprefix("test_")
    found = set()
    for part in head.split("_"):
        match = re.fullmatch(r"([A-Z]\d{2})[a-z]?", part)
        if not match:
            break
        found.add(match[1])
    return found


def run_tests(files: list[str], ids: list[str]) -> dict[str, str]:
    """Outcome of each test of `files` that bears an id: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        wanted = " or ".join(f"test_{i}" for i in ids) + " or " + " or ".join(f"_{i}_" for i in ids)
        command = [sys.executable, "-m", "pytest", "-m", "not vllm and not gpu", "-k", wanted, f"--junitxml={report}"]
        subprocess.run([*command, *files], cwd=ROOT, stdout=sys.stderr, check=False)
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            bad = case.find("failure") is not None or case.find("error") is not None
            state = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
            outcomes[f"{case.get('classname')}::{case.get('name')}"] = state
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    wanted = reports()
    pattern = re.compile(r"def test_[A-Z]\d{2}")
    files = [str(p) for p in sorted((ROOT / "tests").rglob("test_*.py")) if pattern.search(p.read_text("utf-8"))]
    outcomes = run_tests(files, list(wanted))
    states: dict[str, set[str]] = {i: set() for i in wanted}
    for test, state in outcomes.items():
        for i in ids_of(test.rpartition("::")[2]):
            states.setdefault(i, set()).add(state)
    passed = [i for i in wanted if "passed" in states[i] and "failed" not in states[i]]
    excused = [i for i, is_excused in wanted.items() if is_excused and i not in passed]
    failed = [i for i in wanted if "failed" in states[i]]
    missing = [i for i in wanted if i not in passed and i not in excused and i not in failed]
    report = {
        "rows": len(wanted),
        "passed": len(passed),
        "not_applicable": len(excused),
        "missing": len(missing),
        "failed": failed,
        "missing_ids": missing,
        "tests": len(outcomes),
    }
    print(json.dumps(report) if args.json else "\n".join(f"{key:15} {value}" for key, value in report.items()))
    return int(bool(missing or failed))


if __name__ == "__main__":
    sys.exit(main())
