"""compose.yaml: of the right form, and agreed with the images, Prometheus, Grafana and the server about names and numbers."""

import re

import compose_spec
import pytest
import yaml
from conftest import DOCKER, KINDS, ROOT, checked, documents, flush_seconds, image, merged

each = pytest.mark.parametrize("kind", KINDS)


def compose(kind):
    """The services and volumes, on the CPU or with the file for CUDA over it."""
    (under,) = documents(DOCKER / "compose.yaml")
    return under if kind == "cpu" else merged(under, documents(DOCKER / "compose.cuda.yaml")[0])


@each
def test_the_form_is_composes(kind):
    for name in ["compose.yaml", "compose.cuda.yaml"]:
        compose_spec.PyCompose.from_yaml((DOCKER / name).read_text())
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(compose(kind)))


@each
def test_what_is_mounted_is_there(kind):
    whole = compose(kind)
    used = set()
    for name, service in whole["services"].items():
        for volume in service.get("volumes", []):
            source, target, *options = volume.split(":")
            if source.startswith("."):
                assert (DOCKER / source).is_dir() and options == ["ro"], f"{name}: {volume}"
            else:
                used.add(source)
    assert used == set(whole["volumes"])


@each
def test_the_image_is_the_one_that_is_built(kind):
    taper = compose(kind)["services"]["taper"]
    assert taper["image"] == f"taper:{kind}"
    assert (DOCKER / taper["build"]["context"]).resolve() == ROOT
    assert (ROOT / taper["build"]["dockerfile"]) == DOCKER / f"{kind}.Dockerfile"
    for name, service in compose(kind)["services"].items():
        assert re.search(r":[\w.-]+$", service["image"]) and not service["image"].endswith(":latest"), name
    devices = taper.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    assert [device["capabilities"] for device in devices] == ([["gpu"]] if kind == "cuda" else [])


@each
def test_the_server_accepts_what_it_is_told(kind):
    taper, stage = compose(kind)["services"]["taper"], image(kind)
    said = {name: value for name, value in taper["environment"].items() if value is not None}
    said = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)) for name, value in said.items()}
    settings = checked([], stage.environment() | said)
    assert [port.split(":")[-1] for port in taper["ports"]] == [str(settings["port"])] == [stage.last("EXPOSE").text]
    assert [volume.split(":")[1] for volume in taper["volumes"]] == [stage.last("VOLUME").text]
    # A drain takes as long as the longest request, and then what clients need to read the rest.
    assert compose_spec.parse_duration(taper["stop_grace_period"]) >= settings["request_seconds"] + flush_seconds() + 5


@each
def test_nothing_has_more_rights_than_it_needs(kind):
    for name, service in compose(kind)["services"].items():
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert not {"privileged", "network_mode", "pid", "user"} & set(service), name
    taper = compose(kind)["services"]["taper"]
    assert taper["read_only"] and taper["tmpfs"] == ["/tmp"]
    for name, path in image(kind).environment().items():
        if name.endswith("_PATH") and path.startswith("/"):
            assert path.startswith("/tmp/"), f"{name}: the root is read-only"


def test_prometheus_asks_the_server():
    services = compose("cpu")["services"]
    (config,) = documents(DOCKER / "prometheus/prometheus.yml")
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "taper" and job.get("metrics_path", "/metrics") == "/metrics"
    ((target,),) = [static["targets"] for static in job["static_configs"]]
    assert target in [f"{name}:{port.split(':')[-1]}" for name in ["taper"] for port in services[name]["ports"]]
    for name in config["rule_files"]:
        assert (DOCKER / "prometheus" / name).is_file()
    assert "./prometheus:/etc/prometheus:ro" in services["prometheus"]["volumes"]


def test_grafana_finds_prometheus_and_the_dashboard():
    services = compose("cpu")["services"]
    grafana = services["grafana"]
    (source,) = documents(DOCKER / "grafana/provisioning/datasources/prometheus.yaml")[0]["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    port = services["prometheus"]["ports"][0].split(":")[-1]
    assert source["url"] == f"http://prometheus:{port}"
    (interval,) = [documents(DOCKER / "prometheus/prometheus.yml")[0]["global"]["scrape_interval"]]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = documents(DOCKER / "grafana/provisioning/dashboards/taper.yaml")[0]["providers"]
    mounts = dict(reversed(volume.split(":")[:2]) for volume in grafana["volumes"])
    assert mounts["/etc/grafana/provisioning"] == "./grafana/provisioning"
    folder = DOCKER / mounts[provider["options"]["path"]]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.rpartition("/")[0] == provider["options"]["path"]
    assert (folder / home.rpartition("/")[2]).is_file()
