"""The Helm chart: what it renders for each file of matrix/, and what the schemas say of that."""

from __future__ import annotations

import functools
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import promql_parser
import pytest
import yaml
from kubernetes_validate import utils as kubernetes
from support import charts

from weft.version import __version__

CRDS = charts.ROOT.parent / "shared" / "crds"
VERSIONS = [f"1.{minor}" for minor in range(28, 35)]
ERROR = 3  # Helm's number for it

each_set = pytest.mark.parametrize("name", charts.NAMES)


@pytest.mark.parametrize("name", charts.REVIEWED)
def test_it_renders_as_reviewed(name: str) -> None:
    golden = (charts.GOLDEN / f"{name}.yaml").read_text()
    assert charts.text(charts.rendered(name)) == golden, "run tests/support/charts.py, and read it"


@pytest.mark.parametrize("name", ["n", "on", "1234", "null", "1e3"])
def test_names_that_yaml_takes_for_something_else_stay_texts(name: str) -> None:
    secrets: charts.Object = {"apiKeys": {"existingSecret": name}}
    token = {"huggingFaceToken": {"existingSecret": name}, "path": "hf://Qwen/Qwen3-32B"}
    nodes = {
        "accelerator": {"type": "h200", "perHost": 8},
        "hosts": 2,
        "nodeToken": {"existingSecret": name},
    }
    for values in (secrets, secrets | nodes, secrets | {"model": token}):
        found = list(_secret_names(charts.render(values)))
        assert found
        assert set(found) == {name}


def _secret_names(node: Any) -> Iterator[Any]:
    """The names in all references to secrets, as YAML reads them."""
    if isinstance(node, list):
        for each in node:
            yield from _secret_names(each)
    elif isinstance(node, dict):
        for key, each in node.items():
            if key == "secretName":
                yield each
            elif key == "secretKeyRef":
                yield each["name"]
            else:
                yield from _secret_names(each)


def test_nothing_reviewed_is_left_over() -> None:
    assert sorted(path.stem for path in charts.GOLDEN.iterdir()) == sorted(charts.REVIEWED)


@each_set
def test_strict_lint_finds_nothing(name: str) -> None:
    report = helm_python.lint(charts.CHART, charts.values_of(name), strict=True)
    findings = [each for each in report["messages"] if each["severity"] > 1]
    assert not report["errors"]
    assert not findings


@pytest.fixture(scope="module")
def quick() -> Any:
    """kubernetes-validate reads a megabyte of definitions for each object; here once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes, "schema_contents", functools.cache(kubernetes.schema_contents))
        yield kubernetes.validate


def as_pods(objects: list[charts.Object]) -> list[charts.Object]:
    """Those of a LeaderWorkerSet, of whose pods no schema of Kubernetes tells."""
    return [
        {"apiVersion": "v1", "kind": "Pod", **template}
        for each in objects
        if each["kind"] == "LeaderWorkerSet"
        for template in charts.templates_of(each).values()
    ]


@pytest.mark.parametrize("version", VERSIONS)
@each_set
def test_kubernetes_takes_it(quick: Any, name: str, version: str) -> None:
    objects = charts.rendered(name)
    known = [each for each in objects if (each["apiVersion"], each["kind"]) not in crds()]
    for each in known + as_pods(objects):
        quick(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_endpoint_picker(quick: Any, version: str) -> None:
    for each in example("endpoint-picker"):
        quick(each, version, strict=True)


def example(name: str) -> list[charts.Object]:
    return list(yaml.safe_load_all((charts.CHART / "examples" / f"{name}.yaml").read_text()))


def test_the_endpoint_picker_belongs_to_the_documented_release() -> None:
    parts = {each["kind"]: each for each in example("endpoint-picker")}
    (container,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    service, (port,) = parts["Service"], parts["Service"]["spec"]["ports"]
    picker = {"name": service["metadata"]["name"]}
    values = {"inferencePool": {"enabled": True, "endpointPicker": picker}}
    objects = charts.render(values, name="llm")
    (pool,) = [each for each in objects if each["kind"] == "InferencePool"]
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]
    assert f"--pool-group={pool['apiVersion'].partition('/')[0]}" in container["args"]
    assert pool["spec"]["endpointPickerRef"] == picker | {"port": {"number": port["port"]}}
    named = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert named[port["targetPort"]] == port["port"]
    (file,) = parts["ConfigMap"]["data"]
    assert f"--config-file=/config/{file}" in container["args"]
    plugins = yaml.safe_load(parts["ConfigMap"]["data"][file])
    (profile,) = plugins["schedulingProfiles"]
    assert [each["pluginRef"] for each in profile["plugins"]] == [
        each["type"] for each in plugins["plugins"]
    ]
    labels = parts["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert parts["RoleBinding"]["roleRef"]["name"] == parts["Role"]["metadata"]["name"]


@pytest.mark.parametrize(("setting", "given"), [({}, True), ({"vllm_metrics": False}, False)])
def test_a_pool_s_servers_report_vllm_s_names(setting: dict[str, bool], given: bool) -> None:
    pool = {"enabled": True, "endpointPicker": {"name": "epp"}}
    objects = charts.render({"inferencePool": pool, "settings": setting})
    server = charts.templates_of(charts.workload(objects))["server"]
    args = server["spec"]["containers"][0]["args"]
    assert ("--vllm-metrics" in args) == given
    assert ("--no-vllm-metrics" in args) == (not given)
    assert "--open-metrics" in args


def test_prometheus_adapter_offers_what_the_autoscaler_asks_for() -> None:
    (values,) = example("prometheus-adapter")
    (rule,) = values["rules"]["custom"]
    objects = charts.render({"autoscaling": {"kind": "hpa"}})
    (scaler,) = [each for each in objects if each["kind"] == "HorizontalPodAutoscaler"]
    series = promql_parser.parse(rule["seriesQuery"])
    names, labels = {}, set()
    for matcher in series.matchers.matchers:
        if matcher.name == "__name__":
            names = {matcher.value}
        else:
            labels.add(matcher.name)
    assert labels == rule["resources"]["overrides"].keys() == {"namespace", "pod"}
    for metric in scaler["spec"]["metrics"]:
        assert all(re.match(name, metric["pods"]["metric"]["name"]) for name in names)
        query = rule["metricsQuery"]
        for part, text in (
            ("Series", metric["pods"]["metric"]["name"]),
            ("LabelMatchers", 'namespace="llm",pod=~"a|b"'),
            ("GroupBy", "pod"),
        ):
            query = query.replace(f"<<.{part}>>", text)
        assert isinstance(promql_parser.parse(query), promql_parser.AggregateExpr)


def test_kubernetes_would_not_take_a_misspelt_field(quick: Any) -> None:
    (service,) = [each for each in charts.rendered("default") if each["kind"] == "Service"]
    wrong = service | {"spec": service["spec"] | {"portz": []}}
    with pytest.raises(kubernetes.ValidationError, match="portz"):
        quick(wrong, "1.28", strict=True)


def crds() -> dict[tuple[str, str], Path]:
    """Kinds that are none of Kubernetes' own, and where their schemas are, if they are there."""
    kinds = {
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"),
        ("monitoring.coreos.com/v1", "ServiceMonitor"),
        ("keda.sh/v1alpha1", "ScaledObject"),
        ("gateway.networking.k8s.io/v1", "HTTPRoute"),
        ("inference.networking.k8s.io/v1", "InferencePool"),
    }
    return {(a, k): CRDS / f"{k}.{a.rpartition('/')[2]}.json" for a, k in kinds}


def closed(schema: Any) -> Any:
    """A CRD's schema that refuses unknown fields, which a server only drops."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        schema["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return schema


@functools.cache
def validator(path: Path) -> jsonschema.Draft7Validator:
    schema = closed(json.loads(path.read_text())["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize("kind", sorted(crds()), ids=lambda kind: kind[1])
def test_custom_resources_are_as_their_schemas_say(kind: tuple[str, str]) -> None:
    found = [
        each
        for name in charts.NAMES
        for each in charts.rendered(name)
        if (each["apiVersion"], each["kind"]) == kind
    ]
    assert found, "no file of the matrix has one"
    if not CRDS.is_dir():
        pytest.skip(f"there are no schemas of custom resources at {CRDS}")
    check = validator(crds()[kind])
    for each in found:
        check.validate(each)
        assert not check.is_valid(each | {"spec": each["spec"] | {"misspelt": 1}})


def test_its_version_is_weft_s() -> None:
    metadata = charts.chart().metadata
    assert metadata["version"] == metadata["appVersion"] == __version__


def test_a_package_holds_the_dashboard(tmp_path: Path) -> None:
    """It is a link in the repository, so that there is one."""
    archive = helm_python.package(charts.CHART, destination=tmp_path)
    with tarfile.open(archive) as package:
        file = package.extractfile("weft/files/dashboard.json")
        assert file is not None
        assert file.read() == (charts.ROOT / "deploy/grafana/weft.json").read_bytes()
    with helm_python.Chart.load(archive) as chart:
        files = chart.render(charts.values_of("h100"), name="weft", namespace="llm")
    (shown,) = yaml.safe_load_all(files["weft/templates/dashboard.yaml"])
    assert json.loads(shown["data"]["weft.json"])["title"] == "weft"


def test_notes_say_what_to_do_next() -> None:
    def notes(name: str) -> str:
        files = charts.chart().render(charts.values_of(name), name="mine", namespace="llm")
        return files["weft/templates/NOTES.txt"]

    assert "helm test mine -n llm" in notes("default")
    assert "set apiKeys.existingSecret" in notes("default")
    assert "set apiKeys.existingSecret" not in notes("h100")
    (job,) = [
        each
        for each in charts.render(charts.values_of("batch"), name="mine")
        if each["kind"] == "Job"
    ]
    assert f"job/{job['metadata']['name']}" in notes("batch")
