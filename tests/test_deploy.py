"""The dashboard, the rules and the guide name metrics of a real broker, and nothing else."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strictyaml  # type: ignore[import-untyped]

from tests.support import BrokerProcess

ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
SCRAPING = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "penstock.json"
GUIDE = ROOT / "docs" / "guide" / "monitoring.md"

METRIC = re.compile(r"\b(?:penstock|process)_[a-z_]+\b")
LABELS = re.compile(r"\b(?:by \(([a-z, ]+)\)|([a-z_]+)(?:=~|!=|=)\"|\{\{([a-z_]+)\}\}|\$labels\.([a-z_]+))")
# Added by Prometheus.
OUTER_LABELS = {"instance", "job"}
# Of metrics that a new broker without others has no sample of.
UNUSED_LABELS = {"error", "node_id", "topic"}


@pytest.fixture(scope="module")
def scraped() -> Iterator[str]:
    with BrokerProcess(arguments=["--metrics", "0"]) as broker:
        address = broker.ready_line.rpartition("metrics=")[2]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            yield answer.read().decode()


@pytest.fixture(scope="module")
def names(scraped: str) -> set[str]:
    """What an expression may name: histograms have three series each."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", scraped, re.MULTILINE):
        found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    assert len(found) > 60
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = strictyaml.load(RULES.read_text()).data["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def test_every_metric_in_the_rules_exists(names: set[str]) -> None:
    used = {name for rule in rules() for name in METRIC.findall(rule["expr"])}
    assert len(used) > 20
    assert used <= names


def test_every_metric_on_the_dashboard_exists(names: set[str]) -> None:
    used = {
        name
        for panel in panels()
        for target in panel.get("targets", ())
        for name in METRIC.findall(target["expr"])
    }
    assert len(used) > 40
    assert used <= names
    queries = [each["query"] for each in json.loads(DASHBOARD.read_text())["templating"]["list"]]
    assert {name for query in queries for name in METRIC.findall(query)} <= names


def test_every_label_that_they_use_exists(scraped: str) -> None:
    known = {*re.findall(r"[{,]([a-z_]+)=\"", scraped), *OUTER_LABELS, *UNUSED_LABELS}
    for text in (RULES.read_text(), json.dumps(panels()).replace('\\"', '"')):
        used = {
            label.strip()
            for found in LABELS.findall(text)
            for part in found
            for label in part.split(",")
            if label
        }
        assert used <= known, used - known


def test_every_metric_of_the_broker_is_in_the_guide_and_the_guide_has_no_others(
    scraped: str, names: set[str]
) -> None:
    text = GUIDE.read_text()
    metrics = set(re.findall(r"^# TYPE (penstock_\S+)", scraped, re.MULTILINE))
    described = set(re.findall(r"^\| `(penstock_[a-z_]+)", text, re.MULTILINE))
    assert described == metrics
    assert set(METRIC.findall(text)) <= metrics | names


def test_every_alert_says_how_urgent_it_is_and_what_it_means_and_the_guide_what_to_do() -> None:
    guide = GUIDE.read_text()
    alerts = [rule["alert"] for rule in rules()]
    assert len(set(alerts)) == len(alerts)
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule
        assert rule["annotations"]["summary"], rule
        assert f"| `{rule['alert']}` |" in guide


def test_the_example_reads_the_rules_and_the_nodes_of_penstock_dev() -> None:
    example = strictyaml.load(SCRAPING.read_text()).data
    assert example["rule_files"] == [RULES.name]
    (job,) = example["scrape_configs"]
    assert job["job_name"] == "penstock"
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{port}" for port in (9464, 9465, 9466)]


def test_panels_have_names_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        assert panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
