"""The metrics of all processes in one scrape.

Each process offers its metrics to the others on a Unix socket in their private folder. The one that
is scraped collects them and labels each series with the number of its process.
"""

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from engram_server.observability.metrics import PROCESS_UP, Metrics, encode
from engram_server.processes.process import Process

# Less than scrapers wait: a process that hangs must not hide the metrics of the others.
TIMEOUT_SECONDS: Final = 2.0
_LABEL: Final = "process"

_log = logging.getLogger("engram.processes")


class Siblings:
    """Exchanges metrics with the other processes."""

    def __init__(self, process: Process, metrics: Metrics) -> None:
        self._process = process
        self._metrics = metrics
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        path = self._process.metrics_socket(self._process.number)
        path.unlink(missing_ok=True)  # of the process that this one replaces
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._process.metrics_socket(self._process.number).unlink(missing_ok=True)

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(dump(self._metrics.collect()))
            await writer.drain()
        except ConnectionError:
            _log.debug("another process did not read the metrics of this one")
        finally:
            writer.close()

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all processes in the format that a scraper accepts."""
        numbers = range(1, self._process.count + 1)
        collected = await asyncio.gather(*(self._collect(number) for number in numbers))
        by_process = {str(n): each for n, each in zip(numbers, collected, strict=True)}
        up = GaugeMetricFamily(PROCESS_UP.name, PROCESS_UP.doc, labels=PROCESS_UP.labels)
        for number, families in by_process.items():
            up.add_metric([number], float(families is not None))
        return encode([*merge(by_process), up], accept)

    async def _collect(self, number: int) -> list[Metric] | None:
        """The metrics of a process; None if it does not answer."""
        if number == self._process.number:
            return list(self._metrics.collect())
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(
                    self._process.metrics_socket(number)
                )
                try:
                    return load(await reader.read())
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError):  # absent, hanging, or ended half-way
            return None


def merge(by_process: dict[str, list[Metric] | None]) -> list[Metric]:
    """One family per metric, whose samples are labelled with their process."""
    merged: dict[str, Metric] = {}
    for number, families in by_process.items():
        for family in families or ():
            into = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            into.samples += [_labelled(sample, number) for sample in family.samples]
    return list(merged.values())


def _labelled(sample: Sample, number: str) -> Sample:
    return sample._replace(labels={**sample.labels, _LABEL: number})


def dump(families: Iterable[Metric]) -> bytes:
    return json.dumps(
        [
            [each.name, each.documentation, each.type, each.unit, _values(each.samples)]
            for each in families
        ]
    ).encode()


def _values(samples: Iterable[Sample]) -> list[tuple[str, Any, float]]:
    return [(each.name, each.labels, each.value) for each in samples]


def load(data: bytes) -> list[Metric]:
    families = []
    for name, documentation, kind, unit, samples in json.loads(data):
        family = Metric(name, documentation, kind, unit)
        family.samples = [Sample(*sample) for sample in samples]
        families.append(family)
    return families
