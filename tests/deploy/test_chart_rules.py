"""The Helm chart: what must hold of the objects together, and of what they run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from support import charts
from support.charts import Object

from weft.serving.cli.main import weft

each_set = pytest.mark.parametrize("name", charts.NAMES)
SERVERS = [name for name in charts.NAMES if name != "batch"]
each_server = pytest.mark.parametrize("name", SERVERS)


def pods(name: str) -> dict[str, Object]:
    """Templates of pods, by component."""
    return charts.templates_of(charts.workload(charts.rendered(name)))


def containers(pod: Object) -> list[Object]:
    return pod["spec"].get("initContainers", []) + pod["spec"]["containers"]


def kinds(name: str, kind: str) -> list[Object]:
    return [each for each in charts.rendered(name) if each["kind"] == kind]


def nodes(tree: Any) -> Iterator[Any]:
    """A tree of an object, and all trees in it."""
    yield tree
    for child in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        yield from nodes(child)


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """As Kubernetes does, with matchLabels and the operator In."""
    plain = selector.get("matchLabels", {}).items() <= labels.items()
    among = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in among)
    return plain and all(labels.get(each["key"]) in each["values"] for each in among)


@each_server
def test_selectors_find_the_pods_that_they_are_for(name: str) -> None:
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(name).items()}
    labels["test"] = kinds(name, "Pod")[0]["metadata"]["labels"]

    def found(selector: Object) -> set[str]:
        return {component for component in labels if selects(selector, labels[component])}

    (service,) = kinds(name, "Service")
    assert found({"matchLabels": service["spec"]["selector"]}) == {"server"}
    for each in kinds(name, "Deployment") + kinds(name, "InferencePool"):
        assert found(each["spec"]["selector"]) == {"server"}
    for each in kinds(name, "PodDisruptionBudget"):
        assert found(each["spec"]["selector"]) == labels.keys() - {"test"}
    for each in kinds(name, "ServiceMonitor"):
        assert selects(each["spec"]["selector"], service["metadata"]["labels"])
    for pod in pods(name).values():
        for each in pod["spec"].get("topologySpreadConstraints", []):
            assert found(each["labelSelector"]) == {"server"}


@each_server
def test_ports_have_the_names_that_others_call_them_by(name: str) -> None:
    server = pods(name)["server"]["spec"]["containers"][0]
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    assert f"--port={ports['http']}" in server["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["port"] in ports
    (service,) = kinds(name, "Service")
    served = {each["name"]: each for each in service["spec"]["ports"]}
    assert {each["targetPort"] for each in served.values()} <= ports.keys()
    for monitor in kinds(name, "ServiceMonitor"):
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= served.keys()
    for pool in kinds(name, "InferencePool"):
        assert [each["number"] for each in pool["spec"]["targetPorts"]] == [ports["http"]]
    for ingress in kinds(name, "Ingress"):
        backends = [each["backend"]["service"] for each in nodes(ingress) if "backend" in each]
        assert backends
        for backend in backends:
            assert backend["name"] == service["metadata"]["name"]
            assert backend["port"]["name"] in served
    for route in kinds(name, "HTTPRoute"):
        for backend in route["spec"]["rules"][0]["backendRefs"]:
            assert backend["name"] == service["metadata"]["name"]
            if backend.get("kind", "Service") == "Service":
                assert backend["port"] == served["http"]["port"]
    if "worker" in pods(name):
        assert f"--node-port={ports['join']}" in server["args"]
        joins = pods(name)["worker"]["spec"]["containers"][0]["args"][-1]
        assert joins == f"$(LWS_LEADER_ADDRESS):{ports['join']}"


@each_server
def test_the_grace_period_is_longer_than_what_a_pod_does_to_end(name: str) -> None:
    server = pods(name)["server"]
    (container,) = server["spec"]["containers"]
    (drain,) = [each for each in container["args"] if each.startswith("--drain-timeout=")]
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    ends = waits + float(drain.partition("=")[2])
    assert server["spec"]["terminationGracePeriodSeconds"] >= ends + 15
    if worker := pods(name).get("worker"):
        stays = int(worker["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
        assert ends + 5 <= stays < worker["spec"]["terminationGracePeriodSeconds"]


@each_set
def test_accelerators_are_as_many_as_ranks_need_and_all_of_a_slice(name: str) -> None:
    accelerator = charts.values_of(name).get("accelerator", {})
    presets = yaml.safe_load((charts.CHART / "files/accelerators.yaml").read_text())
    own = accelerator.get("types", {})
    presets |= {each: presets[fields["like"]] | fields for each, fields in own.items()}
    preset = presets[accelerator.get("type", "cpu")]
    workload = charts.workload(charts.rendered(name))
    hosts = workload["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
    counts = set()
    for pod in pods(name).values():
        resources = pod["spec"]["containers"][0]["resources"]
        resource = preset.get("resource")
        assert resources["requests"].get(resource) == resources["limits"].get(resource)
        counts.add(int(resources["limits"].get(resource, 0)))
    (count,) = counts
    args = next(iter(pods(name).values()))["spec"]["containers"][0]["args"]
    flags = dict(each[2:].split("=") for each in args if "=" in each)
    tp, ep, cp, pp, dp = (int(flags.get(each, 1)) for each in ("tp", "ep", "cp", "pp", "dp"))
    assert int(flags.get("nodes", 1)) == hosts
    ranks = dp * pp * max(tp * cp, ep)
    if preset["kind"] == "tpu":
        chips = math.prod(map(int, accelerator["topology"].split("x")))
        assert count * hosts == chips
        assert ranks == chips * preset["devices"]
        for pod in pods(name).values():
            selector = pod["spec"]["nodeSelector"]
            assert selector["cloud.google.com/gke-tpu-topology"] == accelerator["topology"]
    elif preset["kind"] == "cuda":
        assert ranks == count * hosts
    else:
        assert ranks >= hosts
        assert count == 0


@each_set
def test_secrets_are_named_and_never_written(name: str) -> None:
    assert not kinds(name, "Secret")
    for pod in pods(name).values():
        for container in containers(pod):
            assert not re.search("--(api-key|node-token|ssl-key)[^-]", " ".join(container["args"]))
            for each in container["env"]:
                if re.search("TOKEN|KEY|SECRET|PASSWORD|HEADERS", each["name"]):
                    assert "secretKeyRef" in each["valueFrom"]


@each_set
def test_pods_have_no_more_rights_than_they_need(name: str) -> None:
    every = [*pods(name).values(), *kinds(name, "Pod")]
    for pod in every:
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "else WEFT_PORT is taken for a setting"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["fsGroup"], "most new volumes belong to root"
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "runAsUser" not in context, "an OpenShift project has users of its own"
    for account in kinds(name, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
        assert {pod["spec"]["serviceAccountName"] for pod in every} == {account["metadata"]["name"]}


@each_set
def test_what_is_mounted_is_there_and_what_is_there_is_mounted(name: str) -> None:
    for pod in pods(name).values():
        mounted = {m["name"] for each in containers(pod) for m in each["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["spec"]["volumes"]}
        paths = [each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]]
        assert len(paths) == len(set(paths))
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        for each in pod["spec"]["containers"][0]["volumeMounts"]:
            if "subPathExpr" in each:  # made by root, for its group alone to write to
                assert "persistentVolumeClaim" in volumes[each["name"]]
        shm = [each for each in pod["spec"]["volumes"] if each["name"] == "shm"]
        assert shm[0]["emptyDir"]["medium"] == "Memory"


@each_set
def test_weft_takes_the_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.config.logs.configure", lambda form: None)  # of this process
    for pod in pods(name).values():
        (container,) = pod["spec"]["containers"]
        assert container["command"] == ["weft"]
        command, *words = container["args"]
        weft.commands[command].make_context(command, list(words))  # refuses unknown flags
        if command == "join":
            continue
        flags = [each for each in words if each.startswith("--")]
        if command == "batch":
            flags = [each for each in flags if not each.startswith(("--output", "--resume"))]
        done = CliRunner().invoke(weft, ["config", "--json", *flags], standalone_mode=False)
        assert done.exception is None, done.exception
        if name == "h100":
            assert json.loads(done.output)["max_num_batched_tokens"]["value"] == 1048576


def test_weft_would_not_take_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.config.logs.configure", lambda form: None)  # of this process
    with pytest.raises(Exception, match="No such option"):
        weft.commands["serve"].make_context("serve", ["weft-demo", "--misspelt=1"])


@each_set
def test_autoscalers_scale_what_is_there_by_metrics_that_the_dashboard_shows(name: str) -> None:
    dashboard = (charts.ROOT / "deploy/grafana/weft.json").read_text()
    workload = charts.workload(charts.rendered(name))
    scalers = kinds(name, "HorizontalPodAutoscaler") + kinds(name, "ScaledObject")
    assert ("replicas" in workload["spec"]) == (not scalers and workload["kind"] != "Job")
    for each in scalers:
        target = each["spec"]["scaleTargetRef"]
        assert target == {
            "apiVersion": workload["apiVersion"],
            "kind": workload["kind"],
            "name": workload["metadata"]["name"],
        }
        metrics = set(re.findall(r"weft_\w+", json.dumps(each["spec"])))
        assert metrics == {"weft_requests_waiting", "weft_kv_cache_usage_ratio"}
        assert all(re.search(rf"\b{metric}\b", dashboard) for metric in metrics)


@each_set
def test_a_group_has_another_name_than_any_service(name: str) -> None:
    """LeaderWorkerSet's controller makes a Service of the group's name, for ranks to meet."""
    groups = {each["metadata"]["name"] for each in kinds(name, "LeaderWorkerSet")}
    assert not groups & {each["metadata"]["name"] for each in kinds(name, "Service")}


@each_server
def test_ranks_are_reached_by_ranks_alone(name: str) -> None:
    policies = kinds(name, "NetworkPolicy")
    if name == "bare":
        assert not policies
        return
    inner, api = policies
    assert inner["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert [each["ports"] for each in api["spec"]["ingress"]] == [
        [{"port": "http", "protocol": "TCP"}]
    ]
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(name).items()}
    assert all(selects(inner["spec"]["podSelector"], each) for each in labels.values())
    rules = inner["spec"].get("ingress", [])
    assert len(rules) == ("worker" in labels)
    for rule in rules:
        (peer,) = rule["from"]
        assert all(selects(peer["podSelector"], each) for each in labels.values())
        assert not selects(peer["podSelector"], {"app.kubernetes.io/component": "server"})
    for rule in inner["spec"].get("egress", [])[:1]:
        # Kubernetes' DNS, and OpenShift's: a policy looks at the port of the pod.
        names = {(each["port"], each["protocol"]) for each in rule["ports"]}
        assert names == {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}
    test = kinds(name, "Pod")[0]["metadata"]["labels"]
    for rule in api["spec"]["ingress"]:
        assert any(selects(peer["podSelector"], test) for peer in rule.get("from", [])[:1]) or (
            "from" not in rule
        )
