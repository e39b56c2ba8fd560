"""`helm upgrade`: this chart after an older one, with the values that the release has had till now.

older/ has charts as they were, and values that users have given to them. A release adds its own:
`helm package helm --destination tests/deploy/older`, and what is then in matrix/ as one file.
"""

from __future__ import annotations

import copy
import functools
import tarfile
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from support import charts
from support.charts import Object

OLDER = Path(__file__).parent / "older"
RELEASES = [
    (package, name)
    for package in sorted(OLDER.glob("*.tgz"))
    for name in yaml.safe_load(package.with_suffix(".yaml").read_text())
]


@functools.cache
def older(package: Path) -> helm_python.Chart:
    return helm_python.Chart.load(package)


def values_of(package: Path, name: str) -> Object:
    values: Object = yaml.safe_load(package.with_suffix(".yaml").read_text())[name]
    return values


def before(package: Path, values: Object) -> list[Object]:
    files = older(package).render(values, name="weft", namespace="llm")
    texts = (files[file] for file in sorted(files) if not file.endswith("NOTES.txt"))
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]


def fixed(each: Object) -> Any:
    """What Kubernetes, or LeaderWorkerSet's controller, lets nobody change; and whom it selects,
    or an upgrade leaves clients without a server until it is through.
    """
    spec = each.get("spec", {})
    match each["kind"]:
        case "Job":
            return {key: spec.get(key) for key in ("template", "selector", "completions")}
        case "LeaderWorkerSet":
            keys = ("size", "subGroupPolicy", "volumeClaimTemplates")
            group = {key: spec["leaderWorkerTemplate"].get(key) for key in keys}
            return group | {"networkConfig": spec["networkConfig"]}
        case "Pod":
            return None  # a test, which Helm removes first
    return spec.get("selector")


def named(objects: list[Object]) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): fixed(each) for each in objects}


@pytest.mark.parametrize(
    ("package", "name"), RELEASES, ids=[f"{p.stem}-{name}" for p, name in RELEASES]
)
def test_it_takes_the_place_of_an_older_one(package: Path, name: str) -> None:
    values = values_of(package, name)
    old, new = named(before(package, values)), named(charts.render(values, upgrade=True))
    assert {key: new[key] for key in new.keys() & old.keys()} == {
        key: old[key] for key in new.keys() & old.keys()
    }
    gone = {key for key in old.keys() ^ new.keys() if key[0] != "Job"}
    assert not gone, "what runs is replaced without a pause only by what has its name"


@pytest.mark.parametrize("package", sorted(OLDER.glob("*.tgz")), ids=lambda path: path.stem)
def test_the_values_of_an_older_one_are_taken_when_they_are_copied(package: Path) -> None:
    with tarfile.open(package) as archive:
        file = archive.extractfile("weft/values.yaml")
        assert file is not None
        values = yaml.safe_load(file)
    (server,) = charts.templates_of(charts.workload(charts.render(values))).values()
    assert server["spec"]["containers"][0]["args"][:2] == ["serve", "weft-demo"]


@pytest.mark.parametrize("name", charts.NAMES)
def test_an_upgrade_gives_what_an_install_does(name: str) -> None:
    assert charts.render(charts.values_of(name), upgrade=True) == charts.rendered(name)


def test_a_job_of_other_pods_is_another_job() -> None:
    values = charts.values_of("batch")
    other = copy.deepcopy(values) | {"image": {"tag": "next"}}
    retries = copy.deepcopy(values)
    retries["batch"]["retries"] = 9  # which may be changed
    jobs = [charts.workload(charts.render(each)) for each in (values, other, retries)]
    assert jobs[0]["metadata"]["name"] != jobs[1]["metadata"]["name"]
    assert jobs[0]["metadata"]["name"] == jobs[2]["metadata"]["name"]
    assert fixed(jobs[0]) == fixed(jobs[2]) != fixed(jobs[1])
