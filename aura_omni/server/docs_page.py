"""GET /docs: the OpenAPI document as a page to read. No script and nothing from elsewhere, so it works offline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from aura_omni.server.openapi import operations

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h2{margin-top:2.5rem;border-top:1px solid #ccc;padding-top:1rem;font-size:1.15rem}h2 b{display:inline-block;min-width:4.5rem}
code,pre{font:14px/1.4 ui-monospace,monospace;background:#f4f4f4;border-radius:4px}code{padding:0 .2em}
pre{padding:.7rem;overflow:auto}table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0;
border-bottom:1px solid #eee}summary{cursor:pointer}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}code,pre{background:#262626}td,th{border-color:#333}}
"""
HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


def page(document: Mapping[str, Any]) -> str:
    info, schemas = document["info"], document["components"]["schemas"]
    found = operations(document)
    return "".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
            f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
            f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
            "<p>The same for programs: <a href=openapi.json>openapi.json</a></p><ul>",
            *(f"<li><a href='#{_anchor(method, path)}'>{method} {escape(path)}</a>" for method, path, _ in found),
            "</ul>",
            *(part for method, path, operation in found for part in _operation(method, path, operation)),
            "<h2>Answers</h2>",
            *_headers(document["components"]["headers"]),
            *(part for name, schema in sorted(schemas.items()) for part in _schema(name, schema)),
        ]
    )


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}", quote=True)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2 id='{_anchor(method, path)}'><b>{method}</b> <code>{escape(path)}</code></h2>"
    if "description" in operation:
        yield f"<p>{escape(operation['description'])}</p>"
    parameters = operation.get("parameters", [])
    if parameters:
        rows = (
            (item["name"], f"{item['in']}, {_kind(item['schema'])}", item.get("description", "")) for item in parameters
        )
        yield from _table(rows)
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body: <code>{escape(media_type)}</code></p>"
        if "example" in content:
            example = content["example"]
            if media_type == "application/json":
                sent = f"-H 'Content-Type: {media_type}' -d '{json.dumps(example)}'"
            else:
                fields = content["schema"]["properties"]
                file = {name: "@" for name, field in fields.items() if field.get("format") == "binary"}
                sent = " ".join(f"-F '{name}={file.get(name, '')}{value}'" for name, value in example.items())
            yield f"<pre>{escape(f'curl http://localhost:8091{path} {sent}')}</pre>"
        yield "<details><summary>Fields</summary>"
        yield from _fields(content["schema"])
        yield "</details>"
    for status, answer in sorted(operation["responses"].items()):
        kinds = ", ".join(
            f"<code>{escape(media_type)}</code> {_link(content['schema'])}"
            for media_type, content in answer["content"].items()
        )
        yield f"<p><b>{status}</b> {escape(answer['description'])}: {kinds}</p>"
        own = {name: header for name, header in answer["headers"].items() if "$ref" not in header}
        if own:
            yield from _headers(own)


def _headers(headers: Mapping[str, Any]) -> Iterator[str]:
    return _table((name, f"header, {_kind(item['schema'])}", item["description"]) for name, item in headers.items())


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h3 id='{escape(name)}'>{escape(name)}</h3>"
    if "description" in schema:
        yield f"<p>{escape(schema['description'])}</p>"
    yield from _fields(schema)


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    return _table(
        (name, ("" if name in required else "optional ") + _kind(field), field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    )


def _table(rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    yield "<table>"
    for name, kind, text in rows:
        yield f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{escape(text)}"
    yield "</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """A type in words, as HTML."""
    if "$ref" in schema:
        return _link(schema)
    if "enum" in schema or "const" in schema:
        return " | ".join(
            f"<code>{escape(json.dumps(value))}</code>" for value in schema.get("enum", [schema.get("const")])
        )
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return " | ".join(dict.fromkeys(_kind(item) for item in schema[name]))
    kinds = schema.get("type", "anything")
    named = " | ".join(kinds) if isinstance(kinds, list) else str(kinds)
    if "items" in schema:
        return named.replace("array", f"list of ({_kind(schema['items'])})")
    if "properties" in schema:
        inner = ", ".join(
            f"<code>{escape(name)}</code>: {_kind(field)}" for name, field in schema["properties"].items()
        )
        return f"{{{inner}}}"
    return escape(named)


def _link(schema: Mapping[str, Any]) -> str:
    if "properties" in schema:  # an event, whose data is what matters
        data = schema["properties"]["data"]
        schema = data.get("anyOf", [data])[-1]["contentSchema"]
    if "$ref" not in schema:
        return ""
    name = escape(schema["$ref"].rpartition("/")[2])
    return f"<a href='#{name}'>{name}</a>"
