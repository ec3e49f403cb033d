"""Writes the dashboards of grafana/ from the tables below: `python deploy/observe/make_dashboards.py`.

tests/python/test_observe.py fails if a dashboard differs from what this writes.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "grafana"
INTERVAL = "$__rate_interval"


def rate(metric, by="", where=""):
    """How much a counter grows in a second, summed."""
    by = f" by ({by})" if by else ""
    return f"sum{by} (rate({metric}{{{where}}}[{INTERVAL}]))"


def quantile(share, metric, by="", where=""):
    by = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket{{{where}}}[{INTERVAL}])))"


WORKER = 'model_name=~"$model", engine=~"$worker"'

# By dashboard: title, what it is for, variables, and rows of panels. A panel is its title, its unit, and lines of legend and expression.
DASHBOARDS = {
    "service": (
        "kvik: service",
        "Requests through the gateways: how many, how fast, where they go, and the workers behind them.",
        [],
        [
            ("Requests", [
                ("Requests", "reqps", [("{{status}}", rate("kvik_gateway_requests_total", "status"))]),
                ("Time to first token", "s", [("half", quantile(0.5, "kvik_gateway_ttft_seconds")), ("95 of 100", quantile(0.95, "kvik_gateway_ttft_seconds"))]),
                ("Whole answer", "s", [("half", quantile(0.5, "kvik_gateway_request_seconds")), ("95 of 100", quantile(0.95, "kvik_gateway_request_seconds"))]),
                ("Queue of the gateways", "short", [("waiting", "sum(kvik_gateway_queue_length)"), ("open", "sum(kvik_gateway_outstanding_requests)")]),
                ("Refused by the gateway", "reqps", [("{{reason}}", rate("kvik_gateway_rejected_total", "reason"))]),
                ("Tried again, continued elsewhere", "reqps", [("tried again", rate("kvik_gateway_retries_total")), ("{{outcome}}", rate("kvik_gateway_continued_total", "outcome"))]),
            ]),
            ("Placement", [
                ("Why a worker was chosen", "reqps", [("{{reason}}", rate("kvik_gateway_route_decisions_total", "reason"))]),
                ("Outstanding tokens by worker", "short", [("{{worker}}", "sum by (worker) (kvik_gateway_outstanding_tokens)")]),
                ("Breakers (2: open)", "short", [("{{worker}}", "max by (worker) (kvik_gateway_breaker_state)")]),
                ("Prompts computed elsewhere", "reqps", [("{{protocol}} {{outcome}}", rate("kvik_gateway_disaggregation_total", "protocol, outcome"))]),
            ]),
            ("Workers", [
                ("Running sequences", "short", [("{{engine}}", "sum by (engine) (vllm:num_requests_running)")]),
                ("Waiting sequences", "short", [("{{engine}}", "sum by (engine) (vllm:num_requests_waiting)")]),
                ("Tokens", "short", [("prompt", rate("vllm:prompt_tokens_total")), ("computed", rate("kvik_worker_computed_tokens_total")), ("generated", rate("vllm:generation_tokens_total"))]),
                ("Between two tokens", "s", [("half", quantile(0.5, "vllm:inter_token_latency_seconds")), ("99 of 100", quantile(0.99, "vllm:inter_token_latency_seconds"))]),
            ]),
            ("Coordinators", [
                ("Workers by state", "short", [("{{state}}", "max by (state) (kvik_coordinator_workers)")]),
                ("Leaders", "short", [("leaders", "sum(kvik_coordinator_is_leader)")]),
                ("Gateways that follow a coordinator", "short", [("connected", "sum(kvik_gateway_coordinator_connected)")]),
                ("Requests moved to spread the load", "reqps", [("{{outcome}}", rate("kvik_coordinator_rebalanced_total", "outcome"))]),
            ]),
        ],
    ),
    "kv-cache": (
        "kvik: KV cache",
        "Where the KV of prompts comes from, and what the tiers of the stores hold and do.",
        [("model", "label_values(vllm:prompt_tokens_total, model_name)"), ("worker", 'label_values(vllm:prompt_tokens_total{model_name=~"$model"}, engine)')],
        [
            ("Prompts", [
                ("Share of prompt tokens from the cache, by tier", "percentunit", [("{{tier}}", f"{rate('kvik_worker_cached_tokens_total', 'tier', WORKER)} / ignoring(tier) group_left {rate('vllm:prompt_tokens_total', '', WORKER)}")]),
                ("Prompt tokens", "short", [("cached in {{tier}}", rate("kvik_worker_cached_tokens_total", "tier", WORKER)), ("computed", rate("kvik_worker_computed_tokens_total", "", WORKER))]),
                ("Requests that moved with or without their KV", "reqps", [("KV {{kv}}", rate("kvik_worker_resumed_total", "kv", WORKER))]),
            ]),
            ("Tiers", [
                ("Used share of each tier", "percentunit", [("{{engine}} {{tier}}", f"sum by (engine, tier) (kvik_store_tier_used_bytes{{{WORKER}}}) / sum by (engine, tier) (kvik_store_tier_capacity_bytes{{{WORKER}}})")]),
                ("Chunks", "short", [("{{tier}}", f"sum by (tier) (kvik_store_tier_chunks{{{WORKER}}})")]),
                ("Bytes read", "Bps", [("{{tier}}", rate("kvik_store_tier_bytes_total", "tier", WORKER + ', operation="get"'))]),
                ("Bytes written", "Bps", [("{{tier}}", rate("kvik_store_tier_bytes_total", "tier", WORKER + ', operation="put"')), ("ram", rate("kvik_store_stored_bytes_total", "", WORKER))]),
                ("Time of a call, 99 of 100", "s", [("{{tier}} {{operation}}", f'max by (tier, operation) (kvik_store_tier_call_seconds{{{WORKER}, quantile="0.99"}})')]),
                ("Outcomes that are no hit", "ops", [("{{tier}} {{operation}} {{outcome}}", rate("kvik_store_tier_operations_total", "tier, operation, outcome", WORKER + ', outcome!~"hit|stored|present"'))]),
                ("Evicted chunks", "ops", [("ram", rate("kvik_store_evicted_chunks_ram_total", "", WORKER)), ("nvme", rate("kvik_store_evicted_chunks_nvme_total", "", WORKER))]),
                ("Tiers that are down", "short", [("{{engine}} {{tier}}", f"1 - kvik_store_tier_up{{{WORKER}}}")]),
            ]),
            ("Store daemons", [
                ("Sessions", "short", [("{{instance}}", "kvik_node_sessions")]),
                ("Requests", "reqps", [("{{instance}}", rate("kvik_node_requests_total", "instance"))]),
                ("Engines turned away, damaged chunks", "ops", [("refused {{instance}}", rate("kvik_node_refused_total", "instance")), ("damaged {{instance}}", rate("kvik_node_corrupt_chunks_total", "instance"))]),
            ]),
        ],
    ),
    "memory": (
        "kvik: memory",
        "KV blocks of the engines, and the memory that engines on one device share.",
        [("worker", "label_values(kvik_worker_kv_blocks, engine)")],
        [
            ("KV blocks", [
                ("Held by running sequences", "percentunit", [("{{engine}}", 'vllm:kv_cache_usage_perc{engine=~"$worker"}')]),
                ("Filled with KV that prompts can find", "percentunit", [("{{engine}}", 'kvik_worker_kv_blocks_cached{engine=~"$worker"} / kvik_worker_kv_blocks{engine=~"$worker"}')]),
                ("Blocks that engines have the memory of", "short", [("{{engine}}", 'kvik_worker_kv_blocks{engine=~"$worker"}'), ("most of {{engine}}", 'kvik_worker_kv_blocks_limit{engine=~"$worker"}')]),
                ("Evicted from engines", "ops", [("{{engine}}", rate("kvik_worker_kv_blocks_evicted_total", "engine", 'engine=~"$worker"'))]),
                ("Given back because others needed memory", "ops", [("{{engine}}", rate("kvik_worker_kv_blocks_given_back_total", "engine", 'engine=~"$worker"'))]),
                ("Sequences put back for lack of blocks", "ops", [("{{engine}}", rate("vllm:num_preemptions_total", "engine", 'engine=~"$worker"'))]),
            ]),
            ("Stores", [
                ("Memory of ram tiers", "bytes", [("{{engine}}", 'sum by (engine) (kvik_store_tier_used_bytes{engine=~"$worker", tier="ram"})')]),
                ("KV not copied into the store yet", "bytes", [("{{engine}}", 'kvik_store_copy_queue_bytes{engine=~"$worker"}')]),
                ("Directory of chunks", "bytes", [("{{engine}}", 'kvik_store_index_bytes{engine=~"$worker"}')]),
            ]),
        ],
    ),
    "index": (
        "kvik: index",
        "The global index of which worker holds which block: what it hears, how it is asked, and how often it is right.",
        [],
        [
            ("Answers", [
                ("Questions before a choice", "reqps", [("{{outcome}}", rate("kvik_gateway_index_lookups_total", "outcome"))]),
                ("Predictions that workers kept", "percentunit", [("kept", f"{rate('kvik_index_predictions_total', '', 'outcome=' + chr(34) + 'kept' + chr(34))} / {rate('kvik_index_predictions_total')}")]),
                ("Placed by the index", "percentunit", [("holder or spread", f"{rate('kvik_gateway_route_decisions_total', '', 'reason=~' + chr(34) + 'holder|spread' + chr(34))} / {rate('kvik_gateway_route_decisions_total')}")]),
            ]),
            ("Events", [
                ("Sources that are heard", "short", [("connected", "sum(kvik_index_source_connected)"), ("all", "count(kvik_index_source_connected)")]),
                ("Batches", "ops", [("{{source}}", rate("kvik_index_source_batches_total", "source"))]),
                ("Gaps, and those that were given up", "ops", [("gaps {{source}}", rate("kvik_index_source_gaps_total", "source")), ("given up {{source}}", rate("kvik_index_source_skipped_gaps_total", "source"))]),
                ("Restarts and snapshots", "ops", [("restart {{source}}", rate("kvik_index_source_restarts_total", "source")), ("snapshot {{source}}", rate("kvik_index_source_snapshots_total", "source"))]),
            ]),
        ],
    ),
}

DATA = {"type": "prometheus", "uid": "${datasource}"}


def variables(queries):
    found = [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
    for name, query in queries:
        found.append({
            "name": name, "label": name.capitalize(), "type": "query", "datasource": DATA, "query": {"query": query, "refId": name}, "definition": query,
            "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*", "current": {"selected": True, "text": ["All"], "value": ["$__all"]}, "sort": 1,
        })
    return found


def panel(number, title, unit, lines, x, y):
    return {
        "id": number, "type": "timeseries", "title": title, "datasource": DATA, "gridPos": {"h": 8, "w": 8, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never"}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": DATA, "expr": expression, "legendFormat": legend} for place, (legend, expression) in enumerate(lines)
        ],
    }


def dashboard(name):
    title, description, queries, rows = DASHBOARDS[name]
    panels, y, number = [], 0, 0
    for row, members in rows:
        number += 1
        panels.append({"id": number, "type": "row", "title": row, "collapsed": False, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []})
        y += 1
        for place, (panel_title, unit, lines) in enumerate(members):
            number += 1
            panels.append(panel(number, panel_title, unit, lines, 8 * (place % 3), y + 8 * (place // 3)))
        y += 8 * -(-len(members) // 3)
    return {
        "uid": f"kvik-{name}", "title": title, "description": description, "tags": ["kvik"], "schemaVersion": 39, "version": 1, "editable": True,
        "graphTooltip": 1, "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "timezone": "", "annotations": {"list": []},
        "templating": {"list": variables(queries)}, "links": [{"type": "dashboards", "title": "kvik", "tags": ["kvik"], "asDropdown": True}], "panels": panels,
    }


def text(name):
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(text(each))
