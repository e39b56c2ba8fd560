#!/usr/bin/env python
"""Write what of the chart is made of other files: run it when these have changed.

    python deploy/chart.py

docs/chart-values.md is made of the comments in helm/values.yaml, and `settings` in
helm/values.schema.json of weft's own settings, so that a misspelt one fails at `helm install`.
helm/files/server-settings.yaml has those that `weft serve` has and `weft batch` has not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from weft.serving.cli.main import weft
from weft.serving.config.fields import Setting
from weft.serving.config.sources import SETTINGS

ROOT = Path(__file__).parent.parent
VALUES = ROOT / "helm" / "values.yaml"
SCHEMA = ROOT / "helm" / "values.schema.json"
TABLE = ROOT / "docs" / "chart-values.md"
OF_SERVER = ROOT / "helm" / "files" / "server-settings.yaml"

# Those that the chart gives itself, of other values; and those that say where secrets are.
OWN = {
    *("model", "served_model_name", "host", "port", "device", "backend", "compile_cache"),
    *("tp", "ep", "cp", "pp", "dp", "executor", "nodes", "node_address", "node_port"),
    *("node_token", "node_token_file"),
    *("drain_timeout", "api_key", "api_key_file", "open_metrics"),
    *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"),
}

HEAD = """\
# Values of the Helm chart

`python deploy/chart.py` generates this table from [helm/values.yaml](../helm/values.yaml). For
examples, see [deployment](deployment.md).

| value | default | description |
| --- | --- | --- |
"""


def table(values: str) -> str:
    """docs/chart-values.md: a row for each key that has a comment above it, or a plain value."""
    rows: list[str] = []
    comment: list[str] = []
    path: list[str] = []
    for line in values.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip()[1:].strip())
            continue
        if match := re.fullmatch(r"( *)([\w.]+):\s*(.*)", line):
            indent, key, default = match.groups()
            path = [*path[: len(indent) // 2], key]
            if comment or default:
                shown = f"`{default}`" if default else ""
                rows.append(f"| `{'.'.join(path)}` | {shown} | {' '.join(comment)} |")
        comment = []
    return HEAD + "\n".join(rows) + "\n"


def of_server() -> str:
    """helm/files/server-settings.yaml: what a Job that runs `weft batch` is not given."""
    serve, batch = ({each.name for each in weft.commands[c].params} for c in ("serve", "batch"))
    names = [name for name in SETTINGS if name in serve - batch - OWN]
    return "# Made by deploy/chart.py.\n" + "".join(f"- {name}\n" for name in names)


def schema_of(setting: Setting) -> dict[str, Any]:
    """JSON schema of a setting's value."""
    if setting.help.unit == "bytes":
        return {"type": ["integer", "string"]}
    if get_origin(setting.type) is Literal:
        return {"enum": list(get_args(setting.type))}
    kinds = get_args(setting.type) or (setting.type,)
    names = {int: "integer", float: "number", bool: "boolean", str: "string"}
    schema: dict[str, Any] = {"type": names[kinds[0]]}
    for word, limit in (
        ("minimum", setting.help.ge),
        ("exclusiveMinimum", setting.help.gt),
        ("maximum", setting.help.le),
    ):
        if limit is not None:
            schema[word] = limit
    return schema


def schema(text: str) -> str:
    """helm/values.schema.json with weft's settings in it."""
    whole = json.loads(text)
    known = {name: schema_of(each) for name, each in SETTINGS.items() if name not in OWN}
    whole["properties"]["settings"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": known,
    }
    return json.dumps(whole, indent=2) + "\n"


def main() -> None:
    """Write all files."""
    TABLE.write_text(table(VALUES.read_text()))
    SCHEMA.write_text(schema(SCHEMA.read_text()))
    OF_SERVER.write_text(of_server())


if __name__ == "__main__":
    main()
