"""Prints what is installed beside this Python as a bill of materials: CycloneDX 1.6, in JSON.

    python scripts/sbom.py > sbom.cdx.json

Needs nothing but Python, since the image's build runs it, and names no time and no machine: the
same packages give the same bytes.
"""

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import Any

SERVER = "engram"
# Longer ones are whole licence texts, which packages put where a name belongs.
LONGEST_LICENCE = 64


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def licences(package: Distribution) -> list[dict[str, Any]]:
    """What a package says of its licence: an SPDX expression where it has one, or else names."""
    expressions = package.metadata.get_all("License-Expression")
    if expressions:
        return [{"expression": expressions[0]}]
    classifiers = package.metadata.get_all("Classifier") or []
    names = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License ::")]
    text = " ".join(package.metadata.get_all("License") or []).strip()
    if not names and text and "\n" not in text and len(text) <= LONGEST_LICENCE:
        names = [text]
    return [{"license": {"name": name}} for name in sorted(set(names))]


def reference(package: Distribution) -> str:
    return f"pkg:pypi/{canonical(package.metadata['Name'])}@{package.version}"


def component(package: Distribution) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference(package),
        "name": canonical(package.metadata["Name"]),
        "version": package.version,
        "purl": reference(package),
    }
    known = licences(package)
    return {**entry, "licenses": known} if known else entry


def required(package: Distribution) -> set[str]:
    """The names that a package asks for, whatever for: those not installed do not count later."""
    lines = package.requires or []
    return {canonical(re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0]) for line in lines}


def bill(packages: Iterable[Distribution]) -> dict[str, Any]:
    by_name = {canonical(each.metadata["Name"]): each for each in packages}
    ordered = [by_name[name] for name in sorted(by_name)]
    server = by_name.get(SERVER)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": SERVER,
                "name": SERVER,
                **({"version": server.version} if server else {}),
            }
        },
        "components": [component(each) for each in ordered],
        "dependencies": [
            {
                "ref": reference(each),
                "dependsOn": sorted(
                    reference(by_name[name]) for name in required(each) & by_name.keys()
                ),
            }
            for each in ordered
        ],
    }


if __name__ == "__main__":
    json.dump(bill(distributions()), sys.stdout, indent=1)
    sys.stdout.write("\n")
