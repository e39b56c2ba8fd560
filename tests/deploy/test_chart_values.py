"""The Helm chart: values that it refuses, and what says which there are."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from typing import Any

import helm_python
import pytest
import yaml
from support import charts

from weft.serving.cli.main import weft
from weft.serving.config.sources import SETTINGS

SCRIPT = runpy.run_path(str(charts.ROOT / "deploy" / "chart.py"))


def leaves(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of the objects in values.yaml that have keys of their own."""
    if not isinstance(tree, dict) or not tree:
        return []
    found = [path]
    for key, child in tree.items():
        found += leaves(child, (*path, key))
    return found


DEFAULTS = yaml.safe_load((charts.CHART / "values.yaml").read_text())
FREE = {
    *(("podSecurityContext",), ("podSecurityContext", "seccompProfile")),
    *(("securityContext",), ("securityContext", "capabilities")),
    ("metrics", "dashboard", "labels"),
}
"""Kubernetes' own objects, and maps of labels."""


@pytest.mark.parametrize("path", sorted(set(leaves(DEFAULTS)) - FREE), ids=".".join)
def test_a_misspelt_key_is_refused(path: tuple[str, ...]) -> None:
    values: Any = {"misspelt": 1}
    for key in reversed(path):
        values = {key: values}
    with pytest.raises(helm_python.HelmError, match="misspelt"):
        charts.render(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accelerator": {"type": 100}}, "accelerator/type"),
        ({"accelerator": {"types": {"new": {"labels": {}}}}}, "labels"),
        ({"model": {"path": "hf://Qwen"}}, "model/path"),
        ({"model": {"path": "llama"}}, "model/path"),
        ({"model": {"path": "s3://bucket/llama"}}, "model/path"),
        ({"model": {"path": "./models/llama"}}, "model/path"),
        ({"model": {"path": "../llama"}}, "model/path"),
        ({"replicas": "two"}, "replicas"),
        ({"image": {"digest": "sha256:abc"}}, "image/digest"),
        ({"settings": {"max_model_len": "long"}}, "settings/max_model_len"),
        ({"settings": {"api_key": "sk-in-plain-text"}}, "api_key"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "nvidia.com/gpu"),
        ({"extraEnv": [{"nam": "A"}]}, "extraEnv"),
    ],
)
def test_the_schema_refuses(values: charts.Object, message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        charts.render(values)


NODE = {"nodeToken": {"existingSecret": "node"}}
STATE = {"settings": {"state_dir": "/cache/state"}}
KEDA = {"metrics": {"serviceMonitor": {"enabled": True}}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"accelerator": {"type": "h101"}},
            'accelerator.type is "h101"; it must be a key of accelerator.types or one of a100, ',
        ),
        (
            {"accelerator": {"type": "new", "types": {"new": {"like": "h101"}}}},
            'accelerator.types.new.like is "h101"; it must be one of a100, ',
        ),
        ({"accelerator": {"resource": "nvidia.com/gpu"}}, "accelerator.resource is .* cpu has no"),
        ({"accelerator": {"type": "v5e"}}, r'topology is ""; .* 1x1, 2x2, 2x4, 4x4, 4x8, 8x8'),
        ({"accelerator": {"type": "v5p", "topology": "4x4"}}, "accelerator.topology is"),
        (
            {"accelerator": {"type": "v6e", "topology": "4x4", "perHost": 8}, **NODE},
            "accelerator.perHost is 8; with accelerator.topology 4x4 it must be one of 4",
        ),
        (
            {"accelerator": {"type": "v6e", "topology": "4x4"}, "hosts": 2, **NODE},
            "hosts is 2; a slice of 4x4 has 4 hosts of 4 chips",
        ),
        ({"accelerator": {"type": "h100", "topology": "2x4"}}, "accelerator.topology is"),
        ({"accelerator": {"perHost": 2}}, "accelerator.perHost is 2; accelerator.type cpu"),
        (
            {"accelerator": {"type": "h100", "perHost": 8}, "parallelism": {"tp": 4, "pp": 1}},
            r"tp 4, cp 1, ep 1\) makes 4 ranks; a replica has 1 hosts with 8 devices",
        ),
        (
            {"accelerator": {"type": "v5e", "topology": "2x4"}, "parallelism": {"pp": 2}},
            "parallelism.pp 2; on TPUs both must be 1",
        ),
        ({"hosts": 4, "parallelism": {"tp": 2}, **NODE}, "makes 2 ranks; hosts is 4"),
        ({"hosts": 2}, "nodeToken.existingSecret is empty"),
        ({"batch": {"enabled": True}}, "batch.claim is empty"),
        ({"batch": {"enabled": True, "claim": "a"}, "hosts": 2, **NODE}, "a Job has one"),
        ({"autoscaling": {"kind": "hpa", "minReplicas": 0}}, "autoscaling.minReplicas is 0"),
        ({"autoscaling": {"kind": "keda", "minReplicas": 0}}, "autoscaling.minReplicas is 0"),
        ({"autoscaling": {"kind": "hpa", "minReplicas": 5}}, "autoscaling.maxReplicas is 4"),
        (
            {"autoscaling": {"kind": "keda"}},
            "kind is keda and metrics.serviceMonitor.enabled is false; .* set metrics",
        ),
        (
            {**KEDA, "autoscaling": {"kind": "keda", "keda": {"serverAddress": ""}}},
            "autoscaling.keda.serverAddress is empty; it must be the URL",
        ),
        ({"updateStrategy": {"maxSurge": 0}}, "are both 0, .* set one of them to 1"),
        ({"updateStrategy": {"maxSurge": "0%"}, "hosts": 2, **NODE}, "are both 0"),
        ({**STATE, "replicas": 2}, "state_dir is set and replicas is 2; .* set it to 1"),
        (
            {**STATE, **KEDA, "autoscaling": {"kind": "keda", "maxReplicas": 3}},
            "state_dir is set and autoscaling.maxReplicas is 3; .* set it to 1",
        ),
        (
            {**STATE, "hosts": 2, **NODE},
            "maxSurge is 1; .* set updateStrategy.maxSurge=0 and updateStrategy.maxUnavailable=1",
        ),
        ({"ingress": {"enabled": True}}, "ingress.hosts is empty"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs is empty"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name is empty"),
    ],
)
def test_what_does_not_fit_together_is_refused(values: charts.Object, message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        charts.render(values)


def test_a_folder_of_batches_has_one_server_at_a_time() -> None:
    spec = charts.workload(charts.render(STATE))["spec"]
    # A rolling update starts a pod while the one before it still drains.
    assert spec["strategy"] == {"type": "Recreate"}
    update = {"maxSurge": 0, "maxUnavailable": 1}
    objects = charts.render({**STATE, "hosts": 2, "updateStrategy": update, **NODE})
    spec = charts.workload(objects)["spec"]
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == update


def test_a_job_is_given_the_settings_that_batch_has() -> None:
    taken = {
        name: {each.name for each in weft.commands[name].params} for name in ("serve", "batch")
    }
    schema = json.loads((charts.CHART / "values.schema.json").read_text())
    known = schema["properties"]["settings"]["properties"]
    assert known.keys() <= taken["serve"]
    settings = {name: example(each) for name, each in known.items()}
    job = {"batch": {"enabled": True, "claim": "data"}, "model": {"name": "mine"}}
    for given, command in (({}, "serve"), (job, "batch")):
        objects = charts.render({**given, "settings": settings})
        (pod,) = charts.templates_of(charts.workload(objects)).values()
        name, *words = pod["spec"]["containers"][0]["args"]
        assert name == command
        found = weft.commands[command].make_context(command, list(words)).params
        passed = {name for name in known if found.get(name) is not None}
        assert passed == known.keys() & taken[command]
    assert found["served_model_name"] == "mine"


@pytest.mark.parametrize("batch", [False, True])
def test_names_may_have_any_characters(batch: bool) -> None:
    values = {
        "model": {"path": "/models/a: b #c", "name": "yes: no # {}"},
        "batch": {"enabled": batch, "claim": "data"},
    }
    (pod,) = charts.templates_of(charts.workload(charts.render(values))).values()
    args = pod["spec"]["containers"][0]["args"]
    assert "--served-model-name=yes: no # {}" in args
    assert ("--model=/models/a: b #c" if batch else "/models/a: b #c") in args


def example(schema: charts.Object) -> Any:
    """A value that a setting's schema takes."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    return {"integer": 1, "number": 0.5, "boolean": True, "string": "text"}[kind]


@pytest.mark.parametrize(
    ("values", "group"),
    [({}, 10001), ({"podSecurityContext": {"fsGroup": None}}, None)],
    ids=["default", "openshift"],
)
def test_volumes_are_writable_for_a_group_unless_the_cluster_chooses_it(
    values: charts.Object, group: int | None
) -> None:
    objects = charts.render(values)
    pod = charts.templates_of(charts.workload(objects))["server"]
    assert pod["spec"]["securityContext"].get("fsGroup") == group


@pytest.mark.parametrize("path", ["Qwen/Qwen3-32B", "Qwen/Qwen3-32B@9216db5", "a_b/c.d-e"])
def test_a_name_of_the_hub_is_downloaded(path: str) -> None:
    objects = charts.render({"model": {"path": path}})
    assert objects == charts.render({"model": {"path": f"hf://{path}"}})
    (pod,) = charts.templates_of(charts.workload(objects)).values()
    (download,) = pod["spec"]["initContainers"]
    name, _, revision = path.partition("@")
    assert download["args"][0] == name
    assert (f"--revision={revision}" in download["args"]) == bool(revision)
    assert pod["spec"]["containers"][0]["args"][1] == f"/models/{name}"


def test_a_type_of_accelerator_is_like_another_but_for_its_fields() -> None:
    def pod(accelerator: charts.Object) -> Any:
        workload = charts.workload(charts.render({"accelerator": accelerator}))
        return charts.templates_of(workload)["server"]["spec"]

    labels = {"gke": {"cloud.google.com/gke-accelerator": "new"}}
    own = {"new": {"like": "mi300x", "resource": "example.com/new", "cpu": 3, "nodes": labels}}
    new = pod({"type": "new", "types": own})
    assert new["nodeSelector"] == labels["gke"]
    (container,) = new["containers"]
    assert container["image"].endswith("-rocm")
    assert container["resources"]["requests"] == {
        "example.com/new": "1",
        "cpu": "3",
        "memory": "96Gi",
    }
    assert [each["key"] for each in new["tolerations"]] == ["example.com/new"]
    # A field replaces the other type's whole field.
    new = pod({"type": "new", "types": {"new": {"like": "h100", "nodes": labels}}})
    assert new["nodeSelector"] == labels["gke"]
    pools = {"gke": {"cloud.google.com/gke-nodepool": "mine"}}
    new = pod({"type": "new", "types": {"new": {"like": "h100", "nodes": pools}}})
    assert new["nodeSelector"] == pools["gke"]
    # The chart's own types can be changed, too; the default is any NVIDIA GPU.
    assert pod({"type": "h100", "types": {"h100": {"like": "h100", "cpu": 3}}})["nodeSelector"]
    (container,) = pod({"type": "new", "types": {"new": {}}})["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    part = pod({"type": "gpu", "resource": "nvidia.com/mig-3g.40gb"})
    assert part["containers"][0]["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "1"}
    assert "nodeSelector" not in part


def test_every_type_of_accelerator_can_be_installed_and_is_documented() -> None:
    presets = yaml.safe_load((charts.CHART / "files/accelerators.yaml").read_text())
    described = (charts.CHART / "values.yaml").read_text().partition("\n  type: cpu")[0]
    table = (charts.ROOT / "docs" / "deployment.md").read_text()
    for name, preset in presets.items():
        topology = {"topology": next(iter(preset["slices"]))} if "slices" in preset else {}
        charts.render({"accelerator": {"type": name, **topology}})
        assert re.search(rf"\b{name}\b", described.rpartition("accelerator:")[2])
        assert f"`{name}`" in table


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        ({"accelerator": {"type": "h100", "perHost": 8}}, {"--tp=8"}),
        ({"accelerator": {"type": "h100", "perHost": 8}, "hosts": 4, **NODE}, {"--tp=8", "--pp=4"}),
        (
            {
                "accelerator": {"type": "h100", "perHost": 8},
                "hosts": 2,
                "parallelism": {"dp": 2},
                **NODE,
            },
            {"--tp=8", "--dp=2"},
        ),
        (
            {
                "accelerator": {"type": "h100", "perHost": 8},
                "hosts": 2,
                "parallelism": {"tp": 16},
                **NODE,
            },
            {"--tp=16"},
        ),
        (
            {"accelerator": {"type": "h100", "perHost": 8}, "parallelism": {"cp": 2, "dp": 2}},
            {"--tp=2", "--cp=2", "--dp=2"},
        ),
        ({"accelerator": {"type": "tpu7x", "topology": "2x2x1"}}, {"--tp=8"}),
        ({"hosts": 3, **NODE}, {"--tp=3"}),
    ],
)
def test_ranks_take_what_is_left(values: charts.Object, layout: set[str]) -> None:
    workload = charts.workload(charts.render(values))
    args = charts.templates_of(workload)["server"]["spec"]["containers"][0]["args"]
    assert {each for each in args if each[2:4] in ("tp", "ep", "cp", "pp", "dp")} == layout


@pytest.mark.parametrize(
    ("cores", "threads"), [("4", 4), (4, 4), ("2500m", 2), ("500m", 1), (1.5, 1)]
)
def test_threads_are_the_pod_s_cores(cores: str | float, threads: int) -> None:
    objects = charts.render({"resources": {"limits": {"cpu": cores}}})
    pod = charts.templates_of(charts.workload(objects))["server"]
    assert f"--threads={threads}" in pod["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("accelerator", [{}, {"type": "h100"}], ids=str)
@pytest.mark.parametrize(
    "resources",
    [
        {"limits": {"cpu": "500m", "memory": "4Gi"}},
        {"requests": {"cpu": 90, "memory": "200Gi"}},
        {"requests": {"memory": "1Gi"}, "limits": {"cpu": 2}},
    ],
    ids=str,
)
def test_no_more_is_requested_than_is_allowed(
    accelerator: dict[str, Any], resources: dict[str, Any]
) -> None:
    objects = charts.render({"accelerator": accelerator, "resources": resources})
    found = charts.templates_of(charts.workload(objects))["server"]["spec"]["containers"][0]
    told = found["resources"]
    for name in told["requests"].keys() & told["limits"].keys():
        assert quantity(told["requests"][name]) <= quantity(told["limits"][name])
    for kind, given in resources.items():
        assert told[kind].items() >= given.items()
    assert ("memory" in told["limits"]) == (
        not accelerator or "memory" in resources.get("limits", {})
    )


def quantity(text: str | float) -> float:
    """A quantity of Kubernetes, as a number."""
    number, unit = re.fullmatch(r"([\d.]+)(m|[KMG]i|)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * {"m": 1e-3, "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[unit]


def test_what_is_made_of_other_files_is_current() -> None:
    advice = "run deploy/chart.py"
    assert SCRIPT["table"](SCRIPT["VALUES"].read_text()) == SCRIPT["TABLE"].read_text(), advice
    schema = SCRIPT["SCHEMA"].read_text()
    assert SCRIPT["schema"](schema) == schema, advice
    assert SCRIPT["of_server"]() == SCRIPT["OF_SERVER"].read_text(), advice
    assert SCRIPT["OWN"] <= SETTINGS.keys()


def test_every_value_is_described() -> None:
    """By its own comment, or that of the value that it is a part of."""
    rows = re.findall(
        r"^\| `([\w.]+)` \| .*? \| (.*) \|$", SCRIPT["TABLE"].read_text(), re.MULTILINE
    )
    text = dict(rows)
    assert len(text) > 100
    for value in text:
        assert text[value] or text.get(value.rpartition(".")[0]), value


def installs() -> list[str]:
    """Every `helm install` in docs/deployment.md, as one line."""
    text = (charts.ROOT / "docs" / "deployment.md").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith("helm install ")]


@pytest.mark.parametrize("command", installs())
def test_the_commands_of_the_documentation_install(command: str) -> None:
    words = shlex.split(command)
    assert words[:2] == ["helm", "install"]
    assert words[3] == "./helm"
    values: charts.Object = {}
    parse = {
        "--set": helm_python.parse_set_string,
        "--set-string": helm_python.parse_set_string_values,
    }
    for flag, text in zip(words[4::2], words[5::2], strict=True):
        merge(values, parse[flag](text))
    charts.workload(charts.render(values, name=words[2]))


def merge(into: charts.Object, values: charts.Object) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            merge(into.setdefault(key, {}), value)
        else:
            into[key] = value
