"""The manifests: valid by Kubernetes' own schemas, and agreed with the image and the server about names and numbers."""

import tomllib
from pathlib import PurePosixPath

import kubernetes_validate
import pytest
import yaml
from conftest import DOCKER, KINDS, checked, documents, flush_seconds, image, rendered
from yamllint import linter
from yamllint.config import YamlLintConfig

MANIFESTS = DOCKER / "kubernetes"
# The first in which preStop may sleep, and the newest that the validator knows.
VERSIONS = ["1.30", kubernetes_validate.latest_version()]

each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def all_of(kind):
    return rendered(MANIFESTS / "overlays" / kind)


@pytest.fixture(scope="module")
def pod(all_of):
    return all_of["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def taper(pod):
    (container,) = pod["containers"]
    return container


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(all_of, version):
    kinds = {
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "Service",
    }
    assert set(all_of) == kinds
    for document in all_of.values():
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    "path",
    sorted(p for ending in ("yaml", "yml") for p in DOCKER.rglob(f"*.{ending}")),
    ids=lambda p: str(p.relative_to(DOCKER)),
)
def test_yaml_is_tidy(path):
    rules = "{extends: default, rules: {line-length: disable, document-start: disable, truthy: {check-keys: false}}}"
    assert [str(problem) for problem in linter.run(path.read_text(), YamlLintConfig(rules))] == []


def test_no_secret_is_in_the_repository():
    for path in MANIFESTS.rglob("*.yaml"):
        assert all(
            document.get("kind") != "Secret" and "secretGenerator" not in document for document in documents(path)
        ), path


def test_the_pod_runs_as_the_image_does(kind, pod, taper):
    stage = image(kind)
    user, group = map(int, stage.last("USER").text.split(":"))
    security = pod["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (user, group, group)
    assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
    own = taper["securityContext"]
    assert own == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert not pod["automountServiceAccountToken"]
    # The server's settings are variables TAPER_…, and so is what Kubernetes says of a service called taper.
    assert pod["enableServiceLinks"] is False
    assert taper["image"] == f"taper:{kind}"
    assert [port["containerPort"] for port in taper["ports"]] == [int(stage.last("EXPOSE").text)]
    mounts = {mount["mountPath"] for mount in taper["volumeMounts"] if not mount.get("readOnly")}
    # Where the program writes: its models, and what else the image's environment names.
    assert mounts == {stage.last("VOLUME").text, "/tmp"}


def test_what_is_mounted_is_there(all_of, pod, taper):
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in taper["volumeMounts"]} == set(volumes)
    assert volumes["config"]["configMap"]["name"] == all_of["ConfigMap"]["metadata"]["name"]
    assert (
        volumes["models"]["persistentVolumeClaim"]["claimName"] == all_of["PersistentVolumeClaim"]["metadata"]["name"]
    )


@pytest.fixture(scope="module")
def settings(kind, all_of, taper, tmp_path_factory):
    """What the server in the pod would go by, as the program reads it."""
    where = {mount["name"]: PurePosixPath(mount["mountPath"]) for mount in taper["volumeMounts"]}
    (file,) = all_of["ConfigMap"]["data"].items()
    assert taper["args"] == ["serve", "--config", str(where["config"] / file[0])]
    folder = tmp_path_factory.mktemp("settings")
    (folder / file[0]).write_text(file[1])
    # The secret's file is where the settings expect it; its content is as the README has it.
    keys = PurePosixPath(tomllib.loads(file[1])["api_keys"])
    assert keys.parent == where["keys"] and keys.name == "keys.toml"
    readme = (DOCKER / "README.md").read_text()
    text = readme.partition("cat > keys.toml <<KEYS\n")[2].partition("KEYS\n")[0]
    (folder / keys.name).write_text(text.replace("$(openssl rand -hex 32)", "0123456789abcdef" * 4))
    # What comes of a secret is no setting of the server's.
    said = {variable["name"]: variable["value"] for variable in taper["env"] if "value" in variable}
    environment = image(kind).environment() | said
    return checked(["--config", str(folder / file[0]), "--api-keys", str(folder / keys.name)], environment)


def test_the_server_accepts_its_settings(kind, settings, pod, taper):
    assert settings["host"] == "0.0.0.0" and settings["port"] == taper["ports"][0]["containerPort"]
    assert settings["device"] == kind


def test_a_token_of_the_hub_may_be_there_and_is_named_as_the_readme_has_it(taper):
    (token,) = [variable["valueFrom"]["secretKeyRef"] for variable in taper["env"] if variable["name"] == "HF_TOKEN"]
    assert token["optional"] is True
    command = f"kubectl create secret generic {token['name']} --from-literal={token['key']}="
    assert command in (DOCKER / "README.md").read_text()


def test_the_secret_is_named_as_the_readme_has_it(pod):
    (secret,) = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert f"kubectl create secret generic {secret} --from-file=keys.toml" in (DOCKER / "README.md").read_text()


def test_a_pod_has_the_time_to_drain(pod, taper, settings):
    pause = taper["lifecycle"]["preStop"]["sleep"]["seconds"]
    # Longer than kube-proxy and the load balancers take to hear of it.
    assert pause >= 5
    assert pod["terminationGracePeriodSeconds"] >= pause + settings["request_seconds"] + flush_seconds() + 5


def test_probes_ask_what_the_server_answers(taper, server):
    name = {port["name"] for port in taper["ports"]}
    probes = {probe: taper[probe] for probe in ["startupProbe", "livenessProbe", "readinessProbe"]}
    for probe in probes.values():
        assert {probe["httpGet"]["port"]} == name
        server.get(probe["httpGet"]["path"])
    assert [probe["httpGet"]["path"] for probe in probes.values()] == ["/health", "/health", "/ready"]
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900, "a large model takes minutes to load"


def test_the_deployment_waits_as_long_as_a_pod_may_load(all_of, taper):
    startup = taper["startupProbe"]
    assert (
        all_of["Deployment"]["spec"]["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]
    )


def test_selectors_and_names_meet(all_of, pod, taper):
    deployment = all_of["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert all_of["Service"]["spec"]["selector"].items() <= labels.items()
    assert all_of["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for spread in pod["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    assert {port["targetPort"] for port in all_of["Service"]["spec"]["ports"]} == {
        port["name"] for port in taper["ports"]
    }
    scaled = all_of["HorizontalPodAutoscaler"]["spec"]
    assert scaled["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    # The autoscaler's own say; and one pod may go, while another serves.
    assert "replicas" not in deployment["spec"]
    assert scaled["minReplicas"] > all_of["PodDisruptionBudget"]["spec"]["maxUnavailable"] >= 1
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(taper["ports"][0]["containerPort"])
    assert annotations["prometheus.io/scrape"] == "true"


def test_the_scraped_path_is_the_servers(all_of, server):
    path = all_of["Deployment"]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"]
    assert "vllm:num_requests_waiting" in server.get(path)


def test_resources_are_asked_for(kind, all_of, pod, taper):
    resources = taper["resources"]
    assert {"cpu", "memory"} <= set(resources["requests"])
    # Memory that is not promised is what pods are killed for.
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    rolling = all_of["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    if kind == "cuda":
        assert resources["limits"]["nvidia.com/gpu"] == "1"
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
        assert pod["nodeSelector"] == {"nvidia.com/gpu.family": "hopper"}
        assert (rolling["maxUnavailable"], rolling["maxSurge"]) == (1, 0)
    else:
        assert "nvidia.com/gpu" not in yaml.safe_dump(pod)
        # Threads are counted by the limit.
        assert resources["limits"]["cpu"] == resources["requests"]["cpu"]
        assert (rolling["maxUnavailable"], rolling["maxSurge"]) == (0, 1)
