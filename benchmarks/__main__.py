"""All that `make bench` measures, one after the other, and the page written from it.

    python -m benchmarks [--quick]

Meant to take half an hour on two cores, besides the peers' environments, which the first run makes.
On 2026-11-17: peers 9 minutes, one pass 4, its precisions 3, scale 5, serving 5. Each part says how
long it took.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import figure, page

MEASURED = (
    ("benchmarks.peers",),
    ("benchmarks.one_pass",),
    ("benchmarks.one_pass", "--precisions"),
    ("benchmarks.scale",),
    ("benchmarks.serving",),
    ("benchmarks.front_end", "--against-litserve"),
)
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that all of it runs")
    quick = ["--quick"] if parser.parse_args().quick else []
    subprocess.run([sys.executable, "-m", "benchmarks.peers", "--prepare"], check=True)
    started = time.perf_counter()
    for part in MEASURED:
        # A process each: what one leaves in memory or in caches is not the next one's.
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", *part, *quick], check=True)
        print(f"{' '.join(part)}: {(time.perf_counter() - began) / 60:.1f} minutes", flush=True)
    print(f"measured in {(time.perf_counter() - started) / 60:.0f} minutes")
    if not quick:  # figures of a trial are no figures
        page.main()
        figure.write_all(IMAGES)


if __name__ == "__main__":
    main()
