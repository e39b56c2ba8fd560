"""The Helm chart, rendered as `helm template` would: by Helm's own SDK.

    python tests/support/charts.py

writes tests/deploy/golden: the rendered manifests of four telling files of tests/deploy/matrix.
Read the difference before you commit it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
MATRIX = ROOT / "tests" / "deploy" / "matrix"
GOLDEN = ROOT / "tests" / "deploy" / "golden"
NAMES = sorted(path.stem for path in MATRIX.glob("*.yaml"))
REVIEWED = ("default", "h100", "h200-hosts", "v5p-hosts")
"""Names with a golden file: CPUs, one GPU node with everything on, a GPU group, a TPU group."""

Object = dict[str, Any]


@functools.cache
def chart() -> helm_python.Chart:
    """The chart, loaded once."""
    return helm_python.Chart.load(CHART)


def render(values: Object, *, name: str = "weft", upgrade: bool = False) -> list[Object]:
    """The objects that a release has, in the templates' order.

    Raises:
        helm_python.HelmError: they cannot be.
    """
    how = {"is_upgrade": True, "is_install": False} if upgrade else {}
    files = chart().render(values, name=name, namespace="llm", **how)
    texts = (files[file] for file in sorted(files) if not file.endswith("NOTES.txt"))
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]


def values_of(name: str) -> Object:
    """A file of the matrix."""
    values: Object = yaml.safe_load((MATRIX / f"{name}.yaml").read_text())
    return values


@functools.cache
def rendered(name: str) -> list[Object]:
    """What a file of the matrix comes to; not to be changed."""
    return render(values_of(name))


def text(objects: list[Object]) -> str:
    """As it is kept in GOLDEN: without the files of the chart that are in it as they are."""
    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    return yaml.dump_all(_short(objects), Dumper=dumper, sort_keys=False, width=100)


def _short(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _short(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_short(value) for value in node]
    return "..." if isinstance(node, str) and len(node) > 500 else node


def templates_of(workload: Object) -> dict[str, Object]:
    """The pods' templates of a Deployment, LeaderWorkerSet or Job, by their component."""
    spec = workload["spec"]
    group = spec.get("leaderWorkerTemplate")
    found = [group["leaderTemplate"], group["workerTemplate"]] if group else [spec["template"]]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found}


def workload(objects: list[Object]) -> Object:
    """That which runs weft."""
    kinds = ("Deployment", "LeaderWorkerSet", "Job")
    (found,) = [each for each in objects if each["kind"] in kinds]
    return found


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in REVIEWED:
        (GOLDEN / f"{each}.yaml").write_text(text(rendered(each)))
