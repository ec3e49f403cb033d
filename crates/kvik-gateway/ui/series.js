// The last hour, from the gateway's own memory.

import { chart } from "./chart.js";
import { h } from "./dom.js";
import { byTier, bytes, clock, count, percent, seconds, tierKind, tierName } from "./format.js";

function tiersOf(points, ...names) {
  const all = {};
  for (const point of points) for (const name of names) for (const tier of Object.keys(point[name])) all[tier] = true;
  return byTier(all).map(([tier]) => tier);
}

const rate = (points, value) => points.map((point) => value(point) / point.seconds);

function charts() {
  return [
    chart({
      title: "Served from cache",
      note: "Share of prompt tokens by the tier that their KV came from",
      isStacked: true,
      max: 1,
      format: percent,
      series: (points) =>
        tiersOf(points, "cached_tokens").map((tier) => ({
          name: tierName(tier),
          kind: tierKind(tier),
          values: points.map((point) => (point.prompt_tokens > 0 ? (point.cached_tokens[tier] ?? 0) / point.prompt_tokens : null)),
        })),
    }),
    chart({
      title: "Time to first token",
      note: "Of streams, as the gateway's clients see it",
      format: seconds,
      series: (points) => [
        { name: "half within", kind: "engine", values: points.map((point) => point.ttft_p50_s) },
        { name: "95 of 100 within", kind: "ram", values: points.map((point) => point.ttft_p95_s) },
      ],
    }),
    chart({
      title: "Requests",
      note: "Ended in a second",
      format: (value) => `${count(value)}/s`,
      series: (points) => [
        { name: "answered", kind: "engine", values: rate(points, (point) => point.ok_requests) },
        { name: "failed or refused", kind: "bad", values: rate(points, (point) => point.failed_requests) },
      ],
    }),
    chart({
      title: "Queue",
      note: "Requests at the gateway and sequences at workers",
      format: count,
      series: (points) => [
        { name: "running", kind: "engine", values: points.map((point) => point.running) },
        { name: "waiting at workers", kind: "ram", values: points.map((point) => point.waiting) },
        { name: "waiting at the gateway", kind: "remote", values: points.map((point) => point.queue_length) },
      ],
    }),
    chart({
      title: "Tokens",
      note: "Of all workers in a second",
      format: (value) => `${count(value)}/s`,
      series: (points) => [
        { name: "prompt", kind: "ram", values: rate(points, (point) => point.prompt_tokens) },
        { name: "computed", kind: "nvme", values: rate(points, (point) => point.computed_tokens) },
        { name: "generated", kind: "engine", values: rate(points, (point) => point.generated_tokens) },
      ],
    }),
    chart({
      title: "Bytes moved",
      note: "Read from and written to the tiers of all stores",
      isStacked: true,
      format: (value) => `${bytes(value)}/s`,
      series: (points) =>
        tiersOf(points, "read_bytes", "written_bytes").map((tier) => ({
          name: tierName(tier),
          kind: tierKind(tier),
          values: rate(points, (point) => (point.read_bytes[tier] ?? 0) + (point.written_bytes[tier] ?? 0)),
        })),
    }),
  ];
}

export function seriesView() {
  const all = charts();
  const span = h(
    "select",
    { on: { change: () => redraw() } },
    h("option", { value: 360 }, "Last hour"),
    h("option", { value: 90 }, "Last 15 minutes"),
    h("option", { value: 30 }, "Last 5 minutes"),
  );
  const asTable = h("input", { type: "checkbox", on: { change: () => redraw() } });
  const table = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The last hour as a table", hidden: true });
  const grid = h("div", { class: "charts" }, all.map((each) => each.element));
  const element = h(
    "div",
    {},
    h("div", { class: "controls" }, h("label", { class: "inline" }, "Show ", span), h("label", { class: "inline" }, asTable, " as a table")),
    grid,
    table,
  );
  let points = [];
  let lastTime = null;

  function redraw() {
    const shown = points.slice(-Number(span.value));
    for (const each of all) each.update(shown);
    grid.hidden = asTable.checked;
    table.hidden = !asTable.checked;
    if (asTable.checked) {
      const heads = all.flatMap((each) => each.values(0).map(([name]) => `${each.title}: ${name}`));
      const rows = shown.map((point, place) =>
        h("tr", {}, h("th", { scope: "row" }, clock(point.time_s * 1000)), all.flatMap((each) => each.values(place).map(([, value]) => h("td", { class: "number" }, value)))),
      );
      table.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Time"), heads.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows.reverse())));
    }
  }

  return {
    element,
    enter: redraw,
    update(state) {
      const time = state.points.at(-1)?.time_s ?? null;
      if (time === lastTime) return;
      lastTime = time;
      points = state.points;
      redraw();
    },
  };
}
