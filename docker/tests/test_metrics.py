"""Every metric that the dashboard, the alerts and the autoscaler name is exported by a real server, of the type and with the
labels that the expression needs."""

import json
import re
import shutil
import subprocess

import promql_parser
import pytest
from conftest import DOCKER, documents, rendered

DASHBOARD = json.loads((DOCKER / "grafana/dashboards/taper.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
(ALERTS,) = documents(DOCKER / "prometheus/alerts.yml")
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
# What Prometheus itself says of what it asks, and what it adds to what it hears.
OF_PROMETHEUS = {"up": ("gauge", set())}
ADDED = {"instance", "job", "namespace", "pod"}


def expressions():
    """All PromQL, each with where it stands."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"panel {panel['title']} {target['refId']}", target["expr"]
    for rule in RULES:
        yield f"alert {rule['alert']}", rule["expr"]
    for variable in VARIABLES.values():
        if variable["type"] == "query":
            yield (
                f"variable {variable['name']}",
                re.fullmatch(r"label_values\((.+), \w+\)", variable["query"]["query"])[1],
            )
    (adapter,) = documents(DOCKER / "kubernetes/prometheus-adapter.yaml")
    for rule in adapter["rules"]["custom"]:
        yield "adapter series", rule["seriesQuery"]
        series = rule["seriesQuery"].partition("{")[0]
        query = rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.LabelMatchers>>", 'pod="a"')
        yield "adapter query", query.replace("<<.GroupBy>>", "pod")


ALL = list(expressions())


def parsed(text):
    """An expression, with Grafana's variables put in."""
    values = {"model": ".*", "instance": ".*", "delta": "0.1", "window": "1h", "__rate_interval": "1m"}
    named = set(re.findall(r"\$(\w+)", text))
    assert named <= set(values) and named - {"__rate_interval"} <= set(VARIABLES), named
    return promql_parser.parse(re.sub(r"\$(\w+)", lambda match: values[match[1]], text))


def below(expression):
    """An expression's own parts."""
    parts = ["expr", "lhs", "rhs", "param"]
    found = [getattr(expression, part, None) for part in parts] + list(getattr(expression, "args", []) or [])
    return [part for part in found if isinstance(part, promql_parser.Expr)]


def selectors(expression, through=""):
    """Every selector, with the function that a range of it goes through."""
    if isinstance(expression, promql_parser.MatrixSelector):
        yield expression.vector_selector, through
    elif isinstance(expression, promql_parser.VectorSelector):
        yield expression, ""
    else:
        name = expression.func.name if isinstance(expression, promql_parser.Call) else through
        for part in below(expression):
            yield from selectors(part, name)


def groupings(expression):
    """Every `by (…)` with what it is of."""
    if isinstance(expression, promql_parser.AggregateExpr) and expression.modifier:
        yield set(expression.modifier.labels), expression
    for part in below(expression):
        yield from groupings(part)


@pytest.fixture(scope="module")
def exported(server):
    """Every series' type and labels by its name, as /metrics has them."""
    types, series = {}, {}
    for line in server.get("/metrics").splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            types[name] = kind
        elif line and not line.startswith("#"):
            name, labels = re.match(r"([\w:]+)(?:\{(.*)\})? ", line).groups()
            family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in types else name
            kind = types[family] if types[family] != "histogram" else "histogram" + name.removeprefix(family)
            known = series.setdefault(name, (kind, set()))[1]
            known |= set(re.findall(r'(\w+)="', labels or ""))
    return series


def test_the_server_exports_what_there_is(exported):
    assert exported["vllm:num_requests_waiting"] == ("gauge", {"model_name", "engine"})


@pytest.mark.parametrize("expression", [text for _, text in ALL], ids=[where for where, _ in ALL])
def test_every_metric_named_is_exported(expression, exported):
    tree = parsed(expression)
    for selector, function in selectors(tree):
        assert selector.name in OF_PROMETHEUS or selector.name in exported, f"{selector.name} is not exported"
        kind, labels = (OF_PROMETHEUS | exported)[selector.name]
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= labels | ADDED, f"{selector.name} has no label {matched - labels - ADDED}"
        counts = kind in ("counter", "histogram_bucket", "histogram_sum", "histogram_count")
        assert (function in ("rate", "increase")) == counts, (
            f"{selector.name} is a {kind}, and goes through {function!r}"
        )
    for by, of in groupings(tree):
        for selector, _ in selectors(of):
            kind, labels = (OF_PROMETHEUS | exported)[selector.name]
            assert by <= labels | ADDED, f"{selector.name} has no label {by - labels - ADDED}"
            assert ("le" in by) == (kind == "histogram_bucket"), f"{selector.name} by {by}"


def test_every_metric_of_attention_is_on_the_dashboard(exported):
    shown = {
        selector.name
        for panel in PANELS
        for target in panel["targets"]
        for selector, _ in selectors(parsed(target["expr"]))
    }
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if name.startswith("taper:")}
    missing = {family for family in families if not any(name.startswith(family) for name in shown)}
    assert not missing


def test_panels_stand_side_by_side():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_panels_say_what_they_show(panel):
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [target["refId"] for target in panel["targets"]] == sorted({target["refId"] for target in panel["targets"]})
    for target in panel["targets"]:
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        by = [labels - {"le"} for labels, _ in groupings(parsed(target["expr"]))]
        assert all(labels == named for labels in by), f"{target['legendFormat']} of {by}"
        if target["expr"].startswith("vector("):
            continue
        for selector, _ in selectors(parsed(target["expr"])):
            # Each obeys the choice of model and server.
            assert {matcher.name for matcher in selector.matchers.matchers} >= {"model_name", "instance"}, selector.name


def test_the_datasource_chosen_at_first_is_the_one_provisioned():
    (source,) = documents(DOCKER / "grafana/provisioning/datasources/prometheus.yaml")[0]["datasources"]
    assert VARIABLES["datasource"]["current"]["value"] == source["uid"]


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alerts_name_labels_that_they_have(rule):
    assert rule["labels"]["severity"] in ("warning", "critical")
    by = [labels for labels, of in groupings(parsed(rule["expr"]))]
    kept = set.intersection(*by) if by else ADDED
    for text in rule["annotations"].values():
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept, text


def test_the_autoscaler_asks_for_what_the_adapter_answers(exported):
    (adapter,) = documents(DOCKER / "kubernetes/prometheus-adapter.yaml")
    rules = {rule["name"]["as"]: rule for rule in adapter["rules"]["custom"]}
    (metric,) = rendered(DOCKER / "kubernetes/base")["HorizontalPodAutoscaler"]["spec"]["metrics"]
    rule = rules[metric["pods"]["metric"]["name"]]
    series = rule["seriesQuery"].partition("{")[0]
    assert exported[series][0] == "gauge" and re.fullmatch(rule["name"]["matches"], series)
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}
    target = metric["pods"]["target"]
    # Scaling has to begin before the queue is full.
    assert target["type"] == "AverageValue" and float(target["averageValue"]) < 256


@pytest.mark.parametrize(
    "check",
    [["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]],
)
def test_prometheus_accepts_its_files_and_the_alerts_fire_when_they_should(check):
    if not shutil.which("promtool"):
        pytest.fail("no promtool here: apt-get install prometheus", pytrace=False)
    done = subprocess.run(["promtool", *check], cwd=DOCKER / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
