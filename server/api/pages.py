"""The page `/docs` for people. Plain HTML: no script, nothing from elsewhere."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from fastapi.responses import HTMLResponse

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884;
         vertical-align: top; }
pre { padding: .8rem; overflow-x: auto; border: 1px solid #8884; border-radius: .3rem; }
code { font: .9em ui-monospace, monospace; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'none'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Pages:
    """Renders it, once."""

    def __init__(self) -> None:
        self._docs: HTMLResponse | None = None

    def docs(self, document: Mapping[str, Any]) -> HTMLResponse:
        """The OpenAPI document, laid out."""
        if self._docs is None:
            parts = [
                _operation(method, path, operation)
                for path, operations in document["paths"].items()
                for method, operation in operations.items()
            ]
            head = f"<h1>{escape(document['info']['title'])} API</h1>"
            about = f"<p>{escape(document['info'].get('summary', ''))}</p>"
            link = '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>'
            self._docs = _page("Engram API", head + about + link + "".join(parts))
        return self._docs


def _page(title: str, body: str) -> HTMLResponse:
    return HTMLResponse(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<body>{body}</body></html>",
        headers=_HEADERS,
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    heading = f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    text = "".join(f"<p>{escape(each)}</p>" for each in _paragraphs(operation))
    parameters = "".join(
        _row(
            (
                f"<code>{escape(each['name'])}</code>",
                escape(each["in"]),
                escape(each.get("description", "")),
            )
        )
        for each in operation.get("parameters", ())
    )
    table = f"<table>{parameters}</table>" if parameters else ""
    body = operation.get("requestBody", {}).get("content", {})
    accepts = f"<p>Body: {escape(', '.join(body))}.</p>" if body else ""
    answers = "".join(
        _row((escape(status), escape(answer["description"])))
        for status, answer in operation["responses"].items()
    )
    return f"{heading}{text}{table}{accepts}<table>{answers}</table>"


def _paragraphs(operation: Mapping[str, Any]) -> list[str]:
    text: str = operation.get("description", operation.get("summary", ""))
    return [part for part in text.split("\n\n") if part]


def _row(cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
