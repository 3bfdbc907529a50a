"""Asks an advisory service for known weaknesses of all that serving needs: the lock, and torch.

    python -m scripts.audit

Exits with 0 where none is known, 1 where some are, 2 where some package could not be looked up.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.lock import LOCK, UNLOCKED, locked_versions, pins

UNREACHABLE = (
    "No advisory service can be reached from here, so nothing was audited: run `make audit` where "
    "there is a network."
)


def audit(requirements: Path) -> tuple[list[dict[str, Any]], str]:
    """What the service says of each package, and what pip-audit says where it cannot ask."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off"),
            *("--disable-pip", "--no-deps", "--requirement", str(requirements)),
        ],
        capture_output=True,
        text=True,
    )
    try:
        answer: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except json.JSONDecodeError:
        return [], "".join(done.stderr.splitlines(keepends=True)[-1:])
    return answer, ""


def main() -> None:
    versions = {**locked_versions(), UNLOCKED: pins()[UNLOCKED]}
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / LOCK.name
        listed.write_text("".join(f"{name}=={each}\n" for name, each in versions.items()))
        answers, trouble = audit(listed)
    # pip-audit passes over what the service does not know and ends well: here that is a failure.
    skipped = [each["name"] for each in answers if "skip_reason" in each]
    weak = [each for each in answers if each.get("vulns")]
    for each in weak:
        for found in each["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "none yet"
            say(f"{each['name']} {each['version']}: {found['id']}, fixed in: {fixed}")
    if len(skipped) == len(answers):
        sys.stderr.write(f"{UNREACHABLE}\n{trouble}")
        sys.exit(2)
    if skipped:
        say(f"Not known to the advisory service, so not audited: {', '.join(skipped)}.")
    say(f"{len(answers) - len(skipped)} packages audited, {len(weak)} with known weaknesses.")
    sys.exit(1 if weak else 2 if skipped else 0)


def say(sentence: str) -> None:
    sys.stdout.write(sentence + "\n")


if __name__ == "__main__":
    main()
